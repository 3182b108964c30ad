"""The scales a checkpoint was quantized with, by our names: what its codes can be had from again.

Where codes are symmetric and groups are blocks in order, a matrix of floats and its scales give the codes back:
round(W / scale). Otherwise only the floats are kept, as the formats of the targets have neither zero points nor
scattered groups. q, k and v, or gate and up, become one matrix with a scale for each row, so that parts with one scale
each keep theirs. They read one input, whose static scale must be one: the largest of the parts', with which no part
saturates earlier than with its own.

Legend: O outputs, G groups, K KV heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from toolchain.errors import DtoolError, name_list
from toolchain.model.config import DecoderConfig
from toolchain.model.foreign.cache import Foreign
from toolchain.model.foreign.coded import CodedTensor
from toolchain.model.foreign.grid import read_grid
from toolchain.model.foreign.scheme import INSTEAD
from toolchain.model.quantized import INPUT_SCALE, SCALE_SUFFIX
from toolchain.tensor_file import read_tensor

if TYPE_CHECKING:
    from toolchain.model.checkpoint import Parameter

_ZERO = "zero points are not in the middle"
_ORDER = "groups are not blocks of inputs in order"


@dataclass(frozen=True, slots=True)
class CheckpointScales:
    """float32 scales by our names, what they are scales of, and what a user should see."""

    tensors: dict[str, torch.Tensor]
    details: dict[str, Any]
    notes: tuple[str, ...]


def read_stored_scales(
    parameters: Mapping[str, "Parameter"], foreign: Foreign, config: DecoderConfig
) -> CheckpointScales:
    """The scales of all matrices, inputs and caches that codes can be had from again.

    Reads no codes. Raises DtoolError as `read_grid` does, and for a scale of another shape.
    """
    notes: list[str] = []
    weights: dict[str, torch.Tensor] = {}
    inputs: dict[str, torch.Tensor] = {}
    bent: dict[str, str] = {}
    for name, parameter in parameters.items():
        coded = [part for part in parameter.parts if isinstance(part, CodedTensor)]
        module = name.removesuffix(".weight")
        if not coded:
            continue
        if len(coded) < len(parameter.parts):
            notes.append(f"{module} has no stored scales, as only some of its parts are codes")
            continue
        scale_OG, reason = _weight_scale(coded)
        if reason:
            bent[module] = reason
        scale_OG = scale_OG if parameter.arrange is None else parameter.arrange(scale_OG).contiguous()
        weights[name + SCALE_SUFFIX] = scale_OG if foreign.scheme.group_size else scale_OG[:, 0].contiguous()
        if (fixed := _input_scale(module, coded, notes)) is not None:
            inputs[f"{module}.{INPUT_SCALE}"] = fixed
    if bent:
        reasons = name_list(sorted(set(bent.values())))
        notes.append(f"no scales are stored, as {reasons} (such as {name_list(bent, 2)}): algorithm stored will refuse")
    cache = {name: _by_head(name, read_tensor(entry), config) for name, entry in foreign.cache.items()}
    kept = {} if bent else weights | inputs
    details = _details(foreign, matrices=len(weights), symmetric=_ZERO not in bent.values(), stored=not bent)
    for name, scale in (kept | cache).items():
        if not bool(torch.isfinite(scale).all()):
            raise DtoolError(
                f"{name} of the checkpoint is inf or NaN",
                expected="finite scales",
                found=f"{int((~torch.isfinite(scale)).sum())} of {scale.numel()} that are not",
                fix="download the checkpoint again",
            )
    return CheckpointScales(kept | cache, details, tuple(notes))


def _weight_scale(coded: list[CodedTensor]) -> tuple[torch.Tensor, str]:
    """float32 scales [O, G] of parts whose rows follow one another, and why they do not give the codes back."""
    grids = [read_grid(part) for part in coded]
    reason = _ZERO if any(g.zero is not None for g in grids) else ""
    reason = reason or (_ORDER if any(g.group is not None for g in grids) else "")
    return torch.cat([grid.scale for grid in grids]), reason


def _input_scale(module: str, coded: list[CodedTensor], notes: list[str]) -> torch.Tensor | None:
    """The static scale [] of a product's input: the largest of its parts'. None where a part has none."""
    entries = [part.input_scale for part in coded]
    if any(entry is None for entry in entries):
        return None
    scales = [read_tensor(entry).float().reshape(-1) for entry in entries if entry is not None]
    if any(len(scale) != 1 for scale in scales):
        raise DtoolError(
            f"the input of {module} has several static scales",
            expected="one for the whole tensor",
            found=" and ".join(str(len(scale)) for scale in scales),
            fix=INSTEAD,
        )
    values = [float(scale) for scale in scales]
    if len(set(values)) > 1:
        notes.append(f"the parts of {module} read one input: its scale is the largest, {max(values):g}")
    return scales[values.index(max(values))].reshape(())


def _by_head(name: str, scale: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """float32 [K] of one scale for all heads, or of one each."""
    heads, flat = config.num_key_value_heads, scale.float().flatten()
    if len(flat) not in {1, heads}:
        raise DtoolError(
            f"{name} of the checkpoint has another shape than the cache",
            expected=f"one scale, or one for each of {heads} heads",
            found=str(list(scale.shape)),
            fix=INSTEAD,
        )
    return flat.expand(heads).contiguous()


def _details(foreign: Foreign, *, matrices: int, symmetric: bool, stored: bool) -> dict[str, Any]:
    scheme = foreign.scheme
    return {
        "method": scheme.method,
        "weight_format": scheme.weight_format,
        "group_size": scheme.group_size,
        "symmetric": symmetric,
        "activations": list(scheme.activations) if scheme.activations else None,
        "kv_format": scheme.kv_format if foreign.cache else None,
        "matrices": matrices,
        "scales": "stored" if stored and matrices else "none",
    }

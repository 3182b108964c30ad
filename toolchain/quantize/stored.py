"""Codes with the scales that the checkpoint was quantized with: nothing is chosen, nothing is lost.

An export holds W = code * scale, rounded to its compute type, and the scale in float32. Then

    code = nearest(W / scale)

is the stored code: |W / scale - code| <= u |code|, with u the unit roundoff, is below half a step for every code of
int4, int8 and E4M3 in float32, float16 (u 2^-11) and bfloat16 (u 2^-8; 127 * 2^-8 < 1/2). Below the smallest normal
number of the compute type the error is absolute; so each matrix is proved: the codes times the scale, rounded to the
compute type, must be W bit for bit, and a scale must be large enough that two codes never become one number.

Graphs dequantize in the compute type, so the scale written is the nearest number that type has, which moves all
weights of a channel alike by at most u; codes stay. A scale the type cannot hold so well is refused.

Legend: O outputs, I inputs, G groups, g inputs of a group, K KV heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError, name_list
from toolchain.model.config import DecoderConfig
from toolchain.model.foreign.scheme import STORED_DETAILS, STORED_SCALES, Scheme
from toolchain.quantize.plan import INT4_GROUPS, QuantizePlan
from toolchain.recipe import Recipe
from toolchain.tensor_file import TensorEntry, read_header, read_tensor

if TYPE_CHECKING:
    import torch

    from toolchain.quantize.rounding import RoundedMatrix

REQUANTIZE = "--set weights.algorithm=rtn quantizes the numbers anew"


@dataclass(frozen=True, slots=True)
class StoredScales:
    """The scales of an export's checkpoint, checked against a recipe.

    `groups`: the group size of each int4 matrix. `static`: names of the scales of inputs and of caches that
    the recipe takes from the file.
    """

    entries: Mapping[str, TensorEntry]
    fmt: str
    groups: Mapping[str, int]
    static: tuple[str, ...]
    notes: tuple[str, ...]

    def static_scales(self, held_in: "torch.dtype") -> dict[str, Any]:
        """float32 scales [] of inputs, of values that `held_in` has, and [K] of caches."""
        scales = {name: read_tensor(self.entries[name]) for name in self.static}
        return {name: _held(name, s, held_in) if s.ndim == 0 else _positive(name, s) for name, s in scales.items()}

    def round(self, module: str, weight_OI: "torch.Tensor") -> "RoundedMatrix":
        """The stored codes of a matrix, with its scales; as `rounding.round_matrix`.

        Raises DtoolError where the numbers are not those of the scales.
        """
        from toolchain.numerics import dequantize, pack_int4, quantize
        from toolchain.quantize.rounding import RoundedMatrix, sqnr_db

        name = f"{module}.weight_scale"
        out, into = weight_OI.shape
        group = self.groups.get(module, 0)
        scale_OG = read_tensor(self.entries[name]).reshape(out, -1)
        if group:  # a group cut into smaller ones, each with its scale: the same numbers
            scale_OG = scale_OG.repeat_interleave(into // group // scale_OG.shape[1], dim=1)
        held_in, width = weight_OI.dtype, into // scale_OG.shape[1]
        weight_OGg = weight_OI.unflatten(-1, (-1, width))
        scale_OG = _usable(name, scale_OG, weight_OGg, held_in)
        codes_OGg = quantize(weight_OGg, scale_OG[..., None], self.fmt)
        again_OGg = dequantize(codes_OGg, scale_OG[..., None]).to(held_in)
        if wrong := int((again_OGg != weight_OGg).sum()):
            raise DtoolError(
                f"the weights of {module} are not those of the stored scales",
                expected=f"code * scale in {str(held_in).removeprefix('torch.')}",
                found=f"{wrong} of {weight_OI.numel()} other numbers",
                fix="export the checkpoint again; " + REQUANTIZE,
            )
        scale_OG = _held(name, scale_OG, held_in)
        codes_OI = codes_OGg.flatten(1)
        shown_OI = dequantize(codes_OGg, scale_OG[..., None]).flatten(1)
        return RoundedMatrix(
            codes=pack_int4(codes_OI) if self.fmt == "int4" else codes_OI,
            scale=scale_OG if group else scale_OG[:, 0].contiguous(),
            shown=shown_OI,
            weight_sqnr_db=sqnr_db(weight_OI.float(), shown_OI),
            output_sqnr_db=None,
            clipped_share=0.0,
        )


def open_stored(exported: Artifact, recipe: Recipe, plan: QuantizePlan) -> StoredScales | None:
    """The stored scales a recipe asks for; None where it asks for none.

    Raises DtoolError when the export has none, or when their format, their groups or their matrices are not
    those of the recipe.
    """
    if recipe.weights.algorithm != "stored":
        return None
    details = exported.manifest.details.get(STORED_DETAILS)
    entries = read_header(exported.file(STORED_SCALES)) if STORED_SCALES in exported.manifest.files else {}
    if not isinstance(details, dict) or not entries:
        raise _none_stored(f"one quantized as {details}" if details else "a checkpoint of floats")
    if recipe.weights.format != "none":
        _require_format(details["weight_format"], details["group_size"], recipe)
        _require_scales(entries, plan, exported, recipe)
    _require_whole_inputs(details["activations"], recipe)
    static, notes = _static_names(entries, details, exported, recipe, plan)
    return StoredScales(entries, recipe.weights.format, plan.groups, static, notes)


def needs_calibration(recipe: Recipe, plan: QuantizePlan, config: DecoderConfig, stored: StoredScales | None) -> bool:
    """Whether a scale of the recipe, or a mean, is still to be measured."""
    if plan.uses_hessian or plan.centered or recipe.rotation.is_on or recipe.smoothing.is_on:
        return True  # the last two are checked on text to be identities
    wanted = _input_names(plan)
    if recipe.kv_cache.is_static:
        wanted += _cache_names(config)
    return not set(wanted) <= set(() if stored is None else stored.static)


def check_scheme(scheme: Scheme | None, recipe: Recipe) -> None:
    """What `open_stored` refuses, as far as a checkpoint's config tells it."""
    if recipe.weights.algorithm != "stored":
        return
    if scheme is None:
        raise _none_stored("a checkpoint of floats")
    if recipe.weights.format != "none":
        _require_format(scheme.weight_format, scheme.group_size, recipe)
    _require_whole_inputs(scheme.activations, recipe)


def _require_whole_inputs(stored: Sequence[str] | None, recipe: Recipe) -> None:
    """Refuse to take an excess or a mean off inputs whose scale is stored; `stored`: their format and granularity."""
    for at, (_, activations) in zip(recipe.places, recipe.variants, strict=True):
        taken = {"excess_channels": activations.excess_channels, "center": activations.center}
        asked = [recipe.said_at(f"activations.{name}", at) for name, there in taken.items() if there]
        if asked and activations.is_static and stored and tuple(stored) == (activations.format, "tensor"):
            raise DtoolError(
                f"{' and '.join(asked)} cannot be with stored scales of the inputs",
                expected="inputs as the checkpoint's own scales were measured on: whole",
                found=f"stored scales of {activations.format} inputs",
                fix=f"leave {' and '.join(asked)} out, or --set {recipe.said_at('activations.granularity', at)}=token "
                "measures anew each time",
            )


def _none_stored(found: str) -> DtoolError:
    return DtoolError(
        "the recipe asks for stored scales, but there are none",
        expected="a checkpoint with symmetric codes, in groups that are blocks of inputs",
        found=found,
        fix=REQUANTIZE,
    )


def _require_format(fmt: str, group: int | None, recipe: Recipe) -> None:
    weights = recipe.weights
    asked: object = weights.format
    found: object = fmt
    if asked == found and fmt == "int4" and group in INT4_GROUPS:
        asked, found = f"groups of {weights.group_size}", f"groups of {group}"
    elif asked == found and fmt != "int4" and group is not None:
        asked, found = f"a scale for each {weights.granularity}", f"groups of {group}"
    if asked == found:
        return
    fix = f"--set weights.format={fmt}" if weights.format != fmt else f"--set weights.group_size={group}"
    raise DtoolError(
        "the recipe and the stored scales do not agree",
        expected=f"{weights.format}, {asked}" if weights.format == fmt else str(asked),
        found=f"{fmt}, {found}" if weights.format == fmt else str(found),
        fix=REQUANTIZE if group is not None and fmt != "int4" and weights.format == fmt else f"{fix}; or {REQUANTIZE}",
    )


def _require_scales(entries: Mapping[str, TensorEntry], plan: QuantizePlan, exported: Artifact, recipe: Recipe) -> None:
    """Refuse matrices without a stored scale, groups that are no part of the stored ones, and a coarser granularity."""
    lacking = [name for name in plan.weights if f"{name}.weight_scale" not in entries]
    if lacking:
        skip = ", ".join(f'"{name}"' for name in (*recipe.weights.skip, *lacking))
        raise DtoolError(
            "the recipe quantizes matrices that the checkpoint stores as floats",
            expected=f"stored scales of {name_list(lacking)}",
            found="none",
            fix=f"--set 'weights.skip=[{skip}]', or {REQUANTIZE}",
        )
    weights = read_header(exported.file("weights.safetensors"))
    for name in plan.weights:
        stored, into = entries[f"{name}.weight_scale"].shape, weights[f"{name}.weight"].shape[1]
        width, group = into // (stored[1] if len(stored) == 2 else 1), plan.groups.get(name, into)
        if width % group:
            raise DtoolError(
                f"the stored groups of {name} cannot be cut into the recipe's",
                expected=f"groups of {group}",
                found=f"groups of {width}",
                fix=REQUANTIZE,
            )
    if recipe.weights.granularity == "tensor":
        _require_one_scale(entries, plan, exported)


def _require_one_scale(entries: Mapping[str, TensorEntry], plan: QuantizePlan, exported: Artifact) -> None:
    config = exported.read("decoder.json", DecoderConfig)
    for name in plan.weights:
        scale_O = read_tensor(entries[f"{name}.weight_scale"])
        parts = scale_O.split(list(config.part_sizes(f"{name}.weight") or scale_O.shape[:1]))
        if any(len(part.unique()) > 1 for part in parts):
            raise DtoolError(
                "the recipe and the stored scales do not agree",
                expected="a scale for each tensor",
                found=f"a scale for each channel of {name}",
                fix=f"--set weights.granularity=channel; or {REQUANTIZE}",
            )


def _input_names(plan: QuantizePlan) -> list[str]:
    return [f"{name}.input_scale" for name in plan.static]


def _cache_names(config: DecoderConfig) -> list[str]:
    layers = range(config.num_hidden_layers)
    return [f"model.layers.{i}.self_attn.{scale}" for i in layers for scale in ("k_scale", "v_scale")]


def _static_names(
    entries: Mapping[str, TensorEntry],
    details: Mapping[str, Any],
    exported: Artifact,
    recipe: Recipe,
    plan: QuantizePlan,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The static scales that come from the file, and notes on those that must be measured although it has some."""
    config, cache = exported.read("decoder.json", DecoderConfig), recipe.kv_cache
    notes, static = [], []
    for what, asked, found, names in (
        ("activations", recipe.activations.format, (details["activations"] or ["none"])[0], _input_names(plan)),
        ("kv_cache", cache.format, details["kv_format"], _cache_names(config) if cache.is_static else []),
    ):
        present = [name for name in names if name in entries]
        if present and asked != found:
            notes.append(f"{what}: stored scales are of {found}, the recipe asks for {asked}: measured anew")
        elif names and not present:
            notes.append(f"{what}: the checkpoint has no scales of it: measured on the calibration text")
        else:
            static += present
            if absent := [name for name in names if name not in entries]:
                notes.append(f"{what}: measured where no scale is stored: {name_list(absent)}")
            if what == "kv_cache" and present and cache.scale != "amax":
                notes.append(f"kv_cache.scale {cache.scale} does nothing with the checkpoint's own scales")
    return tuple(static), tuple(notes)


def _positive(name: str, scale: "torch.Tensor") -> "torch.Tensor":
    if not bool((scale > 0).all()):
        raise DtoolError(
            f"{name} of the checkpoint is not above zero",
            expected="scales above zero",
            found=f"{float(scale.min()):g}",
            fix=REQUANTIZE,
        )
    return scale


def _usable(name: str, scale_OG: "torch.Tensor", weight_OGg: "torch.Tensor", held_in: "torch.dtype") -> "torch.Tensor":
    """The scales; 1 for groups of zeros, which have no other codes whatever their scale.

    Raises DtoolError for a scale that is not above zero, or so small that two codes are one number in `held_in`.
    """
    import torch

    blank_OG = (weight_OGg == 0).all(-1)
    scale_OG = torch.where(blank_OG & ~_fits(scale_OG, held_in), 1.0, scale_OG)
    smallest = 2 * torch.finfo(held_in).smallest_normal * torch.finfo(held_in).eps
    _positive(name, scale_OG)
    if not bool((scale_OG >= smallest).all()):
        raise DtoolError(
            f"{name} is too small for {str(held_in).removeprefix('torch.')}",
            expected=f"at least {smallest:g}, so that no two codes become one number",
            found=f"{float(scale_OG.min()):g}",
            fix="export with compute_dtype bfloat16 or float32",
        )
    return scale_OG


def _fits(scale: "torch.Tensor", held_in: "torch.dtype") -> "torch.Tensor":
    """Where a scale is above zero and differs from the nearest number of `held_in` by at most its roundoff."""
    import torch

    return (scale > 0) & ((scale.to(held_in).float() - scale).abs() <= scale * torch.finfo(held_in).eps / 2)


def _held(name: str, scale: "torch.Tensor", held_in: "torch.dtype") -> "torch.Tensor":
    """The nearest float32 numbers that `held_in` has. Raises DtoolError where that is not near."""
    _positive(name, scale)
    if not bool(_fits(scale, held_in).all()):
        off = scale[~_fits(scale, held_in)]
        raise DtoolError(
            f"{name} does not fit {str(held_in).removeprefix('torch.')}",
            expected="scales that the compute type has to its full precision",
            found=f"{float(off.min()):g}",
            fix="export with compute_dtype bfloat16 or float32",
        )
    return scale.to(held_in).float()

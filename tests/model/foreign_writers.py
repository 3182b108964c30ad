"""Tiny quantized checkpoints as other libraries write them, and the plain checkpoint each of them stands for.

`write_case` takes a plain checkpoint, quantizes its layers' matrices to the nearest on a grid with float16 scales, and
writes two folders: the codes in the layout asked, and the numbers they stand for as float32. Packing is done here
with Python integers, one word at a time, so that it shares nothing with the reader.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SINGLE = "model.safetensors"
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Case:
    """One layout: its writer, its grid, and what its config says."""

    layout: str
    config: dict[str, Any]
    bits: int = 4
    group: int = 0
    symmetric: bool = True
    order: str = "blocks"
    inputs: bool = False
    cache: str = ""
    scale_dtype: torch.dtype = torch.float16
    granularity: str = "channel"
    quant_file: dict[str, Any] = field(default_factory=dict)

    @property
    def weight_format(self) -> str:
        return "fp8_e4m3" if self.layout == "fp8" else f"int{self.bits}"


@dataclass
class Matrix:
    """Unsigned codes [O, I] (E4M3 for fp8), float scales and zero points [O, G], the group of each input."""

    codes: Any
    scale: torch.Tensor
    zero: np.ndarray
    group: np.ndarray
    bits: int

    def values(self) -> torch.Tensor:
        scale = self.scale.double().numpy()[:, self.group]
        codes = self.codes.double().numpy() if isinstance(self.codes, torch.Tensor) else self.codes
        return torch.from_numpy((codes - self.zero[:, self.group]) * scale).float()

    def signed(self) -> torch.Tensor:
        """Codes relative to the middle, as they are known to be stored."""
        if isinstance(self.codes, torch.Tensor):
            return self.codes
        return torch.from_numpy(self.codes - (1 << (self.bits - 1))).to(torch.int8)


def gptq(**changes):
    base = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return base | {"checkpoint_format": "gptq", "damp_percent": 0.01, "true_sequential": True} | changes


def awq(**changes):
    base = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return base | {"modules_to_not_convert": None} | changes


def compressed(form, weights, inputs=None, **changes):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    base = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return base | {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"} | changes


def arguments(**changes):
    base = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return base | {"group_size": None, "observer": "minmax", "actorder": None, "block_structure": None} | changes


GROUPED = {"num_bits": 4, "strategy": "group", "group_size": 32}
FLOAT = {"type": "float", "strategy": "tensor"}
STATIC = {"strategy": "tensor"}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.33.0"}}

CASES: dict[str, Case] = {
    "gptq": Case("gptq", gptq(), group=32),
    "gptq_v2": Case("gptq_v2", gptq(checkpoint_format="gptq_v2"), group=32),
    "gptq_int8": Case("gptq", gptq(bits=8, group_size=-1), bits=8),
    "gptq_channel": Case("gptq", gptq(group_size=-1)),
    "gptq_static_groups": Case("gptq", gptq(desc_act=True, static_groups=True), group=32),
    "gptq_offset": Case("gptq", gptq(sym=False), group=32, symmetric=False),
    "gptq_v2_offset": Case("gptq_v2", gptq(sym=False, checkpoint_format="gptq_v2"), group=32, symmetric=False),
    "gptq_order": Case("gptq", gptq(desc_act=True), group=32, order="scattered"),
    "awq": Case("awq", awq(), group=32, symmetric=False),
    "awq_middle": Case("awq", awq(zero_point=False), group=32),
    "packed_int4": Case("packed", compressed("pack-quantized", arguments(**GROUPED)), group=32),
    "packed_int8": Case("packed", compressed("pack-quantized", arguments()), bits=8, scale_dtype=torch.bfloat16),
    "packed_offset": Case(
        "packed", compressed("pack-quantized", arguments(**GROUPED, symmetric=False)), group=32, symmetric=False
    ),
    "packed_order": Case(
        "packed", compressed("pack-quantized", arguments(**GROUPED, actorder="group")), group=32, order="scattered"
    ),
    "int_dynamic": Case(
        "int", compressed("int-quantized", arguments(), arguments(strategy="token", dynamic=True)), bits=8
    ),
    "int_static": Case(
        "int",
        compressed("int-quantized", arguments(), arguments(**STATIC), kv_cache_scheme=arguments(**STATIC)),
        bits=8,
        inputs=True,
        cache="attention",
    ),
    "float_static": Case(
        "fp8",
        compressed("float-quantized", arguments(**FLOAT), arguments(**FLOAT), kv_cache_scheme=arguments(**FLOAT)),
        bits=8,
        inputs=True,
        cache="attention",
        granularity="tensor",
    ),
    "float_dynamic": Case(
        "fp8",
        compressed(
            "float-quantized",
            arguments(type="float"),
            arguments(type="float", strategy="token", dynamic=True),
        ),
        bits=8,
        scale_dtype=torch.float32,
    ),
    "modelopt": Case(
        "fp8",
        {},
        bits=8,
        inputs=True,
        cache="projection",
        granularity="tensor",
        scale_dtype=torch.float32,
        quant_file=MODELOPT
        | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    ),
    "modelopt_new": Case(
        "fp8",
        MODELOPT
        | {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "config_groups": {}}
        | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
        bits=8,
        inputs=True,
        cache="projection",
        granularity="tensor",
        scale_dtype=torch.float32,
    ),
    "modelopt_int8": Case(
        "int",
        {},
        bits=8,
        inputs=True,
        quant_file=MODELOPT | {"quantization": {"quant_algo": "INT8_SQ", "kv_cache_quant_algo": None}},
    ),
}


def write_case(plain: Path, coded: Path, dequantized: Path, case: Case) -> dict[str, Matrix]:
    """Write both checkpoints of a case; by stored module what was written."""
    for folder in (coded, dequantized):
        shutil.copytree(plain, folder)
    tensors = load_file(plain / SINGLE)
    stored: dict[str, torch.Tensor] = {}
    floats = dict(tensors)
    matrices: dict[str, Matrix] = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if not {"layers", "h"} & set(name.split(".")) or weight.ndim != 2:
            stored[name] = weight
            continue
        seed = len(matrices)
        matrices[module] = matrix = _fp8(weight, case) if case.layout == "fp8" else _integers(weight, case, seed)
        floats[name] = matrix.values()
        stored |= {f"{module}.{piece}": value for piece, value in WRITERS[case.layout](matrix, case).items()}
        if case.inputs:  # the parts of one matrix disagree
            stored[f"{module}.input_scale"] = torch.tensor([0.01 + 0.001 * seed]).reshape([1][: case.layout == "int"])
    stored |= _cache_scales(stored, case)
    save_file({name: value.contiguous() for name, value in stored.items()}, coded / SINGLE)
    save_file({name: value.contiguous() for name, value in floats.items()}, dequantized / SINGLE)
    document = json.loads((coded / "config.json").read_text())
    if case.config:
        document["quantization_config"] = case.config
    if case.quant_file:
        (coded / "hf_quant_config.json").write_text(json.dumps(case.quant_file))
    (coded / "config.json").write_text(json.dumps(document))
    return matrices


def _integers(weight: torch.Tensor, case: Case, seed: int) -> Matrix:
    out, into = weight.shape
    group, levels = case.group or into, (1 << case.bits) - 1
    index = np.arange(into) // group
    if case.order == "scattered":
        index = np.random.default_rng(seed).permutation(index)
    groups = int(index.max()) + 1
    w = weight.double().numpy()
    scale, zero = np.zeros((out, groups)), np.zeros((out, groups), np.int64)
    for g in range(groups):
        part = w[:, index == g]
        if case.symmetric:
            scale[:, g] = 2 * abs(part).max(1) / levels
            zero[:, g] = (levels + 1) // 2
        else:
            low, high = np.minimum(part.min(1), -0.05), np.maximum(part.max(1), 0.05)
            scale[:, g] = (high - low) / levels
            zero[:, g] = np.clip(np.rint(-low / scale[:, g]), 1, levels - 1)
    held = torch.from_numpy(scale).to(case.scale_dtype)
    spread, shift = held.double().numpy()[:, index], zero[:, index]
    codes = np.clip(np.rint(w / spread) + shift, 0, levels).astype(np.int64)
    return Matrix(codes, held, zero, index, case.bits)


def _fp8(weight: torch.Tensor, case: Case) -> Matrix:
    amax = weight.abs().amax(1, keepdim=True)
    if case.granularity == "tensor":
        amax = amax.max().expand_as(amax)
    scale = (amax / 448).to(case.scale_dtype)
    codes = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Matrix(codes, scale, np.zeros(scale.shape, np.int64), np.zeros(weight.shape[1], np.int64), 8)


def pack(values: np.ndarray, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words of each row of unsigned values, the first in the lowest bits; `columns`: another order of them."""
    per = 32 // bits
    columns = columns or tuple(range(per))
    words = []
    for row in np.atleast_2d(values).tolist():
        padded = row + [0] * (-len(row) % per)
        chunks = [padded[at : at + per] for at in range(0, len(padded), per)]
        words.append([sum(chunk[c] << (bits * place) for place, c in enumerate(columns)) for chunk in chunks])
    return torch.from_numpy(np.array(words, np.uint64).astype(np.uint32).view(np.int32))


def _write_gptq(m: Matrix, case: Case, less: int = 1) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(m.codes.T.T, case.bits).mT,
        "qzeros": pack(m.zero.T - less, case.bits),
        "scales": m.scale.mT,
        "g_idx": torch.from_numpy(m.group).int(),
    }


def _write_awq(m: Matrix, case: Case) -> dict[str, torch.Tensor]:
    codes, zeros = (pack(values.T, 4, AWQ_COLUMNS) for values in (m.codes, m.zero))
    return {"qweight": codes, "qzeros": zeros, "scales": m.scale.mT}


def _write_packed(m: Matrix, case: Case) -> dict[str, torch.Tensor]:
    pieces = {"weight_packed": pack(m.codes, case.bits), "weight_scale": m.scale}
    pieces["weight_shape"] = torch.tensor(m.codes.shape)
    if not case.symmetric:
        pieces["weight_zero_point"] = pack(m.zero.T, case.bits).mT
    if case.order == "scattered":
        pieces["weight_g_idx"] = torch.from_numpy(m.group).int()
    return pieces


def _write_plain(m: Matrix, case: Case) -> dict[str, torch.Tensor]:
    scale = m.scale[:1, 0] if case.granularity == "tensor" else m.scale
    if case.quant_file or case.config.get("quant_method") == "modelopt":
        scale = scale.reshape(()) if case.granularity == "tensor" else scale[:, 0]
    return {"weight": m.signed(), "weight_scale": scale}


WRITERS = {
    "gptq": _write_gptq,
    "gptq_v2": lambda m, case: _write_gptq(m, case, less=0),
    "awq": _write_awq,
    "packed": _write_packed,
    "int": _write_plain,
    "fp8": _write_plain,
}


def _cache_scales(stored: dict[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    layers = sorted({name.split(".self_attn.")[0] for name in stored if ".self_attn." in name})
    found = {}
    for i, layer in enumerate(layers if case.cache else ()):
        for part, size in (("k", 0.05), ("v", 0.02)):
            at = f"{layer}.self_attn." + (f"{part}_proj." if case.cache == "projection" else "")
            found[f"{at}{part}_scale"] = torch.tensor([size * (i + 1)]).reshape([1][: case.cache == "attention"])
    return found

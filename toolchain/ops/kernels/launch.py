"""The kernels on torch tensors: on a CUDA GPU, or on the CPU where TRITON_INTERPRET=1 was set before import.

The same grids, arguments and constants as the plugin uses, so what is tested here is what is shipped.
"""

from typing import Any

import torch

from toolchain.ops.attention import AttentionSpec
from toolchain.ops.kernels.bindings import ARGUMENTS, constants, plan
from toolchain.ops.kernels.decode import decode_merge, decode_split
from toolchain.ops.kernels.prefill import cache_write, prefill
from toolchain.ops.kernels.tiles import Launch, choose_splits

INTERPRETED_SM = 90
"""Tiles of this GPU are used where there is none."""
_KERNELS: dict[str, Any] = {
    "cache_write": cache_write,
    "prefill": prefill,
    "decode_split": decode_split,
    "decode_merge": decode_merge,
}


def attend(
    qkv_BTN: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    past_lengths_B: torch.Tensor,
    key_cache_BKCD: torch.Tensor,
    value_cache_BKCD: torch.Tensor,
    spec: AttentionSpec,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    splits: int | None = None,
    sm: int | None = None,
    tiles: dict[str, Launch] | None = None,
) -> torch.Tensor:
    """The attention output [B, T, H*D] in the dtype of `qkv_BTN`; writes the new tokens into the caches.

    The contract of `toolchain.ops.attention.attend_in_place`. One token a row (T = 1) runs split decode,
    more run prefill.

    Args:
        qkv_BTN: Packed projection [B, T, (H + 2K) D], contiguous as all tensors here.
        cos_PR: float32 [P, rotary_dim / 2], P at least the capacity.
        sin_PR: As `cos_PR`.
        past_lengths_B: int64 cached tokens of each row.
        key_cache_BKCD: Compute dtype, int8 or float8_e4m3fn.
        value_cache_BKCD: As `key_cache_BKCD`.
        spec: The attributes of the node.
        scales: float32 of K and V for quantized caches: static [K], or [B, K, C] of every slot, written in place.
        norms: [D] of q and k in the compute dtype, for QK-norm.
        splits: Pieces of the cache in decode; chosen from the capacity when None.
        sm: Compute capability whose tiles are used; the device's when None.
        tiles: Launches that replace those of the table, by kernel name.
    """
    launch_of = plan(spec, sm or _sm_of(qkv_BTN.device), str(qkv_BTN.dtype).removeprefix("torch.")) | (tiles or {})
    batch, new = qkv_BTN.shape[:2]
    out = qkv_BTN.new_empty(batch, new, spec.num_heads * spec.head_dim)
    key_scale, value_scale = scales or (cos_PR, cos_PR)
    q_norm, k_norm = norms or (qkv_BTN, qkv_BTN)
    inputs = (qkv_BTN, cos_PR, sin_PR, past_lengths_B, key_cache_BKCD, value_cache_BKCD, key_scale, value_scale)
    values: dict[str, Any] = dict(zip(ARGUMENTS["prefill"][: len(inputs)], inputs, strict=True))
    values |= {"q_norm": q_norm, "k_norm": k_norm, "out": out, "new_tokens": new, "capacity": key_cache_BKCD.shape[2]}
    if new == 1:
        splits = splits or _splits(values, spec, launch_of)
        values |= _partials(out, spec, splits)
        _run("decode_split", (splits, spec.num_kv_heads, batch), values, spec, launch_of)
        _run("decode_merge", (spec.num_heads, batch), values, spec, launch_of)
        return out
    blocks = -(-new // launch_of["cache_write"].tile["BLOCK_T"])
    _run("cache_write", (blocks, spec.num_kv_heads, batch), values, spec, launch_of)
    blocks = -(-new * (spec.num_heads // spec.num_kv_heads) // launch_of["prefill"].tile["BLOCK_M"])
    _run("prefill", (blocks, spec.num_kv_heads, batch), values, spec, launch_of)
    return out


def _sm_of(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_SM
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _splits(values: dict[str, Any], spec: AttentionSpec, launch_of: dict[str, Launch]) -> int:
    device = values["qkv"].device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    block_n = launch_of["decode_split"].tile["BLOCK_N"]
    slots = min(spec.window or values["capacity"], values["capacity"])
    return choose_splits(len(values["qkv"]), spec.num_kv_heads, slots, block_n, processors)


def _partials(out: torch.Tensor, spec: AttentionSpec, splits: int) -> dict[str, Any]:
    shape = (out.shape[0], spec.num_heads, splits)
    partial_out = torch.empty(*shape, spec.head_dim, dtype=torch.float32, device=out.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    return {"partial_out": partial_out, "partial_lse": partial_lse, "splits": splits}


def _run(
    name: str, grid: tuple[int, ...], values: dict[str, Any], spec: AttentionSpec, launch_of: dict[str, Launch]
) -> None:
    launch = launch_of[name]
    arguments = [values[argument] for argument in ARGUMENTS[name]]
    fixed = constants(name, spec, launch.tile, native=values["out"].is_cuda)
    _KERNELS[name][grid](*arguments, **fixed, **launch.options)

"""The plugin's kernels from torch: the library's C entry point on CUDA tensors, without TensorRT."""

import ctypes
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from toolchain.errors import DtoolError
from toolchain.formats import FORMATS
from toolchain.ops.attention import ABI, AttentionSpec
from toolchain.ops.plugin.table import COMPUTE_DTYPES

ALIGNMENT = 16
"""Bytes; the kernels load this much at a time."""
_POINTERS = (
    *("qkv", "cos", "sin", "past_lengths", "key_cache", "value_cache"),
    *("key_scale", "value_scale", "q_norm", "k_norm", "out", "workspace"),
)


class AttentionCall(ctypes.Structure):
    """`DtoolAttentionCall` of native/c_entry.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("spec", "compute_dtype", "batch", "new_tokens", "capacity")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("workspace_bytes", ctypes.c_uint64),
    )


class PluginLibrary:
    """A built plugin library. Loading it needs neither a GPU nor TensorRT."""

    def __init__(self, path: Path) -> None:
        try:
            self._library: Any = ctypes.CDLL(str(Path(path).absolute()))
            self._library.dtool_attention_describe.restype = ctypes.c_char_p
            self._library.dtool_attention_last_error.restype = ctypes.c_char_p
            self._library.dtool_attention_workspace_bytes.restype = ctypes.c_int64
            self._description: dict[str, Any] = json.loads(self._library.dtool_attention_describe())
        except (OSError, AttributeError) as error:
            raise DtoolError(
                "the plugin library cannot be loaded",
                expected="a library built by dtool build-plugin on a host like this one",
                found=str(error),
                fix="build it again here",
            ) from error
        if self._description["abi"] != ABI:
            raise DtoolError(
                "the plugin library is of another dtool",
                expected=f"abi {ABI}",
                found=f"abi {self._description['abi']}",
                fix="build the plugin again",
            )

    def describe(self) -> dict[str, Any]:
        """What the library carries: abi, specs, compute_dtypes, sms, sets of kernels, versions."""
        return self._description

    def prepare(self, spec: AttentionSpec, compute_dtype: str) -> None:
        """Load the kernels of a node on the current CUDA device now, not in the first call."""
        index = self._spec_index(spec)
        self._check(self._library.dtool_attention_prepare(index, _dtype_index(compute_dtype)))

    def attend(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        past_lengths: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: AttentionSpec,
        *,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The attention output [B, T, H*D]; writes the new keys and values, and scales of tokens, into the caches.

        The contract of `toolchain.ops.attention.attend_in_place`, on CUDA tensors and on the current
        stream. past + T must fit the capacity; lengths are on the device, so that is not checked here.
        """
        tensors = {"qkv": qkv, "cos": cos, "sin": sin, "past_lengths": past_lengths}
        tensors |= {"key_cache": key_cache, "value_cache": value_cache}
        tensors |= _pair("scales", ("key_scale", "value_scale"), scales, wanted=spec.quantized)
        tensors |= _pair("norms", ("q_norm", "k_norm"), norms, wanted=spec.qk_norm)
        check_tensors(tensors, spec)
        check_device(qkv)
        batch, new = qkv.shape[:2]
        out = qkv.new_empty(batch, new, spec.num_heads * spec.head_dim)
        dtype = str(qkv.dtype).removeprefix("torch.")
        call = self.make_call(spec, dtype, batch, new, key_cache.shape[2])
        workspace = torch.empty(self.workspace_bytes(spec, batch, new), dtype=torch.uint8, device=qkv.device)
        for name, tensor in (tensors | {"out": out, "workspace": workspace}).items():
            setattr(call, name, tensor.data_ptr() or None)
        call.workspace_bytes = workspace.numel()
        with torch.cuda.device(qkv.device):
            self.launch(call, torch.cuda.current_stream().cuda_stream)
        return out

    def workspace_bytes(self, spec: AttentionSpec, batch: int, new_tokens: int) -> int:
        """Bytes of device memory one call of these sizes needs for itself."""
        return self._library.dtool_attention_workspace_bytes(self._spec_index(spec), batch, new_tokens)

    def make_call(
        self, spec: AttentionSpec, compute_dtype: str, batch: int, new_tokens: int, capacity: int
    ) -> AttentionCall:
        """A call with its sizes filled in; the caller sets the pointers."""
        dtype = _dtype_index(compute_dtype)
        return AttentionCall(ctypes.sizeof(AttentionCall), self._spec_index(spec), dtype, batch, new_tokens, capacity)

    def launch(self, call: AttentionCall, stream: int) -> None:
        """Launch one call on raw device pointers. Raises DtoolError with the library's words."""
        self._check(self._library.dtool_attention(ctypes.byref(call), ctypes.c_void_p(stream)))

    def _check(self, code: int) -> None:
        if code != 0:
            raise DtoolError(
                "the attention kernels were not launched",
                expected="a launch without an error",
                found=self.last_error(),
                fix="check the message: sizes, device and driver",
            )

    def last_error(self) -> str:
        """The text of this thread's last failure."""
        return self._library.dtool_attention_last_error().decode("utf-8", "replace")

    def _spec_index(self, spec: AttentionSpec) -> int:
        wanted = _rounded(asdict(spec))
        for index, carried in enumerate(self._description["specs"]):
            if _rounded(carried) == wanted:
                return index
        raise DtoolError(
            "the plugin library has no kernels for this attention node",
            expected="; ".join(str(AttentionSpec(**carried)) for carried in self._description["specs"]),
            found=str(spec),
            fix="build the plugin again with this node",
        )


def _dtype_index(compute_dtype: str) -> int:
    if compute_dtype not in COMPUTE_DTYPES:
        expected = " or ".join(COMPUTE_DTYPES)
        raise DtoolError(
            "the attention kernels do not compute in this type",
            expected=expected,
            found=compute_dtype,
            fix="convert to one of these types",
        )
    return COMPUTE_DTYPES.index(compute_dtype)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """A spec's values with floats as float32, which is what the library compares."""
    return {k: struct.pack("f", v) if isinstance(v, float) else v for k, v in values.items()}


def _pair(
    argument: str, names: Sequence[str], pair: tuple[torch.Tensor, torch.Tensor] | None, *, wanted: bool
) -> dict[str, torch.Tensor]:
    if wanted != (pair is not None):
        raise DtoolError(
            f"{argument} do not fit the attention node",
            expected=f"{names[0]} and {names[1]}" if wanted else "none",
            found="none" if wanted else f"{names[0]} and {names[1]}",
            fix="pass what the node's spec says",
        )
    return dict(zip(names, pair or (), strict=False))


def check_tensors(tensors: dict[str, torch.Tensor], spec: AttentionSpec) -> None:
    """Refuse tensors of another device, type, shape or layout than the kernels read. Raises DtoolError."""
    for name, (dtype, shape) in _expected(tensors, spec).items():
        tensor = tensors[name]
        expected = f"{dtype} {list(shape)} on {tensors['qkv'].device}"
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        if found != expected:
            raise DtoolError(
                f"{name} does not fit the attention node", expected=expected, found=found, fix="pass a tensor like that"
            )
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
            raise DtoolError(
                f"{name} cannot be read by the kernels",
                expected=f"contiguous memory aligned to {ALIGNMENT} bytes",
                found=f"strides {tensor.stride()} at {tensor.data_ptr():#x}",
                fix="pass a contiguous tensor of its own",
            )
    capacity, positions = tensors["key_cache"].shape[2], tensors["cos"].shape[0]
    if positions < capacity:
        found = f"{positions} positions"
        raise DtoolError(
            "cos and sin do not cover the cache",
            expected=f"{capacity} or more",
            found=found,
            fix="compute the tables for more positions",
        )
    if not 1 <= tensors["qkv"].shape[1] <= capacity:
        found = f"{tensors['qkv'].shape[1]} new tokens"
        raise DtoolError(
            "the new tokens do not fit the cache",
            expected=f"1 to {capacity}",
            found=found,
            fix="pass fewer tokens, or a larger cache",
        )


def check_device(qkv: torch.Tensor) -> None:
    """Refuse tensors that are not on a GPU. Raises DtoolError."""
    if not qkv.is_cuda:
        raise DtoolError(
            "the attention kernels run on a GPU only",
            expected="CUDA tensors",
            found=str(qkv.device),
            fix="move the tensors to a GPU: .cuda()",
        )


def _expected(tensors: dict[str, torch.Tensor], spec: AttentionSpec) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape each tensor must have; sizes that are free are taken from the tensor that sets them."""
    qkv, cos, cache = tensors["qkv"], tensors["cos"], tensors["key_cache"]
    if qkv.ndim != 3 or cos.ndim != 2 or cache.ndim != 4 or str(qkv.dtype).removeprefix("torch.") not in COMPUTE_DTYPES:
        raise DtoolError(
            "the tensors do not fit the attention node",
            expected="qkv [B, T, N] in float16 or bfloat16, cos [P, rotary_dim / 2], key_cache [B, K, C, D]",
            found=f"{qkv.dtype} {list(qkv.shape)}, {list(cos.shape)}, {list(cache.shape)}",
            fix="pass tensors of these shapes",
        )
    batch, kv_heads, dim = qkv.shape[0], spec.num_kv_heads, spec.head_dim
    cache_dtype = FORMATS[spec.cache_format].torch_dtype if spec.quantized else qkv.dtype
    table = torch.float32, (cos.shape[0], spec.rotary_dim // 2)
    kept = cache_dtype, (batch, kv_heads, cache.shape[2], dim)
    expected = {
        "qkv": (qkv.dtype, (batch, qkv.shape[1], spec.packed_width)),
        "cos": table,
        "sin": table,
        "past_lengths": (torch.int64, (batch,)),
        "key_cache": kept,
        "value_cache": kept,
    }
    if spec.quantized:
        scales = kept[1][:3] if spec.token_scales else (kv_heads,)
        expected |= dict.fromkeys(("key_scale", "value_scale"), (torch.float32, scales))
    if spec.qk_norm:
        expected |= dict.fromkeys(("q_norm", "k_norm"), (qkv.dtype, (dim,)))
    return expected

"""The torch side of the C entry point: what it passes on, and what it refuses. No kernel runs here."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.ops_plugin.conftest import FP8, FULL, INT8, PLAIN, TOKEN, no_driver
from toolchain.errors import DtoolError
from toolchain.ops.plugin.entry import AttentionCall, PluginLibrary

CACHE = {"none": torch.float16, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def library(plugin):
    return PluginLibrary(plugin.path)


def arguments(spec, batch=2, tokens=4, capacity=64, dtype=torch.float16):
    kept = (batch, spec.num_kv_heads, capacity, spec.head_dim)
    cache = dtype if spec.cache_format == "none" else CACHE[spec.cache_format]
    tables = [torch.zeros(128, spec.rotary_dim // 2) for _ in range(2)]
    qkv = torch.zeros(batch, tokens, spec.packed_width, dtype=dtype)
    lengths = torch.zeros(batch, dtype=torch.int64)
    return [qkv, *tables, lengths, torch.zeros(kept, dtype=cache), torch.zeros(kept, dtype=cache)]


def extras(spec, dtype=torch.float16):
    given = {}
    if spec.quantized:
        shape = (2, spec.num_kv_heads, 64) if spec.token_scales else (spec.num_kv_heads,)
        given["scales"] = tuple(torch.ones(shape) for _ in range(2))
    if spec.qk_norm:
        given["norms"] = tuple(torch.ones(spec.head_dim, dtype=dtype) for _ in range(2))
    return given


@pytest.fixture
def launched(library, monkeypatch):
    """The calls that would be launched, with CPU tensors taken for CUDA tensors."""
    calls = []
    monkeypatch.setattr("toolchain.ops.plugin.entry.check_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x99))
    monkeypatch.setattr(library, "launch", lambda call, stream: calls.append((call, stream)))
    return calls


@pytest.mark.parametrize(("spec", "index"), [(PLAIN, 0), (INT8, 1), (FP8, 2), (FULL, 3), (TOKEN, 4)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_every_pointer_reaches_its_field(library, launched, spec, index, tokens):
    given, more = arguments(spec, tokens=tokens), extras(spec)
    out = library.attend(*given, spec, **more)
    ((call, stream),) = launched
    assert out.shape == (2, tokens, spec.num_heads * spec.head_dim)
    assert (out.dtype, stream) == (torch.float16, 0x99)
    sizes = {"spec": index, "compute_dtype": 0, "batch": 2, "new_tokens": tokens, "capacity": 64}
    assert {name: getattr(call, name) for name in sizes} == sizes
    names = ("qkv", "cos", "sin", "past_lengths", "key_cache", "value_cache")
    tensors = dict(zip(names, given, strict=True)) | {"out": out}
    tensors |= dict(zip(("key_scale", "value_scale"), more.get("scales", ()), strict=False))
    tensors |= dict(zip(("q_norm", "k_norm"), more.get("norms", ()), strict=False))
    unused = {"key_scale", "value_scale", "q_norm", "k_norm"} - set(tensors)
    assert {name: getattr(call, name) for name in tensors} == {n: t.data_ptr() for n, t in tensors.items()}
    assert all(getattr(call, name) is None for name in unused)
    decode = tokens == 1
    assert (call.workspace is not None) == decode
    assert call.workspace_bytes == library.workspace_bytes(spec, 2, tokens) == (decode and call.workspace_bytes)


def test_bfloat16_is_the_second_type(library, launched):
    library.attend(*arguments(PLAIN, dtype=torch.bfloat16), PLAIN)
    assert launched[0][0].compute_dtype == 1


def test_the_struct_is_laid_out_as_the_header_says(library):
    assert AttentionCall().__class__.workspace_bytes.offset == 120
    code = library._library.dtool_attention(None, None)
    assert code == 1
    assert library.last_error() == "struct_bytes: expected 128, found 0"


def test_cpu_tensors_are_refused(library):
    with pytest.raises(DtoolError, match=r"run on a GPU only(?s:.*)found: +cpu"):
        library.attend(*arguments(PLAIN), PLAIN)


@pytest.mark.parametrize(
    ("at", "tensor", "said"),
    [
        (0, torch.zeros(2, 4, 100, dtype=torch.float16), "qkv does not fit(?s:.*)[2, 4, 128](?s:.*)[2, 4, 100]"),
        (0, torch.zeros(2, 4, 128), "in float16 or bfloat16(?s:.*)torch.float32 [2, 4, 128]"),
        (0, torch.zeros(2, 65, 128, dtype=torch.float16), "new tokens do not fit(?s:.*)1 to 64(?s:.*)65 new tokens"),
        (0, torch.zeros(2, 128, 4, dtype=torch.float16).mT, "qkv cannot be read(?s:.*)contiguous"),
        (0, torch.zeros(2 * 4 * 128 + 1, dtype=torch.float16)[1:].view(2, 4, 128), "aligned to 16 bytes"),
        (1, torch.zeros(128, 8, dtype=torch.float16), "cos does not fit(?s:.*)torch.float32 [128, 8]"),
        (2, torch.zeros(64, 8), "sin does not fit"),
        (3, torch.zeros(2, dtype=torch.int32), "past_lengths does not fit(?s:.*)torch.int64 [2]"),
        (4, torch.zeros(2, 2, 64, 16, dtype=torch.bfloat16), "key_cache does not fit"),
        (5, torch.zeros(2, 2, 32, 16, dtype=torch.float16), "value_cache does not fit"),
        (0, torch.zeros(2, 4, 128, dtype=torch.float16, device="meta"), "cos does not fit(?s:.*)on meta(?s:.*)on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(library, at, tensor, said):
    given = arguments(PLAIN)
    given[at] = tensor
    pattern = said.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(DtoolError, match=pattern):
        library.attend(*given, PLAIN)


def test_tables_must_cover_the_cache(library):
    with pytest.raises(DtoolError, match=r"do not cover the cache(?s:.*)256 or more(?s:.*)128 positions"):
        library.attend(*arguments(PLAIN, capacity=256), PLAIN)


def test_scales_and_norms_belong_to_the_spec(library):
    with pytest.raises(DtoolError, match=r"scales do not fit(?s:.*)key_scale and value_scale(?s:.*)none"):
        library.attend(*arguments(INT8), INT8)
    with pytest.raises(DtoolError, match=r"scales do not fit(?s:.*)expected: none"):
        library.attend(*arguments(PLAIN), PLAIN, **extras(INT8))
    with pytest.raises(DtoolError, match=r"key_scale does not fit(?s:.*)\[2, 2, 64\](?s:.*)float32 \[2\]"):
        library.attend(*arguments(TOKEN), TOKEN, norms=extras(TOKEN)["norms"], scales=extras(INT8)["scales"])
    with pytest.raises(DtoolError, match="norms do not fit"):
        library.attend(*arguments(FULL), FULL, scales=extras(FULL)["scales"])


@no_driver
def test_preparing_without_a_gpu_fails_and_says_why(library):
    with pytest.raises(DtoolError, match="cannot load the NVIDIA driver"):
        library.prepare(PLAIN, "float16")


def test_an_unknown_type_is_refused(library):
    with pytest.raises(DtoolError, match=r"float16 or bfloat16(?s:.*)float32"):
        library.prepare(PLAIN, "float32")


def test_another_file_is_refused(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(DtoolError, match=re.escape("the plugin library cannot be loaded")):
        PluginLibrary(tmp_path / "text.so")
    with pytest.raises(DtoolError, match="built by dtool build-plugin"):
        PluginLibrary("/lib/x86_64-linux-gnu/libm.so.6")


def test_a_library_of_another_abi_is_refused(library, plugin, monkeypatch):
    monkeypatch.setattr("toolchain.ops.plugin.entry.ABI", 4)
    with pytest.raises(DtoolError, match=r"expected: abi 4\n  found:    abi 3"):
        PluginLibrary(plugin.path)

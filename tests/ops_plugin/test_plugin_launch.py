"""The launch logic without a GPU: a stand-in for the driver records what the library asks of it."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.ops_plugin.conftest import (
    FP8,
    FULL,
    INT8,
    PLAIN,
    SHARED,
    TILES,
    WARPS,
    child_environment,
    no_driver,
    read_calls,
    run_child,
)
from toolchain.errors import DtoolError
from toolchain.ops.attention import AttentionSpec
from toolchain.ops.kernels.tiles import MOST_SPLITS, RESIDENT, choose_splits
from toolchain.ops.plugin import build
from toolchain.ops.plugin.entry import PluginLibrary

POINTERS = ("qkv", "cos", "sin", "past_lengths", "key_cache", "value_cache", "key_scale", "value_scale")
ADDRESS = {name: 0x100000 * (i + 1) for i, name in enumerate((*POINTERS, "q_norm", "k_norm", "out", "workspace"))}
SHARED_OPT_IN = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass
class Request:
    """A call of the C entry point; `changes` replace fields of the struct."""

    spec: AttentionSpec
    batch: int
    new_tokens: int
    capacity: int
    dtype: str = "float16"
    stream: int = 0
    changes: dict = field(default_factory=dict)

    def struct(self, library):
        call = library.make_call(self.spec, self.dtype, self.batch, self.new_tokens, self.capacity)
        values = ADDRESS | {"workspace_bytes": self.workspace_bytes(library)} | self.changes
        for name, value in values.items():
            setattr(call, name, value)
        return {"struct": bytes(call).hex(), "stream": self.stream}

    def workspace_bytes(self, library):
        return max(0, library.workspace_bytes(self.spec, self.batch, self.new_tokens))


@pytest.fixture(scope="module")
def library(plugin):
    return PluginLibrary(plugin.path)


@pytest.fixture
def call(plugin, library, fake_environment, tmp_path):
    """Make C calls in a child with the fake driver; returns the answers and the driver's log."""

    def call_(*requests, threads=1, **device):
        environment, log = fake_environment(**device)
        calls = [r.struct(library) if isinstance(r, Request) else r for r in requests]
        request = {"library": str(plugin.path), "calls": calls, "threads": threads}
        return run_child("c_child.py", request, environment, tmp_path)[0], log

    return call_


def splits_of(log):
    return [c["arguments"]["splits"] for c in read_calls(log, "cuLaunchKernel") if c["kernel"] == "decode_split"]


def test_prefill_writes_the_cache_and_then_attends(call):
    answers, log = call(Request(FULL, 3, 37, 96, stream=0x55))
    assert answers == [[0, ""]]
    write, attend = read_calls(log, "cuLaunchKernel")
    assert [write["kernel"], attend["kernel"]] == ["cache_write", "prefill"]
    assert write["grid"] == [-(-37 // TILES["BLOCK_T"]), FULL.num_kv_heads, 3]
    rows = 37 * FULL.num_heads // FULL.num_kv_heads
    assert attend["grid"] == [-(-rows // TILES["BLOCK_M"]), FULL.num_kv_heads, 3]
    for made in (write, attend):
        assert made["block"] == [32 * WARPS[made["kernel"]], 1, 1]
        assert made["shared"] == SHARED[made["kernel"]]
        assert made["stream"] == 0x55
        assert made["function"] == f"{made['kernel']}_kernel"
    common = {name: ADDRESS[name] for name in POINTERS} | {"new_tokens": 37, "capacity": 96}
    assert write["arguments"] == common | {"k_norm": ADDRESS["k_norm"]}
    assert attend["arguments"] == common | {"q_norm": ADDRESS["q_norm"], "out": ADDRESS["out"]}


def test_decode_splits_and_then_merges(call):
    answers, log = call(Request(FULL, 3, 1, 4096, stream=0x55), processors=24)
    assert answers[0] == [0, ""]
    split, merge = read_calls(log, "cuLaunchKernel")
    assert [split["kernel"], merge["kernel"]] == ["decode_split", "decode_merge"]
    # one wave of 24 over 3 rows and 2 KV heads has room for 12; the window of 96 slots has 3 tiles of 32
    splits = choose_splits(3, FULL.num_kv_heads, FULL.window, TILES["BLOCK_N"], 24)
    assert splits_of(log) == [splits] == [3]
    assert split["grid"] == [splits, FULL.num_kv_heads, 3]
    assert merge["grid"] == [FULL.num_heads, 3, 1]
    names = (*POINTERS, "q_norm", "k_norm")
    partial = 3 * FULL.num_heads * splits * FULL.head_dim * 4
    partial_lse = ADDRESS["workspace"] + -(-partial // 256) * 256
    parts = {"partial_out": ADDRESS["workspace"], "partial_lse": partial_lse, "splits": splits}
    assert split["arguments"] == {name: ADDRESS[name] for name in names} | parts | {"capacity": 4096}
    assert merge["arguments"] == parts | {"out": ADDRESS["out"]}
    assert [split["block"], merge["block"]] == [[128, 1, 1], [64, 1, 1]]


@pytest.mark.parametrize(
    ("spec", "processors", "batch", "capacity"),
    [
        (PLAIN, 24, 1, 4096),
        (PLAIN, 25, 3, 4096),  # 75 programs over 6: rounded down
        (PLAIN, 132, 1, 32768),  # the most
        (PLAIN, 132, 1, 4064),  # a tile fewer than the most
        (PLAIN, 132, 1, 257),  # a tile each, the last of one slot
        (PLAIN, 132, 1, 32),  # a single tile
        (PLAIN, 132, 64, 32768),
        (PLAIN, 132, 500, 32768),  # enough rows without
        (FULL, 132, 1, 4096),  # the window, not the capacity
        (FULL, 132, 1, 64),  # the capacity, not the window
    ],
)
def test_splits_are_those_the_kernels_choose(call, library, spec, processors, batch, capacity):
    request = Request(spec, batch, 1, capacity)
    answers, log = call(request, processors=processors)
    assert answers[0][0] == 0
    slots = min(spec.window or capacity, capacity)
    splits = choose_splits(batch, spec.num_kv_heads, slots, TILES["BLOCK_N"], processors)
    assert splits_of(log) == [splits]
    assert splits <= MOST_SPLITS
    needed = batch * spec.num_heads * splits * (spec.head_dim + 1) * 4
    assert needed <= request.workspace_bytes(library)


def test_the_constants_of_the_split_rule_are_those_of_the_kernels():
    native = Path(build.__file__).parent / "native"
    for file, name, value in (("common.h", "kMaxSplits", MOST_SPLITS), ("launcher.cpp", "kResident", RESIDENT)):
        assert re.search(rf"constexpr \w+ {name} = (\d+);", (native / file).read_text())[1] == str(value)


def test_modules_are_loaded_once_a_context_and_shared_memory_is_asked_for(call):
    plain = Request(PLAIN, 1, 4, 64)
    answers, log = call(plain, plain, Request(PLAIN, 1, 1, 64), {"context": 0x2000}, plain, {"context": 0x1000}, plain)
    assert [answer[0] for answer in answers] == [0] * 5
    loads = read_calls(log, "cuModuleLoadData")
    labels = [f"spec0.float16.sm89.{name}" for name in ("cache_write", "prefill", "decode_split", "decode_merge")]
    assert [(load["label"], load["context"]) for load in loads] == [
        (label, context) for context in (0x1000, 0x2000) for label in labels
    ]
    asked = read_calls(log, "cuFuncSetAttribute")
    assert [(a["function"], a["attribute"], a["value"]) for a in asked] == [
        ("prefill_kernel", SHARED_OPT_IN, 70_000)
    ] * 2
    assert len(read_calls(log, "cuInit")) == 1


def test_threads_share_the_loaded_kernels(call):
    requests = [Request(PLAIN, 1, tokens, 64, dtype=dtype) for tokens in (1, 4) for dtype in ("float16", "bfloat16")]
    answers, log = call(*requests * 10, {"context": 0x1000}, threads=8)
    assert answers == [[[0, ""]] * 40] * 8
    assert len(read_calls(log, "cuModuleLoadData")) == 8
    assert len(read_calls(log, "cuLaunchKernel")) == 8 * 40 * 2


@pytest.mark.parametrize(
    ("device", "spec", "dtype", "label"),
    [
        (80, PLAIN, "float16", "spec0.float16.sm80"),
        (86, INT8, "float16", "spec1.float16.sm80"),  # code of a lower minor runs
        (89, FP8, "float16", "spec2.float16.sm89"),  # the nearest is taken
        (89, PLAIN, "bfloat16", "spec0.bfloat16.sm89"),
    ],
)
def test_kernels_of_the_nearest_device_are_taken(call, device, spec, dtype, label):
    answers, log = call(Request(spec, 1, 4, 64, dtype=dtype), sm=device)
    assert answers[0] == [0, ""]
    assert {made["label"].rsplit(".", 1)[0] for made in read_calls(log, "cuLaunchKernel")} == {label}


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        ({"sm": 90}, "float16", "no kernels for sm90, float16, 4 query"),
        ({"sm": 75}, "float16", "expected one of the embedded: sm80, sm89;"),
        ({"sm": 87}, "float16", "no kernels for sm87"),  # an embedded device
        ({"sm": 86, "shared": 65_536}, "float16", "sm80 (needs more shared memory), sm89;"),
        ({"sm": 80}, "bfloat16", "expected one of the embedded: sm89;"),
    ],
)
def test_a_device_without_kernels_is_named(call, device, dtype, said):
    answers, log = call(Request(PLAIN, 1, 4, 64, dtype=dtype), **device)
    assert answers[0][0] == 2
    assert said in answers[0][1]
    assert read_calls(log, "cuModuleLoadData", "cuLaunchKernel") == []


@pytest.mark.parametrize(
    "failing", ["cuInit", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"]
)
def test_a_failing_driver_call_is_reported(call, failing):
    answers, log = call(Request(PLAIN, 1, 4, 64), Request(PLAIN, 1, 4, 64), fail=failing)
    assert [answer[0] for answer in answers] == [3, 3]
    assert all("CUDA error 209, no kernel image is available" in answer[1] for answer in answers)
    unloaded = len(read_calls(log, "cuModuleUnload"))
    assert unloaded == {"cuModuleGetFunction": 2, "cuFuncSetAttribute": 2}.get(failing, 0)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(PLAIN, 1, 65, 64), "new_tokens: expected 1 to 64, found 65"),
        (Request(PLAIN, 0, 1, 64), "batch: expected 1 to 65535, found 0"),
        (Request(PLAIN, 1, 4, 64, changes={"qkv": None}), "qkv: expected device memory, found a null pointer"),
        (Request(INT8, 1, 4, 64, changes={"key_scale": None}), "key_scale: expected device memory"),
        (Request(FULL, 1, 4, 64, changes={"k_norm": None}), "k_norm: expected device memory"),
        (
            Request(PLAIN, 1, 4, 64, changes={"out": 0x1008}),
            "out: expected an address aligned to 16 bytes, found 0x1008",
        ),
        (
            Request(PLAIN, 1, 1, 64, changes={"workspace_bytes": 8}),
            "the workspace has 8 bytes, expected 544 for batch 1 and 2 splits",
        ),
        (Request(PLAIN, 1, 1, 64, changes={"workspace": None}), "the workspace has 0 bytes"),
        (Request(PLAIN, 1, 1, 64, changes={"struct_bytes": 8}), "struct_bytes: expected 128, found 8"),
        (Request(PLAIN, 1, 1, 64, changes={"spec": 9}), "spec: expected an index from 0 to 5, found 9"),
        (Request(PLAIN, 1, 1, 64, changes={"compute_dtype": 2}), "compute_dtype: expected 0 (float16) or 1"),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(call, request_, said):
    answers, log = call(request_)
    assert answers[0][0] == 1
    assert said in answers[0][1]
    assert read_calls(log, "cuLaunchKernel") == []


def test_pointers_a_spec_has_no_use_for_may_be_null(call):
    unused = dict.fromkeys(("key_scale", "value_scale", "q_norm", "k_norm", "workspace"))
    answers, log = call(Request(PLAIN, 1, 4, 64, changes=unused))
    assert answers[0][0] == 0
    assert read_calls(log, "cuLaunchKernel")[0]["arguments"]["key_scale"] == 0


def test_a_thread_without_a_context_is_refused(call):
    answers, _ = call({"context": 0}, Request(PLAIN, 1, 4, 64))
    assert answers[0][0] == 3
    assert "no CUDA context is current" in answers[0][1]


def test_an_unknown_spec_is_refused_with_those_carried(library):
    with pytest.raises(DtoolError, match=r"num_heads=6(?s:.)*found.*window=7"):
        library.make_call(replace(PLAIN, window=7), "float16", 1, 1, 64)


@no_driver
def test_without_a_driver_the_call_fails_and_says_why(plugin, library, tmp_path):
    calls = [Request(PLAIN, 1, tokens, 64).struct(library) for tokens in (4, 1)]
    request = {"library": str(plugin.path), "calls": calls}
    answers, _ = run_child("c_child.py", request, child_environment(tmp_path), tmp_path)
    assert [code for code, _ in answers] == [3, 3]
    assert "cannot load the NVIDIA driver (libcuda.so.1" in answers[0][1]

"""A small plugin library built once, and what the tests make of it."""

import ctypes.util
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from toolchain.ops.attention import AttentionSpec
from toolchain.ops.function_body import SCALE_OUTPUTS, node_attributes
from toolchain.ops.kernels.bindings import ARGUMENTS, INTEGERS
from toolchain.ops.plugin.build import build_library, build_plugin
from toolchain.ops.plugin.table import KernelSet
from toolchain.ops.plugin.toolkit import find_toolkit

HERE = Path(__file__).parent
PACKAGES = ("kernel_lens", "tensorrt_rtx", "tensorrt_lean_bindings", "triton")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
MISSING += [] if shutil.which("nvcc") else ["nvcc"]
TIMEOUT_S = 120
no_driver = pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a CUDA driver here")

PLAIN = AttentionSpec(4, 2, 16, 0.25, 16, "none")
INT8 = AttentionSpec(4, 2, 16, 0.25, 16, "int8")
FP8 = AttentionSpec(4, 2, 16, 0.25, 16, "fp8_e4m3")
FULL = AttentionSpec(6, 2, 18, 0.125, 8, "int8", interleaved=True, softcap=30.0, window=96, qk_norm_eps=1e-6)
TOKEN = AttentionSpec(6, 2, 18, 0.125, 8, "int8", softcap=30.0, window=96, qk_norm_eps=1e-6, token_scales=True)
FP8_TOKEN = AttentionSpec(4, 2, 16, 0.25, 16, "fp8_e4m3", token_scales=True)
SPECS = (PLAIN, INT8, FP8, FULL, TOKEN, FP8_TOKEN)
REAL = AttentionSpec(4, 2, 64, 0.125, 64, "int8")
"""A spec whose kernels are compiled; those above have stand-ins."""
TILES = {"BLOCK_T": 16, "BLOCK_M": 32, "BLOCK_N": 32}
SHARED = {"cache_write": 0, "prefill": 70_000, "decode_split": 49_152, "decode_merge": 512}
WARPS = {"cache_write": 4, "prefill": 8, "decode_split": 4, "decode_merge": 2}


def pytest_collection_modifyitems(items):
    for item in items:
        if MISSING and item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(MISSING)}"))


@dataclass(frozen=True)
class StandIn:
    """A kernel whose machine code is a label: the fake driver of the tests reads it back."""

    name: str
    cubin: bytes
    function: str
    num_warps: int
    shared_bytes: int
    tile: dict
    registers: int = 40
    spill_bytes: int = 0


def stand_in_set(spec, sm, dtype="float16", shared=SHARED):
    """A kernel set with labels in place of machine code."""
    label = f"spec{SPECS.index(spec)}.{dtype}.sm{sm}"
    kernels = tuple(
        StandIn(name, f"{label}.{name}\0".encode(), f"{name}_kernel", WARPS[name], shared[name], TILES)
        for name in SHARED
    )
    return KernelSet(spec, dtype, sm, kernels)


@pytest.fixture(scope="session")
def toolkit():
    return find_toolkit()


@pytest.fixture(scope="session")
def plugin(toolkit, tmp_path_factory):
    """A library for all specs on sm80 and sm89, and bfloat16 for the plain one; no machine code in it."""
    sets = [stand_in_set(spec, sm) for spec in SPECS for sm in (80, 89)]
    sets.append(stand_in_set(PLAIN, 89, "bfloat16"))
    return build_library(sets, tmp_path_factory.mktemp("plugin") / "libdtool_attention.so", toolkit)


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A library with kernels that Triton compiled, for one spec on sm80 and sm89."""
    return build_plugin([REAL], "float16", [89, 80], tmp_path_factory.mktemp("real") / "libdtool_attention.so")


def attributes(spec, **changes):
    """The node's attributes as the exporter writes them; a change to None leaves one out."""
    values = {attribute.name: attribute.value for attribute in node_attributes(spec)} | changes
    return {name: value for name, value in values.items() if value is not None}


CACHE_TYPES = {"int8": TensorProto.INT8, "fp8_e4m3": TensorProto.FLOAT8E4M3FN}


def attention_graph(path, spec, *, tokens=None, dtype=TensorProto.FLOAT16, types=(), shapes=(), drop=(), **changes):
    """A graph of one attention node whose inputs and outputs are the graph's own.

    `types` and `shapes` replace those of named inputs, `drop` leaves inputs out, `changes` are attributes.
    """
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    cache_type = CACHE_TYPES.get(spec.cache_format, dtype)
    cache = ["B", kv_heads, 64, dim]
    inputs = {
        "qkv": (dtype, ["B", tokens or "T", spec.packed_width]),
        "cos": (TensorProto.FLOAT, [128, spec.rotary_dim // 2]),
        "sin": (TensorProto.FLOAT, [128, spec.rotary_dim // 2]),
        "past_lengths": (TensorProto.INT64, ["B"]),
        "past_key": (cache_type, cache),
        "past_value": (cache_type, cache),
    }
    if spec.quantized:
        scale = cache[:3] if spec.token_scales else [kv_heads]
        inputs |= dict.fromkeys(("key_scale", "value_scale"), (TensorProto.FLOAT, scale))
    if spec.qk_norm:
        inputs |= dict.fromkeys(("q_norm", "k_norm"), (dtype, [dim]))
    types, shapes = dict(types), dict(shapes)
    infos = [
        helper.make_tensor_value_info(name, types.get(name, kind), shapes.get(name, shape))
        for name, (kind, shape) in inputs.items()
        if name not in drop
    ]
    outputs = [
        helper.make_tensor_value_info("out", dtype, ["B", tokens or "T", heads * dim]),
        helper.make_tensor_value_info("present_key", types.get("past_key", cache_type), shapes.get("past_key", cache)),
        helper.make_tensor_value_info("present_value", types.get("past_value", cache_type), cache),
    ]
    names = SCALE_OUTPUTS if spec.token_scales else ()
    outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, cache[:3]) for name in names]
    node = helper.make_node(
        "FusedAttention",
        [info.name for info in infos],
        [info.name for info in outputs],
        name="attend",
        domain="dtool",
        **attributes(spec, **changes),
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("dtool", 1)]
    graph = helper.make_graph([node], "attention", infos, outputs)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), path)
    return {info.name: _shape_range(info) for info in infos if "B" in _dims(info) or "T" in _dims(info)}


def _dims(info):
    return [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]


def _shape_range(info):
    pick = ({"B": 1, "T": 1}, {"B": 2, "T": 8}, {"B": 4, "T": 32})
    return [[sizes.get(dim, dim) for dim in _dims(info)] for sizes in pick]


def child_environment(folder):
    """What a child needs. TensorRT-RTX's parser dlopens a name of its library that the wheel does not ship."""
    links = folder / "lib"
    links.mkdir(exist_ok=True)
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    for base in spec.submodule_search_locations if spec else ():
        link = links / "libtensorrt_rtx.so"
        if not link.exists():
            link.symlink_to(next(Path(base).glob("libtensorrt_rtx.so.*")).resolve())
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | {"LD_LIBRARY_PATH": str(links)}


def run_child(script, request, environment, folder):
    """Run a script of this folder with a JSON request; returns its JSON answer, its last line, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-P", HERE / script, json.dumps(request)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="session")
def compile_rtx(plugin, tmp_path_factory):
    """Compile attention graphs with TensorRT-RTX, all in one child process: {name: {spec, sm, graph's changes}}."""

    def compile_(jobs, library=plugin.path):
        folder = tmp_path_factory.mktemp("rtx")
        requests = []
        for name, job in jobs.items():
            settings = {"sm": job.get("sm", 89), "aliasing": job.get("aliasing", True)}
            changes = {key: value for key, value in job.items() if key not in {"spec", "sm", "aliasing"}}
            profile = attention_graph(folder / f"{name}.onnx", job["spec"], **changes)
            requests.append(settings | {"onnx": str(folder / f"{name}.onnx"), "profile": profile})
        request = {"library": str(library), "jobs": requests}
        results, _ = run_child("rtx_child.py", request, child_environment(folder), folder)
        return dict(zip(jobs, results, strict=True))

    return compile_


KINDS = {name: "".join("i" if a in INTEGERS else "p" for a in arguments) for name, arguments in ARGUMENTS.items()}


@pytest.fixture(scope="session")
def fake_driver(toolkit, tmp_path_factory):
    """A folder with a libcuda.so.1 that records calls: see fake_cuda.c."""
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-shared", "-cudart=none", "-nodlink", "-Xcompiler=-fPIC"]
    toolkit.run([*flags, HERE / "fake_cuda.c", "-o", "libcuda.so.1"], folder)
    return folder


@pytest.fixture(scope="session")
def harness(toolkit, tmp_path_factory):
    """A program that drives the plugin as TensorRT would: see harness.cpp."""
    path = tmp_path_factory.mktemp("harness") / "harness"
    flags = ["-std=c++17", "-cudart=none", "-nodlink", f"-isystem={toolkit.include}"]
    toolkit.run([*flags, HERE / "harness.cpp", "-o", path], path.parent)
    return path


@pytest.fixture
def fake_environment(fake_driver, tmp_path):
    """The environment of a process that finds the fake driver, and the log the driver will write."""

    def make(**device):
        log = tmp_path / "calls.jsonl"
        kinds = ";".join(f"{name}={kinds}pp" for name, kinds in KINDS.items())
        named = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in device.items()}
        environment = child_environment(tmp_path) | {"FAKE_CUDA_LOG": str(log), "FAKE_CUDA_ARGS": kinds} | named
        environment["LD_LIBRARY_PATH"] = str(fake_driver)
        return environment, log

    return make


def read_calls(log, *names):
    """The recorded driver calls, or those of some names; launch arguments as a dict by the kernel's names."""
    calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for call in calls:
        if call["call"] == "cuLaunchKernel":
            call["kernel"] = call["label"].rsplit(".", 1)[1]
            *arguments, scratch, profile = call["arguments"]
            assert (scratch, profile, call["extra"]) == (0, 0, 0)
            call["arguments"] = dict(zip(ARGUMENTS[call["kernel"]], arguments, strict=True))
    return [call for call in calls if not names or call["call"] in names]

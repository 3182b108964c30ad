"""Building the library: what is in it, that it is the same every time, and what is said when it cannot be built."""

import ctypes
import hashlib
import json
import re
import shutil
import time
from dataclasses import asdict, replace

import pytest

from tests.ops_plugin.conftest import FULL, PLAIN, REAL, SPECS, stand_in_set
from toolchain.errors import DtoolError
from toolchain.ops.attention import ABI
from toolchain.ops.kernels.compile import compile_kernels
from toolchain.ops.plugin.build import NATIVE, build_library, build_plugin
from toolchain.ops.plugin.entry import PluginLibrary
from toolchain.ops.plugin.table import KernelSet
from toolchain.ops.plugin.toolkit import cache_folder, find_headers, find_toolkit, header_version

EXPORTED = {
    "getCreators",
    "setLoggerFinder",
    "dtool_attention",
    "dtool_attention_describe",
    "dtool_attention_last_error",
    "dtool_attention_prepare",
    "dtool_attention_workspace_bytes",
}


def test_it_carries_the_compiled_kernels(real):
    described = PluginLibrary(real.path).describe()
    assert described == real.description
    assert described["abi"] == ABI
    assert described["specs"] == [asdict(REAL)]
    assert described["compute_dtypes"] == ["float16"]
    assert described["sms"] == [80, 89]
    content = real.path.read_bytes()
    assert (real.bytes, real.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    for carried, sm in zip(described["sets"], (80, 89), strict=True):
        kernels = compile_kernels(REAL, sm, "float16", cache_dir=cache_folder() / "triton")
        assert (carried["spec"], carried["sm"]) == (0, sm)
        for kernel in kernels:
            assert kernel.cubin in content
            said = next(k for k in carried["kernels"] if k["name"] == kernel.name)
            assert said["cubin_sha256"] == hashlib.sha256(kernel.cubin).hexdigest()
            assert said["registers"] == kernel.registers
            assert (said["num_warps"], said["shared_bytes"]) == (kernel.num_warps, kernel.shared_bytes)
            assert said["tile"] == kernel.tile


def test_it_says_what_built_it(real):
    versions = real.description["versions"]
    assert set(versions) == {"tensorrt_headers", "cuda", "compiler", "triton"}
    assert all(re.match(r"\d+\.\d+", version) for version in versions.values())
    text = ctypes.CDLL(str(real.path)).dtool_attention_describe
    text.restype = ctypes.c_char_p
    assert json.loads(text()) == real.description


def test_rtx_compiles_a_graph_with_it(real, compile_rtx):
    result = compile_rtx({"real": {"spec": REAL}}, real.path)["real"]
    assert result["errors"] == []
    assert "LayerType: PluginV3" in result["layers"]


def test_equal_inputs_give_equal_bytes(real, plugin, toolkit, tmp_path, monkeypatch):
    again = build_plugin([REAL, replace(REAL)], "float16", [80, 89, 80], tmp_path / "elsewhere" / "other_name.so")
    assert again.sha256 == real.sha256
    sets = [stand_in_set(spec, sm) for spec in SPECS for sm in (80, 89)] + [stand_in_set(PLAIN, 89, "bfloat16")]
    monkeypatch.setenv("DTOOL_CACHE_DIR", str(tmp_path / "cache"))  # the C++ objects are compiled anew
    assert build_library(sets, tmp_path / "plugin.so", toolkit).sha256 == plugin.sha256
    assert not list(tmp_path.glob(".*"))  # nothing is left over
    # and another input gives other bytes
    assert build_library(sets[:-1], tmp_path / "plugin.so", toolkit).sha256 != plugin.sha256


def test_a_library_is_written_through_a_link(toolkit, tmp_path):
    (tmp_path / "libraries").mkdir()
    link = tmp_path / "plugin.so"
    link.symlink_to(tmp_path / "libraries" / "data.so")
    for _ in range(2):
        build_library([stand_in_set(PLAIN, 89)], link, toolkit)
        assert link.is_symlink()
        assert (tmp_path / "libraries" / "data.so").is_file()


def test_a_second_build_takes_seconds(real, tmp_path):
    start = time.perf_counter()
    build_plugin([REAL], "float16", [80, 89], tmp_path / "plugin.so")
    assert time.perf_counter() - start < 10


def test_it_exports_only_what_is_called_from_outside(plugin):
    content = plugin.path.read_bytes()
    exported = set(re.findall(rb"\0(getCreators|setLoggerFinder|dtool_\w+)(?=\0)", content))
    assert {name.decode() for name in exported} == EXPORTED
    assert not re.search(rb"_ZN5dtool\w*(Plugin|Driver|launch)", content)


def test_it_asks_little_of_a_host(plugin):
    content = plugin.path.read_bytes()
    needed = set(re.findall(rb"\0(lib[\w+-]+\.so[.\d]*|libcuda[\w.]*)(?=\0)", content)) - {b"libcuda.so.1"}
    assert needed <= {b"libstdc++.so.6", b"libgcc_s.so.1", b"libc.so.6", b"libm.so.6"}
    assert tuple(map(int, plugin.needs["GLIBC"].split("."))) <= (2, 28)
    assert str(NATIVE).encode() not in content
    assert b"/tmp/" not in content


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], "float16", [89]), "without attention nodes"),
        (([REAL], "float16", []), "without target devices"),
        (([REAL], "float32", [89]), "float16 or bfloat16"),
        (([REAL], "float16", [61]), "sm_61"),
        (([replace(REAL, cache_format="fp8_e4m3")], "float16", [80]), "sm_80 has no e4m3"),
    ],
)
def test_impossible_requests_are_refused(arguments, said, tmp_path):
    with pytest.raises(DtoolError, match=said):
        build_plugin(*arguments, tmp_path / "plugin.so")
    assert not list(tmp_path.iterdir())


def test_an_incomplete_kernel_set_is_refused(toolkit, tmp_path):
    whole = stand_in_set(FULL, 89)
    with pytest.raises(DtoolError, match="a kernel decode_merge"):
        build_library([KernelSet(FULL, "float16", 89, whole.kernels[:3])], tmp_path / "plugin.so", toolkit)
    odd = tuple(replace(kernel, tile={}) for kernel in whole.kernels)
    with pytest.raises(DtoolError, match="tile BLOCK_T"):
        build_library([KernelSet(FULL, "float16", 89, odd)], tmp_path / "plugin.so", toolkit)


def test_missing_tools_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(DtoolError, match=r"without nvcc(?s:.*)install the CUDA toolkit"):
        find_toolkit()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("toolchain.ops.plugin.toolkit._system_folders", list)
    with pytest.raises(DtoolError, match=r"TensorRT's headers(?s:.*)pip install 'dtool\[plugin\]'"):
        find_headers()
    with pytest.raises(DtoolError, match=f"none in {tmp_path}"):
        find_headers(tmp_path)


def test_a_missing_compiler_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "toolchain.ops.kernels.compile", None)
    with pytest.raises(DtoolError, match=r"kernels cannot be compiled(?s:.*)pip install 'dtool\[plugin\]'"):
        build_plugin([REAL], "float16", [89], tmp_path / "plugin.so")


def headers(folder, version, text=""):
    major, minor = version
    names = (("MAJOR", major), ("MINOR", minor), ("PATCH", 0))
    lines = [f"#define NV_TENSORRT_{name} {value} //!< part" for name, value in names]
    (folder / "NvInferVersion.h").write_text("\n".join(lines))
    (folder / "NvInferRuntime.h").write_text(text)


def test_old_headers_are_refused(tmp_path):
    headers(tmp_path, (8, 6))
    with pytest.raises(DtoolError, match=r"version 10\.3 or later(?s:.*)8\.6\.0"):
        find_toolkit(tmp_path)
    headers(tmp_path, (11, 4))
    assert header_version(tmp_path) == "11.4.0"


def test_a_compiler_error_is_shown(tmp_path, monkeypatch):
    headers(tmp_path, (11, 4), "#error these headers are broken\n")
    monkeypatch.setenv("DTOOL_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(DtoolError, match=r"does not compile(?s:.*)these headers are broken"):
        build_library([stand_in_set(PLAIN, 89)], tmp_path / "plugin.so", find_toolkit(tmp_path))
    assert not (tmp_path / "plugin.so").exists()


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DTOOL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DtoolError, match="set DTOOL_CACHE_DIR"):
        cache_folder()

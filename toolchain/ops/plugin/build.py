"""Build the plugin library: compile the kernels, embed them, compile and link the C++ around them.

Equal inputs and tools give equal bytes: nothing in the library tells a path, a time or a build. The
C++ objects and the kernels are kept in the cache under digests of all they depend on.
"""

import hashlib
import importlib.metadata
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolchain.errors import DtoolError
from toolchain.ops.attention import AttentionSpec
from toolchain.ops.plugin.table import COMPUTE_DTYPES, KernelSet, describe, write_table
from toolchain.ops.plugin.toolkit import INSTALL, Toolkit, cache_folder, digest_files, find_toolkit

NATIVE = Path(__file__).parent / "native"
_HOST = (
    "-fPIC",
    "-O2",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffunction-sections",
    "-Wall",
    "-Wextra",
)
_COMPILE = ("-std=c++17", *(f"-Xcompiler={flag}" for flag in _HOST))
_LINK = (
    "-shared",
    "-cudart=none",  # only the driver is called, and that is found at run time
    "-nodlink",
    *(f"-Xlinker={flag}" for flag in ("--build-id=none", "--gc-sections", "-s", "-z", "defs", "-z", "relro")),
)
_NEEDS = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d[\d.]*)(?=\0)")


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A built library. `needs` are the newest symbol versions it asks of a host; `description` what it carries."""

    path: Path
    bytes: int
    sha256: str
    needs: dict[str, str]
    description: dict[str, Any]


def build_plugin(
    specs: Sequence[AttentionSpec],
    compute_dtype: str,
    sms: Sequence[int],
    out: Path,
    *,
    tensorrt_include: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> PluginInfo:
    """Build the library that serves some nodes on some devices, and put it at `out`.

    Args:
        specs: the attention nodes to serve.
        compute_dtype: float16 or bfloat16.
        sms: compute capabilities, 89 for 8.9.
        out: the library's path; replaced at once when the build is done.
        tensorrt_include: folder of TensorRT's headers; found by itself when not given.
        report: told what is being done.

    Raises:
        DtoolError: when a tool is missing, an argument is impossible or a step fails.
    """
    _check_request(specs, compute_dtype, sms)
    toolkit = find_toolkit(tensorrt_include)  # before the kernels, which take longer
    sets = []
    for spec in dict.fromkeys(specs):
        for sm in sorted(set(sms)):
            scales = " with a scale per token" if spec.token_scales else ""
            report(f"kernels for sm{sm}, head_dim {spec.head_dim}, cache {spec.cache_format}{scales}")
            sets.append(KernelSet(spec, compute_dtype, sm, _compile_kernels(spec, sm, compute_dtype)))
    report("plugin library")
    return build_library(sets, out, toolkit)


def _check_request(specs: Sequence[AttentionSpec], compute_dtype: str, sms: Sequence[int]) -> None:
    if not specs or not sms:
        missing = "attention nodes" if not specs else "target devices"
        raise DtoolError(
            f"a plugin without {missing} serves nothing",
            expected=f"at least one of the {missing}",
            found="none",
            fix="give an artifact with attention nodes, and engine.targets",
        )
    if compute_dtype not in COMPUTE_DTYPES:
        raise DtoolError(
            "the attention kernels do not compute in this type",
            expected=" or ".join(COMPUTE_DTYPES),
            found=compute_dtype,
            fix="set compute_dtype in the recipe",
        )


def _compile_kernels(spec: AttentionSpec, sm: int, compute_dtype: str) -> Sequence[Any]:
    try:
        from toolchain.ops.kernels.compile import compile_kernels
    except ImportError as error:
        raise DtoolError(
            "the attention kernels cannot be compiled",
            expected="triton",
            found=str(error),
            fix=INSTALL,
        ) from error
    return compile_kernels(spec, sm, compute_dtype, cache_dir=cache_folder() / "triton")


def build_library(sets: Sequence[KernelSet], out: Path, toolkit: Toolkit) -> PluginInfo:
    """Embed compiled kernel sets in a library at `out`."""
    description = describe(sets, _versions(toolkit))
    objects = _objects(toolkit)
    out = out.resolve()  # a link is followed, as every output follows one
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        folder = Path(name)
        write_table(sets, description, folder)
        sources = ("table.cpp", f"-I{NATIVE}", f"-Xlinker=--version-script={NATIVE / 'exports.map'}")
        toolkit.run([*_COMPILE, *_LINK, *sources, *objects, "-o", "library.so"], folder)
        content = (folder / "library.so").read_bytes()
        (folder / "library.so").replace(out)
    return PluginInfo(out, len(content), hashlib.sha256(content).hexdigest(), _needs(content), description)


def _needs(library: bytes) -> dict[str, str]:
    """The newest version of each system library's symbols, from the library's string table."""
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in _NEEDS.findall(library):
        parts = tuple(int(part) for part in version.split(b"."))
        newest[name.decode()] = max(parts, newest.get(name.decode(), parts))
    return {name: ".".join(map(str, parts)) for name, parts in sorted(newest.items())}


def _versions(toolkit: Toolkit) -> dict[str, str]:
    found = {"tensorrt_headers": toolkit.tensorrt, "cuda": toolkit.cuda, "compiler": toolkit.compiler}
    try:
        return found | {"triton": importlib.metadata.version("triton")}
    except importlib.metadata.PackageNotFoundError:
        return found | {"triton": "none"}


def _objects(toolkit: Toolkit) -> list[Path]:
    """The compiled C++ sources, from the cache when nothing they depend on has changed."""
    sources = sorted(NATIVE.glob("*.cpp"))
    depends = [*sources, *sorted(NATIVE.glob("*.h")), *sorted(toolkit.include.glob("NvInfer*.h"))]
    key = digest_files(depends, toolkit.cuda, toolkit.compiler, *_COMPILE)
    kept = cache_folder() / "plugin-objects" / key[:32]
    if not kept.is_dir():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as name:
            made = Path(name) / "made"
            made.mkdir()
            flags = [*_COMPILE, f"-isystem={toolkit.include}", "-c", "-odir", made]
            toolkit.run([*flags, *(source.name for source in sources)], NATIVE)
            with suppress(OSError):  # another build was faster, and its objects are the same
                made.rename(kept)
    return sorted(kept.glob("*.o"))

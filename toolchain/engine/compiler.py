"""Compiling one ONNX graph with TensorRT or TensorRT-RTX, in a process of its own.

TensorRT keeps the first builder's logger for the life of a process, aborts on some faults, may be
killed for its memory, and does not return to Python for Ctrl-C. A child process per engine answers
all four. This module is the parent's side; `compile_child` is what the child runs. The child reads a
JSON request, writes the plan, the layer log and a JSON result, tells its progress on stdout, and logs
to stderr.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import toolchain
from toolchain.engine.profiles import Profile
from toolchain.errors import DtoolError
from toolchain.memory import NO_MEMORY, ending, memory_at_hand, size_text

CHILD = "toolchain.engine.compile_child"
REFUSED, UNWRITTEN = 3, 4
"""The child's exit statuses when TensorRT said no, and when a file could not be written; any other but 0 is a crash."""

PROGRESS, SYSTEM_ERROR = "progress ", "system error "
"""Beginnings of the lines on the child's stdout; after the second stands the error as JSON."""
LOG_LINES = 6
NAMES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "CUDA_VISIBLE_DEVICES")
BASE_RSS_BYTES, RSS_PER_WEIGHT_BYTE = 400_000_000, 4  # 1.4 GB was measured for 0.27 GB of weights
COMPILE_ELSEWHERE = "free memory, or compile on a larger machine"
_FIXES = (
    (
        re.compile(r"dedicated kernel"),
        "engine.attention plugin; or compute_dtype float16 or bfloat16, and a head_dim from 16 to 256",
    ),
    (re.compile(r"HW-specific datatypes"), "leave out the targets that lack the format"),
    (re.compile(r"(?i)plugin.*(not found|creator)"), "give the library that holds the plugin: --plugin-library FILE"),
    (re.compile(r"workspace|WORKSPACE"), "raise engine.memory_limit_mb, or leave it out"),
    (NO_MEMORY, COMPILE_ELSEWHERE),
)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the builder is asked beyond the graph; None leaves the builder's default."""

    optimization_level: int | None = None
    memory_limit_mb: int | None = None
    weight_streaming: bool = False
    refit: bool = False
    strip_weights: bool = False
    hardware_compatibility: str = "none"
    version_compatible: bool = False


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What the child needs: backend, graph, SMs, one profile per phase, plugins, and the folder for its outputs.

    `timing_cache` is read if it is there, and written back; plugin libraries are loaded in order.
    """

    backend: str
    onnx: Path
    sms: tuple[int, ...]
    profiles: tuple[Profile, ...]
    folder: Path
    plugin_libraries: tuple[Path, ...] = ()
    options: BuildOptions = field(default_factory=BuildOptions)
    timing_cache: Path | None = None

    def path(self, kind: str) -> Path:
        """The file of one kind: request, result, plan or layers."""
        return self.folder / f"{self.onnx.stem}.{kind}"


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A compiled engine: its plan and layer log, what it took, and how the timing cache was used."""

    plan: Path
    layers: str
    parse_s: float
    build_s: float
    peak_rss_bytes: int
    timing_cache: str


def estimate_rss_bytes(weights_bytes: int) -> int:
    """About how much memory compiling takes: a fixed part and a few copies of the weights."""
    return BASE_RSS_BYTES + RSS_PER_WEIGHT_BYTE * weights_bytes


def compile_graph(request: BuildRequest, report: Callable[[str], None] = lambda _: None) -> BuildResult:
    """Compile in a child process; `report` is told the builder's progress.

    Raises DtoolError with the compiler's last lines when it fails or dies, and OSError as the child met it: the
    log is in memory and the error comes through a pipe, so that a full disk cannot hide itself.
    """
    document = asdict(request) | {"onnx": f"./{request.onnx.name}", "folder": "."}
    document["plugin_libraries"] = [str(path.resolve()) for path in request.plugin_libraries]
    document["timing_cache"] = str(request.timing_cache.resolve()) if request.timing_cache else None
    request.path("request").write_text(json.dumps(document), "utf-8")
    failure: list[Any] = []
    with os.fdopen(os.memfd_create("compiler-log"), "w+b") as log:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            child_command(request.path("request").name),
            cwd=request.folder,
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=child_environment(request.folder),
            text=True,
        )
        try:
            for line in child.stdout or ():
                if line.startswith(PROGRESS):
                    report(f"{request.onnx.stem}: {line.removeprefix(PROGRESS).strip()}")
                elif line.startswith(SYSTEM_ERROR):
                    failure = json.loads(line.removeprefix(SYSTEM_ERROR))
            status = child.wait()
        finally:  # Ctrl-C lands here: the child ignores it, so it is ended and awaited
            child.kill()
            child.wait()
            if child.stdout:
                child.stdout.close()
        log.seek(0)
        lines = log.read().decode("utf-8", "replace")
    if status == UNWRITTEN and failure:
        number, cause, name = failure
        raise OSError(number, cause, str(request.folder / name))
    if status != 0:
        raise _explain_failure(request, status, lines)
    result = json.loads(request.path("result").read_text("utf-8"))
    return BuildResult(request.path("plan"), request.path("layers").read_text("utf-8"), **result)


def child_command(request: str) -> list[str]:
    """The command line of the child, which runs in the request's folder."""
    return [sys.executable, "-P", "-m", CHILD, request]


def child_environment(folder: Path) -> dict[str, str]:
    """A small environment that is the same in every build, with a `libtensorrt_rtx.so` on the library path.

    The parser dlopens that name when it meets a plugin; the wheel ships `.so.1` alone, and without
    the name the process aborts. Paths are relative to the child's folder: see `compile_child.fix_addresses`.
    """
    links = folder / "lib"
    links.mkdir(exist_ok=True)
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    for base in (spec.submodule_search_locations or ()) if spec else ():
        for library in Path(base).glob("libtensorrt_rtx.so.*"):
            link = links / "libtensorrt_rtx.so"
            if not link.exists():
                link.symlink_to(library.resolve())
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    libraries = os.pathsep.join(filter(None, ["lib", os.environ.get("LD_LIBRARY_PATH")]))
    sources = str(Path(toolchain.__file__).parent.parent)
    return kept | {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": sources, "PYTHONHASHSEED": "0"}


def _explain_failure(request: BuildRequest, status: int, log: str) -> DtoolError:
    lines = [line.strip()[:500] for line in log.splitlines() if line.strip()]
    last = "\n".join(lines[-LOG_LINES:]) or "no message"
    fix = next((text for pattern, text in _FIXES if pattern.search(log)), "")
    name, compiler = request.onnx.stem, NAMES[request.backend]
    if status == REFUSED:
        return DtoolError(f"{compiler} cannot compile {name}", expected="a plan", found=last, fix=fix)
    ended = ending(status)
    if -status == signal.SIGKILL or NO_MEMORY.search(log):
        ended += f"; {_memory_text(request)}"
        fix = fix or COMPILE_ELSEWHERE
    return DtoolError(
        f"the {compiler} compiler of {name} died",
        expected="a process that ends by itself",
        found=f"{ended}; its last lines: {last}",
        fix=fix or "try again; if it dies again, report it with these lines",
    )


def _memory_text(request: BuildRequest) -> str:
    """The memory that compiling takes by estimate, and what there is now that the compiler has ended."""
    weights = sum(path.stat().st_size for path in request.folder.glob("*.safetensors"))
    return f"about {size_text(estimate_rss_bytes(weights))} is needed, {memory_at_hand()}"

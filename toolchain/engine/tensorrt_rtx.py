"""Compile one ONNX graph with TensorRT-RTX, in a process of its own.

TensorRT keeps the first builder's logger for the life of a process, aborts on some faults, may be
killed for its memory, and does not return to Python for Ctrl-C. A child process per engine answers
all four. Run as `python -m toolchain.engine.tensorrt_rtx REQUEST`, this module is that child: it
reads a JSON request, writes the plan, the layer log and a JSON result, and logs to stderr.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import toolchain
from toolchain.engine.layers import LOG_HEAD
from toolchain.engine.profiles import Profile, check_profile
from toolchain.errors import DtoolError

REFUSED = 3
"""The child's exit status when TensorRT-RTX said no; anything else that is not 0 is a crash."""

LOG_LINES = 6
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")
BASE_RSS_BYTES, RSS_PER_WEIGHT_BYTE = 400_000_000, 4  # 1.4 GB was measured for 0.27 GB of weights
_PR_SET_PDEATHSIG = 1
_ADDR_NO_RANDOMIZE = 0x0040000
_ASK_PERSONALITY = 0xFFFFFFFF
_MEMORY = re.compile(
    r"out of memory|bad_alloc|cannot allocate memory|MemoryError|OutOfMemory"
    r"|CHECK\(p\) failed",  # the compiler's null check after an allocation, seen under a memory limit
    re.IGNORECASE,
)
_NOISE = re.compile(r"A node named \S+ already exists|Make sure input \S+ has Int64 binding")
"""Said of every function body that is used twice and every int64 input; it would crowd out the errors."""
_FIXES = (
    (re.compile(r"dedicated kernel"), "compute_dtype float16 or bfloat16, and a head_dim from 16 to 256"),
    (re.compile(r"HW-specific datatypes"), "leave out the targets that lack the format"),
    (_MEMORY, "free memory, or compile on a larger machine"),
)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What the child needs: the graph, the SMs, the profile, and the folder for its outputs."""

    onnx: Path
    sms: tuple[int, ...]
    profile: Profile
    folder: Path

    def path(self, kind: str) -> Path:
        """The file of one kind: request, result, plan, layers or log."""
        return self.folder / f"{self.onnx.stem}.{kind}"


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A compiled engine: its plan and layer log, and what it took."""

    plan: Path
    layers: str
    parse_s: float
    build_s: float
    peak_rss_bytes: int


def estimate_rss_bytes(weights_bytes: int) -> int:
    """About how much memory compiling takes: a fixed part and a few copies of the weights."""
    return BASE_RSS_BYTES + RSS_PER_WEIGHT_BYTE * weights_bytes


def compile_graph(request: BuildRequest) -> BuildResult:
    """Compile in a child process. Raises DtoolError with the compiler's last lines when it fails or dies."""
    document = asdict(request) | {"onnx": f"./{request.onnx.name}", "folder": "."}
    request.path("request").write_text(json.dumps(document), "utf-8")
    with request.path("log").open("wb") as log:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            child_command(request.path("request").name),
            cwd=request.folder,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=child_environment(request.folder),
        )
        try:
            status = child.wait()
        finally:  # Ctrl-C lands here: the child ignores it, so it is ended and awaited
            child.kill()
            child.wait()
    if status != 0:
        raise _explain_failure(request, status)
    result = json.loads(request.path("result").read_text("utf-8"))
    return BuildResult(request.path("plan"), request.path("layers").read_text("utf-8"), **result)


def child_command(request: str) -> list[str]:
    """The command line of the child, which runs in the request's folder."""
    return [sys.executable, "-P", "-m", "toolchain.engine.tensorrt_rtx", request]


def child_environment(folder: Path) -> dict[str, str]:
    """A small environment that is the same in every build, with a `libtensorrt_rtx.so` on the library path.

    The parser dlopens that name when it meets a plugin; the wheel ships `.so.1` alone, and without
    the name the process aborts. Paths are relative to the child's folder: see `fix_addresses`.
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


def _explain_failure(request: BuildRequest, status: int) -> DtoolError:
    log = request.path("log").read_text("utf-8", "replace")
    lines = [line.strip()[:500] for line in log.splitlines() if line.strip()]
    last = "\n            ".join(lines[-LOG_LINES:]) or "no message"
    fix = next((text for pattern, text in _FIXES if pattern.search(log)), "")
    name = request.onnx.stem
    if status == REFUSED:
        return DtoolError(f"TensorRT-RTX cannot compile {name}", expected="a plan", found=last, fix=fix)
    ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    if -status == signal.SIGKILL:
        ended += ", which is what the system does to a process when memory runs out"
        fix = fix or "free memory, or compile on a larger machine"
    return DtoolError(
        f"the TensorRT-RTX compiler of {name} died",
        expected="a process that ends by itself",
        found=f"{ended}; its last lines: {last}",
        fix=fix or "try again; if it dies again, report it with these lines",
    )


class RefusedError(Exception):
    """TensorRT-RTX rejected the graph; its errors are in the log."""


def main(request_path: str) -> int:
    """The child: compile what the request says. Returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphan when the parent is killed
    if fix_addresses():
        os.execv(sys.executable, child_command(request_path))  # noqa: S606 - ourselves again
    document = json.loads(Path(request_path).read_text("utf-8"))
    request = BuildRequest(
        Path(document["onnx"]), tuple(document["sms"]), document["profile"], Path(document["folder"])
    )
    try:
        result = _compile(request)
    except (RefusedError, DtoolError) as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    request.path("result").write_text(json.dumps(result), "utf-8")
    return 0


def fix_addresses() -> bool:
    """Turn address randomization off for what this process executes next; False when it is off or must stay.

    The compiler numbers some symbols in the order of their addresses, so two plans of one graph may
    differ in a few bytes. At fixed addresses, with equal arguments and environment, they were equal
    in every build tried. Some containers forbid the change.
    """
    libc = ctypes.CDLL(None)
    persona = libc.personality(_ASK_PERSONALITY)
    if persona == -1 or persona & _ADDR_NO_RANDOMIZE:
        return False
    return libc.personality(persona | _ADDR_NO_RANDOMIZE) != -1


def _compile(request: BuildRequest) -> dict[str, Any]:
    """Parse, configure and build; writes the plan and the layer log. Raises RefusedError."""
    trt: Any = importlib.import_module("tensorrt_rtx")  # it has no type stubs
    logger, layer_log = _make_logger(trt)
    start = time.perf_counter()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(request.onnx)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise RefusedError("\n".join(f"parser: node {e.node_name()} ({e.node_operator()}): {e.desc()}" for e in errors))
    parsed = time.perf_counter()
    config = _configure(trt, builder, network, request)
    plan = builder.build_serialized_network(network, config)
    built = time.perf_counter()
    if plan is None:
        raise RefusedError("the builder returned no plan")
    if not layer_log:
        raise RefusedError("the builder gave no layer log, so what it compiled cannot be checked")
    with request.path("plan").open("wb") as stream:
        stream.write(memoryview(plan))
    request.path("layers").write_text(layer_log[0], "utf-8")
    return {
        "parse_s": round(parsed - start, 3),
        "build_s": round(built - parsed, 3),
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def _make_logger(trt: Any) -> tuple[Any, list[str]]:
    """A logger that writes warnings and errors to stderr, and the list that gets the layer log."""
    layer_log: list[str] = []

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if message.startswith(LOG_HEAD):
                layer_log.append(message)
            elif severity <= trt.ILogger.Severity.WARNING and not _NOISE.search(message):
                sys.stderr.write(f"{message}\n")
                sys.stderr.flush()

    return Logger(), layer_log


def _configure(trt: Any, builder: Any, network: Any, request: BuildRequest) -> Any:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = [tensor.name for tensor in inputs if -1 in tuple(tensor.shape)]
    check_profile(dynamic, request.profile)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = len(request.sms)
    for i, sm in enumerate(request.sms):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), i)
    profile = builder.create_optimization_profile()
    for name in dynamic:
        profile.set_shape(name, *request.profile[name])
    config.add_optimization_profile(profile)
    return config


def _peak_rss_bytes() -> int:
    """The largest resident size of this process; rusage would count the parent's at the fork."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

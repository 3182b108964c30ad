"""The child of `compiler`: parses a graph, configures a builder and compiles it. One process per engine.

One code path serves TensorRT and TensorRT-RTX, whose Python modules differ in little: TensorRT-RTX is
told the GPUs to compile for and needs none, TensorRT compiles for the GPU of this machine and keeps
measured kernel times in a timing cache.
"""

import ctypes
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from toolchain.engine.compiler import (
    PROGRESS,
    REFUSED,
    SYSTEM_ERROR,
    UNWRITTEN,
    BuildOptions,
    BuildRequest,
    child_command,
)
from toolchain.engine.layers import LOG_HEAD
from toolchain.engine.profiles import check_profile
from toolchain.errors import DtoolError
from toolchain.recipe import BACKEND_MODULES

_PR_SET_PDEATHSIG = 1
_ADDR_NO_RANDOMIZE = 0x0040000
_ASK_PERSONALITY = 0xFFFFFFFF
_NOISE = re.compile(r"A node named \S+ already exists|Make sure input \S+ has Int64 binding")
"""Said of every function body that is used twice and every int64 input; it would crowd out the errors."""


class RefusedError(Exception):
    """TensorRT rejected the graph; its errors are in the log."""


def main(request_path: str) -> int:
    """Compile what the request says. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphan when the parent is killed
    if fix_addresses():
        os.execv(sys.executable, child_command(request_path))  # noqa: S606 - ourselves again
    request = _read_request(Path(request_path))
    try:
        result = _compile(request)
        _write(request.path("result"), json.dumps(result).encode())
    except OSError as error:
        document = [error.errno, error.strerror or str(error), os.fsdecode(error.filename or "")]
        sys.stdout.write(f"{SYSTEM_ERROR}{json.dumps(document)}\n")
        sys.stdout.flush()
        return UNWRITTEN
    except (RefusedError, DtoolError) as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    return 0


def _write(path: Path, data: bytes | memoryview) -> None:
    """Write a file of the child's; an error tells how large the file was to be."""
    try:
        path.write_bytes(data)
    except OSError as error:
        cause = f"{error.strerror or error}, for a file of {memoryview(data).nbytes:,} bytes"
        raise OSError(error.errno, cause, str(path)) from error


def _read_request(path: Path) -> BuildRequest:
    document = json.loads(path.read_text("utf-8"))
    timing_cache = document["timing_cache"]
    return BuildRequest(
        backend=document["backend"],
        onnx=Path(document["onnx"]),
        sms=tuple(document["sms"]),
        profiles=tuple(document["profiles"]),
        folder=Path(document["folder"]),
        plugin_libraries=tuple(map(Path, document["plugin_libraries"])),
        options=BuildOptions(**document["options"]),
        timing_cache=Path(timing_cache) if timing_cache else None,
    )


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
    trt: Any = importlib.import_module(BACKEND_MODULES[request.backend][0])  # it has no type stubs
    logger, layer_log = _make_logger(trt)
    start = time.perf_counter()
    builder = trt.Builder(logger)
    for library in request.plugin_libraries:
        if trt.get_plugin_registry().load_library(str(library)) is None:
            raise RefusedError(f"the plugin library {library} cannot be loaded")
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(request.onnx)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise RefusedError("\n".join(f"parser: node {e.node_name()} ({e.node_operator()}): {e.desc()}" for e in errors))
    parsed = time.perf_counter()
    config = _configure(trt, builder, network, request)
    used = _attach_timing_cache(config, request)
    plan = builder.build_serialized_network(network, config)
    built = time.perf_counter()
    if plan is None:
        raise RefusedError("the builder returned no plan")
    if used != "none":
        _keep_timing_cache(config, request)
    _write(request.path("plan"), memoryview(plan))
    layers = layer_log[0] if request.backend == "tensorrt-rtx" and layer_log else _inspect(trt, logger, plan)
    _write(request.path("layers"), layers.encode())
    return {
        "parse_s": round(parsed - start, 3),
        "build_s": round(built - parsed, 3),
        "peak_rss_bytes": _peak_rss_bytes(),
        "timing_cache": used,
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
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.backend == "tensorrt-rtx":
        config.num_compute_capabilities = len(request.sms)
        for i, sm in enumerate(request.sms):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), i)
        if not request.options.weight_streaming:
            # decode is replayed as a CUDA graph, which must not allocate; streaming excludes both
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if request.plugin_libraries:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    _set_options(trt, config, request.options)
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    dynamic = [tensor.name for tensor in inputs if -1 in tuple(tensor.shape)]
    for ranges in request.profiles:
        check_profile(dynamic, ranges)
        profile = builder.create_optimization_profile()
        for name in dynamic:
            profile.set_shape(name, *ranges[name])
        config.add_optimization_profile(profile)
    config.progress_monitor = _make_monitor(trt)
    return config


def _set_options(trt: Any, config: Any, options: BuildOptions) -> None:
    flags = {
        "WEIGHT_STREAMING": options.weight_streaming,
        "REFIT": options.refit,
        "STRIP_PLAN": options.strip_weights,
        "VERSION_COMPATIBLE": options.version_compatible,
    }
    for name, wanted in flags.items():
        if wanted:
            config.set_flag(getattr(trt.BuilderFlag, name))
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.memory_limit_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.memory_limit_mb << 20)
    if options.hardware_compatibility != "none":
        level = getattr(trt.HardwareCompatibilityLevel, options.hardware_compatibility.upper())
        config.hardware_compatibility_level = level


def _make_monitor(trt: Any) -> Any:
    """Tells the outermost phases of the build, line by line, on stdout."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = num_steps
                self.tell(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.steps:
                self.tell(phase_name, step + 1)
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

        def tell(self, phase_name: str, step: int) -> None:
            sys.stdout.write(f"{PROGRESS}{phase_name} {step}/{self.steps[phase_name]}\n")
            sys.stdout.flush()

    return Monitor()


def _attach_timing_cache(config: Any, request: BuildRequest) -> str:
    """Give the builder the kernel times that were measured before: `none`, `new`, `used` or `ignored`.

    A cache that cannot be read, or that another GPU or version wrote, is ignored with a warning.
    """
    if request.timing_cache is None:
        return "none"
    stored = request.timing_cache.read_bytes() if request.timing_cache.is_file() else b""
    if stored:
        try:
            cache = config.create_timing_cache(stored)
            accepted = cache is not None and config.set_timing_cache(cache, ignore_mismatch=False)
        except (RuntimeError, TypeError, ValueError):
            accepted = False
        if accepted:
            return "used"
        sys.stderr.write(f"timing cache {request.timing_cache.name} ignored: it cannot be used here\n")
    config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    return "ignored" if stored else "new"


def _keep_timing_cache(config: Any, request: BuildRequest) -> None:
    """Write the cache back, whole or not at all: other builds may read it meanwhile."""
    assert request.timing_cache is not None
    folder = request.timing_cache.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as stream:
        stream.write(memoryview(config.get_timing_cache().serialize()))
    Path(stream.name).replace(request.timing_cache)


def _inspect(trt: Any, logger: Any, plan: Any) -> str:
    """What the inspector reads from the plan, as a JSON list with a document per profile; needs a GPU."""
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if engine is None:
        raise RefusedError("the builder gave no account of its kernels, so what it compiled cannot be checked")
    inspector, documents = engine.create_engine_inspector(), []
    for profile in range(engine.num_optimization_profiles):
        context = engine.create_execution_context()
        context.set_optimization_profile_async(profile, 0)
        inspector.execution_context = context
        documents.append(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    return "[" + ",".join(map(str, documents)) + "]"


def _peak_rss_bytes() -> int:
    """The largest resident size of this process; rusage would count the parent's at the fork."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

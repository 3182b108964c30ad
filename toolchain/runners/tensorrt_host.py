"""Whether this machine can run an engine: its manifest against the package, the files and the GPU here.

Everything is compared before CUDA is touched where it can be. TensorRT says little about an engine
of another version, and may crash on it. Rules by NVIDIA's "Engine Compatibility" pages (TensorRT
11.1, TensorRT-RTX 1.7): a plan runs in the version that built it, or in later ones of the same major
version when it was built version compatible (TensorRT alone); on GPUs of its compute capability, or
on all from 8.0 on when it was built for Ampere and later.
"""

import importlib
from collections import deque
from typing import Any

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError, name_list
from toolchain.recipe import BACKEND_MODULES
from toolchain.runners.device import CudaDevice, Device, gpu_present

REBUILD = "dtool build-engine SOURCE -r RECIPE -o OUT"
AMPERE = (8, 0)
KEPT_ERRORS = 4

_loggers: dict[int, Any] = {}
_libraries: dict[tuple[int, str], Any] = {}
"""Of this process, by the id of the TensorRT module; libraries by their digest too.

TensorRT keeps the first logger it is given, and refuses a plugin that is registered already.
"""


def section(artifact: Artifact, key: str) -> Any:
    """A field of the manifest's target. Raises DtoolError when another version of dtool left it out."""
    target = artifact.manifest.target
    if key not in target:
        raise DtoolError(
            f"{artifact.path} does not say its {key}",
            expected=f"target.{key} in its manifest",
            found=", ".join(sorted(target)),
            fix=f"build the engine again with this version of dtool: {REBUILD}",
        )
    return target[key]


def import_backend(artifact: Artifact) -> Any:
    """The module that runs the artifact's backend. Raises DtoolError when it is missing or lacks its libraries."""
    backend = section(artifact, "backend")
    module, extra = BACKEND_MODULES[backend]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if not gpu_present():
            raise no_gpu(artifact) from error
        raise DtoolError(
            f"{artifact.path} needs {backend}, which is not installed",
            expected=f"the Python module {module}",
            found=str(error),
            fix=f'pip install "dtool[{extra}]"',
        ) from error


def check_version(artifact: Artifact, version: str) -> None:
    """Refuse an engine that was compiled by a version this one cannot load."""
    target, backend = artifact.manifest.target, section(artifact, "backend")
    compiler = section(artifact, "compiler")
    package = next((name for name in compiler if name.startswith(backend)), next(iter(compiler), backend))
    built = str(compiler.get(package, "unknown"))
    if version == built:
        return
    here, there = _numbers(version), _numbers(built)
    later = backend == "tensorrt" and here[:1] == there[:1] and here >= there
    if later and target.get("version_compatible"):
        return
    raise DtoolError(
        f"{artifact.path} was compiled by another version of {backend}",
        expected=f"{package} {built}",
        found=f"{backend} {version} on this machine",
        fix=f"pip install {package}=={built}, or build the engine again with what is installed: {REBUILD}",
    )


def check_files(artifact: Artifact) -> None:
    """Refuse an artifact without one of the plans or plugin libraries that its manifest names."""
    plans = {entry["file"] for entry in section(artifact, "engines").values()}
    libraries = artifact.manifest.target.get("plugin_libraries", ())
    for what, names in (("plan", sorted(plans)), ("plugin library", libraries)):
        for name in names:
            if name not in artifact.manifest.files or not (artifact.path / name).is_file():
                raise DtoolError(
                    f"the {what} {artifact.path / name} is missing",
                    expected=f"a {what} that the manifest names",
                    found="no such file" if name in artifact.manifest.files else "a file the manifest does not list",
                    fix=f"copy the artifact again, whole, or build it again: {REBUILD}",
                )


def no_gpu(artifact: Artifact) -> DtoolError:
    """What a machine without a GPU is told."""
    return DtoolError(
        f"{artifact.path} was compiled by {artifact.manifest.target['backend']}, and this machine has no GPU",
        expected="an artifact this machine can run",
        found=f"engines for {', '.join(artifact.manifest.target.get('targets', ()))}",
        fix="run it on a host with such a GPU; `dtool inspect` shows what is in it",
    )


def find_device(artifact: Artifact, name: str) -> Device:
    """The GPU called `name`. Raises DtoolError when torch sees none here."""
    if not gpu_present():
        raise no_gpu(artifact)
    return CudaDevice(name)


def check_capability(artifact: Artifact, capability: str) -> None:
    """Refuse an engine that was compiled for other GPUs. `capability` as 8.9."""
    target, built = artifact.manifest.target, section(artifact, "compute_capabilities")
    if capability in built:
        return
    if target.get("hardware_compatibility") == "ampere_plus" and _numbers(capability) >= AMPERE:
        return
    sm = f"sm{capability.replace('.', '')}"
    wanted = ", ".join(built) + (" or any from 8.0 on" if target.get("hardware_compatibility") == "ampere_plus" else "")
    raise DtoolError(
        f"{artifact.path} was compiled for another GPU",
        expected=f"compute capability {wanted} ({', '.join(target.get('targets', ()))})",
        found=f"compute capability {capability} ({sm}) on this machine",
        fix=f"build it for this GPU: {REBUILD} --set 'engine.targets=[\"{sm}\"]'",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def make_logger(trt: Any) -> Any:
    """The process's TensorRT logger: `last` holds its latest errors, and nothing is printed."""
    if id(trt) not in _loggers:

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.last: deque[str] = deque(maxlen=KEPT_ERRORS)

            def log(self, severity: Any, msg: str) -> None:
                if severity <= trt.ILogger.Severity.ERROR:
                    self.last.append(msg.strip())

        _loggers[id(trt)] = Logger()
    return _loggers[id(trt)]


def fill_weights(trt: Any, artifact: Artifact, engine: Any, plan: str) -> None:
    """Give a plan that was built without weights those of its graph. Raises DtoolError when any stays unset."""
    logger, graph = make_logger(trt), artifact.file(artifact.manifest.target["weights_from"][plan])
    logger.last.clear()
    refitter = trt.Refitter(engine, logger)
    filled = trt.OnnxParserRefitter(refitter, logger).refit_from_file(str(graph))
    missing = list(refitter.get_missing_weights()) if filled else []
    if not filled or missing or not refitter.refit_cuda_engine():
        raise DtoolError(
            f"the weights of {artifact.path / plan} cannot be filled in",
            expected=f"every weight of the plan in {graph.name}",
            found=f"without: {name_list(missing)}" if missing else "; ".join(logger.last) or "TensorRT gave no reason",
            fix=f"build it again: {REBUILD}",
        )


def load_plugins(trt: Any, artifact: Artifact) -> None:
    """Register the artifact's plugin libraries, each once per process. Raises DtoolError naming the file."""
    logger = make_logger(trt)
    for name in artifact.manifest.target.get("plugin_libraries", ()):
        path, key = artifact.file(name).resolve(), (id(trt), artifact.manifest.files[name].sha256)
        if key in _libraries:
            continue
        logger.last.clear()
        try:
            handle, reason = trt.get_plugin_registry().load_library(str(path)), ""
        except (RuntimeError, OSError, TypeError) as error:
            handle, reason = None, str(error)
        if handle is None:
            said = reason or "; ".join(logger.last) or "TensorRT gave no reason"
            raise DtoolError(
                f"the plugin library {path} cannot be loaded",
                expected="a plugin library for this system, whose plugins are not registered yet",
                found=said,
                fix="use one process per engine when they bring different plugin libraries; "
                f"otherwise build it again on this machine: {REBUILD}",
            )
        _libraries[key] = handle

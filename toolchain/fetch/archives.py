"""Members of wheels, source distributions and Debian packages, read without running or unpacking them."""

import io
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from toolchain.errors import DtoolError, did_you_mean

AR_MAGIC = b"!<arch>\n"
AR_HEADER_BYTES = 60


def read_members(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of the named members of an archive, by name.

    Raises DtoolError when the archive is damaged or has no such member.
    """
    wanted = set(names)
    try:
        if path.suffix == ".whl":
            found = _zip_members(path, wanted)
        elif path.suffix == ".deb":
            found = _tar_members(io.BytesIO(_deb_data(path)), wanted)
        else:
            with path.open("rb") as stream:
                found = _tar_members(stream, wanted)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, ValueError) as error:
        raise DtoolError(
            f"{path} is damaged",
            expected="a whole archive",
            found=str(error),
            fix="delete it and run the command again",
        ) from error
    if missing := sorted(wanted - set(found)):
        names = _names(path)
        raise DtoolError(
            f"{path.name} has no file {missing[0]}",
            expected=missing[0],
            found=f"{len(names)} other files",
            fix=did_you_mean(missing[0], names),
        )
    return found


def _zip_members(path: Path, wanted: set[str]) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in wanted & set(archive.namelist())}


def _tar_members(stream: io.BufferedIOBase, wanted: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if name in wanted and (content := archive.extractfile(member)) is not None:
                found[name] = content.read()
    return found


def _names(path: Path) -> list[str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    stream = io.BytesIO(_deb_data(path) if path.suffix == ".deb" else path.read_bytes())
    with tarfile.open(fileobj=stream) as archive:
        return [name.removeprefix("./") for name in archive.getnames()]


def _deb_data(path: Path) -> bytes:
    """data.tar.* of a .deb, which is an `ar` archive: 60-byte headers, members padded to even lengths."""
    content = path.read_bytes()
    if not content.startswith(AR_MAGIC):
        raise ValueError("not an ar archive")
    at = len(AR_MAGIC)
    while at + AR_HEADER_BYTES <= len(content):
        name = content[at : at + 16].decode("ascii").strip().rstrip("/")
        size = int(content[at + 48 : at + 58])
        at += AR_HEADER_BYTES
        if name.startswith("data.tar"):
            return content[at : at + size]
        at += size + size % 2
    raise ValueError("no data.tar in it")

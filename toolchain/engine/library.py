"""What a plugin library is, found out before a compiler loads it: whole, loadable, with plugins, perhaps ours."""

import ctypes
import json
import struct
from pathlib import Path
from typing import Any

from toolchain.errors import DtoolError

DESCRIBE, CREATORS = "dtool_attention_describe", "getCreators"
_ELF = b"\x7fELF\x02"
_SECTION_TABLE, _HEADER_SIZES = 0x28, 0x34  # e_shoff; e_ehsize and the four after it
_HEADER_BYTES = 64


def describe_library(library: Path) -> dict[str, Any] | None:
    """What a library built by dtool says of itself; None for plugins of others.

    Raises DtoolError for what is no library, not whole, or holds no TensorRT plugins.
    """
    _require_whole(library)
    try:
        loaded = ctypes.CDLL(str(library.resolve()))
    except OSError as error:
        raise _refused(library, "cannot be loaded", str(error), "build it on a system like this one") from error
    if not hasattr(loaded, CREATORS):
        raise _refused(library, "holds no TensorRT plugins", f"no function {CREATORS} in it", "give the right library")
    if not hasattr(loaded, DESCRIBE):
        return None
    describe = getattr(loaded, DESCRIBE)
    describe.restype = ctypes.c_char_p
    return json.loads(describe())


def _require_whole(library: Path) -> None:
    """Loading a file that ends too early kills the process, so its section table is looked for first."""
    data = library.read_bytes()
    if data[: len(_ELF)] != _ELF or len(data) < _HEADER_BYTES:
        raise _refused(library, "cannot be loaded", "no 64-bit ELF file", "give a shared library of this system")
    (offset,) = struct.unpack_from("<Q", data, _SECTION_TABLE)
    *_, entry_size, count = struct.unpack_from("<HHHHH", data, _HEADER_SIZES)
    if offset + entry_size * count > len(data):
        found = f"{len(data):,} bytes of at least {offset + entry_size * count:,}"
        raise _refused(library, "is cut short", found, "copy it again")


def _refused(library: Path, problem: str, found: str, fix: str) -> DtoolError:
    return DtoolError(
        f"{library} {problem}", expected="a whole shared library with TensorRT plugins", found=found, fix=fix
    )

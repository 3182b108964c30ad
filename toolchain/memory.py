"""Memory: how much there is, whether tensors fit before they are read, and how a failure for lack of it reads.

Several limits hold at once, and the least of them is what there is: the memory of the machine with
its swap, the limit of the control group (a container's, a batch job's), and the limits of the
process (`ulimit -v` on its addresses, `ulimit -d` on its data). A file that is mapped takes addresses
alone, as its pages are read and dropped as needed.

A request is refused beforehand only where its tensors alone are larger than all that. What else a
library needs is unknown, so a request that passes may still fail; then each library says so in its
own way, and `memory_error` finds it wherever it stands in a chain of errors.
"""

import contextlib
import importlib.util
import re
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolchain.errors import DtoolError

MACHINE, PROCESS = Path("/proc/meminfo"), Path("/proc/self/status")
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
TORCH_PER_LIBRARY_BYTE = 1.2
"""Addresses that torch's import takes at least, per byte of its libraries: 568 MB were measured for 467 MB."""
WAYS_OUT = "free memory, raise the limit if one is set, or use a machine with more"
NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|bad_alloc|not enough memory"
    r"|(cannot|can't|could not|unable to|failed to) allocate (memory|[\d.]+ ?([KMGTPE]i?B|bytes))"
    r"|failed to map segment from shared object"  # the loader, for a library that finds no room
    r"|CHECK\(p\) failed",  # TensorRT's null check after an allocation
    re.IGNORECASE,
)
"""How numpy, torch, ONNX Runtime, TensorRT, C++ and the C library say that memory ran out."""
_ASKED = re.compile(r"(?:allocate|buffer of size) ([\d.]+) ?(bytes|[KMGTPE]iB|$)?", re.IGNORECASE)
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50, "e": 1 << 60}
_UNLIMITED = 1 << 60
"""Control groups write a missing limit as `max`, or as a number of this size."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are free, and what limits them."""

    free: int
    limit: str

    def __str__(self) -> str:
        return f"{size_text(self.free)} free in {self.limit}"


def size_text(count: int) -> str:
    """A number of bytes as a reader wants it: 1.4 GB, 65.5 MB."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"


def memory_at_hand(*, mapped: bool = False) -> Room:
    """What this process may still take. `mapped`: of addresses alone, for files that are mapped."""
    limits = [*_address_limits(mapped=mapped)]
    if not mapped:
        limits += [_machine(), *_control_groups()]
    return min(limits, key=lambda room: room.free, default=Room(_UNLIMITED, "this process"))


def require_memory(needed: int, subject: str, *, mapped: bool = False) -> None:
    """Refuse to load `subject` when its tensors alone, `needed` bytes, are more than what there is."""
    room = memory_at_hand(mapped=mapped)
    if needed > room.free:
        raise DtoolError(
            f"{subject} does not fit into memory",
            expected=f"{size_text(needed)} for its tensors alone",
            found=str(room),
            fix=WAYS_OUT,
        )


def require_torch() -> None:
    """Refuse to import torch where its libraries find no room: it may then abort, or never return, in C++."""
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None:
        return
    libraries = [path for place in spec.submodule_search_locations or () for path in Path(place).glob("lib/*.so*")]
    mapped = int(TORCH_PER_LIBRARY_BYTE * sum(path.stat().st_size for path in libraries))
    room = memory_at_hand(mapped=True)
    if mapped > room.free:
        raise DtoolError(
            "the libraries of torch do not fit into memory",
            expected=f"{size_text(mapped)} of addresses for them",
            found=str(room),
            fix=WAYS_OUT,
        )


def memory_error(error: BaseException | None) -> DtoolError | None:
    """The failure as one of memory, when this error or one it came from says so; None otherwise."""
    texts = [f"{type(e).__name__}: {e}" for e in _chain(error)]
    told = [text for text in texts if NO_MEMORY.search(text)]
    if not told:
        return None
    on_gpu = next((text for text in told if "CUDA" in text), None)
    asked = next((size for text in told if (size := _asked_bytes(text))), None)
    found = on_gpu.splitlines()[0][:400] if on_gpu else f"{memory_at_hand()}, now that it failed"
    return DtoolError(
        "the memory of the GPU ran out" if on_gpu else "memory ran out",
        expected=f"room for {size_text(asked)} more" if asked else "more memory than there is",
        found=found,
        fix=WAYS_OUT,
    )


def ending(status: int) -> str:
    """How a child process ended, by its return code: an exit status, or the signal that ended it."""
    if status >= 0:
        return f"exit status {status}"
    text = f"ended by {signal.Signals(-status).name}"
    if -status == signal.SIGKILL:
        text += ", which is what the system does to a process when memory runs out"
    return text


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _asked_bytes(text: str) -> int | None:
    """How many bytes a library says it asked for; None where it does not."""
    match = _ASKED.search(text)
    if match is None:
        return None
    return int(float(match[1]) * _UNITS[(match[2] or "bytes")[0].lower()])


def _machine() -> Room:
    free = _kilobytes(MACHINE)
    return Room(free["MemAvailable"] + free["SwapFree"], "this machine's memory and swap")


def _address_limits(*, mapped: bool) -> Iterator[Room]:
    used = _kilobytes(PROCESS)
    limits = [(resource.RLIMIT_AS, used["VmSize"], "ulimit -v")]
    if not mapped:
        limits.append((resource.RLIMIT_DATA, used["VmData"], "ulimit -d"))
    for kind, taken, name in limits:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield Room(max(limit - taken, 0), f"the {size_text(limit)} that {name} leaves this process")


def _kilobytes(path: Path) -> dict[str, int]:
    """The sizes in a file of /proc, in bytes, by name. Read by hand: when memory is out, nothing can be imported."""
    fields = (line.split() for line in path.read_text("utf-8").splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(count) << 10 for name, count, _ in fields}


def _control_groups() -> Iterator[Room]:
    """The limits of this process's control group and of those around it, of version 2 or 1."""
    with contextlib.suppress(OSError, ValueError):
        swap = _kilobytes(MACHINE)["SwapFree"]
        for line in OWN_CGROUP.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                yield from _groups_from(CGROUPS / controllers, path, swap)


def _groups_from(top: Path, path: str, swap: int) -> Iterator[Room]:
    names = ("memory.max", "memory.current") if top == CGROUPS else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    own = Path(path.strip("/"))
    for group in (own, *own.parents):
        folder = top / group
        with contextlib.suppress(OSError, ValueError):  # `max` is no number: no limit
            limit, current = (int((folder / name).read_text("utf-8")) for name in names)
            if limit < _UNLIMITED:
                free = limit - current + _file_pages(folder) + swap
                yield Room(max(free, 0), f"the {size_text(limit)} of this control group")


def _file_pages(folder: Path) -> int:
    """Bytes that a control group holds of files: they are dropped when memory is asked for."""
    lines = (folder / "memory.stat").read_text("utf-8").splitlines()
    found = dict(line.split(" ", 1) for line in lines)
    prefix = "total_" if "total_active_file" in found else ""
    return sum(int(found.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))

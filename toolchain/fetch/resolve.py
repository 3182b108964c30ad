"""What a user may name as a model: a checkpoint folder, a GGUF file, or a repository of the hub."""

import contextlib
import fcntl
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toolchain.artifact import lacks_room
from toolchain.errors import DtoolError
from toolchain.fetch.download import Report, cache_folder

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


@contextlib.contextmanager
def resolve_model(text: str | Path, report: Report, *, weights: bool = True) -> Iterator[Path]:
    """A checkpoint folder for what a user typed, good until the block ends; without `weights` its config at least.

    What exists goes first: a folder is itself, and a GGUF file is unpacked beside the download cache and
    removed again. `org/name` or `org/name@revision` that does not exist here is asked of the hub and
    stays in its cache. Anything else comes back as a path, for the reader to say what is wrong with it.
    """
    path, named = Path(text), HUB_ID.fullmatch(str(text))
    if path.is_file() and _is_gguf(path):
        with _unpacked(path, report, weights=weights) as folder:
            yield folder
    elif named and not path.exists() and path.suffix != ".gguf":
        yield _from_hub(named["repo"], named["revision"], report, weights=weights)
    else:
        yield path


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as stream:
        return path.suffix == ".gguf" or stream.read(4) == b"GGUF"


@contextlib.contextmanager
def _unpacked(gguf: Path, report: Report, *, weights: bool) -> Iterator[Path]:
    from toolchain.fetch.gguf_checkpoint import checkpoint_from_gguf

    with contextlib.ExitStack() as stack:
        folder = _new_scratch(stack) / gguf.stem
        folder.mkdir()
        if weights:
            report(f"unpacking {gguf.name} to safetensors, for this run")
        checkpoint_from_gguf(gguf, folder, report, weights=weights)
        yield folder


def _new_scratch(stack: contextlib.ExitStack) -> Path:
    """A folder that goes when the stack ends, or, after a kill, when the next one is made."""
    base = cache_folder().parent / "unpacked"
    base.mkdir(parents=True, exist_ok=True)
    with (base / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        _remove_abandoned(base)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        fcntl.flock(stack.enter_context((scratch / "lock").open("w")), fcntl.LOCK_EX)
    return scratch


def _remove_abandoned(base: Path) -> None:
    """Remove what killed runs left: those whose lock nobody holds."""
    for scratch in base.iterdir():
        with contextlib.suppress(OSError), (scratch / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(scratch)


def _from_hub(repo: str, revision: str | None, report: Report, *, weights: bool) -> Path:
    from toolchain.fetch.hub import cached_snapshot, download_snapshot, reason_of

    report(f"{repo} is no folder here: asking the hub")
    try:
        return download_snapshot(repo, revision, weights=weights)
    except DtoolError:
        raise
    except Exception as error:  # whatever the hub's client raises, the model is not to be had there
        if lacks_room(error):
            raise
        if cached := cached_snapshot(repo, revision):
            report(f"the hub does not answer ({reason_of(error)}): taking the copy in its cache")
            return cached
        raise DtoolError(
            f"{repo} is no folder here, and the hub does not give it",
            expected="a checkpoint folder, a .gguf file, or org/name[@revision] on the hub",
            found=reason_of(error),
            fix="check the spelling and the network; a folder or the hub's cache works without one",
        ) from error

"""Artifacts: folders with a manifest, written whole or not at all.

Every stage reads artifacts and writes one. A folder is built under a hidden sibling name while a
lock is held, hashed, fsynced and renamed, so a reader sees nothing or everything. The manifest
carries no times, hosts or paths: equal inputs give equal bytes. The one file it does not hash is
`timings.json`, which holds what differs between two equal runs (seconds, peak memory).
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from toolchain.errors import DtoolError, name_list
from toolchain.manifest import FileEntry, Manifest

Model = TypeVar("Model", bound=pydantic.BaseModel)
SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TIMINGS = "timings.json"
PAGE_MARK = '<meta name="generator" content="dtool">'
"""Near the top of every HTML page dtool writes: such a file may be written anew."""
CHUNK_BYTES = 1 << 22
PARTIAL, OLD, PROGRESS = "partial", "old", "progress"
LEFT_OVERS = {
    PROGRESS: "what is finished; the same command goes on from there",
    PARTIAL: "could not be removed",
    OLD: "what was at the output before",
}
"""Ends of the hidden names beside an output, and the use of what a failed command may leave under them."""
WAYS_OUT = {
    errno.ENOSPC: "free some space, or choose an output path on another disk",
    errno.EDQUOT: "free some of your quota, or choose an output path on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose an output path on another disk",
}
"""What to do about each error of the system that means a lack of room."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A finished folder and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def identity(self) -> str:
        """sha256 of the manifest, which covers every file."""
        return hash_file(self.path / MANIFEST)

    def file(self, name: str) -> Path:
        """The path of one of its files. Raises DtoolError when the manifest has no such file."""
        if name not in self.manifest.files:
            raise DtoolError(
                f"{self.path} has no file {name!r}",
                expected=f"a {self.manifest.stage} artifact with {name}",
                found=name_list(self.manifest.files),
                fix="run the stage that writes it again",
            )
        return self.path / name

    def json(self, name: str) -> Any:
        """One of its JSON files, parsed. Raises DtoolError when it is none."""
        return read_json(self.file(name))

    def read(self, name: str, model: type[Model]) -> Model:
        """One of its JSON files as the model that describes it. Raises DtoolError when it does not fit."""
        try:
            return model.model_validate(self.json(name))
        except pydantic.ValidationError as error:
            raise DtoolError(
                f"{self.path / name} cannot be used",
                expected=f"a {model.__name__} as dtool {importlib.metadata.version('dtool')} writes it",
                found=_first_fault(error),
                fix="make the artifact again with this version of dtool",
            ) from error


@dataclass(slots=True)
class Draft:
    """An artifact being written: fill `path` with files and set the fields."""

    path: Path
    stage: str
    out: Path
    """What `path` becomes; for messages."""
    key: str = ""
    lineage: dict[str, str] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    kv_contract: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    known_sha256: dict[str, str] = field(default_factory=dict)
    """Digests a stage computed while it wrote, so that large files are not read again."""

    def write_json(self, name: str, document: Any) -> None:
        """Write `document` canonically (sorted keys, newline at the end)."""
        (self.path / name).write_text(dump_json(document), "utf-8")


def dump_json(document: Any, *, ascii_only: bool = False) -> str:
    """Canonical JSON text: sorted keys, two-space indent, one newline at the end."""
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=ascii_only) + "\n"


def read_json(path: Path, fix: str = "make the artifact again, or copy it again") -> Any:
    """What a JSON file holds; a byte order mark, as some editors write it, is passed over. Raises DtoolError."""
    try:
        return json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, an endless number, or too deep
        found = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:200]
        raise DtoolError(f"{path} is not JSON", expected="JSON in UTF-8", found=found, fix=fix) from error


def hash_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def hash_json(document: Any) -> str:
    """Hex sha256 of a document's canonical JSON."""
    return hashlib.sha256(dump_json(document).encode()).hexdigest()


def stage_key(stage: str, lineage: Mapping[str, str], recipe: Mapping[str, Any], packages: Iterable[str]) -> str:
    """Identity of a stage's work: equal keys mean equal outputs, so a finished one is reused."""
    return hash_json({"stage": stage, "lineage": dict(lineage), "recipe": dict(recipe), "versions": versions(packages)})


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions of dtool and of the packages that shape an output."""
    return {name: importlib.metadata.version(name) for name in sorted({"dtool", *packages})}


def open_artifact(path: Path, stages: Iterable[str] = (), *, check_hashes: bool = True, later: str = "") -> Artifact:
    """The artifact in folder `path`, its files checked by sha256, or by size alone: without `check_hashes`, `later`.

    Raises DtoolError when it is no artifact, of another schema or stage, incomplete or altered.
    """
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        raise DtoolError(
            f"{path} is not a dtool artifact",
            expected=f"a folder with {MANIFEST}",
            found="no such folder" if not path.exists() else "no manifest in it" if path.is_dir() else "a file",
            fix="give the folder that `dtool export`, `quantize` or `build-engine` wrote",
        )
    manifest = _read_manifest(manifest_path)
    wanted = tuple(stages)
    if wanted and manifest.stage not in wanted:
        raise DtoolError(
            f"{path} is an artifact of stage {manifest.stage!r}",
            expected=f"stage {' or '.join(wanted)}",
            found=manifest.stage,
            fix="give the folder that the earlier stage wrote",
        )
    artifact = Artifact(path, manifest)
    verify_files(artifact, check_hashes=check_hashes, later=later)
    return artifact


def _first_fault(error: pydantic.ValidationError) -> str:
    """The first field that does not fit, and why."""
    first = error.errors()[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


def _read_manifest(path: Path) -> Manifest:
    document = read_json(path)
    try:
        if document.get("schema_version") != SCHEMA_VERSION:
            raise DtoolError(
                f"{path} has another schema version",
                expected=str(SCHEMA_VERSION),
                found=str(document.get("schema_version")),
                fix="make the artifact again with this version of dtool",
            )
        return Manifest.model_validate(document)
    except (ValueError, AttributeError) as error:  # AttributeError: no object
        found = _first_fault(error) if isinstance(error, pydantic.ValidationError) else type(document).__name__
        raise DtoolError(
            f"{path} cannot be read", expected="a manifest of dtool", found=found, fix="make the artifact again"
        ) from error


def verify_files(artifact: Artifact, *, check_hashes: bool, later: str = "") -> None:
    """Check that every file of the manifest is there, whole (`later`: of its size), and that there are no others."""
    present = {str(p.relative_to(artifact.path)) for p in artifact.path.rglob("*") if p.is_file()} - {MANIFEST, TIMINGS}
    listed = set(artifact.manifest.files)
    if present != listed:
        raise DtoolError(
            f"the files of {artifact.path} are not those of its manifest",
            expected=f"missing: {name_list(sorted(listed - present)) or 'none'}",
            found=f"not in the manifest: {name_list(sorted(present - listed)) or 'none'}",
            fix="make the artifact again",
        )
    for name, entry in artifact.manifest.files.items():
        size = (artifact.path / name).stat().st_size
        if size != entry.bytes:
            raise DtoolError(
                f"{artifact.path / name} is damaged",
                expected=f"{entry.bytes} bytes",
                found=f"{size} bytes",
                fix="make the artifact again, or copy it again",
            )
        if check_hashes and name != later and (found := hash_file(artifact.path / name)) != entry.sha256:
            raise DtoolError(
                f"{artifact.path / name} is damaged",
                expected=f"sha256 {entry.sha256}",
                found=f"sha256 {found}",
                fix="make the artifact again, or copy it again",
            )


@contextlib.contextmanager
def create_artifact(out: Path, stage: str, *, force: bool = False) -> Iterator[Draft]:
    """Write an artifact to `out`: yields the draft, publishes it when the block ends well.

    Raises DtoolError when `out` exists (unless `force` and it is an artifact) or another process
    writes it. On any failure, `out` is what it was before.
    """
    check_output(out, force=force)
    with new_folder(out, replace=force) as partial:
        draft = Draft(partial, stage, out)
        yield draft
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            stage=stage,
            key=draft.key,
            lineage=draft.lineage,
            recipe=draft.recipe,
            versions=versions(draft.packages),
            target=draft.target,
            kv_contract=draft.kv_contract,
            details=draft.details,
            files=_file_entries(partial, draft.known_sha256),
        )
        draft.write_json(MANIFEST, manifest.model_dump())


def _file_entries(folder: Path, known: Mapping[str, str]) -> dict[str, FileEntry]:
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return {
        name: FileEntry(bytes=(folder / name).stat().st_size, sha256=known.get(name) or hash_file(folder / name))
        for name in names
        if name != TIMINGS
    }


def check_output(out: Path, *, force: bool = False, source: Path | None = None) -> None:
    """Refuse an output that exists before any work; `force` allows replacing a dtool artifact.

    An output that is, holds or lies in its own `source` is always refused. A link counts as the place it leads to.
    """
    here = real_place(out)
    if source is not None:
        there = real_place(source)
        if here == there or here in there.parents or there in here.parents:
            raise DtoolError(
                f"{out} overlaps with what it is made from",
                expected=f"an output beside {source}",
                found=str(out),
                fix="choose another output path",
            )
    if not here.exists() and not here.is_symlink():  # a link that leads to itself has no other place
        return
    if force and (out / MANIFEST).is_file():
        return
    raise DtoolError(
        f"{out} already exists",
        expected="a path that does not exist yet",
        found="a dtool artifact" if (out / MANIFEST).is_file() else "something dtool did not write",
        fix="choose another path" + (", or add --force to replace it" if (out / MANIFEST).is_file() else ""),
    )


def enclosing_artifact(folder: Path) -> Path | None:
    """The artifact that `folder` is or lies in; None outside of all."""
    here = real_place(folder)
    return next((f for f in (here, *here.parents) if (f / MANIFEST).is_file()), None)


def check_page(path: Path) -> None:
    """Refuse a path for an HTML page that exists and is no page of ours, lies in an artifact, or cannot be written."""
    folder, found = real_place(path).parent, ""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        found = "a folder that cannot be written" if folder.exists() else "no such folder"
    elif (inside := enclosing_artifact(folder)) is not None:
        found = f"it would lie in an artifact, {inside}"
    if found:
        raise DtoolError(
            f"no page can be written to {path}",
            expected="a writable folder outside artifacts, which hold what their manifest lists",
            found=found,
            fix="choose another path",
        )
    if path.exists() and (not path.is_file() or PAGE_MARK not in path.read_bytes()[:1000].decode("utf-8", "replace")):
        raise DtoolError(
            f"{path} already exists",
            expected="a path that is free, or a page dtool wrote",
            found="something dtool did not write",
            fix="choose another path",
        )


@contextlib.contextmanager
def new_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A hidden sibling folder that becomes `out` when the block ends well, and vanishes otherwise."""
    with locked(out):
        place = real_place(out)
        partial, old = hidden_beside(out, PARTIAL), hidden_beside(out, OLD)
        try:
            if old.exists() and not place.exists():
                old.rename(place)  # a replacement was killed between its two renames
            _remove(partial)
            partial.mkdir(parents=True)
            yield partial
            sync_tree(partial)
            _swap_in(partial, out, replace=replace)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)  # before the message says what is left
            raise explain_os_error(error, out) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def real_place(out: Path) -> Path:
    """The place that an output path leads to, which is another where it is a link.

    A link is followed, never replaced, as a shell follows one after `>`: somebody made it so that the data is
    elsewhere, on a larger disk or where a server reads it, and it shall still lead to the newest output.
    """
    return Path(os.path.realpath(out))


def hidden_beside(out: Path, end: str) -> Path:
    """The path `.NAME.end` beside the place an output path leads to: on its disk, so that a rename is atomic."""
    place = real_place(out)
    return place.with_name(f".{place.name}.{end}")


def _swap_in(partial: Path, out: Path, *, replace: bool) -> None:
    place, old = real_place(out), hidden_beside(out, OLD)
    _remove(old)
    if replace and place.exists():
        place.rename(old)
    if place.exists():
        found, fix = "something put there since", "choose another path"
        raise DtoolError(f"{out} appeared while it was being written", expected="a free path", found=found, fix=fix)
    try:
        partial.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise
    _sync_folder(place.parent)
    try:
        _remove(old)
    except OSError as error:
        raise DtoolError(
            f"{out} is written, but what it replaced is still there",
            expected=f"to remove {old}",
            found=f"{error.strerror or error} ({error.filename or old})",
            fix="remove that folder; the new output is whole",
        ) from error


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def require_room(out: Path, needed: int, beside: int = 0) -> None:
    """Refuse an output of `needed` bytes in one file, and `beside` it more, that there is no room for.

    Looks at the disk and at the limit on file sizes of this process. Raises DtoolError with both numbers.
    """
    folder, limit = _present_folder(real_place(out)), _file_size_limit()
    free = shutil.disk_usage(folder).free
    if free < needed + beside:
        raise DtoolError(
            f"there is no room for {out}",
            expected=f"at least {needed + beside:,} bytes free in {folder}",
            found=f"{free:,} bytes",
            fix=f"{WAYS_OUT[errno.ENOSPC]}; nothing was written",
        )
    if limit is not None and limit < needed:
        raise DtoolError(
            f"{out} would have a file that is larger than this process may write",
            expected=f"a limit of at least {needed:,} bytes",
            found=f"{limit:,} bytes (ulimit -f)",
            fix=f"{WAYS_OUT[errno.EFBIG]}; nothing was written",
        )


def _file_size_limit() -> int | None:
    """The most bytes a file of this process may have; None where the system sets no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def lacks_room(error: BaseException) -> bool:
    """Whether an error means that a disk, a quota or a limit on file sizes is too small."""
    return isinstance(error, OSError) and error.errno in WAYS_OUT


def explain_os_error(error: OSError, out: Path) -> DtoolError:
    """The words for a failure of the system while `out` was made: its cause, the room there is, and what is left.

    Not every such error is of the output: a file that is read may fail too, and then that file is named.
    """
    place, cause = real_place(out), error.strerror or str(error)
    named = Path(os.fsdecode(error.filename)).absolute() if isinstance(error.filename, str | bytes) else None
    left = _left_beside(out)
    if error.errno in WAYS_OUT:
        problem, expected, fix = "was not written", "room for the output", WAYS_OUT[error.errno]
        cause = f"{cause} ({named or place.parent}); {_room(error.errno, named or place)}"
    elif named is not None and _is_of_output(named, place):
        problem, expected, fix = "cannot be written", "a writable place", "choose another output path"
        cause = f"{cause} ({named})"
    else:
        problem, expected = "was not made", "files that can be read and written"
        fix = f"check {named}" if named else "check the disks of what is read and of the output"
        cause = f"{cause} ({named})" if named else cause
    return DtoolError(
        f"{out} {problem}",
        expected=expected,
        found="\n".join([cause, *left]),
        fix=fix if left else f"{fix}; nothing of the output was left behind",
    )


def _room(number: int | None, place: Path) -> str:
    """How much room there is of the kind that an error of the system lacks."""
    if number == errno.EFBIG and (limit := _file_size_limit()) is not None:
        return f"a file may have {limit:,} bytes"
    return f"{shutil.disk_usage(_present_folder(place)).free:,} bytes are free"


def _present_folder(place: Path) -> Path:
    """The nearest folder above a path that is there already."""
    return next(folder for folder in place.parents if folder.is_dir())


def _is_of_output(named: Path, place: Path) -> bool:
    """Whether a file is the output, leads to it, or lies in it or in what is kept beside it meanwhile."""
    ours = {place, *(hidden_beside(place, end) for end in ("lock", *LEFT_OVERS))}
    return named in place.parents or not ours.isdisjoint({named, *named.parents})


def _left_beside(out: Path) -> list[str]:
    """What a failed command left beside its output, each with its bytes and its use."""
    lines = []
    for end, use in LEFT_OVERS.items():
        path = hidden_beside(out, end)
        if path.exists():
            size = sum(p.stat().st_size for p in (path, *path.rglob("*")) if p.is_file())
            lines.append(f"left: {path}, {size:,} bytes: {use}")
    return lines


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the exclusive lock of an output path; a second process is refused at once."""
    lock_path = hidden_beside(out, "lock")
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        handle = lock_path.open("w")
    except OSError as error:
        raise explain_os_error(error, out) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle.fileno()).st_ino != lock_path.stat().st_ino:
                raise BlockingIOError  # the holder removed the file between our open and our lock
        except (BlockingIOError, FileNotFoundError) as error:
            raise DtoolError(
                f"{out} is locked", expected="one writer", found="another dtool process", fix="wait for it to end"
            ) from error
        try:
            yield
        finally:
            lock_path.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write one file whole or not at all; through a link where the path is one."""
    partial = hidden_beside(path, PARTIAL)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(real_place(path))
    except OSError as error:
        with contextlib.suppress(OSError):  # before the message says what is left
            partial.unlink(missing_ok=True)
        raise explain_os_error(error, path) from error


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

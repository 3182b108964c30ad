"""Text to calibrate with and held-out text to evaluate on, built from pinned packages.

`sources.toml` says which file of which archive gives which text; nothing of it lies in the repository.
The documents of all sources are interleaved, so that the first N lines hold every kind of text.
"""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Literal, Self

import pydantic

from toolchain.artifact import check_output, hash_file, write_atomic
from toolchain.errors import DtoolError, did_you_mean, name_list
from toolchain.fetch.archives import read_members
from toolchain.fetch.download import Archive, Report, fetch_archive
from toolchain.fetch.text import book_text, decode, html_text, split_documents

SOURCES = Path(__file__).resolve().parents[2] / "calib_data" / "sources.toml"
Split = Literal["calibration", "evaluation"]
SPLITS = ("calibration", "evaluation")


class TextSource(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Some files of one archive, as documents of one kind in one split."""

    id: str
    kind: Literal["prose", "technical", "code", "chinese"]
    split: Split
    archive: str
    files: tuple[str, ...] = pydantic.Field(min_length=1)
    normalise: Literal["plain", "book", "html", "html-chinese"] = "plain"
    chars: tuple[int, int] | None = None
    """First and last character, after normalising, of the part that is taken of each file."""


class Sources(pydantic.BaseModel, frozen=True, extra="forbid"):
    """All of sources.toml."""

    archives: dict[str, Archive]
    sources: tuple[TextSource, ...]
    result: dict[str, str] = {}

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        taken: dict[tuple[str, str], str] = {}
        for source in self.sources:
            if source.archive not in self.archives:
                hint = did_you_mean(source.archive, self.archives)
                raise ValueError(f"{source.id}: no archive {source.archive!r}; {hint}")
            for name in source.files:
                other = taken.setdefault((source.archive, name), source.id)
                if other != source.id:
                    raise ValueError(f"{name} is in {other} and in {source.id}: the splits must not overlap")
        return self


def read_sources(path: Path) -> Sources:
    """sources.toml, checked. Raises DtoolError when it is missing or wrong."""
    try:
        return Sources.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise DtoolError(
            f"{path} cannot be used",
            expected="the sources of the calibration text",
            found="; ".join(str(error).splitlines()[:3]),
            fix="run dtool from a checkout of its repository",
        ) from error


def fetch_calibration(
    out_dir: Path, *, force: bool = False, report: Report, sources: Path = SOURCES
) -> dict[str, Path]:
    """`calibration.jsonl` and `evaluation.jsonl` in `out_dir`, by the names calibration and evaluation.

    One JSON object per line: text, kind (prose, technical, code, chinese), source. Equal sources give
    equal bytes, whose sha256 is checked. A file that is there already with the right bytes is kept, so a
    killed run can be repeated; another one is refused, or replaced with `force`. Raises DtoolError
    for that, for a failed or altered download, and for a result that is not the pinned one.
    """
    plan = read_sources(sources)
    paths = {split: out_dir / f"{split}.jsonl" for split in SPLITS}
    wanted = {
        split: path for split, path in paths.items() if not _is_done(path, plan.result.get(split, ""), force=force)
    }
    if not wanted:
        report(f"{name_list(str(path) for path in paths.values())}: there already")
        return paths
    archives = {name: fetch_archive(archive, report) for name, archive in plan.archives.items()}
    for split, path in wanted.items():
        documents = build_split(plan, split, archives)
        write_atomic(path, _checked_lines(documents, split, plan.result.get(split)))
        report(f"{path}: {len(documents)} documents, {sum(len(d['text']) for d in documents)} characters")
    return paths


def _is_done(path: Path, sha256: str, *, force: bool) -> bool:
    """Whether the file has the wanted bytes. Raises DtoolError when it has others and may not be replaced."""
    if path.is_file() and hash_file(path) == sha256:
        return True
    if path.is_file() and force:
        return False
    if path.is_file():
        raise DtoolError(
            f"{path} already exists",
            expected="no such file, or the text that this command writes",
            found="other text",
            fix="choose another folder, or add --force to replace it",
        )
    check_output(path)
    return False


def build_split(plan: Sources, split: str, archives: dict[str, Path]) -> list[dict[str, str]]:
    """The documents of one split, interleaved so that every beginning of the list holds every source."""
    placed: list[tuple[float, int, dict[str, str]]] = []
    for order, source in enumerate(s for s in plan.sources if s.split == split):
        texts = source_documents(source, archives[source.archive])
        placed += [
            ((i + 0.5) / len(texts), order, {"text": text, "kind": source.kind, "source": source.id})
            for i, text in enumerate(texts)
        ]
    return [document for _, _, document in sorted(placed, key=lambda item: item[:2])]


def source_documents(source: TextSource, archive: Path) -> list[str]:
    """One source's documents, about 4500 characters each, in the order of its files."""
    members = read_members(archive, source.files)
    parts: list[str] = []
    for name in source.files:
        text = normalise_text(decode(members[name]), source.normalise)
        first, last = source.chars or (0, len(text))
        if len(text) < last:
            raise DtoolError(
                f"{source.id}: {name} is short",
                expected=f"{last} characters",
                found=str(len(text)),
                fix="another release of that package came: run the command again, or name your own text in the recipe",
            )
        parts.append(text[first:last].strip("\n"))
    return split_documents("\n\n".join(parts))


def normalise_text(text: str, how: str) -> str:
    """The plain paragraphs of a file's text; `plain` is left as it is (source code, reStructuredText)."""
    if how == "book":
        return book_text(text)
    if how.startswith("html"):
        return html_text(text, chinese=how == "html-chinese")
    return text


def _checked_lines(documents: list[dict[str, str]], split: str, sha256: str | None) -> bytes:
    """The documents as JSON lines. Raises DtoolError when their sha256 is not the pinned one."""
    data = "".join(json.dumps(d, ensure_ascii=False, sort_keys=True) + "\n" for d in documents).encode()
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256:
        raise DtoolError(
            f"the {split} text is not the one that was published",
            expected=f"sha256 {sha256}",
            found=f"sha256 {found}",
            fix="set the new sha256 under [result] of sources.toml if the sources were changed on purpose",
        )
    return data

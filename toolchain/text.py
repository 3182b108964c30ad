"""Text as token ids: the passages of a file, and the blocks that calibration and parity are made of."""

import datetime as dt
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolchain.errors import DtoolError, name_list
from toolchain.tokenizer import Tokenizer, has_tokenizer, load_tokenizer

__all__ = ["Passage", "Tokenizer", "check_ids", "has_tokenizer", "load_tokenizer", "read_texts", "token_blocks"]

Array = np.ndarray[Any, Any]

PASSAGE = ("passage", '{"text": "...", "kind": "...", "source": "..."}')
CONVERSATION = ("conversation", '{"messages": [{"role": "user", "content": "..."}, ...]}, or {"text": "..."}')
A_DAY = dt.datetime(2025, 1, 1)
"""What conversations of a file take for today: equal inputs give equal ids."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One document: its text, its kind (prose, code, chat, ...) and where it comes from."""

    text: str
    kind: str
    source: str


def read_texts(path: Path, chat: Tokenizer | None = None) -> list[Passage]:
    """The passages of a .jsonl file, one {"text", "kind", "source"} a line; kind and source may be absent.

    With `chat` each is a conversation laid out by that tokenizer's template: {"messages": [{"role", "content"}, ...]}
    in place of "text", or a text as what a user says; where no assistant spoke last, its turn begins. Raises
    DtoolError with the line number when a line is anything else, and for a tokenizer without a template.
    """
    if chat is not None and chat.chat_template is None:
        raise chat.without_template("--set calibration.chat=false, or copy the template from the model's page")
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # some editors put a byte order mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise DtoolError(
            f"{path} cannot be read",
            expected="a UTF-8 .jsonl file",
            found=str(error),
            fix='write one {"text": ...} a line in UTF-8, or name another text',
        ) from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise DtoolError(
            f"{path} is empty", expected='one {"text": ...} a line', found="no line", fix="name another text"
        )
    return [_passage(path, number, line, chat) for number, line in enumerate(lines, 1)]


def _passage(path: Path, number: int, line: str, chat: Tokenizer | None) -> Passage:
    def refuse(found: str) -> DtoolError:
        kind, expected = CONVERSATION if chat else PASSAGE
        return DtoolError(
            f"{path}, line {number} is not a {kind}",
            expected=expected,
            found=found,
            fix="mend or remove the line",
        )

    try:
        item = json.loads(line)
    except RecursionError as error:
        raise refuse("JSON that is nested too deeply") from error
    except ValueError as error:
        raise refuse(str(error) if line.strip() else "a blank line") from error
    if not isinstance(item, dict):
        raise refuse(f"a {type(item).__name__}")
    text, kind, source = item.get("text"), item.get("kind", "text"), item.get("source", "")
    if chat is not None and "messages" in item:
        text = _conversation(chat, item["messages"], refuse)
    elif not isinstance(text, str) or not text.strip():
        missing = 'no "text", or an empty one'
        raise refuse(f"{missing}; messages are read with calibration.chat = true" if "messages" in item else missing)
    elif chat is not None:
        text = _conversation(chat, [{"role": "user", "content": text}], refuse)
    if not isinstance(kind, str) or not isinstance(source, str):
        raise refuse("kind or source is no string")
    return Passage(text, kind, source)


def _conversation(tokenizer: Tokenizer, messages: Any, refuse: Callable[[str], DtoolError]) -> str:
    """A conversation as text, the same whenever it is laid out."""
    if not isinstance(messages, list) or not messages:
        raise refuse("messages is no list, or an empty one")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise refuse(f"a message without a role or a content: {message!r:.80}")
    asks = messages[-1]["role"] != "assistant"
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=asks, now=A_DAY)
    except DtoolError as error:
        raise refuse(error.found) from error


def check_ids(ids: Array, vocab_size: int, folder: Path, data: str) -> None:
    """Refuse ids, made of the text `data` by the tokenizer in `folder`, that a model of `vocab_size` rows lacks."""
    largest = int(ids.max())
    if largest >= vocab_size:
        raise DtoolError(
            f"the tokenizer of {folder} is not the model's",
            expected=f"ids below {vocab_size}, the rows of the embedding",
            found=f"id {largest} in {data}",
            fix="copy the tokenizer's files again, all from one model",
        )


def token_blocks(
    texts: Sequence[Passage],
    tokenizer: Tokenizer,
    *,
    blocks: int,
    seq_len: int,
    seed: int,
    skip: int = 0,
    least: int | None = None,
    fix: str = "name a longer text, or ask for fewer or shorter blocks",
) -> Array:
    """int64 ids [blocks, seq_len], packed: documents of a kind one after the other, end tokens between.

    `seed` shuffles the documents within their kind. Blocks are taken in turn from every kind, so
    each is covered; kinds shorter than one block share a stream. Every block begins with the start
    tokens if the tokenizer uses any, and no document of it with others. The first `skip` blocks are passed over.
    With `least` fewer blocks are taken, down to that many, where the text has no more; they are the first of a longer
    text too. Raises DtoolError, with `fix` as what to do, when the text is too short.
    """
    start = list(tokenizer.start_ids)
    size = seq_len - len(start)
    streams = _streams(texts, tokenizer, most=(skip + blocks) * size, seed=seed)
    short = [ids for ids in streams if len(ids) < size]
    streams = [ids for ids in streams if len(ids) >= size]
    together: list[int] = []
    for ids in short:
        _append(together, ids, tokenizer.eos_id)
    streams.append(together)
    pieces = [[ids[i : i + size] for i in range(0, len(ids) - size + 1, size)] for ids in streams]
    found = sum(map(len, pieces))
    if found < skip + (blocks if least is None else least):
        kinds = sorted({t.kind for t in texts})
        after = f" after the {skip} that calibration takes" if skip else ""
        raise DtoolError(
            f"the text is too short: it gives {max(found - skip, 0)} blocks of {seq_len} tokens{after}",
            expected=f"{blocks if least is None else least} blocks",
            found=f"{len(texts)} documents of kind {name_list(kinds)}",
            fix=fix,
        )
    rounds = range(max(map(len, pieces)))
    taken = [kind[i] for i in rounds for kind in pieces if i < len(kind)][skip : skip + blocks]
    return np.array([start + piece for piece in taken], np.int64)


def _streams(texts: Sequence[Passage], tokenizer: Tokenizer, *, most: int, seed: int) -> list[list[int]]:
    """One list of ids per kind, in order of appearance, at most about `most` ids each."""
    by_kind: dict[str, list[str]] = {}
    for passage in texts:
        by_kind.setdefault(passage.kind, []).append(passage.text)
    streams = []
    for documents in by_kind.values():
        ids: list[int] = []
        for index in np.random.default_rng(seed).permutation(len(documents)):
            if len(ids) >= most:
                break
            # A chat template wrote start tokens that the block has already.
            document = tokenizer.without_start(tokenizer.encode_plain(documents[index]))
            _append(ids, document, tokenizer.eos_id)
        streams.append(ids)
    return streams


def _append(ids: list[int], more: list[int], separator: int | None) -> None:
    """Put `more` behind `ids`, the separator between them."""
    if ids and separator is not None:
        ids.append(separator)
    ids += more

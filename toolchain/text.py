"""Text as token ids: the one way calibration, parity and generate turn words into numbers.

A sequence carries exactly one start token: it is added only where the tokenizer asks for one and
the text (a chat template often writes it already) does not begin with it. The tokenizer's own
post-processor is read to learn what it adds and then never used.
"""

import datetime as dt
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolchain.chat_template import compiled
from toolchain.errors import DtoolError, name_list

Array = np.ndarray[Any, Any]
TOKENIZER, CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

PASSAGE = ("passage", '{"text": "...", "kind": "...", "source": "..."}')
CONVERSATION = ("conversation", '{"messages": [{"role": "user", "content": "..."}, ...]}, or {"text": "..."}')
A_DAY = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
"""What conversations of a file take for today: equal inputs give equal ids."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One document: its text, its kind (prose, code, chat, ...) and where it comes from."""

    text: str
    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer with its start, end and chat conventions. `backend` is a `tokenizers.Tokenizer`."""

    path: Path
    backend: Any
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    chat_template: str | None
    special: Mapping[str, str]

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_id(self) -> int | None:
        """The end token put between documents; None when the tokenizer has none."""
        return self.eos_ids[0] if self.eos_ids else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with one start token in front when this tokenizer uses one."""
        return self.with_start(self.encode_plain(text))

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text without anything added; special tokens spelt out in it are recognised."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DtoolError(
                "the text is not valid UTF-8", expected="text in UTF-8", found=str(error), fix="save it as UTF-8"
            ) from error
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def with_start(self, ids: list[int]) -> list[int]:
        """`ids` beginning with exactly one start token, if this tokenizer uses one."""
        if not self.adds_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation laid out by the chat template."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        now: dt.datetime | None = None,
    ) -> str:
        """The conversation as the text the model was trained on.

        `messages` are {"role", "content"}; `now` is the time that a template may tell the model, by default this
        moment. Raises DtoolError without a template or when it refuses.
        """
        if self.chat_template is None:
            raise DtoolError(
                f"{self.path} has no chat template",
                expected=f"{TEMPLATE}, or chat_template in {CONFIG}",
                found="neither",
                fix="give a plain prompt",
            )
        from jinja2 import TemplateError

        try:
            template = compiled(self.chat_template, now)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self.special)
        except (TemplateError, TypeError) as error:
            raise DtoolError(
                f"the chat template of {self.path} refused the messages",
                expected="messages it can lay out",
                found=str(error),
                fix="check the roles and their order",
            ) from error

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some ids."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special))


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint, an artifact or a tokenizer folder has a tokenizer.json."""
    return (_home(folder) / TOKENIZER).is_file()


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder, or of an artifact (in its `tokenizer/`).

    Raises DtoolError naming the files that are missing or cannot be read.
    """
    home = _home(folder)
    missing = [name for name in (TOKENIZER, CONFIG) if not (home / name).is_file()]
    if missing:
        raise DtoolError(
            f"{folder} has no tokenizer",
            expected=f"{TOKENIZER} and {CONFIG} in {home}",
            found="no such folder" if not home.is_dir() else f"no {' and no '.join(missing)}",
            fix="copy them from the model's page, or run what works on token ids alone",
        )
    config = _read_json(home / CONFIG)
    special = _special_tokens(_read_json(home / SPECIAL_TOKENS)) | _special_tokens(config)
    backend = _read_backend(home / TOKENIZER)
    start = _processor_start(backend)
    bos_id = _token_id(home, backend, special, "bos_token")
    asked = config.get("add_bos_token")
    return Tokenizer(
        path=home,
        backend=backend,
        bos_id=start if bos_id is None else bos_id,
        eos_ids=_eos_ids(home, backend, special),
        adds_bos=asked if isinstance(asked, bool) else start is not None,
        chat_template=_chat_template(home, config),
        special=special,
    )


def _home(folder: Path) -> Path:
    return folder if (folder / TOKENIZER).is_file() or not (folder / "tokenizer").is_dir() else folder / "tokenizer"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise _damaged(f"{path} is not JSON", "{ ... }", str(error)) from error
    if not isinstance(document, dict):
        raise _damaged(f"{path} is no JSON object", "{ ... }", type(document).__name__)
    return document


def _read_backend(path: Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise _damaged(f"{path} is not a tokenizer", "a file of the tokenizers package", str(error)) from error


def _damaged(problem: str, expected: str, found: str) -> DtoolError:
    return DtoolError(problem, expected=expected, found=found, fix="copy the file again")


def _special_tokens(document: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; Hugging Face writes each as a string or as {"content"}."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = document.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _token_id(home: Path, backend: Any, special: Mapping[str, str], name: str) -> int | None:
    if name not in special:
        return None
    token_id = backend.token_to_id(special[name])
    if token_id is None:
        raise DtoolError(
            f"{home}: {name} {special[name]!r} is not in the vocabulary",
            expected=f"a token of {TOKENIZER}",
            found=f"{backend.get_vocab_size()} tokens, not this one",
            fix="copy the tokenizer's files again, all from one model",
        )
    return int(token_id)


def _eos_ids(home: Path, backend: Any, special: Mapping[str, str]) -> tuple[int, ...]:
    """The tokenizer's end token first, then the others generation stops at."""
    own = _token_id(home, backend, special, "eos_token")
    listed = _read_json(home / GENERATION).get("eos_token_id", [])
    ids = [] if own is None else [own]
    ids += [listed] if isinstance(listed, int) else [i for i in listed or [] if isinstance(i, int)]
    return tuple(dict.fromkeys(ids))


def _processor_start(backend: Any) -> int | None:
    """The token the post-processor puts in front of a text, if any."""
    with_special = backend.encode("a", add_special_tokens=True)
    mask = with_special.special_tokens_mask
    return int(with_special.ids[0]) if with_special.ids and mask[0] else None


def _chat_template(home: Path, config: Mapping[str, Any]) -> str | None:
    if (home / TEMPLATE).is_file():
        return (home / TEMPLATE).read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template if isinstance(template, str) else None


def read_texts(path: Path, chat: Tokenizer | None = None) -> list[Passage]:
    """The passages of a .jsonl file, one {"text", "kind", "source"} a line; kind and source may be absent.

    With `chat` each is a conversation laid out by that tokenizer's template: {"messages": [{"role", "content"}, ...]}
    in place of "text", or a text as what a user says; where no assistant spoke last, its turn begins. Raises
    DtoolError with the line number when a line is anything else, and for a tokenizer without a template.
    """
    if chat is not None and chat.chat_template is None:
        raise DtoolError(
            f"{chat.path} has no chat template",
            expected=f"{TEMPLATE}, or chat_template in {CONFIG}",
            found="neither",
            fix="--set calibration.chat=false, or copy the template from the model's page",
        )
    try:
        lines = path.read_text("utf-8").split("\n")
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
    token if the tokenizer uses one, and no document of it with another. The first `skip` blocks are passed over.
    With `least` fewer blocks are taken, down to that many, where the text has no more; they are the first of a longer
    text too. Raises DtoolError, with `fix` as what to do, when the text is too short.
    """
    start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
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
            _append(ids, _without_start(tokenizer, documents[index]), tokenizer.eos_id)
        streams.append(ids)
    return streams


def _without_start(tokenizer: Tokenizer, document: str) -> list[int]:
    """Ids of a document, without the start token that a chat template wrote and the block has already."""
    ids = tokenizer.encode_plain(document)
    return ids[1:] if tokenizer.adds_bos and ids[:1] == [tokenizer.bos_id] else ids


def _append(ids: list[int], more: list[int], separator: int | None) -> None:
    """Put `more` behind `ids`, the separator between them."""
    if ids and separator is not None:
        ids.append(separator)
    ids += more

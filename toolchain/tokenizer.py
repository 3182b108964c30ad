"""The tokenizer of a checkpoint or an artifact: text to ids and back, and conversations to text.

transformers reads a checkpoint's files, never with code from the checkpoint. Only its loader knows
everything that decides an id: tokenizer.json, tokenizer_config.json, added_tokens.json,
special_tokens_map.json, the tokenizer class that one of them names, and the model's config.

`write_tokenizer` writes the loaded tokenizer with `save_pretrained`, after which tokenizer.json alone
gives the same ids. Beside it stands `conventions.json`, the few facts that tokenizer.json has no place
for. An artifact is read from these two by the `tokenizers` package, in a tenth of a second and without
importing transformers.

A sequence carries its start tokens exactly once. They are the tokens that the post-processor of
tokenizer.json puts in front of a text. They are added where a text does not begin with them; a chat
template often writes them already. Tokens that a post-processor puts behind a text are left out,
because a prompt is there to be continued.
"""

import codecs
import contextlib
import datetime as dt
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from toolchain.artifact import dump_json
from toolchain.chat_template import render
from toolchain.errors import DtoolError, name_list

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, TEMPLATE, TEMPLATES = "generation_config.json", "chat_template.jinja", "chat_templates"
CONVENTIONS = "conventions.json"
ADDED_TOKENS, SPECIAL_TOKENS = "added_tokens.json", "special_tokens_map.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
TOKENIZER_FILES = (
    TOKENIZER,
    VOCABULARY,
    MERGES,
    CONFIG,
    SPECIAL_TOKENS,
    ADDED_TOKENS,
    TEMPLATE,
    GENERATION,
)
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# A key of the tokenizer_config.json that dtool writes from a GGUF file. Its tokenizer.json is read as it is,
# where the class of the model would rebuild parts of it.
MADE_BY_DTOOL = "made_by_dtool"

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Conventions(pydantic.BaseModel, frozen=True, extra="forbid"):
    """How a tokenizer is used, beyond what tokenizer.json tells."""

    start_ids: tuple[int, ...]
    """In front of every sequence."""
    end_ids: tuple[int, ...]
    """Where generation stops; the tokenizer's own end token comes first."""
    special_tokens: dict[str, str]
    """Texts of the named special tokens, as chat templates see them: bos_token and so on."""
    split_special_tokens: bool = False
    """Special tokens spelt out in a text are text."""
    clean_up_spaces: bool = False
    """Spaces before punctuation and English contractions are taken out of decoded text."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer with its start, end and chat conventions."""

    path: Path
    backend: Any
    """A `tokenizers.Tokenizer`."""
    conventions: Conventions
    templates: Mapping[str, str]
    """Chat templates by name; "default" is the one for conversations."""
    loaded: Any = None
    """The tokenizer of transformers, where a checkpoint was read."""
    notes: tuple[str, ...] = ()
    """What a user should know about how the files were read."""

    @property
    def ids(self) -> list[int]:
        """All ids that stand for a token, ascending. There may be holes between them."""
        return sorted(set(self.backend.get_vocab(with_added_tokens=True).values()))

    def stop_ids(self, model_ids: Iterable[int]) -> tuple[int, ...]:
        """The ids that end generation: `model_ids` of config.json, then the tokenizer's own."""
        return tuple(dict.fromkeys((*model_ids, *self.eos_ids)))

    def allowed_ids(self, rows: int, stop_ids: Iterable[int]) -> list[int]:
        """The ids that a model of so many `rows` may choose, ascending.

        They stand for a token or end the text: an end token needs no text of its own.
        """
        return [i for i in sorted({*self.ids, *stop_ids}) if 0 <= i < rows]

    @property
    def start_ids(self) -> tuple[int, ...]:
        """The tokens in front of every sequence, mostly one or none."""
        return self.conventions.start_ids

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text, the tokenizer's own first."""
        return self.conventions.end_ids

    @property
    def eos_id(self) -> int | None:
        """The end token put between documents; None when the tokenizer has none."""
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def chat_template(self) -> str | None:
        """The template that lays out conversations, if there is one."""
        return self.templates.get("default")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the start tokens in front when this tokenizer uses any."""
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
        """`ids` beginning with the start tokens exactly once."""
        start = list(self.start_ids)
        return ids if ids[: len(start)] == start else start + ids

    def without_start(self, ids: list[int]) -> list[int]:
        """`ids` without the start tokens that a chat template wrote."""
        start = list(self.start_ids)
        return ids[len(start) :] if ids[: len(start)] == start else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation laid out by the chat template."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: dt.datetime | None = None,
    ) -> str:
        """Lay out a conversation as the text the model was trained on.

        `messages` are {"role", "content"}; `now` is the time that a template may tell the model, by
        default this moment. Raises DtoolError without a template or when it refuses.
        """
        template = self.chat_template
        if template is None:
            raise self.without_template("give a plain prompt")
        try:
            # transformers reads the clock itself, and lays out no conversation without messages.
            if self.loaded is not None and now is None and messages:
                return self.loaded.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
                )
            special = self.conventions.special_tokens
            return render(template, messages, special, add_generation_prompt=add_generation_prompt, now=now)
        except Exception as error:  # a template is a program: it may divide by zero
            raise DtoolError(
                f"the chat template of {self.path} refused the messages",
                expected="messages it can lay out",
                found=_first_line(error),
                fix="check the roles and their order, or mend the template",
            ) from error

    def without_template(self, fix: str) -> DtoolError:
        """The error of a conversation that no template lays out."""
        others = f"templates named {name_list(sorted(self.templates))}, none of them default"
        return DtoolError(
            f"{self.path} has no chat template",
            expected=f"{TEMPLATE}, or chat_template in {CONFIG}",
            found=others if self.templates else "neither",
            fix=fix,
        )

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some ids."""
        text = str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special))
        return _clean_up_spaces(text) if self.conventions.clean_up_spaces else text

    def settler(self) -> Callable[[Sequence[int], str], str]:
        """Return a function of ids and their text: the part of the text that no later id can change.

        Three things wait for what follows. The bytes of an unfinished character wait for the rest. A run
        of byte tokens waits for its end, because one byte that does not fit turns the whole run into
        replacement characters. Where spaces are cleaned up, a line waits for its end. DecodeStream of
        the `tokenizers` package waits for the first alone, and so shows text that changes afterwards.
        """
        decoder = self.backend.decoder
        special = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        byte_ids: set[int] = set()
        if decoder is not None and b'"ByteFallback"' in decoder.__getstate__():
            vocabulary = self.backend.get_vocab(with_added_tokens=True)
            byte_ids = {i for token, i in vocabulary.items() if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)}

        def settled(ids: Sequence[int], text: str) -> str:
            last = next((i for i in reversed(ids) if i not in special), None)
            if last in byte_ids:
                return ""
            if self.conventions.clean_up_spaces:
                return text[: text.rfind("\n") + 1]
            return text.rstrip(REPLACEMENT)

        return settled


def is_tokenizer_file(name: str) -> bool:
    """Whether a checkpoint's file decides how text is read; `name` is relative to the checkpoint."""
    return name in TOKENIZER_FILES or (name.startswith(f"{TEMPLATES}/") and name.endswith(".jinja"))


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files of a checkpoint that decide how text is read, in a fixed order."""
    named = [folder / name for name in TOKENIZER_FILES]
    return tuple(path for path in (*named, *sorted((folder / TEMPLATES).glob("*.jinja"))) if path.is_file())


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint, an artifact or a tokenizer folder has a vocabulary."""
    return _has_vocabulary(_home(folder))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder, or of an artifact (in its `tokenizer/`).

    Raises DtoolError naming the files that are missing or cannot be read.
    """
    home = _home(folder)
    missing = [name for name in (TOKENIZER, CONFIG) if not (home / name).is_file()]
    if _has_vocabulary(home) and TOKENIZER in missing:
        missing.remove(TOKENIZER)
    if missing:
        raise DtoolError(
            f"{folder} has no tokenizer",
            expected=f"{TOKENIZER} and {CONFIG} in {home}",
            found="no such folder" if not home.is_dir() else f"no {' and no '.join(missing)}",
            fix="copy them from the model's page, or run what works on token ids alone",
        )
    return _artifact_tokenizer(home) if (home / CONVENTIONS).is_file() else _checkpoint_tokenizer(home)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint's tokenizer to a new folder, for hosts without transformers.

    Equal files of a checkpoint give equal bytes. Raises DtoolError where transformers cannot write it.
    """
    folder.mkdir()
    try:
        tokenizer.loaded.save_pretrained(folder)
    except Exception as error:
        raise _unreadable(tokenizer.path, error) from error
    (folder / CONVENTIONS).write_text(dump_json(tokenizer.conventions.model_dump()), "utf-8")
    if (tokenizer.path / GENERATION).is_file():
        shutil.copyfile(tokenizer.path / GENERATION, folder / GENERATION)


def _home(folder: Path) -> Path:
    return folder if _has_vocabulary(folder) or not (folder / "tokenizer").is_dir() else folder / "tokenizer"


def _has_vocabulary(home: Path) -> bool:
    pair = (home / VOCABULARY).is_file() and (home / MERGES).is_file()
    return pair or (home / TOKENIZER).is_file()


def _artifact_tokenizer(home: Path) -> Tokenizer:
    """Read the files that `write_tokenizer` wrote, without transformers."""
    try:
        conventions = Conventions.model_validate_json((home / CONVENTIONS).read_bytes())
        paths = [home / TEMPLATE, *(home / TEMPLATES).glob("*.jinja")]
        texts = {path.stem: path.read_text("utf-8") for path in paths if path.is_file()}
    except ValueError as error:
        raise DtoolError(
            f"the tokenizer in {home} is damaged",
            expected="files that dtool wrote",
            found=_first_line(error),
            fix="make the artifact again, or copy it again",
        ) from error
    if "chat_template" in texts:
        texts["default"] = texts.pop("chat_template")
    return Tokenizer(home, _plain_backend(_read_backend(home / TOKENIZER), conventions), conventions, texts)


def _checkpoint_tokenizer(home: Path) -> Tokenizer:
    """Read a checkpoint's tokenizer with transformers."""
    # transformers says that something is no JSON, and not which file.
    config, generation = _read_json(home / CONFIG), _read_json(home / GENERATION)
    added = _read_json(home / ADDED_TOKENS)
    _read_json(home / SPECIAL_TOKENS)
    loaded = _load_with_transformers(home, config)
    special = dict(loaded.special_tokens_map)
    backend = loaded.backend_tokenizer
    bare = backend.model.token_to_id
    for name in ("bos_token", "eos_token"):
        text = special.get(name)
        if text is not None and bare(text) is None:
            _check_known(home, name, text, loaded.convert_tokens_to_ids(text), config, added)
    own = loaded.eos_token_id
    listed = generation.get("eos_token_id", [])
    ends = [] if own is None else [own]
    ends += [listed] if isinstance(listed, int) else [i for i in listed or [] if isinstance(i, int)]
    start_ids = _start_ids(backend)
    conventions = Conventions(
        start_ids=start_ids,
        end_ids=tuple(dict.fromkeys(ends)),
        special_tokens=special,
        split_special_tokens=bool(loaded.split_special_tokens),
        clean_up_spaces=_cleans_up(loaded),
    )
    templates = _named_templates(home, loaded.chat_template)
    notes = _disagreement(home, config, start_ids)
    return Tokenizer(home, _plain_backend(backend, conventions), conventions, templates, loaded, notes)


def _load_with_transformers(home: Path, config: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Some files hold {"content": ...} without the mark by which transformers knows a token.
    options: dict[str, Any] = {}
    for name in SPECIAL_NAMES:
        text = _unmarked_token(config.get(name))
        if text is not None:
            options[name] = text
    named = "tokenizer_class" in config or (home / "config.json").is_file()
    if named and not config.get(MADE_BY_DTOOL):
        loader = AutoTokenizer
        # What else is installed must not choose the class, and with it the ids.
        options["mistral_format"] = False
    else:
        loader = PreTrainedTokenizerFast  # the class that takes tokenizer.json as it is
    try:
        with _without_byte_order_marks(home) as folder:
            loaded = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # whatever is wrong with the files, in the words of the loader
        if (home / TOKENIZER).is_file():
            _read_backend(home / TOKENIZER)
        raise _unreadable(home, error) from error
    if not loaded.is_fast:
        raise DtoolError(
            f"the tokenizer of {home} is written in Python",
            expected="one that the tokenizers package can run, as hosts do",
            found=type(loaded).__name__,
            fix=f"convert it to a {TOKENIZER}, or remove its files to work by token ids",
        )
    return loaded


@contextlib.contextmanager
def _without_byte_order_marks(home: Path) -> Iterator[Path]:
    """Yield the folder, or a copy where an editor began one of its files with a byte order mark."""
    files = [path for path in (home / "config.json", *tokenizer_files(home)) if path.is_file()]
    if not any(path.suffix == ".json" and _starts_with_mark(path) for path in files):
        yield home
        return
    with tempfile.TemporaryDirectory() as name:
        for path in files:
            copy = Path(name) / path.relative_to(home)
            copy.parent.mkdir(exist_ok=True)
            data = path.read_bytes()
            # In a template the mark is text: transformers lays it out.
            copy.write_bytes(data.removeprefix(codecs.BOM_UTF8) if path.suffix == ".json" else data)
        yield Path(name)


def _starts_with_mark(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def _unmarked_token(value: Any) -> str | None:
    """The text of a token that is written as an object without saying that it is a token."""
    if not isinstance(value, dict) or "__type" in value or not isinstance(value.get("content"), str):
        return None
    return value["content"]


def _unreadable(home: Path, error: Exception) -> DtoolError:
    return DtoolError(
        f"the tokenizer of {home} cannot be read",
        expected="files that transformers reads without code of the checkpoint",
        found=f"{type(error).__name__}: {_first_line(error)}",
        fix="copy the files again, all from one model, or remove them to work by token ids",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _plain_backend(backend: Any, conventions: Conventions) -> Any:
    """Set a backend as transformers does for every call: texts are neither cut nor filled up."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = conventions.split_special_tokens
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _damaged(f"{path} is not JSON", "{ ... }", _first_line(error)) from error
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


def _check_known(
    home: Path, name: str, text: str, token_id: int, config: Mapping[str, Any], added: Mapping[str, Any]
) -> None:
    """Refuse a start or end token that no file gives an id and for which the model has no row.

    transformers gives such a token the next free id. An end token there is never chosen.
    """
    listed = {str(token) for token in added}
    listed |= {str(token.get("content")) for token in _dicts(config.get("added_tokens_decoder"))}
    if (home / TOKENIZER).is_file():
        listed |= {str(token.get("content")) for token in _dicts(_read_json(home / TOKENIZER).get("added_tokens"))}
    rows = _read_json(home / "config.json").get("vocab_size")
    if text in listed or (isinstance(rows, int) and token_id < rows):
        return
    raise DtoolError(
        f"{home}: {name} {text!r} is not in the vocabulary",
        expected=f"a token of {TOKENIZER}",
        found=f"id {token_id} would be the next free one",
        fix="copy the tokenizer's files again, all from one model",
    )


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The objects in a JSON list, or among the values of a JSON object."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items or [] if isinstance(item, dict)]


def _start_ids(backend: Any) -> tuple[int, ...]:
    """The tokens that the post-processor puts in front of a text."""
    # A text that has ids, so that tokens in front of it can be told from tokens behind it.
    texts = ("a", *backend.get_vocab(with_added_tokens=True))
    text = next((text for text in texts if backend.encode(text, add_special_tokens=False).ids), None)
    if text is None:
        return ()
    encoded = backend.encode(text, add_special_tokens=True)
    return tuple(encoded.ids[: encoded.special_tokens_mask.index(0)])


def _cleans_up(loaded: Any) -> bool:
    """Whether transformers takes spaces out of decoded text: for BPE only where it is asked twice."""
    if not loaded.clean_up_tokenization_spaces:
        return False
    twice = loaded.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return bool(twice) or type(loaded.backend_tokenizer.model).__name__ != "BPE"


def _clean_up_spaces(text: str) -> str:
    """Take out the spaces that transformers takes out, in its order."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text


def _named_templates(home: Path, found: Any) -> dict[str, str]:
    """Chat templates by name, from the one text or the mapping that transformers keeps."""
    templates = found if isinstance(found, dict) else {"default": found}
    given = {str(name): template for name, template in templates.items() if template is not None}
    if odd := [name for name, template in given.items() if not isinstance(template, str)]:
        raise _damaged(f"{home}: a chat template is no text", "Jinja", f"{odd[0]}: {type(given[odd[0]]).__name__}")
    return given


def _disagreement(home: Path, config: Mapping[str, Any], start_ids: tuple[int, ...]) -> tuple[str, ...]:
    """A note where the config asks for another start than tokenizer.json gives."""
    asked = config.get("add_bos_token")
    if not isinstance(asked, bool) or asked == bool(start_ids) or not (home / TOKENIZER).is_file():
        return ()
    does = f"puts {len(start_ids)} in front of a text" if start_ids else "puts none in front of a text"
    said = f"{CONFIG} has add_bos_token={str(asked).lower()}"
    return (f"{said} and {TOKENIZER} {does}: read as transformers does, by {TOKENIZER}",)

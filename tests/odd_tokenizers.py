"""Tokenizers as checkpoints have them: every place for a token, every kind of decoder, files that disagree.

Each function of `CASES` writes the files of one tokenizer into a folder that has a config.json already.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

MARKS = ["<pad>", "<s>", "</s>"]
SPACE = "▁"
TOOL = "<|tool|>"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
ROWS = 400

Write = Callable[[Path], None]


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **({"special": True, "normalized": False} | flags))


def byte_level(vocabulary: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None) -> Tokenizer:
    """One token per byte, and three special ones."""
    numbered = {token: i for i, token in enumerate([*MARKS, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocabulary or numbered, merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([special(text) for text in MARKS])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """BPE over pieces with byte fallback, as converted from SentencePiece: words carry the space before them."""
    pieces = [SPACE, "th", "the", f"{SPACE}the", f"{SPACE}{SPACE}", "ca", "cat", f"{SPACE}cat", f"{SPACE}t"]
    merges = [("t", "h"), ("th", "e"), (SPACE, "the"), (SPACE, SPACE), ("c", "a"), ("ca", "t"), (SPACE, "cat")]
    letters = [*"abcdefghijklmnopqrstuvwxyz.,!?'<>|", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *pieces]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges.append((SPACE, "t"))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([special(text) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def starts(tokenizer: Tokenizer, *tokens: str) -> None:
    """Put tokens in front of every text."""
    known = [(token, tokenizer.token_to_id(token)) for token in tokens]
    front = " ".join(tokens)
    tokenizer.post_processor = processors.TemplateProcessing(f"{front} $A", f"{front} $A $B", known)


def write(folder: Path, tokenizer: Tokenizer | None = None, **config: Any) -> None:
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", names | {"chat_template": TEMPLATE} | config)


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), "utf-8")


def token_object(text: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": text} | plain | flags


def holes(folder: Path) -> None:
    """260 tokens, the largest id is 290."""
    vocabulary = {token: i for i, token in enumerate([*MARKS, *ALPHABET])} | {TOOL: 290}
    tokenizer = byte_level(vocabulary)
    tokenizer.add_special_tokens([special(TOOL)])
    write(folder, tokenizer, eos_token=TOOL)


def hole_that_an_added_token_fills(folder: Path) -> None:
    vocabulary = {token: i for i, token in enumerate([*MARKS, *ALPHABET])} | {"zz": 290}
    write(folder, byte_level(vocabulary), additional_special_tokens=[TOOL, "<|more|>"])


def added_tokens_file(folder: Path) -> None:
    write(folder)
    write_json(folder / "added_tokens.json", {TOOL: 259, "two words": 260})


def added_tokens_decoder(folder: Path) -> None:
    write(folder, added_tokens_decoder={"259": token_object(TOOL), "260": token_object("<n>", special=False)})


def added_tokens_decoder_with_another_id(folder: Path) -> None:
    write(folder, added_tokens_decoder={"300": token_object(TOOL)})


def additional_special_tokens(folder: Path) -> None:
    write(folder, additional_special_tokens=[TOOL])


def extra_special_tokens_by_name(folder: Path) -> None:
    template = TEMPLATE + "{{ tool_token }}"
    write(folder, extra_special_tokens={"tool_token": TOOL}, chat_template=template)


def extra_special_tokens_in_a_list(folder: Path) -> None:
    write(folder, extra_special_tokens=[TOOL, "<|more|>"])


def special_tokens_map(folder: Path) -> None:
    write(folder)
    document = {"eos_token": token_object(TOOL), "additional_special_tokens": ["<|more|>"], "bos_token": "<s>"}
    write_json(folder / "special_tokens_map.json", document)


def tokens_in_every_file_at_once(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|json|>", normalized=False)])
    write(folder, tokenizer, additional_special_tokens=["<|more|>"], pad_token="<pad>")
    write_json(folder / "added_tokens.json", {TOOL: 260})
    write_json(folder / "special_tokens_map.json", {"unk_token": "<|unknown|>"})


def tokens_that_take_spaces(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([special(TOOL, lstrip=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken("cat", single_word=True), AddedToken("the c", normalized=True)])
    write(folder, tokenizer)


def asks_for_a_start_that_no_processor_puts(folder: Path) -> None:
    write(folder, add_bos_token=True)


def refuses_the_start_that_a_processor_puts(folder: Path) -> None:
    tokenizer = byte_level()
    starts(tokenizer, "<s>")
    write(folder, tokenizer, add_bos_token=False)


def starts_with_two_tokens(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([special(TOOL)])
    starts(tokenizer, TOOL, "<s>")
    write(folder, tokenizer)


def starts_with_the_end_token(folder: Path) -> None:
    tokenizer = byte_level()
    starts(tokenizer, "</s>")
    write(folder, tokenizer)


def special_tokens_are_split(folder: Path) -> None:
    write(folder, split_special_tokens=True)


def cuts_and_fills_texts(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64, pad_id=0, pad_token="<pad>")
    write(folder, tokenizer, pad_token="<pad>")


def llama_class_over_metaspace(folder: Path) -> None:
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    starts(tokenizer, "<s>")
    write(folder, tokenizer, tokenizer_class="LlamaTokenizerFast", unk_token="<unk>", legacy=False)


def prepended_spaces(folder: Path) -> None:
    tokenizer = sentencepiece()
    spaces = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    starts(tokenizer, "<s>")
    write(folder, tokenizer, unk_token="<unk>", legacy=True)


def unigram_with_cleaned_spaces(folder: Path) -> None:
    words = [f"{SPACE}the", f"{SPACE}cat", f"{SPACE}n", "'t", SPACE, *"abcdefghijklmnopqrstuvwxyz.,!?'\n"]
    pieces = [(text, 0.0) for text in ("<unk>", "<s>", "</s>")] + [(word, -float(i)) for i, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    tokenizer.add_special_tokens([special(text) for text in ("<unk>", "<s>", "</s>")])
    write(folder, tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=True)


def bpe_that_asks_for_cleaned_spaces(folder: Path) -> None:
    write(folder, clean_up_tokenization_spaces=True)


def vocabulary_and_merges_alone(folder: Path) -> None:
    vocabulary = {token: i for i, token in enumerate([*MARKS, *ALPHABET, "th", "the", "Ġcat", "Ġc", "at"])}
    write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\na t\nĠ c\nĠc at\n", "utf-8")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "add_bos_token": True}
    write_json(folder / "tokenizer_config.json", names | {"tokenizer_class": "GPT2Tokenizer", "chat_template": "x"})


def templates_in_files(folder: Path) -> None:
    write(folder, chat_template="not this one")
    (folder / "chat_template.jinja").write_text("file: " + TEMPLATE + "\n", "utf-8")
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tool_use.jinja").write_text("with tools", "utf-8")


CASES: list[Write] = [
    holes,
    hole_that_an_added_token_fills,
    added_tokens_file,
    added_tokens_decoder,
    added_tokens_decoder_with_another_id,
    additional_special_tokens,
    extra_special_tokens_by_name,
    extra_special_tokens_in_a_list,
    special_tokens_map,
    tokens_in_every_file_at_once,
    tokens_that_take_spaces,
    asks_for_a_start_that_no_processor_puts,
    refuses_the_start_that_a_processor_puts,
    starts_with_two_tokens,
    starts_with_the_end_token,
    special_tokens_are_split,
    cuts_and_fills_texts,
    llama_class_over_metaspace,
    prepended_spaces,
    unigram_with_cleaned_spaces,
    bpe_that_asks_for_cleaned_spaces,
    vocabulary_and_merges_alone,
    templates_in_files,
]

"""tokenizer.json and tokenizer_config.json from a GGUF file's tokens, merges or scores, and token types.

Built with `tokenizers`, not by transformers' GGUF loader, which drops the Digits pre-tokenizer of
`smollm`: "2024" must be four tokens, as in training. Two kinds are known. `gpt2`: byte-level BPE whose
pre-tokenizer the file names. `llama`: SentencePiece BPE, where a piece's score says how early two
neighbours become it, so that every way to split a piece in two is a merge, best score first. Any
other is left out, not guessed: the checkpoint then works by token ids.

Source: llama.cpp src/llama-vocab.cpp (the patterns, which are those of the models' tokenizer.json);
SentencePiece src/bpe_model.cc (the order of merges).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolchain.artifact import dump_json
from toolchain.fetch.gguf_file import Gguf
from toolchain.tokenizer import MADE_BY_DTOOL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL_TOKEN, USER_TOKEN = 3, 4
"""GGUF token types (llama.h, llama_token_type)."""
SPACE = "▁"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST, "qwen2": _WORDS + r"\p{N}" + _REST}
"""Pre-tokenizers that split by a pattern of their own; those of GPT-2 use the pattern of ByteLevel."""


def write_tokenizer(gguf: Gguf, folder: Path, max_tokens: int) -> str:
    """Write the tokenizer's files. Why nothing is written, where the file's tokenizer is not known or broken."""
    try:
        tokenizer = tokenizer_from_gguf(gguf)
        if tokenizer is None:
            return f"model {gguf.get('tokenizer.ggml.model', None)} with {gguf.get('tokenizer.ggml.pre', 'default')}"
        document = dump_json(_tokenizer_config(gguf, max_tokens))
        _put_start_token(gguf, tokenizer)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception; weights are worth having alone
        return f"broken: {str(error).splitlines()[0]}"
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(document, "utf-8")
    return ""


def tokenizer_from_gguf(gguf: Gguf) -> "Tokenizer | None":
    """A tokenizer that adds no tokens of its own to a text; None for a kind that is not known here."""
    from tokenizers import AddedToken

    kind, pre = gguf.get("tokenizer.ggml.model", None), gguf.get("tokenizer.ggml.pre", "default")
    if kind == "llama":
        tokenizer = _sentencepiece(gguf)
    elif kind == "gpt2" and (pre in {"smollm", "gpt-2"} or pre in PATTERNS):
        tokenizer = _byte_level(gguf, pre)
    else:
        return None
    types = gguf.get("tokenizer.ggml.token_type")
    for text, token_type in zip(gguf.get("tokenizer.ggml.tokens"), types, strict=True):  # in order: each keeps its id
        if token_type in {CONTROL_TOKEN, USER_TOKEN}:
            special = token_type == CONTROL_TOKEN
            token = AddedToken(text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


def _byte_level(gguf: Gguf, pre: str) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(gguf.get("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.get("tokenizer.ggml.merges")]
    own = {"ignore_merges": True} if pre == "llama-bpe" else {}  # a word that is a token is that token
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, **own))
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pre in PATTERNS:
        first = [pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated", invert=False)]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=pre not in PATTERNS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: Gguf) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = gguf.get("tokenizer.ggml.tokens"), gguf.get("tokenizer.ggml.scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    best_first = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = [pair for i in best_first for pair in _splits(tokens[i], vocabulary)]
    unknown = tokens[gguf.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(gguf.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _splits(piece: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The ways to make a piece of two others."""
    pairs = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
    return [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]


def special_tokens_from_gguf(gguf: Gguf) -> dict[str, str]:
    """The texts of bos_token, eos_token, pad_token and unk_token, those the file names."""
    tokens = gguf.get("tokenizer.ggml.tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id", None) for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def _put_start_token(gguf: Gguf, tokenizer: "Tokenizer") -> None:
    """Have the tokenizer put its start token in front of texts, where the file asks for it."""
    from tokenizers import processors

    start = special_tokens_from_gguf(gguf).get("bos_token")
    # llama.cpp puts a start token before SentencePiece text unless the file says no, and the other way round
    asked = gguf.get("tokenizer.ggml.add_bos_token", gguf.get("tokenizer.ggml.model") == "llama")
    if start is None or not asked:
        return
    known = [(start, tokenizer.token_to_id(start))]
    tokenizer.post_processor = processors.TemplateProcessing([start, "$A"], [start, "$A", "$B"], known)


def _tokenizer_config(gguf: Gguf, max_tokens: int) -> dict[str, Any]:
    config = {
        # The class that loads tokenizer.json as it is; a model's own class would rebuild its parts. transformers
        # takes Qwen2's own all the same, which is right where the file has Qwen2's pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        MADE_BY_DTOOL: True,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **special_tokens_from_gguf(gguf),
    }
    template = gguf.get("tokenizer.chat_template", None)
    return config | ({"chat_template": template} if template else {})

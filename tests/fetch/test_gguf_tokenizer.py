"""Tokenizers from GGUF metadata: the ids of the tokenizers they were made from."""

import itertools
import json

import pytest
from tiny_gguf import KEYS, SPECIAL, byte_tokenizer, byte_vocabulary, tiny_tensors, write_gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2TokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from toolchain.fetch.gguf_file import open_gguf
from toolchain.fetch.gguf_tokenizer import SPACE, tokenizer_from_gguf, write_tokenizer
from toolchain.text import load_tokenizer

TEXTS = [
    "The 12 cats, the dog: 2024 things don't WON'T.",
    "你好，世界！ 模型 123456",  # noqa: RUF001
    "def f(x):\n\treturn x ** 2\n\n\n   # ok  ",
    "naïve 🙂🎉 e\u0301 ﬁ Å",
    " leading and trailing \r\n",
]


def gguf_with(path, tokenizer, **changes):
    return open_gguf(write_gguf(path, "llama", KEYS, tiny_tensors(8, tied=True), tokenizer=tokenizer | changes))


def trained(pre_tokenizer):
    """A byte-level BPE of a few hundred merges: its vocabulary and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


def as_gguf(vocabulary, merges, pre):
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": tokens, "ggml.token_type": [1] * len(tokens),
        "ggml.merges": [" ".join(pair) for pair in merges], "ggml.eos_token_id": 0,
    }  # fmt: skip


def test_qwen2_text_has_the_ids_of_transformers_tokenizer(tmp_path):
    vocabulary, merges = trained(ByteLevel(add_prefix_space=False))
    theirs = Qwen2TokenizerFast(vocab=vocabulary, merges=merges)
    ours = tokenizer_from_gguf(gguf_with(tmp_path / "m.gguf", as_gguf(vocabulary, merges, "qwen2")))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs(text)["input_ids"])


def test_llama_3_words_split_as_in_transformers_converter(tmp_path):
    vocabulary, merges = trained(ByteLevel(add_prefix_space=False))
    ours = tokenizer_from_gguf(gguf_with(tmp_path / "m.gguf", as_gguf(vocabulary, merges, "llama-bpe")))
    theirs = TikTokenConverter(vocab_file=None).pattern
    split = pre_tokenizers.Split(Regex(theirs), behavior="isolated", invert=False)
    reference = pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in TEXTS:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == reference.pre_tokenize_str(text)
        assert ours.decode(ours.encode(text).ids) == text


def test_a_llama_3_word_that_is_a_token_is_that_token(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "abc", "12"])}  # no merges lead to it
    plain = tokenizer_from_gguf(gguf_with(tmp_path / "q.gguf", as_gguf(vocabulary, [("1", "2")], "qwen2")))
    ours = tokenizer_from_gguf(gguf_with(tmp_path / "l.gguf", as_gguf(vocabulary, [("1", "2")], "llama-bpe")))
    assert ours.encode("abc").tokens == ["abc"]
    assert plain.encode("abc").tokens == ["a", "b", "c"]


PIECES = [
    "<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "th", "the", f"{SPACE}the", f"{SPACE}t", "in",
    "ing", "er", f"{SPACE}{SPACE}", "cat", "at", "he", f"{SPACE}a", "20", "24", f"{SPACE}2", "\n\n", SPACE,
    *"abcdefghijklmnopqrstuvwxyzTWO,.:'#*()x=", *"0123456789",
]  # fmt: skip
LETTERS_FROM = PIECES.index(SPACE)


def sentencepiece(**changes):
    """A vocabulary as llama.cpp's converter writes it: the earlier a piece was merged, the higher its score."""
    merged = {piece: -float(i) for i, piece in enumerate(PIECES[259:LETTERS_FROM])}
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": PIECES,
        "ggml.scores": [merged.get(piece, -1000.0 - i) for i, piece in enumerate(PIECES)],
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [4 if "\n" in piece else 1 for piece in PIECES[259:]],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    } | changes


def merge_greedily(text, scores):
    """SentencePiece's BPE: always the neighbours whose joined piece scores best, the leftmost of equals."""
    pieces = list(text)
    while True:
        joined = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        best = max(((s, i) for s, i in joined if s is not None), default=None)
        if best is None:
            break
        i = -best[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    ids = []
    for piece in pieces:
        ids += [PIECES.index(piece)] if piece in scores else [3 + byte for byte in piece.encode()]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_text_has_the_ids_of_greedy_merging(tmp_path, prefix):
    metadata = sentencepiece() | ({} if prefix else {"ggml.add_space_prefix": False})
    ours = tokenizer_from_gguf(gguf_with(tmp_path / "m.gguf", metadata))
    scores = dict(zip(PIECES[259:], metadata["ggml.scores"][259:], strict=True))
    for text in [*TEXTS, "the thing there  the   cat 2024", "thinginger aat"]:
        expected = merge_greedily((SPACE if prefix else "") + text.replace(" ", SPACE), scores)
        if "\n\n" in text:  # a user-defined token is cut out of the text first
            continue
        assert ours.encode(text).ids == expected, text
        assert ours.decode(expected) == text, text


def test_user_defined_and_control_tokens_are_one_id_wherever_they_stand(tmp_path):
    ours = tokenizer_from_gguf(gguf_with(tmp_path / "m.gguf", sentencepiece(**{"ggml.add_space_prefix": False})))
    assert ours.encode("the\n\ncat</s>").tokens == ["the", "\n\n", "cat", "</s>"]
    assert ours.decode(ours.encode("the\n\ncat</s>").ids) == "the\n\ncat"


@pytest.mark.parametrize(
    ("tokenizer", "starts"),
    [
        (sentencepiece(), True),
        (sentencepiece(**{"ggml.add_bos_token": False}), False),
        (byte_tokenizer(), False),
        (byte_tokenizer() | {"ggml.add_bos_token": True}, True),
    ],
)
def test_a_start_token_is_added_where_the_file_or_llama_cpp_says_so(tmp_path, tokenizer, starts):
    folder = tmp_path / "m"
    folder.mkdir()
    assert not write_tokenizer(gguf_with(tmp_path / "m.gguf", tokenizer), folder, 128)
    ours = load_tokenizer(folder)
    assert (ours.encode("the")[0] == 1) is starts
    assert ours.eos_ids == (2,)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "sentencepiece"])
def test_a_tokenizer_is_read_as_it_was_made_whatever_the_model(tmp_path, model_type, pre):
    metadata = sentencepiece() if pre == "sentencepiece" else byte_tokenizer() | {"ggml.pre": pre}
    assert not write_tokenizer(gguf_with(tmp_path / "m.gguf", metadata), tmp_path, 128)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 400}))
    ours, made = load_tokenizer(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text) == made.encode(text).ids, text


def test_a_file_without_a_known_tokenizer_gives_none_and_says_which(tmp_path):
    for changes, said in (({"ggml.pre": "viking"}, "gpt2 with viking"), ({"ggml.model": "t5"}, "t5 with smollm")):
        gguf = gguf_with(tmp_path / "m.gguf", byte_tokenizer() | changes)
        assert said in write_tokenizer(gguf, tmp_path, 128)
        assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "changes",
    [{"ggml.merges": ["zz qq"]}, {"ggml.merges": ["single"]}, {"ggml.token_type": [1, 1]}, {"ggml.bos_token_id": 9999}],
)
def test_a_broken_tokenizer_is_left_out_with_the_reason(tmp_path, changes):
    said = write_tokenizer(gguf_with(tmp_path / "m.gguf", byte_tokenizer() | changes), tmp_path, 128)
    assert said.startswith("broken: ")
    assert not list(tmp_path.glob("tokenizer*"))


def test_special_tokens_keep_their_ids(tmp_path):
    ours = tokenizer_from_gguf(gguf_with(tmp_path / "m.gguf", byte_tokenizer()))
    assert [ours.token_to_id(text) for text in SPECIAL] == [0, 1, 2]
    assert ours.get_vocab_size() == len(byte_vocabulary())

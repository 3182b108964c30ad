"""What the parity tests share besides fixtures: a recipe, a character tokenizer, names."""

import json
from pathlib import Path

from toolchain.recipe import Recipe, parse_recipe

VOCAB = 97
LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


def make_recipe(**sections) -> Recipe:
    parity = {"blocks": 4, "seq_len": 30, "batch": 3, "decode_steps": 5} | sections.pop("parity", {})
    return parse_recipe({"schema_version": 1, "about": "a test", "parity": parity} | sections, "test")


def write_tokenizer(folder: Path) -> None:
    """One token per character; <s> in front of every sequence."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i for i, c in enumerate(LETTERS, 3)}
    vocab |= {f"<x{i}>": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

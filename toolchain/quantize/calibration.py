"""The calibration text of a recipe as token ids, checked before any weights are read."""

from pathlib import Path
from typing import Any

from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig
from toolchain.recipe import Recipe, find_data
from toolchain.text import check_ids, load_tokenizer, read_texts, token_blocks


def calibration_blocks(folder: Path, recipe: Recipe, config: DecoderConfig) -> Any:
    """Ids int64 [samples, seq_len] by the tokenizer of a checkpoint or an artifact.

    Raises DtoolError for text that is missing, empty, too short or no JSON lines, for a chat template that is not
    there, for blocks longer than the model's positions, and for ids it does not have.
    """
    c = recipe.calibration
    if c.seq_len > config.context_len:
        raise DtoolError(
            "calibration blocks are longer than the model's positions",
            expected=f"calibration.seq_len of at most {config.context_len} (context_len)",
            found=str(c.seq_len),
            fix=f"--set calibration.seq_len={config.context_len}",
        )
    data, tokenizer = find_data(c.data), load_tokenizer(folder)
    texts = read_texts(data, tokenizer if c.chat else None)
    blocks = token_blocks(texts, tokenizer, blocks=c.samples, seq_len=c.seq_len, seed=c.seed)
    check_ids(blocks, config.vocab_size, folder, c.data)
    return blocks

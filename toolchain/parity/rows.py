"""Which rows of text a proof runs over: what an engine cannot take of them is refused before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolchain.errors import DtoolError, name_list
from toolchain.model.config import DecoderConfig
from toolchain.parity.compare import SHORTEST, decode_steps, row_lengths
from toolchain.parity.kv_contract import CAPACITY
from toolchain.recipe import find_data
from toolchain.recipe_sections import Parity
from toolchain.runners.runner import Limits
from toolchain.text import check_ids, has_tokenizer, load_tokenizer, read_texts, token_blocks

Array = np.ndarray[Any, Any]
TEXT_SEED = 0
FIRST_IDS = 8
RANDOM = f"random ids, seed {TEXT_SEED}"
NO_TOKENIZER = "the candidate has no tokenizer: random ids stand in for text, perplexity means nothing"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of `seq_len` tokens, `batch` at once, and what to say where the recipe asks for more."""

    seq_len: int
    batch: int
    notes: tuple[str, ...]


def fit_rows(name: str, parity: Parity, limits: Limits, context_len: int) -> Sizes:
    """The sizes of the recipe, cut to what `name` takes. Raises DtoolError where that leaves nothing to prove."""
    capacity = min(limits.capacity or context_len, context_len)
    if capacity < CAPACITY:
        raise DtoolError(
            f"the cache of {name} is too short to prove",
            expected=f"at least {CAPACITY} slots: the cache contract is checked over so many",
            found=f"engine.kv_capacity {limits.capacity}, context_len {context_len}",
            fix=f"build with engine.kv_capacity and context_len of at least {CAPACITY}",
        )
    seq_len = min(parity.seq_len, limits.max_prompt or capacity, capacity)
    if seq_len < SHORTEST:
        raise DtoolError(
            f"{name} takes too short prompts to prove",
            expected=f"at least {SHORTEST} tokens",
            found=f"engine.prompt_len.max {limits.max_prompt}",
            fix=f"build it with engine.prompt_len.max of at least {SHORTEST}",
        )
    batch = min(parity.batch, limits.max_batch or parity.batch)
    counts = sorted({min(batch, parity.blocks), parity.blocks % batch or batch})
    _check_batches(name, parity, counts[0], limits.min_batch)
    lengths = [row_lengths(count, seq_len) for count in counts]
    steps = [decode_steps(rows, parity.decode_steps) for rows in lengths]
    _check_prompts(name, seq_len, max(steps), limits.min_prompt)
    notes = []
    if seq_len < parity.seq_len:
        notes.append(f"rows are {seq_len} tokens, not {parity.seq_len}: the candidate takes no more")
    if batch < parity.batch:
        notes.append(f"rows at once are {batch}, not {parity.batch}: the candidate takes no more")
    if min(steps) < parity.decode_steps:
        shortest = min(int(rows.min()) for rows in lengths)
        notes.append(
            f"decode steps are {min(steps)}, not {parity.decode_steps}: the shortest row has {shortest} tokens"
        )
    return Sizes(seq_len, batch, tuple(notes))


def _check_batches(name: str, parity: Parity, smallest: int, least: int) -> None:
    if smallest < least:
        raise DtoolError(
            f"{name} takes larger batches than the proof has",
            expected=f"at least {least} rows in every batch (engine.batch.min)",
            found=f"{smallest} in the smallest: parity.blocks {parity.blocks}, parity.batch {parity.batch}",
            fix=f"--set parity.batch={least} --set parity.blocks={least * -(-parity.blocks // least)}",
        )


def _check_prompts(name: str, seq_len: int, steps: int, least: int) -> None:
    """The prefill graph sees the rows without the tokens that decode takes."""
    if seq_len - steps < least:
        raise DtoolError(
            f"{name} takes longer prompts than the proof has",
            expected=f"at least {least} tokens (engine.prompt_len.min)",
            found=f"{seq_len - steps}: rows of {seq_len}, of which {steps} are decoded one by one",
            fix="raise parity.seq_len, or lower parity.decode_steps or engine.prompt_len.min",
        )


def held_out_ids(folder: Path, parity: Parity, seq_len: int, config: DecoderConfig) -> tuple[Array, str]:
    """Ids [rows, seq_len] by the tokenizer of a checkpoint or an artifact, and what text they are of.

    As many rows as the proof may take: `max_blocks`, or what the text has, at least `blocks`. Random ones without a
    tokenizer. Raises DtoolError for text that is missing, too short or no JSON lines, and for ids that the model
    does not have.
    """
    most = parity.blocks * 2 ** (parity.looks - 1)
    if not has_tokenizer(folder):
        return np.random.default_rng(TEXT_SEED).integers(0, config.vocab_size, (most, seq_len), np.int64), RANDOM
    tokenizer, texts = load_tokenizer(folder), read_texts(find_data(parity.data))
    blocks = token_blocks(texts, tokenizer, blocks=most, least=parity.blocks, seq_len=seq_len, seed=TEXT_SEED)
    check_ids(blocks, config.vocab_size, folder, parity.data)
    return blocks, f"{parity.data}: {name_list(sorted({t.kind for t in texts}))}"


def text_facts(blocks: Array, what: str, looks: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """The lines of a report about its text; `looks` are the numbers of rows that a gate may be decided on."""
    more = f", up to {looks[-1]} while a gate is undecided" if len(looks) > 1 else ""
    size = f"{looks[0]} rows of up to {blocks.shape[1]} tokens{more}"
    return ("text", what), ("size", size), ("first ids", " ".join(map(str, blocks[0, :FIRST_IDS])))

"""Tiny checkpoints taken apart: what the tests of reading change in them, and what a reader makes of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import random_ids
from toolchain.errors import DtoolError
from toolchain.model.checkpoint import open_checkpoint
from toolchain.model.load import load_decoder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
IDS = torch.from_numpy(random_ids(0, 2, 9))


def logits(folder):
    decoder = load_decoder(folder)
    caches = decoder.new_caches(IDS.shape[0], IDS.shape[1])
    with torch.inference_mode():
        return decoder(IDS, torch.zeros(IDS.shape[0], dtype=torch.int64), caches)


def edit_config(folder, **changes):
    path = folder / "config.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def edit_tensors(folder, change):
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE)


def take_tensors(folder):
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    return tensors


def write_shards(folder, save=save_file, index=INDEX, ending="safetensors"):
    """The single file as two shards, the second oddly named; what the second one holds."""
    tensors = take_tensors(folder)
    names = sorted(tensors)
    parts = {f"model-00001-of-00002.{ending}": names[:9], f"extra_part.{ending}": names[9:]}
    for file, members in parts.items():
        save({n: tensors[n] for n in members}, folder / file)
    write_index(folder, {n: file for file, members in parts.items() for n in members}, index)
    return names[9:]


def write_index(folder, weight_map, index=INDEX):
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder):
    with pytest.raises(DtoolError) as failure:
        open_checkpoint(folder)
    return str(failure.value)


def notes(folder):
    return " | ".join(open_checkpoint(folder).notes)

"""A tiny Llama with sharp weights, its tokenizer and its export; and ways to spoil an export."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_parity import LETTERS, VOCAB, make_recipe, write_tokenizer

from tests.conftest import save_tiny, seal
from toolchain.export.stage import export_checkpoint
from toolchain.model.load import load_decoder
from toolchain.runners.eager import EagerRunner
from toolchain.tensor_file import read_header, read_tensor, tensor_bytes


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny products gain nothing from threads, and a busy machine makes them wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    save_tiny(folder, vocab_size=VOCAB)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held_out.jsonl"
    letters = np.random.default_rng(1).choice(list(LETTERS), (8, 60))
    texts = enumerate("".join(row) for row in letters)
    lines = [{"text": text, "kind": ("prose", "code")[i % 2], "source": "test"} for i, text in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def exported(checkpoint, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "fp32"
    export_checkpoint(checkpoint, make_recipe(), out, report=lambda _: None)
    return out


@pytest.fixture(scope="session")
def half(checkpoint, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "fp16"
    export_checkpoint(checkpoint, make_recipe(compute_dtype="float16"), out, report=lambda _: None)
    return out


@pytest.fixture(scope="session")
def eager(checkpoint) -> EagerRunner:
    return EagerRunner(load_decoder(checkpoint))


@pytest.fixture
def spoil(exported, tmp_path):
    """spoil(name, change): a copy of the export with one tensor of its weights (or tables) changed."""

    def make(name: str, change, file: str = "weights.safetensors") -> Path:
        folder = tmp_path / "spoilt"
        shutil.copytree(exported, folder)
        entry = read_header(folder / file)[name]
        with (folder / file).open("r+b") as stream:
            stream.seek(entry.offset)
            stream.write(tensor_bytes(change(read_tensor(entry)).float()))
        return seal(folder)

    return make

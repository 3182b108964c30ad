"""Tiny models with weights large enough to show faults: std 0.3, norms in [0.5, 1.5], random biases."""

import functools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from typing import Any

import numpy as np
import pytest

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session", autouse=True)
def traced_once() -> None:
    """Trace a model once a process: two seconds, many tests export the same, and graphs are copies of a trace."""
    from toolchain.export import onnx_export

    onnx_export.trace_decoder = functools.cache(onnx_export.trace_decoder)


def save_tiny(folder: Path, **changes: Any) -> Any:
    """Save a tiny random Llama to `folder` and return the transformers model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(BASE | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder and transformers model of the base tiny checkpoint."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return folder, save_tiny(folder)


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """As `tiny`, with the head tied to the embedding and a group size other than the KV head count."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    changes = {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 96, "vocab_size": 512}
    return folder, save_tiny(folder, **changes)


def make_recipe(**sections: Any) -> Any:
    """A recipe for tests: small engine, given sections on top."""
    from toolchain.recipe import parse_recipe

    engine = {"backend": "onnxruntime", "kv_capacity": 64, "prompt_len": {"min": 1, "opt": 8, "max": 64}}
    document = {"schema_version": 1, "about": "test", "engine": engine} | sections
    return parse_recipe(document, "test recipe")


@pytest.fixture(scope="session")
def exported(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float32 export of `tiny`."""
    from toolchain.export.stage import export_checkpoint

    out = tmp_path_factory.mktemp("export") / "artifact"
    export_checkpoint(tiny[0], make_recipe(), out, report=lambda _: None)
    return out


@pytest.fixture(scope="session")
def exported_tied(tiny_tied: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float32 export of `tiny_tied`."""
    from toolchain.export.stage import export_checkpoint

    out = tmp_path_factory.mktemp("export") / "artifact"
    export_checkpoint(tiny_tied[0], make_recipe(), out, report=lambda _: None)
    return out


def random_ids(seed: int, *shape: int, vocab: int = 97) -> np.ndarray:
    """int64 token ids."""
    return np.random.default_rng(seed).integers(0, vocab, shape)


TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}<|start|>"


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied checkpoint with a byte-level tokenizer of 258 ids over 320 rows."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("text") / "model"
    save_tiny(folder, vocab_size=320, tie_word_embeddings=True, bos_token_id=256, eos_token_id=257)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="session")
def text_export(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float32 export of the checkpoint with a tokenizer."""
    from toolchain.export.stage import export_checkpoint

    out = tmp_path_factory.mktemp("text") / "export"
    export_checkpoint(tiny_text, make_recipe(), out, report=lambda _: None)
    return out


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration and evaluation text of two kinds, made of seeded words."""
    import json

    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(5)
    paths = {}
    for split in ("calibration", "evaluation"):
        lines = []
        for kind in ("prose", "code"):
            words = ["".join(chr(97 + c) for c in random.integers(0, 26, 5)) for _ in range(400)]
            lines.append(json.dumps({"text": " ".join(words), "kind": kind, "source": "random"}))
        paths[split] = folder / f"{split}.jsonl"
        paths[split].write_text("\n".join(lines) + "\n")
    return paths


INTEGER_FORMATS: dict[str, Any] = {
    "weight_only": {"weights": {"format": "int8"}},
    "with_head": {"weights": {"format": "int8", "skip": []}},
    "per_token": {"weights": {"format": "int8", "skip": []}, "activations": {"format": "int8", "skip": []}},
    "float_head_input": {"weights": {"format": "int8", "skip": []}, "activations": {"format": "int8"}},
    "static": {"weights": {"format": "int8", "skip": []}, "activations": {"format": "int8", "granularity": "tensor"}},
    "cache": {"kv_cache": {"format": "int8"}},
    "all": {
        "weights": {"format": "int8", "skip": []},
        "activations": {"format": "int8", "skip": []},
        "kv_cache": {"format": "int8"},
    },
}


OTHER_FORMATS: dict[str, Any] = {
    "fp8_weight_only": {"weights": {"format": "fp8_e4m3", "skip": []}},
    "fp8_per_tensor": {"weights": {"format": "fp8_e4m3", "granularity": "tensor"}},
    "fp8_static": {
        "weights": {"format": "fp8_e4m3"},
        "activations": {"format": "fp8_e4m3", "granularity": "tensor"},
        "kv_cache": {"format": "fp8_e4m3"},
    },
    "fp8_per_token": {"weights": {"format": "fp8_e4m3"}, "activations": {"format": "fp8_e4m3"}},
    "fp8_cache": {"kv_cache": {"format": "fp8_e4m3"}},
    "int4": {"weights": {"format": "int4", "skip": []}},
    "int4_awq_gptq": {
        "weights": {"format": "int4", "algorithm": "gptq", "clip": "search"},
        "smoothing": {"algorithm": "awq"},
    },
    "int8_smooth_gptq": {
        "weights": {"format": "int8", "algorithm": "gptq", "clip": "search", "skip": []},
        "activations": {"format": "int8"},
        "smoothing": {"algorithm": "smoothquant"},
        "kv_cache": {"format": "int8"},
    },
    "int4_small_groups": {"weights": {"format": "int4", "group_size": 32}, "kv_cache": {"format": "int8"}},
}


@pytest.fixture
def random_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate on random ids: the tiny checkpoints have no tokenizer."""

    def blocks(artifact: Any, _: Any) -> np.ndarray:
        return random_ids(11, 4, 48, vocab=artifact.json("decoder.json")["vocab_size"])

    monkeypatch.setattr("toolchain.quantize.stage._calibration_blocks", blocks)
    monkeypatch.setattr("toolchain.quantize.stage._lineage", lambda exported, _: {"source": exported.identity})


def seal(folder: Path) -> Path:
    """List an altered artifact's files anew, so that its fault is a fault of the model, not of the files."""
    import json

    from toolchain.artifact import hash_file

    document = json.loads((folder / "manifest.json").read_text())
    files = {name: folder / name for name in document["files"] if (folder / name).is_file()}
    document["files"] = {
        name: {"bytes": path.stat().st_size, "sha256": hash_file(path)} for name, path in files.items()
    }
    (folder / "manifest.json").write_text(json.dumps(document))
    return folder

"""Recipes over seeded words, and the exports that are searched beside the float32 one."""

import json
import shutil

import pytest

from tests.conftest import make_recipe

TRT = {
    "backend": "tensorrt-rtx",
    "targets": ["sm89"],
    "kv_capacity": 64,
    "prompt_len": {"min": 1, "opt": 8, "max": 64},
}
COSTLY = {"layer": 1, "head": 1}
"""The KV head of `outlier_export` that loses most."""


@pytest.fixture
def base(texts):
    """base(**sections): a recipe whose calibration text is the seeded words."""

    def make(**sections):
        calibration = {"data": str(texts["calibration"]), "samples": 4, "seq_len": 48}
        return make_recipe(calibration=calibration, **({"weights": {"format": "int8", "skip": []}} | sections))

    return make


@pytest.fixture
def half(base):
    """half(**sections): the same for TensorRT-RTX, in float16."""

    def make(**sections):
        return base(**({"compute_dtype": "float16", "engine": TRT} | sections))

    return make


def export_to(folder, model, **sections):
    from toolchain.export.stage import export_checkpoint

    export_checkpoint(model, make_recipe(**sections), folder, report=lambda _: None)
    return folder


@pytest.fixture(scope="session")
def half_export(tiny_text, tmp_path_factory):
    """The float16 export of the checkpoint with a tokenizer."""
    return export_to(tmp_path_factory.mktemp("half") / "export", tiny_text, compute_dtype="float16")


@pytest.fixture(scope="session")
def outlier_export(tiny_text, tmp_path_factory):
    """The same function, but one channel of the values of one KV head is 200 times as large, its readers as small.

    One scale for that head leaves nothing of its other channels.
    """
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("outlier")
    shutil.copytree(tiny_text, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    dim, groups = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    path = folder / "model" / "model.safetensors"
    tensors, attention = load_file(path), f"model.layers.{COSTLY['layer']}.self_attn"
    tensors[f"{attention}.v_proj.weight"][COSTLY["head"] * dim] *= 200
    for query in range(COSTLY["head"] * groups, (COSTLY["head"] + 1) * groups):
        tensors[f"{attention}.o_proj.weight"][:, query * dim] /= 200
    save_file(tensors, path, metadata={"format": "pt"})
    return export_to(folder / "export", folder / "model")

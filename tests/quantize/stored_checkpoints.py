"""Recipes and tensors of quantized checkpoints, for the tests of their way through export and quantize."""

import torch

from tests.conftest import make_recipe
from toolchain.tensor_file import read_header, read_tensor

PARTS = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
SKIP = ["lm_head", "model.embed_tokens"]


def quiet(_):
    pass


def stored(fmt="int4", dtype="float32", **sections):
    weights = {"format": fmt, "algorithm": "stored", "skip": SKIP} | ({"group_size": 32} if fmt == "int4" else {})
    return make_recipe(compute_dtype=dtype, **({"weights": weights} | sections))


def tensors_of(artifact, file="weights.safetensors"):
    return {name: read_tensor(entry) for name, entry in read_header(artifact.path / file).items()}


def rows_of(module, matrices):
    """What was written for one of our modules, its parts one below the other: codes and scales."""
    layer, _, _ = module.partition(".self_attn" if ".self_attn" in module else ".mlp")
    path = module.removeprefix(f"{layer}.")
    names = PARTS.get(path, (path.split(".")[1],))
    parts = [matrices[f"{layer}.{path.split('.')[0]}.{name}"] for name in names]
    return torch.cat([p.signed() for p in parts]), torch.cat([p.scale.float() for p in parts])

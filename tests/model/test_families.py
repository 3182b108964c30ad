"""Every family and variant against Hugging Face eager: logits, parameters, frequencies, norms, and keys."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from tests.conftest import random_ids
from tests.model.families import CONTEXT_LEN, VARIANTS, save_variant
from tests.rounding import rounding_tolerance
from toolchain.model.checkpoint import open_checkpoint
from toolchain.model.decoder import Norm
from toolchain.model.hf import FAMILIES
from toolchain.model.load import empty_decoder, fill_parameters, load_decoder
from toolchain.model.parameters import parameter_shapes
from toolchain.model.positions import inverse_frequencies

TOKENS, STEPS = 100, 8
IDS = torch.from_numpy(random_ids(1, 2, TOKENS))
each_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A function from a variant's name to its folder and transformers model, each made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("variants") / name
            made[name] = (folder, save_variant(folder, name))
        return made[name]

    return get


def run(decoder, ids, past, caches):
    with torch.inference_mode():
        return decoder(ids, torch.full((len(ids),), past), caches)


def open_variant(folder, name):
    return open_checkpoint(folder, CONTEXT_LEN.get(name))


def test_every_family_has_a_variant():
    assert {family for family, _ in VARIANTS.values()} == set(FAMILIES)


def test_the_worked_example_of_contributing_is_what_stands_in_the_repository():
    root = Path(__file__).parents[2]
    (diff,) = re.findall(r"```diff\n(.*?)```", (root / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    files = re.findall(r"--- (\S+)\n((?:\+.*\n)+)", diff)
    assert len(files) == 4
    for path, lines in files:
        assert re.sub(r"^\+", "", lines, flags=re.MULTILINE) in (root / path).read_text("utf-8"), path


# B-01, B-03, B-04, B-06, B-08, B-10, C-03, C-05, C-07, C-08, D-04: each has its variant here
@each_variant
def test_logits_equal_hugging_face_whole_in_chunks_and_by_steps(saved, name):
    folder, model = saved(name)
    with torch.inference_mode():
        theirs = model(IDS).logits
    decoder = load_decoder(folder, context_len=CONTEXT_LEN.get(name))
    allowed = rounding_tolerance(model, IDS)
    whole = run(decoder, IDS, 0, decoder.new_caches(2, TOKENS))
    assert float((whole - theirs).abs().max()) <= allowed
    caches, ends = decoder.new_caches(2, TOKENS + 3), [33, *range(TOKENS - STEPS, TOKENS + 1)]
    parts = [run(decoder, IDS[:, a:b], a, caches) for a, b in zip([0, *ends], ends, strict=False)]
    assert float((torch.cat(parts, 1) - theirs).abs().max()) <= allowed


@each_variant
def test_parameter_shapes_are_the_decoders_in_its_order(saved, name):
    config = open_variant(saved(name)[0], name).config
    ours = {name: tuple(p.shape) for name, p in empty_decoder(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(ours.items())


@each_variant
def test_every_parameter_of_hugging_face_is_consumed(saved, name):
    folder, model = saved(name)
    checkpoint = open_variant(folder, name)
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert sum(math.prod(p.shape) for p in checkpoint.parameters.values()) == theirs


@each_variant
def test_a_config_as_transformers_saves_it_has_no_unknown_keys(saved, name):
    assert not [note for note in open_variant(saved(name)[0], name).notes if "keys" in note]


@each_variant
def test_rotary_frequencies_are_those_of_hugging_face_bit_for_bit(saved, name):
    folder, model = saved(name)
    with torch.inference_mode():
        model(IDS)  # frequencies that depend on the length are set by a call
    config = open_variant(folder, name).config
    buffers = {n.rsplit(".", 1)[-1]: b for n, b in model.named_buffers() if "original" not in n}
    ropes = {"inv_freq": config.rope, "full_attention_inv_freq": config.rope, "sliding_attention_inv_freq": "local"}
    for buffer in buffers.keys() & ropes.keys():
        rope = config.local_rope if ropes[buffer] == "local" else ropes[buffer]
        ours = inverse_frequencies(config, rope)
        exact = rope.rope_type != "dynamic"  # whose base transformers forms in float32
        torch.testing.assert_close(ours, buffers[buffer], rtol=0 if exact else 1e-6, atol=0)


@each_variant
def test_norms_agree_where_epsilon_matters(saved, name):
    folder, model = saved(name)
    config = open_variant(folder, name).config
    theirs = [module for module in model.modules() if "Norm" in type(module).__name__][-1]
    ours = Norm(config)
    with torch.no_grad():
        for kind, parameter in ours.named_parameters():
            parameter.copy_(getattr(theirs, kind))
        x = torch.randn(3, 5, config.hidden_size, generator=torch.Generator().manual_seed(0)) * 1e-3
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours(x * 1e4), theirs(x * 1e4), rtol=1e-5, atol=1e-6)


NEUTRAL = {
    "attention_scale": 0.0,
    "attention_softcap": 0.0,
    "final_logit_softcap": 0.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logit_multiplier": 1.0,
    "qkv_clip": 0.0,
    "norm_unit_offset": False,
    "norm": "rms",
    "rope_interleaved": False,
    "norm_topk_prob": False,
}
NEAR = {"silu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "gelu", "relu": "gelu", "relu2": "relu"}


def without_mechanisms(config):
    """By mechanism: the changes that leave it out, or put the nearest other in its place; no shape changes."""
    changes = {field: {field: value} for field, value in NEUTRAL.items() if getattr(config, field) != value}
    changes["hidden_act"] = {"hidden_act": NEAR[config.hidden_act]}
    if config.windows - {0}:
        wider = [layer.model_copy(update={"window": layer.window and layer.window + 1}) for layer in config.layers]
        changes["window"] = {"layers": tuple(wider)}
    if config.rotary_dim > 2 and set(config.rope_names) != {"rope"}:
        alike = [layer.model_copy(update={"rope": "rope"}) for layer in config.layers]
        changes["rope of a layer"] = {"layers": tuple(alike)}
    if config.rotary_dim > 2:
        changes["theta"] = {"rope": config.rope.model_copy(update={"rope_theta": config.rope.rope_theta * 2})}
    if config.rope.rope_type != "default":
        changes["rope_type"] = {"rope": config.rope.model_copy(update={"rope_type": "default"})}
    if 2 < config.rotary_dim < config.head_dim:
        changes["rotary_dim"] = {"rotary_dim": config.rotary_dim + 2}
    if config.position_embedding != "none":
        changes["offset"] = {"position_offset": 1}
    return changes


@each_variant
def test_a_mechanism_left_out_would_show(saved, name):
    """The other tests of a variant mean something: its logits move by more than five times their tolerance."""
    folder, model = saved(name)
    checkpoint, allowed = open_variant(folder, name), rounding_tolerance(model, IDS)

    def logits(config):
        decoder = empty_decoder(config)
        fill_parameters(decoder, checkpoint.parameters, "float32", partial=True)
        return run(decoder, IDS[:1], 0, decoder.new_caches(1, TOKENS))

    right, config = logits(checkpoint.config), checkpoint.config
    for mechanism, change in without_mechanisms(config).items():
        if mechanism == "offset" and config.position_embedding == "learned":
            continue  # the table's rows are a shape
        moved = float((logits(config.model_copy(update=change)) - right).abs().max())
        assert moved > 5 * allowed, (mechanism, moved, allowed)


def test_biases_of_a_family_without_them_are_refused(saved, tmp_path):  # B-04
    import shutil

    from safetensors.torch import load_file, save_file

    from toolchain.errors import DtoolError

    folder = shutil.copytree(saved("qwen3")[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DtoolError, match=r"q_proj\.bias"):
        open_checkpoint(folder)


def test_biases_that_a_family_always_has_need_no_key(saved):  # B-04
    folder, _ = saved("qwen2")
    assert "attention_bias" not in json.loads((folder / "config.json").read_text())
    checkpoint = open_checkpoint(folder)
    assert "model.layers.0.self_attn.qkv_proj.bias" in checkpoint.parameters
    assert "model.layers.0.self_attn.o_proj.bias" not in checkpoint.parameters


def test_head_dim_of_the_config_wins_over_hidden_by_heads(saved):  # B-01
    decoder = load_decoder(saved("llama_wide_heads")[0])
    attention = decoder.model.layers[0].self_attn
    assert decoder.config.qkv_sizes == (128, 64, 64)
    assert tuple(attention.o_proj.weight.shape) == (64, 128)
    assert tuple(decoder.new_caches(3, 7)[0][0].shape) == (3, 2, 7, 32)


def test_a_score_scale_of_its_own_replaces_that_of_the_head(saved):  # B-06
    config = open_checkpoint(saved("gemma2")[0]).config
    assert config.head_dim == 32
    assert config.score_scale == 0.25
    assert (config.attention_softcap, config.final_logit_softcap) == (50.0, 30.0)

"""Every metadata key of the model's own is read, without effect, or refused by its name."""

import json

import numpy as np
import pytest
from tiny_gguf import HEAD_DIM, write_tiny_gguf

from toolchain.errors import DtoolError
from toolchain.fetch.gguf_architectures import _share
from toolchain.fetch.gguf_checkpoint import checkpoint_from_gguf
from toolchain.fetch.gguf_keys import INERT, OFF

CHANGES = {
    "rope.dimension_count": 8,
    "attention.scale": 0.5,
    "rope.scaling.attn_factor": 1.2,
    "attention.clamp_kqv": 8.0,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "attention.causal": False,
    "attention.max_alibi_bias": 8.0,
    "logit_scale": 0.0625,
    "residual_scale": 0.22,
    "embedding_scale": 12.0,
    "attention.sliding_window": 64,
    "attention.value_length": 32,
    "use_parallel_residual": True,
    "attention.foo_scale": 2.0,
    "attention.foo": "no such thing",
    "rope.dimension_sections": [4, 4, 0, 0],
    "expert_weights_norm": False,
    "expert_gating_func": 2,
    "rope.scaling.yarn_ext_factor": 1.0,
}
NEUTRAL = {
    "rope.dimension_count": HEAD_DIM,
    "attention.scale": HEAD_DIM**-0.5,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.causal": True,
    "attention.sliding_window": 4096,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "use_parallel_residual": False,
    "vocab_size": 263,
    "rope.scale_linear": 1.0,
    "rope.scaling.finetuned": False,
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.layer_norm_epsilon": 1e-5,
}


@pytest.fixture
def convert(tmp_path):
    def convert(architecture="llama", report=lambda line: None, **written):
        folder = tmp_path / "m"
        folder.mkdir()
        path = write_tiny_gguf(tmp_path / "m.gguf", architecture=architecture, **written).path
        checkpoint_from_gguf(path, folder, report, weights=False)
        return json.loads((folder / "config.json").read_text())

    return convert


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_would_change_the_model_is_refused_with_its_value_and_a_way_out(convert, tmp_path, key):
    with pytest.raises(DtoolError) as failure:
        convert(keys={key: CHANGES[key]})
    value = f"{CHANGES[key]:g}" if isinstance(CHANGES[key], float) else CHANGES[key]
    assert failure.value.found == f"llama.{key} {value}"
    assert "Hugging Face folder" in failure.value.fix
    assert not list((tmp_path / "m").iterdir())


def test_all_of_them_are_named_at_once(convert):
    with pytest.raises(DtoolError, match=r"llama\.logit_scale 0\.5, llama\.attention\.foo 1"):
        convert(keys={"logit_scale": 0.5, "attention.foo": 1})


def test_values_without_effect_change_nothing(convert, tmp_path):
    with_keys = convert(keys=NEUTRAL)
    (tmp_path / "m").rename(tmp_path / "other")
    assert convert() == with_keys


@pytest.mark.parametrize("key", sorted(OFF))
def test_every_value_on_the_list_of_those_without_effect_passes(convert, tmp_path, key):
    for number, value in enumerate(OFF[key]):
        convert(keys={key: float(value) if type(value) is int and "scale" in key else value})
        (tmp_path / "m").rename(tmp_path / str(number))


def test_no_key_is_both_inert_and_refused():
    assert not INERT & set(OFF)


def test_keys_of_another_model_are_noted(convert):
    lines: list[str] = []
    convert(report=lines.append, keys={"other.scale": 2.0})
    assert lines == ["note: metadata of m.gguf that is not the model's own is left out: other.scale"]


def test_only_the_models_that_use_lists_of_rotary_factors_may_hold_them(convert):
    factors = {f"rope_factors_{which}.weight": np.ones(8, np.float32) for which in ("long", "short")}
    with pytest.raises(DtoolError, match="stretches its rotary frequencies"):
        convert(extra=factors)


def test_every_share_of_a_head_gives_its_size_back():
    for dim in range(2, 514, 2):
        assert all(int(dim * _share(rotated, dim)) == rotated for rotated in range(2, dim + 1, 2))

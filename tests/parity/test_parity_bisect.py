import pytest
import torch

from toolchain.artifact import open_artifact
from toolchain.parity.bisect import find_divergence


def swap_rows(weight):
    weight[[0, 5]] = weight[[5, 0]]
    return weight


def scale_row(weight):
    weight[3] *= 1.5
    return weight


def spoil_row(weight):
    weight[7] += torch.linspace(-1, 1, weight.shape[1])
    return weight


def test_a_good_export_has_no_divergence(exported, eager):
    assert find_divergence(open_artifact(exported), eager.decoder) is None


@pytest.mark.parametrize(
    "case",
    [
        ("model.layers.0.self_attn.qkv_proj.weight", swap_rows, "layers.0.qkv_proj", "layout"),
        ("model.layers.1.self_attn.qkv_proj.weight", scale_row, "layers.1.qkv_proj", "scale"),
        ("model.layers.1.self_attn.qkv_proj.weight", spoil_row, "layers.1.qkv_proj", "weights"),
        ("model.layers.0.self_attn.o_proj.weight", spoil_row, "layers.0.o_proj", "weights"),
        ("model.layers.1.mlp.down_proj.weight", spoil_row, "layers.1.output", "weights"),
        ("lm_head.weight", spoil_row, "logits", "weights"),
        ("model.embed_tokens.weight", lambda w: w.bfloat16(), "embedding", "cast"),
        ("model.layers.1.self_attn.qkv_proj.weight", lambda w: w.bfloat16(), "layers.1.qkv_proj", "cast"),
    ],
)
def test_the_first_tensor_that_departs_is_named(spoil, eager, case):
    name, change, tensor, fault = case
    found = find_divergence(open_artifact(spoil(name, change)), eager.decoder)
    assert found is not None
    assert (found.tensor, found.fault) == (tensor, fault), found.text()
    assert found.value in found.text()
    assert found.relative_error > found.tolerance


def test_wrong_rotation_tables_are_a_rope_fault(spoil, eager):
    folder = spoil("rope.sin", lambda sin: -sin, file="rope.safetensors")
    found = find_divergence(open_artifact(folder), eager.decoder)
    assert (found.tensor, found.fault) == ("layers.0.attention", "rope"), found.text()


def test_a_mask_that_hides_the_past_is_a_cache_fault(exported, eager, monkeypatch):
    """The reference stands in for the fault: its decoder forgets the first chunk's keys."""
    from toolchain.model import decoder as decoder_module

    true_attend = decoder_module.attend_in_place

    def forgetful(*inputs, **options):
        past, key_cache = inputs[3:5]
        if int(past.max()) > 0:
            key_cache[:, :, : int(past.min())] = 0
        return true_attend(*inputs, **options)

    monkeypatch.setattr(decoder_module, "attend_in_place", forgetful)
    found = find_divergence(open_artifact(exported), eager.decoder)
    assert (found.tensor, found.fault) == ("layers.0.attention", "cache"), found.text()


def test_tiled_kv_heads_are_a_layout_fault(exported, eager, monkeypatch):
    """Heads 0,1,0,1 instead of 0,0,1,1 (the reference stands in for the fault)."""
    from toolchain.model import decoder as decoder_module

    true_attend = decoder_module.attend_in_place

    def tiled(qkv, *rest, **options):
        order = torch.arange(64).reshape(4, 16)[[0, 2, 1, 3]].flatten()
        packed = torch.cat((qkv[..., order], qkv[..., 64:]), dim=-1)
        return true_attend(packed, *rest, **options)[..., order]

    monkeypatch.setattr(decoder_module, "attend_in_place", tiled)
    found = find_divergence(open_artifact(exported), eager.decoder)
    assert (found.tensor, found.fault) == ("layers.0.attention", "layout"), found.text()

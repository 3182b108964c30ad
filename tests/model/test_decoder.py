"""The reference decoder's parts by hand-made numbers, and the cache's promises; whole models: test_families."""

import math

import pytest
import torch

from tests.conftest import BASE, random_ids, save_tiny
from tests.model.families import save_variant
from tests.rounding import rounding_tolerance
from toolchain.model.config import DecoderConfig, Layer
from toolchain.model.decoder import Attention, Decoder, Norm, attention_spec
from toolchain.model.hf import config_from_hf
from toolchain.model.load import load_decoder
from toolchain.ops.attention import AttentionSpec, attend_in_place

E = math.e


def run(decoder, ids, past, caches):
    with torch.inference_mode():
        return decoder(ids, torch.full((len(ids),), past), caches)


def attend(q, k, v, *, start=0, caches=None, **fields):
    """One head's output [T, D] for rows [T, D] at positions from `start` on, without rotation."""
    dim, zeros = q.shape[-1], torch.zeros(64, 1)
    spec = AttentionSpec(1, 1, dim, **({"scale": 1.0, "rotary_dim": 2, "cache_format": "none"} | fields))
    caches = caches or (torch.zeros(1, 1, 64, dim), torch.zeros(1, 1, 64, dim))
    return attend_in_place(torch.cat((q, k, v), -1)[None], zeros + 1, zeros, torch.tensor([start]), *caches, spec)[0]


# Three tokens, one head of four dims, no rotation, worked by hand:
#
#   q = 1 0 1 0    k = 2 0 0 0    v = 1 2 0 0       q k^T = 2 1 1     / sqrt(4)   1  .5  .5    masked   1  -   -
#       0 2 0 0        0 1 1 0        3 0 1 0               0 2 2                 0   1   1             0  1   -
#       1 1 1 1        1 1 0 2        0 1 0 4               2 2 4                 1   1   2             1  1   2
#
#   softmax = 1                                                     1        0        0
#             1/(1+e)    e/(1+e)                                =   0.268941 0.731059 0
#             e/(2e+e^2) e/(2e+e^2) e^2/(2e+e^2)                    0.211942 0.211942 0.576117
#
#   output  = 1                   2                      0         0
#             0.268941 + 3 * 0.731059 = 2.462117   0.537883   0.731059   0
#             0.211942 + 3 * 0.211942 = 0.847766   2 * 0.211942 + 0.576117 = 1   0.211942   4 * 0.576117 = 2.304468
Q = torch.tensor([[1.0, 0, 1, 0], [0, 2, 0, 0], [1, 1, 1, 1]])
K = torch.tensor([[2.0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 0, 2]])
V = torch.tensor([[1.0, 2, 0, 0], [3, 0, 1, 0], [0, 1, 0, 4]])
WEIGHTS = torch.tensor([[1, 0, 0], [0.268941, 0.731059, 0], [0.211942, 0.211942, 0.576117]])
OUTPUT = torch.tensor([[1, 2, 0, 0], [2.462117, 0.537883, 0.731059, 0], [0.847766, 1, 0.211942, 2.304468]])


def test_the_hand_worked_example_is_consistent():
    assert torch.equal(Q @ K.T, torch.tensor([[2.0, 1, 1], [0, 2, 2], [2, 2, 4]]))
    exact = [[1, 0, 0], [1 / (1 + E), E / (1 + E), 0], [1 / (2 + E), 1 / (2 + E), E / (2 + E)]]
    torch.testing.assert_close(WEIGHTS, torch.tensor(exact), rtol=0, atol=2e-6)
    torch.testing.assert_close(WEIGHTS @ V, OUTPUT, rtol=0, atol=3e-6)


def test_the_attention_op_computes_the_hand_worked_example():
    torch.testing.assert_close(attend(Q, K, V, scale=0.5), OUTPUT, rtol=0, atol=2e-6)
    one_hot = torch.eye(3, 4)  # the values tell the weights
    torch.testing.assert_close(attend(Q, K, one_hot, scale=0.5)[:, :3], WEIGHTS, rtol=0, atol=2e-6)


def test_the_decoders_attention_computes_the_hand_worked_example():
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=8,
        norm_eps=1e-6,
        layers=(Layer(rope="no_rope"),),
    )
    attention = Attention(config, 0)
    with torch.inference_mode():
        attention.qkv_proj.weight.zero_()
        attention.qkv_proj.weight[:, :3] = torch.cat((Q, K, V), dim=1).T  # token t is the t-th unit vector
        attention.o_proj.weight.copy_(torch.eye(4))
        rope, past = (torch.ones(8, 2), torch.zeros(8, 2)), torch.zeros(1, dtype=torch.int64)
        out, _ = attention(torch.eye(3, 4)[None], rope, past, (torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4)))
    torch.testing.assert_close(out[0], OUTPUT, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_softmax_is_stable_at_scores_of_ten_thousand(size):
    """Scores size * (key's number + 1); what lies behind the mask is larger than all that is seen."""
    q, k = torch.full((5, 4), 0.5), torch.arange(1.0, 6.0)[:, None].expand(5, 4) * size / 2
    v = torch.arange(5.0)[:, None].expand(5, 4).contiguous()
    out = attend(q, k, v)
    picked = torch.arange(5.0) if size > 0 else torch.zeros(5)
    assert torch.equal(out, picked[:, None].expand(5, 4))


@pytest.mark.parametrize("window", [0, 1, 4, 10, 99])
def test_a_token_sees_as_many_keys_as_its_window_itself_among_them(window):  # D-04
    tokens = 10
    same, one_hot = torch.zeros(tokens, 16), torch.eye(tokens, 16)
    visible = [min(i + 1, window or tokens) for i in range(tokens)]
    rows = attend(same, same, one_hot, window=window)
    assert (rows > 0).sum(-1).tolist() == visible
    for i, row in enumerate(rows):
        assert row[:tokens].nonzero().flatten().tolist() == list(range(i + 1 - visible[i], i + 1))
    caches = (torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 64, 16))
    parts = [attend(same[:3], same[:3], one_hot[:3], window=window, caches=caches)]
    for i in range(3, tokens):
        token = slice(i, i + 1)
        parts.append(attend(same[token], same[token], one_hot[token], start=i, window=window, caches=caches))
    assert torch.equal(torch.cat(parts), rows)


def test_the_window_of_a_config_reaches_the_op():  # D-04
    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 9, "num_hidden_layers": 2}
    document = {"model_type": "qwen2", **sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    off = config_from_hf(document | {"use_sliding_window": False}, {})
    on = config_from_hf(document | {"use_sliding_window": True, "max_window_layers": 1}, {})
    assert [attention_spec(off, i).window for i in range(2)] == [0, 0]
    assert [attention_spec(on, i).window for i in range(2)] == [0, 4]


def test_scores_are_capped_before_the_softmax():  # B-06: 50 tanh(100 / 50) = 48.2014
    q, k = torch.tensor([[10.0, 0], [10.0, 0]]), torch.tensor([[9.8, 0], [10.0, 0]])  # scores 98 and 100
    v = torch.tensor([[0.0, 0], [1.0, 0]])
    lower, upper = (50 * math.tanh(score / 50) for score in (98, 100))
    assert upper == pytest.approx(48.2014, abs=1e-4)
    assert float(attend(q, k, v, softcap=50.0)[1, 0]) == pytest.approx(1 / (1 + math.exp(lower - upper)), abs=1e-6)


def test_logits_are_multiplied_and_then_capped():  # B-06: 30 tanh(60 / 30) = 28.9208
    shape = {"vocab_size": 4, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "head_dim": 4}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8, "norm_eps": 1e-6}
    config = DecoderConfig(**shape, **heads, final_norm=False, final_logit_softcap=30.0, logit_multiplier=0.5)
    decoder = Decoder(config)
    with torch.inference_mode():
        decoder.lm_head.weight.copy_(torch.diag(torch.tensor([120.0, -120.0, 2.0, 0.0])))
        logits = decoder.logits(torch.ones(1, 1, 4))
    expected = [28.9208, -28.9208, 30 * math.tanh(1 / 30), 0.0]
    torch.testing.assert_close(logits[0, 0], torch.tensor(expected), rtol=0, atol=1e-4)


def test_query_head_reads_the_kv_head_of_its_group(tmp_path):  # B-03
    save_tiny(tmp_path / "m", hidden_size=96, num_attention_heads=6)
    decoder = load_decoder(tmp_path / "m")
    attention = decoder.model.layers[0].self_attn
    with torch.no_grad():
        attention.qkv_proj.weight[-2 * BASE["head_dim"] : -BASE["head_dim"]] = 0.0  # the first value head
    seen = []
    attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run(decoder, torch.from_numpy(random_ids(5, 2, 9)), 0, decoder.new_caches(2, 9))
    heads = seen[0].reshape(2, 9, 6, -1).abs().amax((0, 1, 3))
    assert (heads[:3] == 0).all()
    assert (heads[3:] > 0).all()


def test_keys_beyond_the_rotated_dims_enter_the_cache_untouched(tmp_path):  # C-08
    save_variant(tmp_path / "m", "stablelm")
    decoder = load_decoder(tmp_path / "m")
    attention, caches = decoder.model.layers[0].self_attn, decoder.new_caches(1, 50)
    packed = []
    attention.qkv_proj.register_forward_hook(lambda _module, _inputs, output: packed.append(output))
    run(decoder, torch.from_numpy(random_ids(5, 1, 50)), 0, caches)
    projected = packed[0][0].reshape(50, 8, 16)[:, 4:6].transpose(0, 1)
    cached = caches[0][0][0]
    assert decoder.config.rotary_dim == 4
    assert torch.equal(cached[..., 4:], projected[..., 4:])
    assert not torch.isclose(cached[:, 1:, :4], projected[:, 1:, :4]).all(-1).any()


def test_padded_rows_of_the_vocabulary_are_kept(tmp_path):  # 97 tokens, 128 rows
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    save_tiny(tmp_path / "m", vocab_size=128)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["lm_head.weight"][120] *= 50
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    decoder, ids = load_decoder(tmp_path / "m"), torch.from_numpy(random_ids(8, 2, 12))
    ours = run(decoder, ids, 0, decoder.new_caches(2, 12))
    model = LlamaForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = model(ids).logits
    assert ours.shape[-1] == 128
    assert float((ours - theirs).abs().max()) <= rounding_tolerance(model, ids)


def test_one_norm_of_a_parallel_layer_is_read_by_both_parts(tmp_path):
    save_variant(tmp_path / "m", "phi")
    block = load_decoder(tmp_path / "m").model.layers[0]
    read = {}
    for part in ("self_attn", "mlp"):
        getattr(block, part).register_forward_pre_hook(lambda _, inputs, part=part: read.update({part: inputs[0]}))
    x, rope = torch.randn(1, 3, 64), (torch.ones(8, 4), torch.zeros(8, 4))
    with torch.inference_mode():
        block(x, rope, torch.zeros(1, dtype=torch.int64), (torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)))
    assert read["self_attn"] is read["mlp"]


@pytest.mark.parametrize("cache", ["none", "int8", "fp8_e4m3", "int8_token", "fp8_e4m3_token", "mixed"])
def test_stale_slots_never_show(tiny, cache):
    decoder, kinds = load_decoder(tiny[0]), [cache] * 2 if cache != "mixed" else ["none", "int8_token"]
    for block, kind in zip(decoder.model.layers, kinds, strict=True):
        if kind != "none":
            static = None if kind.endswith("token") else (torch.full((2,), 0.05),) * 2
            block.self_attn.quantize_cache(kind.removesuffix("_token"), static)
    ids = torch.from_numpy(random_ids(6, 2, 12))
    clean, dirty = (decoder.new_caches(2, 20) for _ in range(2))
    for part in (part for caches in dirty for part in caches):
        part.fill_(127 if part.dtype == torch.int8 else float("nan"))
    for start, end in ((0, 5), (5, 11), (11, 12)):
        assert torch.equal(run(decoder, ids[:, start:end], start, clean), run(decoder, ids[:, start:end], start, dirty))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_of_large_half_precision_values_does_not_overflow(kind):
    shape = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 9, "num_hidden_layers": 1, "head_dim": 64}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8, "norm_eps": 1e-5}
    norm = Norm(DecoderConfig(**shape, **heads, norm=kind)).half()
    values = torch.full((1, 1, 64), 300.0)
    if kind == "layer":
        values[..., ::2] = -300.0
    with torch.no_grad():
        norm.weight.fill_(1.0)
        assert torch.allclose(norm(values.half()).float(), values.sign(), atol=1e-2)

"""The reference decoder against Hugging Face eager, and the cache's promises."""

import pytest
import torch

from tests.conftest import BASE, random_ids, save_tiny
from toolchain.model.load import load_decoder
from toolchain.numerics import logit_tolerance

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 32},
    "groups_of_three": {"hidden_size": 96, "num_attention_heads": 6},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3_rope": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
}


def run(decoder, ids, past, caches):
    with torch.inference_mode():
        return decoder(ids, torch.full((len(ids),), past), caches)


def tolerance(theirs):
    return logit_tolerance("float32", layers=2, width=128, largest=float(theirs.abs().max()))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_hugging_face_beyond_position_60(tmp_path, name):
    model = save_tiny(tmp_path / "m", **VARIANTS[name])
    ids = torch.from_numpy(random_ids(3, 2, 110))
    with torch.inference_mode():
        theirs = model(ids).logits
    decoder = load_decoder(tmp_path / "m")
    ours = run(decoder, ids, 0, decoder.new_caches(2, 110))
    assert float((ours - theirs).abs().max()) <= tolerance(theirs)


def test_chunks_and_single_steps_equal_one_prefill(tiny):
    decoder = load_decoder(tiny[0])
    ids = torch.from_numpy(random_ids(4, 3, 80))
    whole = run(decoder, ids, 0, decoder.new_caches(3, 96))
    caches = decoder.new_caches(3, 96)
    parts = [run(decoder, ids[:, :33], 0, caches), run(decoder, ids[:, 33:70], 33, caches)]
    parts += [run(decoder, ids[:, i : i + 1], i, caches) for i in range(70, 80)]
    assert float((torch.cat(parts, 1) - whole).abs().max()) <= tolerance(whole)


def test_query_head_reads_the_kv_head_of_its_group(tmp_path):
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


@pytest.mark.parametrize("cache_format", ["none", "int8", "fp8_e4m3"])
def test_stale_slots_never_show(tiny, cache_format):
    decoder = load_decoder(tiny[0])
    for block in decoder.model.layers if cache_format != "none" else ():
        block.self_attn.quantize_cache((torch.full((2,), 0.05),) * 2, cache_format)
    ids = torch.from_numpy(random_ids(6, 2, 12))
    clean, dirty = (decoder.new_caches(2, 20, cache_format) for _ in range(2))
    for key, value in dirty:
        key.fill_(127 if cache_format == "int8" else float("nan"))
        value.fill_(127 if cache_format == "int8" else float("nan"))
    for start, end in ((0, 5), (5, 11), (11, 12)):
        assert torch.equal(run(decoder, ids[:, start:end], start, clean), run(decoder, ids[:, start:end], start, dirty))


def test_norm_of_large_half_precision_values_does_not_overflow():
    from toolchain.model.decoder import RMSNorm

    norm = RMSNorm(64, 1e-5).half()
    with torch.no_grad():
        norm.weight.fill_(1.0)
        assert torch.allclose(norm(torch.full((1, 1, 64), 300.0).half()).float(), torch.ones(64), atol=1e-2)

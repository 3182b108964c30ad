"""Caches with a scale per token, and layers that keep values: what is written, and what it is worth."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
import torch

from tests.conftest import make_recipe, random_ids, save_tiny
from tests.rounding import assert_equal_up_to_rounding
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.graph_io import GRAPH_FILES, PHASES, graph_io
from toolchain.model.caches import CacheFormat, caches_of, describe_caches
from toolchain.model.config import DecoderConfig
from toolchain.model.load import load_artifact_decoder
from toolchain.numerics import INT8_QMAX
from toolchain.ops.attention import AttentionSpec, attend_in_place
from toolchain.parity.bisect import find_divergence
from toolchain.quantize.stage import quantize_artifact
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import fake_quant_runner
from toolchain.tensor_file import read_header

TOKEN = {"format": "int8", "granularity": "token"}
FORMATS = {
    "int8_token": TOKEN,
    "fp8_token": TOKEN | {"format": "fp8_e4m3"},
    "mixed": {"format": "int8", "skip": ["model.layers.0.self_attn"]},
    "mixed_token": TOKEN | {"skip": ["model.layers.[1-9]*.self_attn"]},
    "mixed_fp8_token": TOKEN | {"format": "fp8_e4m3", "skip": ["*.0.*"]},
}


def quiet(_):
    pass


def quantized(source, out, **cache):
    return quantize_artifact(source, make_recipe(kv_cache=cache), out, report=quiet)


@pytest.fixture
def static(request):
    """Calibration for the formats that need one; none is at hand for the others."""
    if request.getfixturevalue("name") == "mixed":
        request.getfixturevalue("random_calibration")


@pytest.mark.usefixtures("static")
@pytest.mark.parametrize("source", ["exported", "exported_tied"])
@pytest.mark.parametrize("name", FORMATS)
def test_graphs_are_the_contract_and_compute_what_torch_computes(source, name, request, tmp_path):
    """Ragged prefill, chunks and decode up to position 76; the tiny checkpoint has no text to calibrate on."""
    artifact = quantized(request.getfixturevalue(source), tmp_path / "q", **FORMATS[name])
    config = DecoderConfig.model_validate(artifact.json("decoder.json"))
    caches = caches_of(artifact.manifest.kv_contract, config.num_hidden_layers)
    for phase in PHASES:
        path = artifact.path / GRAPH_FILES[phase]
        onnx.checker.check_model(str(path), full_check=True)
        graph, contract = onnx.load(path, load_external_data=False).graph, graph_io(config, phase, caches)
        for values, specs in ((graph.input, contract.inputs), (graph.output, contract.outputs)):
            assert [value.name for value in values] == [spec.name for spec in specs]
    ids, lengths = random_ids(12, 3, 76), [(50, 11, 1), (20, 2, 9), *[(1, 1, 1)] * 6]
    plan = [
        (slice(start, end), new, "decode" if end - start == 1 else "prefill")
        for (start, end), new in zip(pairwise((0, 50, *range(70, 77))), lengths, strict=True)
    ]
    assert_equal_up_to_rounding(fake_quant_runner(artifact.path), OnnxRunner(artifact), ids, plan, capacity=96)
    assert find_divergence(artifact, load_artifact_decoder(artifact)) is None


def test_scales_of_tokens_are_in_the_cache_and_not_in_the_weights(exported, tmp_path):
    artifact = quantized(exported, tmp_path / "q", **TOKEN)
    assert not [
        name for name in read_header(artifact.file("weights.safetensors")) if name.endswith(("k_scale", "v_scale"))
    ]
    contract = artifact.manifest.kv_contract
    assert (contract["dtype"], contract["token_scales"]) == ("int8", True)
    assert contract["scales"] == "per layer, token and KV head, in the cache: float32 [batch, kv_heads, capacity]"
    runner = OnnxRunner(artifact)
    state = runner.new_state(2, 8)
    runner.step(state, random_ids(1, 2, 5), np.array([5, 5]), "prefill")
    codes, scales = (state.caches[i].numpy() for i in (0, 2))
    assert (scales.shape, scales.dtype) == ((2, 2, 8), np.float32)
    assert (abs(codes[:, :, :5].astype(int)).max(-1) == INT8_QMAX).all()
    assert (scales[:, :, :5] > 0).all()
    assert (scales[:, :, 5:] == 0).all()


def test_layers_left_out_keep_values_and_have_no_scales(random_calibration, exported, tmp_path):
    artifact = quantized(exported, tmp_path / "q", **FORMATS["mixed"])
    scales = [
        name for name in read_header(artifact.file("weights.safetensors")) if name.endswith(("k_scale", "v_scale"))
    ]
    assert scales == ["model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale"]
    contract = artifact.manifest.kv_contract
    assert contract["not_quantized"] == {"dtype": "float32", "layers": [0]}
    assert caches_of(contract, 2) == (CacheFormat("float32"), CacheFormat("int8"))
    model = onnx.load(artifact.path / "decode.onnx", load_external_data=False)
    assert sorted((f.name, f.overload) for f in model.functions) == [("FusedAttention", ""), ("FusedAttention", "int8")]
    nodes = [node for node in model.graph.node if node.op_type == "FusedAttention"]
    assert [(node.overload, len(node.input)) for node in nodes] == [("", 6), ("int8", 8)]


def test_a_model_with_windows_and_two_kinds_of_cache_has_two_bodies(tmp_path):
    from tests.model.families import save_variant

    save_variant(tmp_path / "m", "gemma3_text")
    export_checkpoint(tmp_path / "m", make_recipe(), tmp_path / "x", report=quiet)
    artifact = quantized(tmp_path / "x", tmp_path / "q", **TOKEN | {"skip": ["model.layers.0.self_attn"]})
    functions = onnx.load(artifact.path / "decode.onnx", load_external_data=False).functions
    assert {f.overload for f in functions} == {"", "int8_token"}
    runners = fake_quant_runner(artifact.path), OnnxRunner(artifact)
    ids, lengths = random_ids(3, 2, 30), np.array([30, 22])
    theirs, ours = (runner.step(runner.new_state(2, 40), ids, lengths, "prefill") for runner in runners)
    assert float(np.median(abs(ours - theirs))) <= 1e-4


@pytest.mark.parametrize("layers", [(), (0,), (1, 3)])
@pytest.mark.parametrize("token", [False, True])
def test_a_manifest_says_the_cache_of_every_layer(layers, token):
    caches = tuple(CacheFormat("float16") if i in layers else CacheFormat("int8", token) for i in range(4))
    assert caches_of(describe_caches(caches), 4) == caches
    plain = (CacheFormat("bfloat16"),) * 3
    assert describe_caches(plain) == {"dtype": "bfloat16"}
    assert caches_of({"dtype": "bfloat16"}, 3) == plain


@pytest.mark.parametrize(
    ("skip", "said"),
    [
        (
            ["model.layers.0.self_atn"],
            ["kv_cache.skip 'model.layers.0.self_atn' matches no layer", "model.layers.0.self_attn"],
        ),
        (["model.layers.7.*"], ["matches no layer"]),
        (["*"], ["leaves no layer with a quantized cache", "all 2 layers", "kv_cache.format to none"]),
    ],
)
def test_patterns_that_cannot_be_are_refused_before_any_work(skip, said, exported, tmp_path):
    with pytest.raises(DtoolError) as caught:
        quantized(exported, tmp_path / "q", **TOKEN, skip=skip)
    assert all(text in str(caught.value) for text in said), str(caught.value)
    assert not (tmp_path / "q").exists()


def test_a_token_with_an_outlier_spoils_itself_alone():
    """One key 100 times the others: a static scale covers it and loses them, scales of tokens do not.

    Relative error of the keys that the cache gives back, over the tokens without the outlier.
    """
    torch.manual_seed(0)
    spec = AttentionSpec(6, 2, 32, 32**-0.5, 32, "int8", token_scales=True)
    qkv = torch.randn(2, 70, spec.packed_width)
    qkv[:, 66, 6 * 32 :] *= 100.0
    tables = (torch.ones(80, 16), torch.zeros(80, 16))
    keys = qkv[..., 6 * 32 : 8 * 32].reshape(2, 70, 2, 32).transpose(1, 2)
    values = qkv[..., 8 * 32 :].reshape(2, 70, 2, 32).transpose(1, 2)
    static = tuple(x.abs().amax((0, 2, 3)) / INT8_QMAX for x in (keys, values))
    tokens = tuple(torch.zeros(2, 2, 80) for _ in range(2))
    others = [t for t in range(70) if t != 66]

    def errors(scales, by_token):
        codes = [torch.zeros(2, 2, 80, 32, dtype=torch.int8) for _ in range(2)]
        kind = AttentionSpec(6, 2, 32, 32**-0.5, 32, "int8", token_scales=by_token)
        for start, end in ((0, 33), (33, 69), (69, 70)):
            past = torch.full((2,), start)
            attend_in_place(qkv[:, start:end], *tables, past, *codes, kind, scales=scales)
        for true, stored, scale in zip((keys, values), codes, scales, strict=True):
            wide = scale[:, :, :70, None] if by_token else scale[:, None, None]
            difference = (stored[:, :, :70].float() * wide - true)[:, :, others]
            yield float(difference.norm() / true[:, :, others].norm())

    for dynamic, fixed in zip(errors(tokens, by_token=True), errors(static, by_token=False), strict=True):
        assert dynamic < 0.01
        assert fixed > 0.5
        assert dynamic < fixed / 50


def test_the_whole_model_keeps_its_precision_beside_an_outlier_token(tmp_path, monkeypatch):
    """One id whose embedding makes large keys: the logits of other tokens barely notice with scales of tokens."""
    model = save_tiny(tmp_path / "m")
    model.model.layers[0].self_attn.k_proj.weight.data[:, 0] = 20.0
    model.model.embed_tokens.weight.data[:, 0] *= 0.01
    model.model.embed_tokens.weight.data[5, 0] = 20.0
    model.save_pretrained(tmp_path / "m")
    export_checkpoint(tmp_path / "m", make_recipe(), tmp_path / "x", report=quiet)
    ids = random_ids(11, 4, 48)
    ids[ids == 5] = 6
    ids[:, 7] = 5
    monkeypatch.setattr("toolchain.quantize.stage._calibration_blocks", lambda *_: ids)
    monkeypatch.setattr("toolchain.quantize.stage._lineage", lambda exported, _: {"source": exported.identity})

    def logits(path):
        decoder = load_artifact_decoder(open_artifact(path))
        with torch.inference_mode():
            return decoder(torch.from_numpy(ids), torch.zeros(4, dtype=torch.int64), decoder.new_caches(4, 48))

    exact = logits(tmp_path / "x")
    found = {}
    for granularity in ("head", "token"):
        quantized(tmp_path / "x", tmp_path / granularity, format="int8", granularity=granularity)
        found[granularity] = float((logits(tmp_path / granularity) - exact).norm() / exact.norm())
    assert found["token"] < found["head"] / 3, found


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_shows_in_its_row_and_head_alone(bad):
    spec = AttentionSpec(4, 2, 16, 0.25, 16, "int8", token_scales=True)
    qkv = torch.randn(2, 9, spec.packed_width)
    qkv[0, 2, 4 * 16 + 3] = bad
    caches = [torch.zeros(2, 2, 16, 16, dtype=torch.int8) for _ in range(2)]
    scales = tuple(torch.full((2, 2, 16), float("nan")) for _ in range(2))  # what lies in unused slots is not read
    tables = (torch.ones(16, 8), torch.zeros(16, 8))
    out = attend_in_place(qkv, *tables, torch.tensor([0, 0]), *caches, spec, scales=scales)
    heads = out.unflatten(-1, (4, 16))
    assert heads[0, 2:, :2].isnan().all()
    assert heads[0, :2].isfinite().all()
    assert heads[0, :, 2:].isfinite().all()
    assert heads[1].isfinite().all()

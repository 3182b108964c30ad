"""The matrix: every weight format x cache x attention x GPU builds as asked, or is refused before any work.

Compiled by TensorRT-RTX on the CPU for a tiny model; `make matrix` runs it, and with DTOOL_MATRIX_MODEL
set to a checkpoint folder the same matrix over that model.
"""

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import random_ids, save_tiny
from toolchain.engine.stage import build_engine
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.model.config import DecoderConfig
from toolchain.quantize.stage import quantize_artifact

pytestmark = [pytest.mark.matrix, pytest.mark.compiles]

SMS = ("sm80", "sm89", "sm120")
PER_TOKEN, STATIC = "token", "tensor"
WEIGHTS = {
    "fp16": ({}, ("Half", "Half")),
    "int8": ({"weights": {"format": "int8"}}, ("Half", "Int8")),
    "int8-w8a8": ({"weights": {"format": "int8"}, "activations": {"format": "int8"}}, ("Int8", "Int8")),
    "fp8": (
        {
            "weights": {"format": "fp8_e4m3"},
            "activations": {"format": "fp8_e4m3", "granularity": "tensor"},
        },
        ("FP8", "FP8"),
    ),
    "int4": ({"weights": {"format": "int4"}}, ("Half", "Int4")),
}
CACHES = {
    "fp16": {},
    "int8": {"format": "int8"},
    "int8-token": {"format": "int8", "granularity": "token"},
    "mixed": {"format": "int8", "granularity": "token", "skip": ["model.layers.1.self_attn"]},
    "fp8": {"format": "fp8_e4m3"},
    "fp8-token": {"format": "fp8_e4m3", "granularity": "token"},
}
CACHE_TYPES = {"fp16": {"Half"}, "int8": {"Int8"}, "mixed": {"Int8", "Half"}, "fp8": {"FP8"}}
CACHE_TYPES |= {f"{name}-token": CACHE_TYPES[name] for name in ("int8", "fp8")}


def quiet(_):
    pass


def refusal(weights, cache, attention, sm):
    """What preflight must say; None where the engine must build."""
    if attention == "native" and cache != "fp16":
        return f"native attention cannot keep an {CACHES[cache]['format']} cache"
    if sm == "sm80" and "fp8" in (weights, cache.removesuffix("-token")):
        return "sm80 (A100, A30) has no fp8_e4m3"
    return None


@pytest.fixture(scope="session")
def matrix_export(tmp_path_factory, make_recipe):
    """The float16 export the matrix starts from."""
    folder = tmp_path_factory.mktemp("matrix")
    model = os.environ.get("DTOOL_MATRIX_MODEL")
    if not model:
        save_tiny(folder / "model", vocab_size=98, head_dim=32)
    return export_checkpoint(Path(model) if model else folder / "model", make_recipe(), folder / "export", report=quiet)


@pytest.fixture
def source(matrix_export, tmp_path, monkeypatch, make_recipe):
    """Quantize the export as a combination asks."""
    config = DecoderConfig.model_validate(matrix_export.json("decoder.json"))
    blocks = random_ids(11, 4, 48, vocab=config.vocab_size)
    monkeypatch.setattr("toolchain.quantize.stage._calibration_blocks", lambda *_: blocks)
    monkeypatch.setattr("toolchain.quantize.stage._lineage", lambda exported, _: {"source": exported.identity})

    def make(sections):
        if not sections:
            return matrix_export
        out = tmp_path / f"q{len(list(tmp_path.glob('q*')))}"
        return quantize_artifact(matrix_export.path, make_recipe(sections=sections), out, report=quiet)

    return make


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_combination_builds_as_asked_or_is_refused_at_once(weights, cache, source, make_recipe, tmp_path):
    sections, types = WEIGHTS[weights]
    sections = sections | ({"kv_cache": CACHES[cache]} if cache != "fp16" else {})
    artifact = source(sections)
    for attention in ("plugin", "native"):
        for sm in SMS:
            recipe = make_recipe(sections=sections, targets=[sm], attention=attention)
            out = tmp_path / f"{attention}-{sm}"
            if expected := refusal(weights, cache, attention, sm):
                start = time.process_time()
                with pytest.raises(DtoolError) as caught:
                    build_engine(artifact.path, recipe, out, report=quiet)
                assert expected in str(caught.value)
                assert "to do:" in str(caught.value)
                assert time.process_time() - start < 2.0
                assert not out.exists()
            else:
                engine = build_engine(artifact.path, recipe, out, report=quiet)
                check_report(engine, types, attention, cache)


def check_report(engine, types, attention, cache):
    config = DecoderConfig.model_validate(engine.json("decoder.json"))
    layers, report = config.num_hidden_layers, engine.json("report.json")
    head_types = ("Half", "Half")
    for phase in ("prefill", "decode"):
        entry, summary = report["engines"][phase], report["engines"][phase]["summary"]
        asked = Counter({types: 4 * layers})
        asked[head_types] += 1
        found = Counter()
        for row in summary["products"]["precisions"]:
            found[row["activations"], row["weights"]] += row["products"]
        assert found == asked
        # q, k, v are one product, and gate and up: four a layer
        assert summary["products"]["kernels_per_layer"] == {"4": layers, "outside": 1}
        kernels = summary["attention"]["kernels"]
        assert summary["attention"]["fused"] == len(kernels) == layers
        native = "_gemm_mha_v2" if phase == "prefill" else "_gemv_mha_v1"
        assert all(row["tactic"].startswith("PluginV3" if attention == "plugin" else native) for row in kernels)
        # a static scale between attention and its projection is a kernel of its own; nothing else may be
        assert summary["unfused_qdq"] <= (layers if types == ("FP8", "FP8") else 0)
        check_cache(entry, config, cache)
    assert engine.manifest.target["plugin_libraries"] == (
        ["plugin/libdtool_attention.so"] if attention == "plugin" else []
    )
    assert set(engine.manifest.target["engines"]) == {"prefill", "decode"}


def check_cache(entry, config, cache):
    """Nothing of the cache's shape is written in another type than the caches', and scales are float."""
    shape = f"[-1,{config.num_key_value_heads},128,{config.head_dim}]"
    written = {t.split("[")[0] for row in entry["layers"] for t in row["outputs"] if t.endswith(shape)}
    assert written <= CACHE_TYPES[cache]
    scales = f"[-1,{config.num_key_value_heads},128]"
    kinds = [t.split("[")[0] for row in entry["layers"] for t in row["outputs"] if t.endswith(scales)]
    layers = config.num_hidden_layers - (cache == "mixed") if cache == "mixed" or cache.endswith("token") else 0
    assert kinds == ["Float"] * 2 * layers


ROTATED = {"rotation": {"stream": True, "values": True, "feed_forward": True}}
BASES = {
    "token": WEIGHTS["int8-w8a8"],
    "static": (
        {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"}},
        ("Int8", "Int8"),
    ),
    "int4": WEIGHTS["int4"],
}


@pytest.mark.parametrize("name", BASES)
def test_rotated_graphs_keep_their_products_in_their_formats(name, source, make_recipe, tmp_path):
    """The bases cost two products at the model's ends and one a layer, in float; all others stay as they were."""
    sections, types = BASES[name]
    artifact = source(sections | ROTATED)
    layers = DecoderConfig.model_validate(artifact.json("decoder.json")).num_hidden_layers
    for sm in ("sm80", "sm89"):
        recipe = make_recipe(sections=sections | ROTATED, targets=[sm], attention="plugin")
        engine = build_engine(artifact.path, recipe, tmp_path / sm, report=quiet)
        for phase in ("prefill", "decode"):
            found = Counter()
            for row in engine.json("report.json")["engines"][phase]["summary"]["products"]["precisions"]:
                found[row["activations"], row["weights"]] += row["products"]
            asked = Counter({types: 4 * layers}) + Counter({("Half", "Half"): 1 + 2 + layers})
            assert found == asked


CENTERED = {
    "int8 static": (
        {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"}},
        "Int8",
    ),
    "int8 token": ({"weights": {"format": "int8"}, "activations": {"format": "int8"}}, "Int8"),
    "fp8": ({"weights": {"format": "fp8_e4m3"}, "activations": {"format": "fp8_e4m3", "granularity": "tensor"}}, "FP8"),
    "int4": ({"weights": {"format": "int4", "group_size": 32}, "activations": {"format": "none"}}, "Int4"),
}


@pytest.mark.parametrize("name", CENTERED)
def test_centered_inputs_cost_no_product_and_no_format(name, source, make_recipe, tmp_path):
    """Taking the mean off and adding the offset fuse with what is there: no kernel more than without."""
    sections, fmt = CENTERED[name]
    kernels = []
    for center in (False, True):
        asked = sections | {"activations": sections["activations"] | {"center": center}}
        artifact = source(asked)
        recipe = make_recipe(sections=asked, targets=["sm89"], attention="plugin")
        engine = build_engine(artifact.path, recipe, tmp_path / str(center), report=quiet)
        summaries = [engine.json("report.json")["engines"][phase]["summary"] for phase in ("prefill", "decode")]
        found = [
            Counter({(row["activations"], row["weights"]): row["products"] for row in s["products"]["precisions"]})
            for s in summaries
        ]
        layers = DecoderConfig.model_validate(artifact.json("decoder.json")).num_hidden_layers
        inputs = "Half" if fmt == "Int4" else fmt
        assert found == [Counter({(inputs, fmt): 4 * layers, ("Half", "Half"): 1})] * 2
        kernels.append([sum(s["kernels"].values()) for s in summaries])
    more = layers if fmt == "Int4" else 0  # an int4 product takes no addition before the plugin
    assert kernels[1] == [count + more for count in kernels[0]]


def test_formats_per_matrix_reach_the_engine(source, make_recipe, tmp_path):
    """INT4 feed-forwards under INT8 attention, by an override."""
    mixed = {
        "weights": {"format": "int8"},
        "overrides": [{"match": ["*.mlp.*"], "weights": {"format": "int4", "group_size": 32}}],
    }
    artifact = source(mixed)
    layers = DecoderConfig.model_validate(artifact.json("decoder.json")).num_hidden_layers
    recipe = make_recipe(sections=mixed, targets=["sm89"], attention="plugin")
    summary = build_engine(artifact.path, recipe, tmp_path / "e", report=quiet).json("report.json")["engines"]["decode"]
    found = Counter()
    for row in summary["summary"]["products"]["precisions"]:
        found[row["activations"], row["weights"]] += row["products"]
    assert found == Counter({("Half", "Int8"): 2 * layers, ("Half", "Int4"): 2 * layers, ("Half", "Half"): 1})

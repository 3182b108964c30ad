"""What quantization lost, as JSON, text and page."""

import pytest

from tests.conftest import OTHER_FORMATS, make_recipe
from toolchain.quantize.report import quantization_document, quantization_page
from toolchain.quantize.stage import quantize_artifact
from toolchain.report import render_html, render_text

pytestmark = pytest.mark.usefixtures("random_calibration")


@pytest.fixture
def document(exported, tmp_path):
    recipe = make_recipe(**OTHER_FORMATS["int4_awq_gptq"])
    return quantization_document(quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None))


def test_every_quantized_matrix_has_a_row_and_everything_else_a_name(document):
    rows = [row["matrix"] for row in document["matrices"]]
    assert len(rows) == len(set(rows)) == 8
    assert set(document["not_quantized"]) == {"lm_head", "model.embed_tokens"}
    assert all(row["group_size"] in {32, 64, 128} and 0 <= row["clipped_share"] < 0.2 for row in document["matrices"])
    assert all(row["output_sqnr_db"] > 10 for row in document["matrices"])
    assert document["identity_error"] < 1e-5


def test_bits_per_parameter_count_codes_and_scales(document):
    """4 bits and a float32 scale per group of 32 or 64; embedding, head and norms in float32."""
    stored = document["weight_bytes"] * 8 / document["parameters"]
    assert document["bits_per_parameter"] == pytest.approx(stored)
    assert 5 < document["bits_per_parameter"] < 12


def test_page_puts_the_worst_matrix_first(document):
    page = quantization_page(document)
    table = page.parts[-1]
    values = [row[4] for row in table.rows]
    assert values == sorted(values)
    text, html = render_text(page), render_html(page)
    assert table.rows[0][0] in text
    assert table.rows[0][0] in html
    assert "bits per parameter" in text


def test_without_activations_the_weights_alone_are_told(exported, tmp_path):
    recipe = make_recipe(weights={"format": "int8"})
    artifact = quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None)
    page = quantization_page(quantization_document(artifact))
    assert all(row[4] is None for row in page.parts[-1].rows)
    facts = dict(page.facts)
    assert facts["weights"] == "format int8, granularity channel, algorithm rtn, clip amax"
    assert (facts["activations"], facts["KV cache"]) == ("in float", "in float")
    off = {"overrides", "means taken apart", "rotation", "smoothing", "bases and smoothing changed"}
    assert not off & set(facts)


def test_settings_in_use_are_told(document):
    facts = dict(quantization_page(document).facts)
    assert facts["weights"].startswith("format int4, algorithm gptq, clip ")
    assert ", refinements " in facts["weights"]
    assert facts["weights"].endswith("groups of 32 and 64")
    assert facts["smoothing"] == "algorithm awq, alpha 0.5"
    assert "bases and smoothing changed" in facts


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ({}, "format int8, granularity head, scale amax"),
        (
            {"scale": "percentile", "percentile": 99.0},
            "format int8, granularity head, scale percentile, percentile 99.0",
        ),
        ({"granularity": "token"}, "format int8, granularity token"),
        (
            {"skip": ["model.layers.0.self_attn"]},
            "format int8, granularity head, scale amax; in float: model.layers.0.self_attn",
        ),
    ],
)
def test_page_names_the_scales_of_the_cache_and_smoothed_keys(cache, said, exported, tmp_path):
    recipe = make_recipe(kv_cache={"format": "int8"} | cache, smoothing={"keys": True})
    artifact = quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None)
    facts = dict(quantization_page(quantization_document(artifact)).facts)
    assert (facts["KV cache"], facts["smoothing"]) == (said, "keys")

"""Every mechanism compiles for GPUs: windows, soft caps, QK-norm, rotations, experts, in float16 and in INT8.

Compiled by TensorRT-RTX on the CPU; the build itself fails when an attention is not the one asked for, a
product does not run in its types, or a quantized cache is expanded. Part of `make matrix`.
"""

import pytest

from tests.conftest import random_ids
from tests.model import families
from toolchain.engine.stage import build_engine
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.quantize.stage import quantize_artifact

pytestmark = [pytest.mark.matrix, pytest.mark.compiles]

EVEN = {"vocab_size": 98}  # TensorRT pads an odd head
MOE = families.MOE | {"moe_intermediate_size": 64}
MECHANISMS = {
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 16, "sliding_window": 10}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "num_hidden_layers": 3, "sliding_window": 14, "sliding_window_pattern": 3},
    ),
    "cohere2": ("cohere2", {"hidden_size": 128, "num_hidden_layers": 4, "sliding_window": 18}),
    "gpt2": ("gpt2", {"hidden_size": 128}),
    "glm4": ("glm4", {"head_dim": 32}),
    "olmo2": ("olmo2", {"hidden_size": 128}),
    "stablelm": ("stablelm", {"hidden_size": 256, "use_parallel_residual": True, "qk_layernorm": True}),
    "qwen3_moe": ("qwen3_moe", MOE | {"num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 32}),
}
SECTIONS = {
    "native": {},
    "plugin": {},
    "integers": {
        "weights": {"format": "int8"},
        "activations": {"format": "int8"},
        "kv_cache": {"format": "int8"},
    },
}
CAPPED = {("gemma2", "native"): "native attention cannot cap its scores"}


def quiet(_):
    pass


@pytest.fixture(scope="module", params=MECHANISMS)
def mechanism(request, tmp_path_factory, make_recipe):
    """The name of a mechanism and its float16 export."""
    folder = tmp_path_factory.mktemp("mechanism")
    family, changes = MECHANISMS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.VARIANTS, request.param, (family, EVEN | changes))
        families.save_variant(folder / "model", request.param)
    return request.param, export_checkpoint(folder / "model", make_recipe(), folder / "export", report=quiet).path


@pytest.mark.parametrize("kind", SECTIONS)
def test_mechanism_compiles_for_one_row(mechanism, kind, tmp_path, monkeypatch, make_recipe):
    """Products of a single row are other kernels, which the check of the build knows as well."""
    name, source = mechanism
    if (name, kind) in CAPPED:
        return
    monkeypatch.setattr("toolchain.quantize.stage._calibration_blocks", lambda *_: random_ids(11, 4, 48))
    monkeypatch.setattr("toolchain.quantize.stage._lineage", lambda exported, _: {"source": exported.identity})
    attention = "native" if kind == "native" else "plugin"
    recipe = make_recipe(
        sections=SECTIONS[kind], attention=attention, targets=["sm89"], batch={"min": 1, "opt": 1, "max": 1}
    )
    if recipe.quantizes:
        source = quantize_artifact(source, recipe, tmp_path / "q", report=quiet).path
    build_engine(source, recipe, tmp_path / "engine", report=quiet)


@pytest.mark.parametrize("kind", SECTIONS)
def test_mechanism_compiles_as_asked_or_is_refused(mechanism, kind, tmp_path, monkeypatch, make_recipe):
    name, source = mechanism
    monkeypatch.setattr("toolchain.quantize.stage._calibration_blocks", lambda *_: random_ids(11, 4, 48))
    monkeypatch.setattr("toolchain.quantize.stage._lineage", lambda exported, _: {"source": exported.identity})
    attention = "native" if kind == "native" else "plugin"
    recipe = make_recipe(sections=SECTIONS[kind], attention=attention, targets=["sm89"])
    if recipe.quantizes:
        source = quantize_artifact(source, recipe, tmp_path / "q", report=quiet).path
    if (name, kind) in CAPPED:
        with pytest.raises(DtoolError, match=CAPPED[name, kind]):
            build_engine(source, recipe, tmp_path / "engine", report=quiet)
        return
    engine = build_engine(source, recipe, tmp_path / "engine", report=quiet)
    layers = engine.json("decoder.json")["num_hidden_layers"]
    for phase in ("prefill", "decode"):
        summary = engine.json("report.json")["engines"][phase]["summary"]["attention"]
        assert summary["fused"] == len(summary["kernels"]) == layers
        assert all(("PluginV3" in row["tactic"]) == (attention == "plugin") for row in summary["kernels"])

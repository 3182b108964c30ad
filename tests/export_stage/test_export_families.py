"""Every family through the exported graphs in ONNX Runtime: prefill, chunked prefill and decode equal Hugging Face."""

import numpy as np
import onnx
import pytest
import torch

from tests.conftest import make_recipe, random_ids
from tests.model.families import CONTEXT_LEN, VARIANTS, save_variant
from tests.rounding import rounding_tolerance
from toolchain.export.stage import export_checkpoint
from toolchain.graph_io import GRAPH_FILES, PHASES
from toolchain.runners.onnx import OnnxRunner

TOKENS, STEPS = 90, 8


def exported_variant(folder, name):
    """The transformers model of a variant and its export, for as many positions as the variant asks."""
    model = save_variant(folder / "model", name)
    recipe = make_recipe(**({"context_len": CONTEXT_LEN[name]} if name in CONTEXT_LEN else {}))
    return model, export_checkpoint(folder / "model", recipe, folder / "onnx", report=lambda _: None)


def check_steps(runner, ids, theirs, chunks, tolerance):
    """Prefill the chunks and decode the rest, every logit against a forward pass of the whole."""
    state = runner.new_state(2, ids.shape[1])
    for begin, end in chunks:
        ours = runner.step(state, ids[:, begin:end], np.full(2, end - begin), "prefill")
        assert np.abs(ours[:, 0] - theirs[:, end - 1]).max() <= tolerance, end
    for i in range(chunks[-1][1], ids.shape[1]):
        ours = runner.step(state, ids[:, i : i + 1], np.ones(2, np.int64), "decode")
        assert np.abs(ours[:, 0] - theirs[:, i]).max() <= tolerance, i


@pytest.mark.parametrize("name", VARIANTS)
def test_exported_graphs_equal_hugging_face(name, tmp_path):
    model, artifact = exported_variant(tmp_path, name)
    for phase in PHASES:
        onnx.checker.check_model(str(artifact.file(GRAPH_FILES[phase])), full_check=True)
    tokens = CONTEXT_LEN.get(name, TOKENS)
    ids = random_ids(7, 2, tokens, vocab=model.config.vocab_size)
    with torch.inference_mode():
        theirs = model(torch.from_numpy(ids)).logits.float().numpy()
    tolerance = rounding_tolerance(model, torch.from_numpy(ids))
    runner, whole = OnnxRunner(artifact), tokens - STEPS
    check_steps(runner, ids, theirs, ((0, whole),), tolerance)
    check_steps(runner, ids, theirs, ((0, 37), (37, whole)), tolerance)


def test_layers_that_differ_in_window_alone_share_one_function(tmp_path):
    _, artifact = exported_variant(tmp_path, "gemma2")
    graph = onnx.load(str(artifact.file(GRAPH_FILES["decode"])), load_external_data=False)
    nodes = [node for node in graph.graph.node if node.op_type == "FusedAttention"]
    assert {onnx.helper.get_node_attr_value(node, "window") for node in nodes} == {0, 10}
    assert [f.name for f in graph.functions] == ["FusedAttention"]


def test_decode_reads_only_the_experts_its_tokens_choose(tmp_path):
    _, artifact = exported_variant(tmp_path, "mixtral")
    picked = {}
    for phase in PHASES:
        graph = onnx.load(str(artifact.file(GRAPH_FILES[phase])), load_external_data=False)
        body = next(f for f in graph.functions if f.name == "Experts")
        picked[phase] = [node.op_type for node in body.node].count("Gather")
    assert picked == {"prefill": 0, "decode": 2, "evaluation": 0}


def test_dense_layers_among_experts_are_traced_as_a_kind_of_their_own(tmp_path):
    _, artifact = exported_variant(tmp_path, "qwen3_moe_mixed")
    graph = onnx.load(str(artifact.file(GRAPH_FILES["decode"])), load_external_data=False)
    mixtures = [node.output[0].split(".")[1] for node in graph.graph.node if node.op_type == "Experts"]
    assert mixtures == ["0", "2"]
    names = {initializer.name for initializer in graph.graph.initializer}
    assert "model.layers.1.mlp.gate_up_proj.weight" in names
    assert "model.layers.2.mlp.experts.gate_up_proj.weight" in names


def test_stored_order_does_not_show_in_the_written_weights(tmp_path):
    """GPT-2 stores matrices the other way round; the artifact has one order for all, and says what was what."""
    from safetensors.torch import load_file

    model, artifact = exported_variant(tmp_path, "gpt2")
    written = load_file(artifact.file("weights.safetensors"))
    theirs = model.transformer.h[1].attn.c_attn.weight.detach().T
    assert torch.equal(written["model.layers.1.self_attn.qkv_proj.weight"], theirs)
    names = artifact.manifest.details["stored_names"]
    assert names["model.layers.0.self_attn.qkv_proj.weight"] == ["transformer.h.0.attn.c_attn.weight"]

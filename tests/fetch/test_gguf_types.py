"""Every number format of GGUF against its published layout, and through the whole conversion."""

import gguf
import numpy as np
import pytest
import torch
from ggml_blocks import FORMATS, numbers, random_blocks
from safetensors import safe_open
from tiny_gguf import byte_vocabulary, llama_cpp_permute, write_gguf
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from toolchain.errors import DtoolError
from toolchain.fetch.gguf_checkpoint import checkpoint_from_gguf
from toolchain.fetch.gguf_file import open_gguf
from toolchain.model.checkpoint import open_checkpoint

WIDTH, HEADS, KV_HEADS = 256, 4, 2
VOCABULARY = len(byte_vocabulary())
KEYS = {
    "block_count": 1, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": WIDTH,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
LAYER = "model.layers.0."
MATRICES = {
    "model.embed_tokens.weight": VOCABULARY,
    "lm_head.weight": VOCABULARY,
    LAYER + "self_attn.q_proj.weight": WIDTH,
    LAYER + "self_attn.k_proj.weight": WIDTH // 2,
    LAYER + "self_attn.v_proj.weight": WIDTH // 2,
    LAYER + "self_attn.o_proj.weight": WIDTH,
    LAYER + "mlp.gate_proj.weight": WIDTH,
    LAYER + "mlp.up_proj.weight": WIDTH,
    LAYER + "mlp.down_proj.weight": WIDTH,
}
NORMS = ["model.norm.weight", LAYER + "input_layernorm.weight", LAYER + "post_attention_layernorm.weight"]


def stored_numbers(kind, rows, rng):
    """Bytes of a matrix as the file has them, and the numbers they mean."""
    if kind in FORMATS:
        blocks = random_blocks(kind, rows, WIDTH, rng)
        return blocks, numbers(kind, blocks)
    values = rng.normal(0, 0.1, (rows, WIDTH)).astype("<f4")
    if kind == "BF16":  # the upper half of a float32
        bits = (values.view("<u4") >> 16).astype("<u2")
        return bits.view(np.uint8), (bits.astype("<u4") << 16).view("<f4")
    values = values.astype({"F32": "<f4", "F16": "<f2"}[kind])
    return values, values


def write_model(path, kind):
    """A llama file whose matrices are all of one format; the numbers by Hugging Face name, q and k back in order."""
    rng = np.random.default_rng(3)
    data = {name: stored_numbers(kind, rows, rng) for name, rows in MATRICES.items()}
    norms = {name: rng.uniform(0.5, 1.5, WIDTH).astype("<f4") for name in NORMS}
    tensors = {name: values for name, (_, values) in data.items()} | norms
    qtype = gguf.GGMLQuantizationType[kind]
    write_gguf(path, "llama", KEYS, tensors, blocks=lambda n, _: (data[n][0], qtype) if n in data else None)
    for name, heads in ((LAYER + "self_attn.q_proj.weight", HEADS), (LAYER + "self_attn.k_proj.weight", KV_HEADS)):
        order = np.argsort(llama_cpp_permute(np.arange(MATRICES[name])[:, None], heads)[:, 0])
        tensors[name] = tensors[name][order]
    return tensors


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *FORMATS])
def test_a_format_means_its_published_layout_and_gives_the_logits_of_those_numbers(tmp_path, kind):
    theirs = write_model(tmp_path / "m.gguf", kind)
    folder = tmp_path / "m"
    folder.mkdir()
    checkpoint_from_gguf(tmp_path / "m.gguf", folder, print)
    with safe_open(folder / "model.safetensors", "np") as stored:
        assert set(stored.keys()) == set(theirs)
        plain = {stored.get_slice(name).get_dtype() for name in MATRICES}
    assert plain == {kind if kind in {"F16", "BF16"} else "F32"}  # what is exact in 16 bits stays in 16
    assert open_checkpoint(folder).config.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, values in theirs.items():
        found = ours.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(found, values, rtol=3e-7, atol=1e-8, err_msg=name)
    reference = LlamaForCausalLM(ours.config).eval()
    reference.load_state_dict({name: torch.from_numpy(v.astype(np.float32)) for name, v in theirs.items()})
    ids = torch.tensor([[1, 40, 41, 42, 43, 44]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, reference.float()(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["IQ4_NL", "TQ1_0", "MXFP4", "F64", "I32"])
def test_a_format_dtool_cannot_read_is_refused_by_name(tmp_path, kind):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    qtype = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[qtype]
    numpy_type = {"F64": np.float64, "I32": np.int32}.get(kind, np.uint8)
    data = np.zeros((4, 256 // elements * size), np.uint8).view(numpy_type)
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=None if kind in {"F64", "I32"} else qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(DtoolError, match=f"1 tensors: blk.0.ffn_up.weight {kind}"):
        open_gguf(tmp_path / "m.gguf")

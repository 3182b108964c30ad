"""Loading is strict: what people's checkpoints really look like, and what must be refused."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import BASE, random_ids, save_tiny
from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Decoder
from toolchain.model.hf import config_from_hf, open_checkpoint, parameter_shapes
from toolchain.model.load import load_decoder
from toolchain.model.rope import inverse_frequencies


@pytest.fixture
def copy(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def logits(folder, ids):
    decoder = load_decoder(folder)
    caches = decoder.new_caches(ids.shape[0], ids.shape[1])
    with torch.inference_mode():
        return decoder(ids, torch.zeros(ids.shape[0], dtype=torch.int64), caches)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_parameter_shapes_are_the_decoders_in_its_order(changes):
    config = config_from_hf({"model_type": "llama", "dtype": "float32"} | BASE | changes, {})
    with torch.device("meta"):
        decoder = Decoder(config)
    theirs = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    assert list(parameter_shapes(config).items()) == list(theirs.items())


def test_head_dim_of_the_config_wins_over_hidden_by_heads(tmp_path):
    save_tiny(tmp_path / "m", head_dim=32)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.config.head_dim == 32
    assert checkpoint.parameters["model.layers.0.self_attn.o_proj.weight"].shape == (64, 128)


def test_tied_matrix_under_either_name_fills_both(tmp_path):
    save_tiny(tmp_path / "m", tie_word_embeddings=True)
    ids = torch.from_numpy(random_ids(0, 2, 9))
    expected = logits(tmp_path / "m", ids)
    edit_tensors(
        tmp_path / "m",
        lambda t: {("lm_head.weight" if n == "model.embed_tokens.weight" else n): v for n, v in t.items()},
    )
    assert torch.equal(logits(tmp_path / "m", ids), expected)


def test_untied_model_without_a_head_is_refused(copy):
    edit_tensors(copy, lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"})
    with pytest.raises(DtoolError, match=r"lm_head\.weight"):
        open_checkpoint(copy)


def test_shards_are_those_of_the_index_whatever_their_names(copy):
    ids = torch.from_numpy(random_ids(1, 1, 9))
    expected = logits(copy, ids)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "extra_part.safetensors": names[9:]}
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, copy / file)
    save_file({"junk": torch.ones(3)}, copy / "consolidated.safetensors")
    index = {"weight_map": {n: file for file, members in parts.items() for n in members}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(copy, ids), expected)
    (copy / "extra_part.safetensors").unlink()
    start = time.perf_counter()
    with pytest.raises(DtoolError, match=f"extra_part.safetensors with {len(names) - 9} tensors"):
        open_checkpoint(copy)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: {n.replace("model.layers.", "transformer.h."): v for n, v in t.items()}, "18 missing"),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2)}, "lora_A"),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias"),
        (lambda t: t | {"model.norm.weight": torch.ones(63)}, "model.norm.weight [63]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(copy, change, text):
    edit_tensors(copy, change)
    with pytest.raises(DtoolError) as failure:
        open_checkpoint(copy)
    assert text in str(failure.value)


def test_stored_rotary_tables_are_noted_and_not_used(copy):
    edit_tensors(copy, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert any("rotary" in note for note in open_checkpoint(copy).notes)
    assert float(inverse_frequencies(open_checkpoint(copy).config)[0]) == 1.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "lama"}, "llama"),
        ({"model_type": None}, "model_type"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "foo"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_configs_dtool_cannot_build_are_refused_by_name(copy, changes, text):
    edit_config(copy, **changes)
    with pytest.raises(DtoolError) as failure:
        open_checkpoint(copy)
    assert text in str(failure.value)


def test_folders_that_are_no_checkpoint_are_refused(tmp_path, copy):
    with pytest.raises(DtoolError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DtoolError, match="an empty folder"):
        open_checkpoint(tmp_path / "empty")
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(DtoolError, match="damaged"):
        open_checkpoint(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(DtoolError, match="no weights"):
        open_checkpoint(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(DtoolError, match="not JSON"):
        open_checkpoint(copy)


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ()])
def test_stored_precision_is_read_from_either_key_or_the_tensors(copy, keys):
    edit_tensors(copy, lambda t: {n: v.bfloat16() for n, v in t.items()})
    edit_config(copy, **({"dtype": None, "torch_dtype": None} | dict.fromkeys(keys, "bfloat16")))
    assert open_checkpoint(copy).config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "second"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 0.193923),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_theta": 10000.0}, 0.193923),
        ({"rope_theta": 500000.0}, 0.193923),
        ({}, 0.316228),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 0.0790569),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 0.0790569),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}}, 0.0790569),
        ({"rope_scaling": None}, 0.316228),
    ],
)
def test_rotary_base_and_scaling_are_found_where_any_version_puts_them(fields, second):
    base = {k: v for k, v in BASE.items() if k != "rope_theta"}
    config = config_from_hf({"model_type": "llama", "dtype": "float32"} | base | fields, {})
    assert float(inverse_frequencies(config)[1]) == pytest.approx(second, rel=1e-5)


def test_llama3_bands_have_their_known_ratios():
    block = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    block["original_max_position_embeddings"] = 64
    document = {"model_type": "llama", "dtype": "float32"} | BASE
    plain = inverse_frequencies(config_from_hf(document, {}))
    scaled = inverse_frequencies(config_from_hf(document | {"rope_scaling": block}, {}))
    expected = torch.tensor([1, 0.772812, 0.130423, 0.125, 0.125, 0.125, 0.125, 0.125])
    torch.testing.assert_close(scaled / plain, expected, rtol=1e-5, atol=0)


def test_llama_2_7b_has_its_known_size():
    config = DecoderConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )
    sizes = [torch.Size(shape).numel() for shape in parameter_shapes(config).values()]
    assert sum(sizes) == 6_738_415_616
    assert config.kv_bytes_per_token_fp16 == 524_288

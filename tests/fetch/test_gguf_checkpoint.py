import json
import sys

import numpy as np
import pytest
from tiny_gguf import HEADS, KV_HEADS, MERGES, llama_cpp_permute, write_tiny_gguf

from toolchain.errors import DtoolError
from toolchain.fetch import gguf_checkpoint, gguf_file
from toolchain.fetch.gguf_checkpoint import undo_rope_permutation
from toolchain.model.checkpoint import open_checkpoint


def checkpoint_from_gguf(path, folder):
    """Convert; what was reported."""
    lines = []
    gguf_checkpoint.checkpoint_from_gguf(path, folder, lines.append)
    return lines


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    return path


def load_tokenizer(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_comes_back_under_its_name(tmp_path, folder, tied):
    from safetensors.numpy import load_file

    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied)
    checkpoint_from_gguf(tiny.path, folder)
    ours = load_file(folder / "model.safetensors")
    assert set(ours) == set(tiny.tensors)  # a tied head is not stored twice
    for name, theirs in tiny.tensors.items():
        np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied


def test_quantized_rows_of_k_are_put_back_after_dequantizing(tmp_path, folder):
    from safetensors.numpy import load_file

    name = "model.layers.1.self_attn.k_proj.weight"
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", quantized=name)
    checkpoint_from_gguf(tiny.path, folder)
    theirs = tiny.tensors[name]
    error = np.abs(load_file(folder / "model.safetensors")[name] - theirs)
    assert 0 < error.max() <= np.abs(theirs).max() / 127


@pytest.mark.parametrize("heads", [HEADS, KV_HEADS])
def test_undo_is_the_inverse_and_not_the_permutation_itself(heads):
    rows = np.arange(heads * 16 * 3, dtype=np.float32).reshape(heads * 16, 3)
    stored = llama_cpp_permute(rows, heads)
    np.testing.assert_array_equal(undo_rope_permutation(stored, heads), rows)
    assert not np.array_equal(undo_rope_permutation(rows, heads), stored)


def test_transformers_loads_the_folder_and_gives_the_logits_of_the_original(tiny_gguf, folder):
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    checkpoint_from_gguf(tiny_gguf.path, folder)
    ours = AutoModelForCausalLM.from_pretrained(folder).eval()
    theirs = LlamaForCausalLM(ours.config).eval()
    theirs.load_state_dict({name: torch.from_numpy(t) for name, t in tiny_gguf.tensors.items()}, strict=False)
    theirs.tie_weights()
    ids = torch.tensor([[1, 40, 41, 42, 43, 44]])
    with torch.no_grad():
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=0)


def test_config_has_the_values_that_were_stored_as_float32(tiny_gguf, folder):
    checkpoint_from_gguf(tiny_gguf.path, folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-05, 10000.0, 16)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_digits_are_split_one_by_one_even_where_a_merge_exists(tiny_gguf, folder):
    checkpoint_from_gguf(tiny_gguf.path, folder)
    assert "1 2" in MERGES
    assert load_tokenizer(folder).encode("the 12").tokens == ["the", "Ġ", "1", "2"]


def test_a_gpt2_tokenizer_keeps_its_digits_together(tmp_path, folder):
    checkpoint_from_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", pre="gpt-2").path, folder)
    assert load_tokenizer(folder).encode("12").tokens == ["12"]


@pytest.mark.parametrize(
    "text",
    ["The 12 cats, the dog.", "你好，世界！", "def f(x):\n\treturn x ** 2\n", "naïve 🙂🎉"],  # noqa: RUF001
)
def test_text_survives_encoding_and_nothing_is_added(tiny_gguf, folder, text):
    from transformers import AutoTokenizer

    checkpoint_from_gguf(tiny_gguf.path, folder)
    ids = load_tokenizer(folder).encode(text).ids
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text)["input_ids"] == ids  # transformers adds no pre-tokenizer, bos or eos of its own
    assert not set(ids) & {0, 1, 2}
    assert tokenizer.decode(ids) == text


def test_chat_template_and_special_tokens_are_one_id_each(tiny_gguf, folder):
    from transformers import AutoTokenizer

    checkpoint_from_gguf(tiny_gguf.path, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the 12"}], tokenize=False)
    ids = tokenizer(prompt)["input_ids"]
    assert (ids[0], ids[-1], ids.count(1), ids.count(2)) == (1, 2, 1, 1)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )


def test_equal_files_give_equal_bytes(tiny_gguf, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for path in folders:
        path.mkdir()
        checkpoint_from_gguf(tiny_gguf.path, path)
    names = sorted(p.name for p in folders[0].iterdir())
    assert names == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_an_unknown_architecture_is_refused_naming_the_known(tmp_path, folder):
    with pytest.raises(DtoolError, match="mamba") as caught:
        checkpoint_from_gguf(write_tiny_gguf(tmp_path / "a.gguf", architecture="mamba").path, folder)
    assert "llama, qwen2, qwen3, qwen3moe, gemma, gemma2, gemma3, phi3" in caught.value.expected
    assert not list(folder.iterdir())


def test_an_unknown_tokenizer_is_left_out_and_it_is_said(tmp_path, folder):
    lines = checkpoint_from_gguf(write_tiny_gguf(tmp_path / "b.gguf", pre="viking").path, folder)
    assert [line for line in lines if "model gpt2 with viking" in line]
    assert not list(folder.glob("tokenizer*"))
    assert any("no tokenizer.json" in note for note in open_checkpoint(folder).notes)


def test_a_missing_tensor_is_named(tmp_path, folder):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(DtoolError, match=f"1 missing: {name} \\(blk.1.ffn_up.weight\\)"):
        checkpoint_from_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", drop=name).path, folder)


def test_an_unknown_tensor_is_named(tmp_path, folder):
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(DtoolError, match=r"1 unknown: blk\.0\.attn_sinks\.weight"):
        checkpoint_from_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", extra=extra).path, folder)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"embedding_length": 96}, "has another shape"),
        ({"feed_forward_length": [96, 96]}, "a positive count for llama.feed_forward_length"),
        ({"attention.head_count": "four"}, "a positive count for llama.attention.head_count"),
        ({"attention.layer_norm_rms_epsilon": "small"}, "a number for llama.attention"),
        ({"rope.scaling.type": "yarn"}, "stretches its rotary frequencies"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_metadata_of_another_model_is_refused(tmp_path, folder, keys, text):
    with pytest.raises(DtoolError, match=text):
        checkpoint_from_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", keys=keys).path, folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"not a model", "another kind of file, of 11 bytes"),
        (b"GGUF\x03\0\0\0", "a file of 8 bytes, cut short"),
        (b"GGUF\x01\0\0\0" + bytes(20), "version 1"),
    ],
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path, folder, content, found):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(DtoolError, match="cannot be read") as failure:
        checkpoint_from_gguf(tmp_path / "x.gguf", folder)
    assert found in failure.value.found


def test_a_byte_changed_anywhere_in_the_header_raises_nothing_but_a_refusal(tiny_gguf, tmp_path, folder):
    data = tiny_gguf.path.read_bytes()
    rng = np.random.default_rng(0)
    texts: list[str] = []
    for _ in range(60):
        changed = bytearray(data)
        changed[int(rng.integers(8, 600))] = int(rng.integers(256))
        (tmp_path / "x.gguf").write_bytes(changed)
        try:
            gguf_checkpoint.checkpoint_from_gguf(tmp_path / "x.gguf", folder, lambda line: None, weights=False)
        except DtoolError as error:
            texts.append(str(error))
    assert texts
    assert not [text for text in texts if "dtype" in text or "array" in text]


@pytest.mark.parametrize("keep", [0.02, 0.2, 0.5, 0.999])
def test_a_cut_file_is_refused_wherever_it_is_cut(tiny_gguf, tmp_path, folder, keep):
    data = tiny_gguf.path.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(keep * len(data))])
    with pytest.raises(DtoolError, match=r"cut\.gguf cannot be read") as failure:
        checkpoint_from_gguf(tmp_path / "cut.gguf", folder)
    assert failure.value.found == f"a file of {int(keep * len(data))} bytes, cut short or damaged"
    assert not list(folder.iterdir())


def move(tiny, path, tensor, offset):
    """A copy of a GGUF file whose table puts one tensor elsewhere."""
    data = bytearray(tiny.path.read_bytes())
    dims = len(next(t for t in gguf_file.open_gguf(tiny.path).reader.tensors if t.name == tensor).shape)
    entry = data.find(tensor.encode()) + len(tensor) + 4 + 8 * dims + 4
    before = int.from_bytes(data[entry : entry + 8], "little")
    data[entry : entry + 8] = offset(before).to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    "offset",
    [lambda _: 0, lambda before: before + 32, lambda before: before - 32, lambda before: before + 1],
    ids=["the first tensor's bytes", "a hole", "an overlap", "not aligned"],
)
def test_a_tensor_that_does_not_follow_the_one_before_is_refused(tiny_gguf, tmp_path, folder, offset):
    """Each has the right size and shape, so that nothing else would tell."""
    move(tiny_gguf, tmp_path / "moved.gguf", "blk.0.attn_q.weight", offset)
    with pytest.raises(DtoolError, match=r"damaged[\s\S]*blk\.0\.attn_q\.weight right after"):
        checkpoint_from_gguf(tmp_path / "moved.gguf", folder)
    assert list(folder.iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(tiny_gguf, folder, monkeypatch):
    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(gguf_checkpoint.shutil, "disk_usage", lambda path: full)
    with pytest.raises(DtoolError, match="no room to unpack"):
        checkpoint_from_gguf(tiny_gguf.path, folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("tied", [True, False])
def test_pieces_of_any_size_give_the_same_file(tmp_path, folder, tied, monkeypatch):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied, quantized="model.layers.0.mlp.up_proj.weight").path
    checkpoint_from_gguf(path, folder)
    whole = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(gguf_file, "PIECE_ELEMENTS", 200)  # some three rows
    checkpoint_from_gguf(path, folder)
    assert (folder / "model.safetensors").read_bytes() == whole


def test_importing_the_module_loads_no_heavy_package():
    import subprocess

    code = "import sys, toolchain.fetch.models, toolchain.fetch.gguf_checkpoint, toolchain.fetch.calibration\n"
    code += "print({'torch', 'transformers', 'gguf', 'numpy', 'huggingface_hub'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

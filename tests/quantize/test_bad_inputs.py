"""What cannot be quantized is refused before the walk and before weights are read, with what to do; or told by name."""

import json
import shlex
import shutil
import time

import pytest
import torch

from tests.conftest import make_recipe, save_tiny, seal
from tests.test_cli import call
from toolchain import tensor_file
from toolchain.artifact import open_artifact
from toolchain.engine.preflight import check_export, check_formats, engine_refusals, quantized_notes
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.model.config import DecoderConfig
from toolchain.numerics import smallest_scale
from toolchain.pipeline import run_pipeline
from toolchain.quantize import layer as layer_module
from toolchain.quantize import stored as stored_module
from toolchain.quantize import stream as stream_module
from toolchain.quantize.stage import quantize_artifact, quantized_matrices
from toolchain.recipe import load_recipe
from toolchain.tensor_file import read_header, read_tensor

STATIC = {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"}}
RTX = {
    "compute_dtype": "float16",
    "engine": {
        "backend": "tensorrt-rtx",
        "targets": ["sm89"],
        "kv_capacity": 64,
        "prompt_len": {"min": 1, "opt": 8, "max": 64},
    },
}
GOOD = '{"text": "' + "some words of a text " * 40 + '"}\n'


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Reading a weight, or a layer, fails the test."""

    def read(*_):
        pytest.fail("weights were read")

    for module in (tensor_file, layer_module, stream_module, stored_module):
        monkeypatch.setattr(module, "read_tensor", read)
    monkeypatch.setattr("toolchain.export.stage.export_checkpoint", read)


@pytest.fixture
def any_backend(monkeypatch):
    """Refusals must not depend on what is installed here."""
    monkeypatch.setattr("toolchain.engine.preflight.require_backend", lambda _: None)


def calibration(path, **changes):
    return {"data": str(path), "samples": 2, "seq_len": 64} | changes


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


PATTERNS = {
    "weights.skip": {"weights": {"format": "int8", "skip": ["lm_haed"]}},
    "weights.skip ''": {"weights": {"format": "int8", "skip": [""]}},
    "activations.skip": STATIC | {"activations": STATIC["activations"] | {"skip": ["model.layers.9.*"]}},
    "kv_cache.skip": {"kv_cache": {"format": "int8", "skip": ["model.layers.7.self_attn"]}},
    "overrides.0.match": {
        "weights": {"format": "int8"},
        "overrides": [{"match": ["*.mpl.*"], "weights": {"clip": "amax"}}],
    },
}
TEXTS = {
    "empty": ("", ["is empty", "no line"]),
    "short": ('{"text": "a few words"}\n', ["too short", "2 blocks"]),
    "not_json": (GOOD + "plain words\n", ["line 2 is not a passage", "Expecting value"]),
    "no_text": (GOOD + '{"body": "x"}\n', ["line 2 is not a passage", 'no "text"']),
    "binary": (b"\xff\xfe\x00", ["cannot be read", "UTF-8"]),
}
SHAPES = {
    "long": ({"seq_len": 512}, ["longer than the model's positions", "at most 128", "512"]),
}


def refusals():
    """Sections, or text and the changes of [calibration], and what the message says."""
    for key, sections in PATTERNS.items():
        yield pytest.param(sections, None, {}, [key, "matches no"], id=key)
    for name, (text, said) in TEXTS.items():
        yield pytest.param(STATIC, text, {}, said, id=name)
    for name, (changes, said) in SHAPES.items():
        yield pytest.param(STATIC, GOOD, changes, said, id=name)
    yield pytest.param(STATIC, None, {}, ["no text at", "no such file"], id="missing")


def refusal_of(by, exported, model, recipe, out):
    """What `dtool quantize` of an export, or `dtool run` of a model, says; all three parts, and nothing written."""
    with pytest.raises(DtoolError) as refusal:
        _start(by, exported, model, recipe, out)
    assert refusal.value.expected
    assert refusal.value.found
    assert refusal.value.fix
    assert list(out.parent.glob("*q*")) == []
    return str(refusal.value)


def _start(by, exported, model, recipe, out):
    if by == "quantize":
        quantize_artifact(exported, recipe, out, report=lambda _: None)
    else:
        run_pipeline(model, recipe, out, bench=False, report=lambda _: None)


@pytest.mark.parametrize("by", ["quantize", "run"])
@pytest.mark.parametrize(("sections", "text", "changes", "said"), list(refusals()))
@pytest.mark.usefixtures("nothing_is_read")
def test_refused_before_weights_are_read(by, sections, text, changes, said, tiny_text, text_export, texts, tmp_path):
    path = tmp_path / "text.jsonl" if text is None else write(tmp_path / "text.jsonl", text)
    parity = {"data": str(texts["evaluation"])}
    recipe = make_recipe(**sections, calibration=calibration(path, **changes), parity=parity)
    found = refusal_of(by, text_export, tiny_text, recipe, tmp_path / "q")
    assert all(part in found for part in said), found


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A model of 80 channels, which no group of 128, 64 or 32 cuts, and its export."""
    folder = tmp_path_factory.mktemp("odd")
    save_tiny(folder / "m", hidden_size=80, num_attention_heads=5, num_key_value_heads=1)
    export_checkpoint(folder / "m", make_recipe(), folder / "x", report=lambda _: None)
    return folder


@pytest.mark.parametrize("by", ["quantize", "run"])
@pytest.mark.usefixtures("nothing_is_read", "any_backend")
def test_groups_that_cut_no_matrix_are_refused_before_weights_are_read(by, odd, texts, tmp_path):
    recipe = make_recipe(**RTX, weights={"format": "int4"}, parity={"data": str(texts["evaluation"])})
    found = refusal_of(by, odd / "x", odd / "m", recipe, tmp_path / "q")
    assert all(part in found for part in ("cannot be stored as int4", "128, 64, 32", "80 inputs", "weights.skip"))


@pytest.mark.parametrize("by", ["quantize", "run"])
def test_chat_without_a_template_is_refused_before_weights_are_read(
    by, nothing_is_read, tiny_text, text_export, texts, tmp_path
):
    places = {"m": tiny_text, "x": text_export}
    for name, source in places.items():
        shutil.copytree(source, tmp_path / name)
    config = tmp_path / "m" / "tokenizer_config.json"
    document = json.loads(config.read_text())
    del document["chat_template"]
    config.write_text(json.dumps(document))
    (tmp_path / "x" / "tokenizer" / "chat_template.jinja").unlink()
    chat = calibration(texts["calibration"], chat=True)
    recipe = make_recipe(**STATIC, calibration=chat, parity={"data": str(texts["evaluation"])})
    found = refusal_of(by, seal(tmp_path / "x"), tmp_path / "m", recipe, tmp_path / "q")
    assert "has no chat template" in found
    assert "calibration.chat=false" in found


def test_conversations_calibrate_and_are_not_plain_text(text_export, texts, tmp_path):
    found = {}
    for chat in (True, False):
        recipe = make_recipe(**STATIC, calibration=calibration(texts["calibration"], chat=chat))
        artifact = quantize_artifact(text_export, recipe, tmp_path / f"{chat}", report=lambda _: None)
        found[chat] = artifact.json("quantization.json")["calibration"]
    assert found[True]["tokens"] == found[False]["tokens"] == 2 * 64
    assert found[True]["distinct_tokens"] > found[False]["distinct_tokens"]


def test_ids_the_model_does_not_have_are_refused(text_export, texts, tmp_path):
    folder = tmp_path / "x"
    shutil.copytree(text_export, folder)
    document = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    document["model"]["vocab"]["z"] = 9999
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(document))
    recipe = make_recipe(**STATIC, calibration=calibration(texts["calibration"]))
    with pytest.raises(DtoolError, match="is not the model's") as refusal:
        quantize_artifact(seal(folder), recipe, tmp_path / "q", report=lambda _: None)
    assert "id 9999" in refusal.value.found


@pytest.mark.parametrize("by", ["quantize", "run"])
@pytest.mark.parametrize(
    "sections",
    [
        {"weights": {"format": "int8", "skip": ["*"]}},
        {"weights": {"format": "int8"}, "overrides": [{"match": ["*"], "weights": {"format": "none"}}]},
    ],
    ids=["skip", "override"],
)
@pytest.mark.usefixtures("nothing_is_read")
def test_a_recipe_that_leaves_everything_out_is_refused(by, sections, tiny_text, text_export, texts, tmp_path):
    recipe = make_recipe(**sections, parity={"data": str(texts["evaluation"])})
    assert "quantizes nothing" in refusal_of(by, text_export, tiny_text, recipe, tmp_path / "q")


@pytest.mark.parametrize("name", ["int8", "int8-rtx", "int4-rtx"])
@pytest.mark.parametrize("changes", [[], ['overrides=[{match=["*"], weights={format="int8"}}]']])
def test_the_way_to_an_engine_in_float_is_a_valid_recipe_of_one(name, changes, text_export):
    changes = [*changes, 'weights.skip=["*"]', "kv_cache.format=none"]
    with pytest.raises(DtoolError, match="quantizes nothing") as refusal:
        quantized_matrices(open_artifact(text_export), load_recipe(name, changes))
    sets = [part for part in shlex.split(refusal.value.fix.partition(" of the export, ")[2]) if part != "--set"]
    assert not load_recipe(name, [*changes, *sets]).quantizes


@pytest.mark.parametrize("key", ["weights.format", "kv_cache.format"])
@pytest.mark.parametrize("command", ["quantize", "run"])
@pytest.mark.usefixtures("nothing_is_read", "any_backend")
def test_a_format_a_target_lacks_is_refused_at_once(command, key, tiny_text, text_export, tmp_path):
    recipe = ["-r", "int8-rtx", "--set", f"{key}=fp8_e4m3", "--set", 'engine.targets=["sm89", "sm80"]']
    recipe += ["--set", "activations.format=none"]
    recipe += ["--set", "compute_dtype=float32"] if command == "quantize" else []
    source = text_export if command == "quantize" else tiny_text
    begin = time.process_time()
    _, err = call(command, source, *recipe, "-o", tmp_path / "q", code=1)
    assert time.process_time() - begin < 2
    said = ["sm80 (A100, A30) has no fp8_e4m3", "expected:", f"{key} fp8_e4m3; targets sm89, sm80", "leave that target"]
    assert all(part in err for part in said), err
    assert not (tmp_path / "q").exists()


def test_a_format_of_an_override_counts_too():
    overrides = [{"match": ["*"], "weights": {"format": "fp8_e4m3"}}]
    recipe = make_recipe(**RTX, weights={"format": "int8"}, overrides=overrides)
    check_formats(recipe)
    with pytest.raises(DtoolError, match=r"sm80 .* has no fp8_e4m3"):
        check_formats(recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"targets": ("sm80",)})}))


INT4, INT8 = {"format": "int4"}, {"format": "int8"}


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"overrides": [{"match": ["*.mlp.*"], "weights": INT4}, {"match": ["*"], "weights": INT8}]}, ()),
        ({"overrides": [{"match": ["*.mlp.*"], "weights": INT4}, {"match": ["*.mlp.*"], "weights": INT8}]}, ()),
        ({"weights": INT4, "overrides": [{"match": ["*"], "weights": INT8}]}, ()),
        ({"weights": INT4 | {"skip": ["*"]}, "kv_cache": INT8}, ()),
        ({"overrides": [{"match": ["*.mlp.*"], "weights": INT4}, {"match": ["*"], "weights": {"clip": "amax"}}]}, (0,)),
        ({"overrides": [{"match": ["*.mlp.*"], "weights": INT4}, {"match": ["*"], "weights": INT4}]}, (1,)),
        ({"overrides": [{"match": ["*.mlp.*"], "weights": INT4}, {"match": ["*up*"], "weights": INT4}]}, (0, 1)),
        ({"overrides": [{"match": ["*.mlp.*"], "weights": INT4}, {"match": ["*.mlp.[du]*"], "weights": INT8}]}, (0,)),
    ],
)
def test_a_format_that_later_ones_hide_in_any_model_is_not_refused(sections, keys):
    recipe = make_recipe(**sections)
    refusals = list(engine_refusals(recipe))
    named = " and ".join(f"overrides.{i}.weights.format" for i in keys)
    assert [refusal.problem for refusal in refusals] == [f"engine.backend onnxruntime cannot take {named} int4"] * bool(
        keys
    )
    if keys:
        assert refusals[0].fix.startswith(" ".join(f"--set overrides.{i}.weights.format=int8" for i in keys) + ", or")


def test_where_the_model_is_known_its_matrices_tell_the_formats(text_export):
    overrides = [{"match": ["*.down_proj"], "weights": INT4}, {"match": ["*.mlp.[du]*"], "weights": INT8}]
    recipe = make_recipe(weights=INT8, overrides=overrides)
    assert len(list(engine_refusals(recipe))) == 1
    exported = open_artifact(text_export)
    matrices = quantized_matrices(exported, recipe)
    config = DecoderConfig.model_validate(exported.json("decoder.json"))
    assert quantized_notes(recipe, config, matrices) == []
    check_export(exported, recipe, matrices)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (RTX | {"compute_dtype": "float32"}, "compute_dtype float16 or bfloat16"),
        ({"weights": {"format": "fp8_e4m3"}}, "weights.format none or int8"),
        ({"compute_dtype": "bfloat16"}, "compute_dtype float32"),
        (RTX | {"kv_cache": {"format": "int8"}}, "kv_cache.format none"),
    ],
)
@pytest.mark.usefixtures("nothing_is_read", "any_backend")
def test_run_finds_what_its_engine_cannot_take_before_the_export(sections, said, tiny_text, texts, tmp_path):
    recipe = make_recipe(**sections, parity={"data": str(texts["evaluation"])})
    assert f"expected: {said}\n" in refusal_of("run", None, tiny_text, recipe, tmp_path / "q")


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        (["weights.format=int4", "weights.granularity=group"], ["backend onnxruntime cannot take weights.format int4"]),
        (["kv_cache.format=fp8_e4m3"], ["backend onnxruntime cannot take kv_cache.format fp8_e4m3"]),
        (["engine.backend=tensorrt-rtx", 'engine.targets=["sm89"]', "compute_dtype=float16"],
         ["tensorrt-rtx with native attention cannot take kv_cache.format int8"]),
        (['overrides=[{match=["*.mlp.*"], weights={format="int4"}}]'],
         ["backend onnxruntime cannot take overrides.0.weights.format int4"]),
        (['overrides=[{match=["*.mlp.*"], weights={format="int4"}}, {match=["*.mlp.*"], weights={format="int8"}}]'],
         []),
        (['overrides=[{match=["*.layers.*"], weights={format="int4"}}, {match=["*qkv*"], weights={format="int4"}}]'],
         ["cannot take overrides.0.weights.format and overrides.1.weights.format int4: "]),
        (['overrides=[{match=["*.mlp.*"], weights={format="int4"}}, {match=["*"], weights={format="int4"}}]'],
         ["cannot take overrides.1.weights.format int4: "]),
        (['overrides=[{match=["lm_head"], weights={format="int4"}}]'], []),
        ([], []),
    ],
)  # fmt: skip
def test_quantize_notes_first_what_no_engine_of_the_recipe_takes(changes, noted, text_export, tiny_text, tmp_path):
    if "compute_dtype=float16" in changes:
        text_export = tmp_path / "half"
        export_checkpoint(tiny_text, make_recipe(compute_dtype="float16"), text_export, report=lambda _: None)
    (tmp_path / "q").mkdir()  # which is in the way of the work
    sets = [part for change in changes for part in ("--set", change)]
    _, err = call("quantize", text_export, "-r", "int8", *sets, "-o", tmp_path / "q", code=1)
    told = [line for line in err.splitlines() if "build-engine will refuse it" in line]
    assert len(told) == len(noted)
    assert all(part in line and "or use " in line for part, line in zip(noted, told, strict=True)), told


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("smoothing", "alpha", 2.0),
        ("smoothing", "alpha", -0.1),
        ("smoothing", "alpha", float("nan")),
        ("calibration", "samples", 0),
        ("calibration", "samples", -4),
        ("calibration", "seq_len", 1),
        ("calibration", "batch", 0),
        ("calibration", "seed", -1),
        ("weights", "group_size", 48),
        ("weights", "refinements", -1),
        ("activations", "excess_channels", -2),
        ("parity", "blocks", 0),
    ],
)
def test_absurd_numbers_are_refused_by_their_key(section, key, value):
    with pytest.raises(DtoolError, match=rf"{section}\.{key}\n.*expected: .*\n.*found: +{value}\n.*to do: "):
        make_recipe(**{section: {key: value}})


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("matrix", ["mlp.up_proj", "self_attn.k_proj"], ids=["inf", "nan"])
def test_activations_that_are_not_finite_are_found_at_their_layer(matrix, tmp_path):
    """Finite weights whose products are not; others the export refuses."""
    model = save_tiny(tmp_path / "m")
    with torch.no_grad():
        model.model.layers[1].get_submodule(matrix).weight[3] = 3e38
    model.save_pretrained(tmp_path / "m")
    export_checkpoint(tmp_path / "m", make_recipe(), tmp_path / "x", report=lambda _: None)
    with pytest.raises(DtoolError, match="layer 1 gives inf or NaN") as refusal:
        quantize_artifact(tmp_path / "x", make_recipe(**STATIC), tmp_path / "q", report=lambda _: None)
    assert "values of its output" in refusal.value.found
    assert refusal.value.expected
    assert refusal.value.fix
    assert not (tmp_path / "q").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """In float16, with a row of one matrix, and all that enters another, too small for a scale of that type."""
    folder = tmp_path_factory.mktemp("small")
    model = save_tiny(folder / "m")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[2] *= 1e-5
        model.model.layers[1].mlp.up_proj.weight *= 1e-4
    model.save_pretrained(folder / "m")
    export_checkpoint(folder / "m", make_recipe(compute_dtype="float16"), folder / "x", report=lambda _: None)
    return folder / "x"


@pytest.mark.usefixtures("random_calibration")
def test_scales_below_the_half_type_are_named_and_stay_finite(small, tmp_path):
    lines = []
    recipe = make_recipe(compute_dtype="float16", **STATIC)
    artifact = quantize_artifact(small, recipe, tmp_path / "q", report=lines.append)
    warned = [line for line in lines if line.startswith("warning: ")]
    assert any("layers.0.self_attn.o_proj: 1 scales are below what float16 holds" in line for line in warned), warned
    assert any("layers.1.mlp.down_proj: its input reaches" in line for line in warned), warned
    entries = read_header(artifact.file("weights.safetensors"))
    scales = [read_tensor(entry) for name, entry in entries.items() if name.endswith("_scale")]
    assert all(bool((s >= smallest_scale(torch.float16)).all() and torch.isfinite(s).all()) for s in scales)
    assert len(artifact.json("quantization.json")["warnings"]) == len(warned)


@pytest.mark.usefixtures("random_calibration")
def test_damaged_weights_are_found_before_the_walk(exported, tmp_path, monkeypatch):
    folder = tmp_path / "x"
    shutil.copytree(exported, folder)
    with (folder / "weights.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x55")
    monkeypatch.setattr("toolchain.quantize.stage._write_weights", lambda *_: pytest.fail("walked"))
    with pytest.raises(DtoolError, match="is damaged"):
        quantize_artifact(folder, make_recipe(**STATIC), tmp_path / "q", report=lambda _: None)

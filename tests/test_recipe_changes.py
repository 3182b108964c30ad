"""`--set`: what it reaches, and what it refuses."""

import pytest

from toolchain.errors import DtoolError
from toolchain.recipe import load_recipe
from toolchain.recipe_faults import OVERRIDES_SET


def test_set_overrides_values_and_creates_sections():
    recipe = load_recipe("fp32", ["weights.format=int8", "bench.prompt_lens=[8, 16]", "calibration.data=my text.jsonl"])
    assert recipe.weights.format == "int8"
    assert recipe.bench.prompt_lens == (8, 16)
    assert recipe.calibration.data == "my text.jsonl"


def test_set_reaches_into_lists(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'schema_version = 1\nabout = "x"\n[weights]\nformat = "int8"\nskip = ["a", "b"]\n'
        '[[overrides]]\nmatch = ["c"]\nweights.clip = "search"\n'
    )
    recipe = load_recipe(str(path), ["overrides.0.weights.format=int4", "weights.skip.1=d"])
    assert recipe.overrides[0].weights == {"clip": "search", "format": "int4"}
    assert recipe.weights.skip == ("a", "d")
    for key, found in (("overrides.1.weights.format", "1"), ("overrides.x.match", "x"), ("weights.skip.2", "2")):
        with pytest.raises(DtoolError, match="no place in it") as failure:
            load_recipe(str(path), [f"{key}=int8"])
        assert failure.value.found == found


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        (["weights.skip.0=lm_head"], """--set 'weights.skip=["lm_head"]'"""),
        (["bench.prompt_lens=[]", "bench.prompt_lens.0=16"], "--set 'bench.prompt_lens=[16]'"),
        (["overrides=[]", "overrides.0.weights.format=int4"], OVERRIDES_SET),
        (["overrides.0.weights.format=int4"], OVERRIDES_SET),
        (["engine.targets.0=sm89"], 'set engine.targets to ["sm89"]'),
    ],
)
def test_a_place_of_an_empty_list_is_told_with_the_list_that_is_meant(changes, fix):
    with pytest.raises(DtoolError) as failure:
        load_recipe("int8", changes)
    assert fix in failure.value.fix


@pytest.mark.parametrize("override", ["=int8", " =int8", ".=1", "weights..format=int8", "weights.=1", ".weights=1"])
def test_an_empty_key_or_part_of_one_is_refused(override):
    with pytest.raises(DtoolError, match=r"names no key|has an empty part") as failure:
        load_recipe("int8", [override])
    assert failure.value.found == repr(override.partition("=")[0])
    assert "weights.format=int8" in failure.value.fix


@pytest.mark.parametrize("override", ["weights.format", "compute_dtype.x=1", "weights.skpi=[]"])
def test_bad_overrides_are_refused(override):
    with pytest.raises(DtoolError):
        load_recipe("fp32", [override])


@pytest.mark.parametrize(
    "override",
    [
        "context_len=true", 'context_len="5"', "context_len=5.5", "engine.batch.max=true", "bench.prompt_lens=[true]",
        "calibration.samples=true", "engine.refit=1", 'engine.refit="yes"', 'parity.fake_quant.kl_mean="0.1"',
        "parity.fake_quant.kl_mean=true", "schema_version=true",
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_its_key(override):
    with pytest.raises(DtoolError, match=override.partition("=")[0].replace(".", r"\.")):
        load_recipe("fp32", [override])

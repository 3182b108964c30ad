"""One thread or several: the same artifacts, byte for byte, for every kind of recipe."""

import pytest
import torch

from tests.conftest import make_recipe, save_tiny
from toolchain.engine.stage import build_engine
from toolchain.export.stage import export_checkpoint
from toolchain.quantize.inverse_factor import inverse_factor_
from toolchain.quantize.pieces import add_product, fixed_pieces, in_pieces, matrix_product, squared_length
from toolchain.quantize.stage import quantize_artifact

GPTQ = {"algorithm": "gptq", "clip": "search"}
ROTATION = {"stream": True, "values": True, "feed_forward": True}
INT8, FP8 = {"format": "int8"}, {"format": "fp8_e4m3"}
STATIC = {"granularity": "tensor"}
KINDS = {
    "int8": {"weights": INT8 | {"skip": []}, "kv_cache": INT8},
    "int8_clip": {"weights": INT8 | {"clip": "search"}, "kv_cache": INT8 | {"scale": "mse"}},
    "w8a8": {"weights": INT8 | {"skip": []}, "activations": INT8, "kv_cache": INT8},
    "w8a8_smooth": {
        "weights": INT8,
        "activations": INT8 | STATIC | {"excess_channels": 4},
        "smoothing": {"algorithm": "smoothquant", "alpha": "search", "keys": True},
        "kv_cache": INT8,
    },
    "w8a8_gptq": {
        "weights": INT8 | GPTQ | {"skip": []},
        "activations": INT8 | {"center": True},
        "rotation": ROTATION,
        "kv_cache": INT8 | {"granularity": "token"},
    },
    "fp8": {"weights": FP8, "activations": FP8 | STATIC, "kv_cache": FP8},
    "fp8_gptq": {
        "weights": FP8 | GPTQ,
        "activations": FP8 | STATIC | {"center": True},
        "calibration": {"inputs": "quantized"},
    },
    "int4": {"weights": {"format": "int4", "group_size": 32}, "kv_cache": INT8},
    "int4_gptq": {
        "weights": {"format": "int4", "group_size": 32, "refinements": 4} | GPTQ,
        "activations": {"center": True},
        "rotation": ROTATION,
        "calibration": {"inputs": "quantized"},
    },
}
WITHOUT_KERNEL = {"fp8", "fp8_gptq", "int4", "int4_gptq"}
"""Kinds that ONNX Runtime's backend does not build."""


@pytest.fixture
def threads():
    """Set how many threads torch has; as before at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def quiet(_):
    """Report nothing."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """The export of one model with one thread, and with three.

    Its matrices are large enough for kernels to split them, of sizes that no split divides.
    """
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 288, "intermediate_size": 416, "num_attention_heads": 6, "num_key_value_heads": 3}
    save_tiny(folder / "model", **sizes, head_dim=48, vocab_size=331)
    before, made = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        made.append(export_checkpoint(folder / "model", make_recipe(), folder / str(count), report=quiet))
    torch.set_num_threads(before)
    return made


def test_an_export_is_the_same_with_one_thread_as_with_several(exports):
    alone, together = exports
    assert together.manifest.files == alone.manifest.files
    assert together.identity == alone.identity


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("kind", KINDS)
def test_artifacts_are_the_same_with_one_thread_as_with_several(kind, exports, threads, tmp_path):
    recipe, found = make_recipe(**KINDS[kind]), []
    for count in (1, 3):
        threads(count)
        folder = tmp_path / str(count)
        made = [quantize_artifact(exports[0].path, recipe, folder / "quantized", report=quiet)]
        if kind not in WITHOUT_KERNEL:
            made.append(build_engine(folder / "quantized", recipe, folder / "engine", report=quiet))
        assert torch.get_num_threads() == count
        found.append([(artifact.manifest.files, artifact.identity) for artifact in made])
    assert found[1] == found[0]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_of_products_and_factors_do_not_depend_on_the_number_of_threads(count, threads):
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(1000, 517, generator=generator), torch.randn(517, 333, generator=generator)
    moments = (left.double().mT @ left.double()).float()

    def compute(number):
        threads(number)
        with fixed_pieces():
            factor, target = moments.double(), torch.ones(1000, 333)
            assert inverse_factor_(factor)
            add_product(target, left, right, factor=-1)
            lengths = [squared_length(left), squared_length(left, moments)]
            products = [matrix_product(left, right), matrix_product(left, right[:, 0])]
            return [factor, target, *products, torch.tensor(lengths, dtype=torch.float64)]

    for ours, alone in zip(compute(count), compute(1), strict=True):
        assert torch.equal(ours, alone)


def test_products_in_pieces_are_the_products(threads):
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(3, 700, 300, generator=generator), torch.randn(300, 900, generator=generator)
    threads(2)
    with fixed_pieces():
        ours, vector = matrix_product(left, right), matrix_product(left, right[:, 0])
        length = squared_length(left[0], right[:, :300])
    torch.testing.assert_close(ours, left @ right)
    torch.testing.assert_close(vector, left @ right[:, 0])
    assert length == pytest.approx(float(((left[0] @ right[:, :300]) * left[0]).double().sum()), rel=1e-4)


@pytest.mark.parametrize("width", [1, 127, 128, 129, 300])
def test_the_factor_is_that_of_the_inverse(width):
    inputs = torch.randn(2 * width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    moments = inputs.mT @ inputs
    ours = moments.clone()
    assert inverse_factor_(ours)
    torch.testing.assert_close(ours, torch.linalg.cholesky(torch.linalg.inv(moments), upper=True))


def test_what_is_not_positive_definite_has_no_factor():
    matrix = torch.eye(300, dtype=torch.float64)
    matrix[3, 3] = -1e-3
    assert not inverse_factor_(matrix)


def test_pieces_have_one_thread_each_and_an_error_of_one_is_raised(threads):
    threads(2)
    with fixed_pieces():
        assert list(in_pieces(lambda _: torch.get_num_threads(), range(5))) == [1] * 5
        with pytest.raises(ZeroDivisionError):
            list(in_pieces(lambda x: 1 / x, range(-2, 3)))
        nested = in_pieces(lambda x: sum(in_pieces(lambda y: x * y, range(10))), range(10))
        assert list(nested) == [45 * x for x in range(10)]
    assert torch.get_num_threads() == 2

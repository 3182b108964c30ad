"""A tiny tied checkpoint with a tokenizer, its export, and recipes over seeded words."""

import pytest

from tests.conftest import make_recipe
from toolchain.export.stage import export_checkpoint


@pytest.fixture(scope="session")
def text_export(tiny_text, tmp_path_factory):
    out = tmp_path_factory.mktemp("search") / "export"
    export_checkpoint(tiny_text, make_recipe(), out, report=lambda _: None)
    return out


@pytest.fixture
def base(texts):
    """base(**sections): a recipe whose calibration text is the seeded words."""

    def make(**sections):
        calibration = {"data": str(texts["calibration"]), "samples": 4, "seq_len": 48}
        return make_recipe(calibration=calibration, **({"weights": {"format": "int8", "skip": []}} | sections))

    return make

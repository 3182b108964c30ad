"""Recipes over seeded words."""

import pytest

from tests.conftest import make_recipe


@pytest.fixture
def base(texts):
    """base(**sections): a recipe whose calibration text is the seeded words."""

    def make(**sections):
        calibration = {"data": str(texts["calibration"]), "samples": 4, "seq_len": 48}
        return make_recipe(calibration=calibration, **({"weights": {"format": "int8", "skip": []}} | sections))

    return make

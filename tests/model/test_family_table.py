"""The README's table of families is the one the tests give."""

from pathlib import Path

from tests.model.family_table import family_table
from toolchain.model.hf import FAMILIES


def test_readme_holds_the_table_made_from_the_tests():
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert family_table() in readme, "print it anew: python -m tests.model.family_table"


def test_every_family_has_a_tested_variant():
    table = family_table()
    assert [name for name in FAMILIES if f"| `{name}` |" not in table] == []

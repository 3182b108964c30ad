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


def test_no_code_outside_the_families_and_the_gguf_reader_names_a_model():
    """A model's name as a value would be a branch that the table of families does not show."""
    import ast

    root = Path(__file__).parents[2] / "toolchain"
    allowed = (root / "model" / "hf", root / "fetch")
    names = set(FAMILIES) - {"opt"}  # also TensorRT's word for the size a profile is tuned for
    found = [
        f"{path.relative_to(root)}:{node.lineno} {node.value}"
        for path in root.rglob("*.py")
        if not any(folder in path.parents for folder in allowed)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]
    assert found == []

"""The README's recipe is one, and shows every key there is and every value a key may have."""

import re
import tomllib
import typing
from pathlib import Path

import pytest

from toolchain.recipe import Recipe, parse_recipe
from toolchain.recipe_sections import Section

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
BLOCK = README.partition("```toml\n")[2].partition("```")[0]
SECTIONS = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def lines():
    """Each line of the block with the section it stands in, at the top "" ."""
    section = ""
    for line in BLOCK.splitlines():
        if line.startswith("["):
            section = line.partition("#")[0].strip().strip("[]")
        yield section, line


def choices(annotation):
    """The values of a key that takes some alone."""
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [value for part in typing.get_args(annotation) for value in choices(part)]


def test_the_example_is_a_recipe():
    parse_recipe(tomllib.loads(BLOCK), "README.md")
    assert len(SECTIONS) > 7


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_section_is_shown_with_its_values(section):
    shown = {line.partition(" =")[0]: line for name, line in lines() if name == section}
    more = README[README.index("More of `[engine]`") :].partition("\n\n")[0] if section == "engine" else ""
    nested = {name.partition(".")[2] for name, _ in lines() if name.startswith(f"{section}.")}
    for key, field in SECTIONS[section].model_fields.items():
        assert key in shown or key in nested or f"`{key}`" in more, key
        words = set(re.findall(r"[\w-]+", shown.get(key, "")))
        assert not words or set(choices(field.annotation)) <= words, key


def test_every_key_of_a_recipe_is_shown():
    shown = {line.partition(" =")[0] for name, line in lines() if not name}
    assert set(Recipe.model_fields) <= shown | {name for name, _ in lines()}

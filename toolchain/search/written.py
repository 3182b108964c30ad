"""A recipe as TOML: what was said in it, in the order of its fields; equal recipes give equal bytes."""

import json
from typing import Any

from toolchain.recipe import Recipe

WIDTH = 110


def recipe_text(recipe: Recipe) -> str:
    """The TOML of a recipe; `parse_recipe` of it is that recipe."""
    document = recipe.model_dump(mode="json", exclude_unset=True)
    lines = [f"{key} = {_value(value)}" for key, value in document.items() if not isinstance(value, dict | list)]
    for key, value in document.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *_pairs(value)]
        elif isinstance(value, list):
            for item in value:
                lines += ["", f"[[{key}]]", *_pairs(item)]
    return "\n".join(lines) + "\n"


def _pairs(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_value(value, room=WIDTH - len(key) - 3)}" for key, value in table.items() if value is not None]


def _value(value: Any, room: int = WIDTH) -> str:
    """One value; lists that are too long for a line have one item a line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list):
        items = [_value(item) for item in value]
        line = f"[{', '.join(items)}]"
        return line if len(line) <= room else "[\n" + "".join(f"    {item},\n" for item in items) + "]"
    return repr(value)

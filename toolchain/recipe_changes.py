"""`--set key=value`: a change of a recipe's document before it is read as a recipe."""

import tomllib
from typing import Any

from toolchain.errors import DtoolError
from toolchain.recipe_faults import OVERRIDES_SET, shown, toml_list


def apply_change(document: dict[str, Any], override: str) -> None:
    """Make one change. Raises DtoolError where it has no value or its key leads nowhere."""
    key, equals, text = override.partition("=")
    if not equals:
        raise DtoolError(
            f"--set {override!r} has no value",
            expected="section.key=value",
            found=override,
            fix="for example --set weights.format=int8",
        )
    if not all(part.strip() for part in key.split(".")):
        raise DtoolError(
            f"--set {override!r} names no key" if not key.strip(" .") else f"--set {override!r} has an empty part",
            expected="section.key=value",
            found=repr(key),
            fix="write the key before the =, its parts joined by single dots, as weights.format=int8",
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, a number without end, or nested too deeply
        value = text
    *sections, last = key.strip().split(".")
    table: Any = document
    for i, section in enumerate(sections):
        table = table.setdefault(section, {}) if isinstance(table, dict) else table[int(section)]
        place, following = ".".join(sections[: i + 1]), [*sections, last][i + 1]
        if not isinstance(table, dict | list):
            raise DtoolError(
                f"--set {key}: {place!r} is a value, not a section",
                expected="section.key=value",
                found=f"{place} = {shown(table)}",
                fix=f"set {place} itself, or a key of another section",
            )
        if isinstance(table, list) and following not in map(str, range(len(table))):
            raise DtoolError(
                f"--set {key}: {place!r} is a list, and {following!r} is no place in it",
                expected=f"a number below {len(table)}, the first being 0" if table else "a list that is not empty",
                found=following,
                fix=f"name one of its places, or set {place} itself" if table else _whole(place, value),
            )
    spot: Any = int(last) if isinstance(table, list) else last
    table[spot] = value


def _whole(place: str, value: Any) -> str:
    """How to set a list whose elements there are none of."""
    if place == "overrides":
        return OVERRIDES_SET
    listed = toml_list([value], type(value)) if isinstance(value, str | int) else ""
    return f"--set '{place}={listed}'" if listed else f"set {place} itself, to a list"

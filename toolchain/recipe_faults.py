"""What is wrong with a recipe, key by key: what was expected, what was found, what to do."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import pydantic

from toolchain.errors import DtoolError, did_you_mean, name_list

KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
}
"""What pydantic's types of errors ask for, where its own words are a programmer's."""
OVERRIDES_SET = """--set 'overrides=[{match=["..."], weights={...}}]'"""
"""How a list of tables is written on a command line; the settings are for the user to say."""
LONGEST = 80
MOST_DIGITS = 20
"""Of a number that may be meant; Python refuses to read thousands."""
OWN_KEY = re.compile(r"(?<!\S)\.(\w+)")
"""A key of the section whose validator speaks, as `.format`: only the recipe knows where the section lies."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One key, and what to do about it; `key` is relative to the section that found the fault."""

    key: str
    expected: str
    found: str
    fix: str


class Misfit(ValueError):
    """Settings that do not go together, as a section's validator raises it."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__(name_list(fault.key for fault in faults))


def misfit(key: str, *, expected: str, found: str, fix: str) -> Misfit:
    """The misfit of one fault."""
    return Misfit(Fault(key, expected, found, fix))


def invalid_recipe(origin: str, faults: Sequence[Fault]) -> DtoolError:
    """The error that names all faults of the recipe from `origin`; where there are more, each line has its key."""
    keys = name_list(fault.key for fault in faults)
    heads = [f"{fault.key}: " if len(faults) > 1 else "" for fault in faults]

    def lines(part: str) -> str:
        return "\n".join(head + getattr(fault, part) for head, fault in zip(heads, faults, strict=True))

    return DtoolError(
        f"{origin} is not a valid recipe: {keys}", expected=lines("expected"), found=lines("found"), fix=lines("fix")
    )


def faults_of(
    error: pydantic.ValidationError, model: Any, prefix: str = "", said_at: Callable[[str], str] | None = None
) -> Iterator[Fault]:
    """The faults that pydantic found in a `model`, which lies under the key `prefix` of a recipe.

    `said_at`: the full key that a key of the model has its value from, where that may lie elsewhere.
    """
    for item in error.errors():
        key = _path(prefix, *item["loc"])
        misfit = item.get("ctx", {}).get("error")
        if isinstance(misfit, Misfit):
            yield from (_placed(fault, key, said_at) for fault in misfit.faults)
        elif item["type"] == "missing":
            yield Fault(key, "a value: it has no default", "none", f"add {key}")
        elif item["type"] == "extra_forbidden":
            yield unknown_key(key, _fields(model, item["loc"][:-1]))
        else:
            yield _no_list(key, item, model) if item["type"] == "tuple_type" else _wrong_value(key, item)


def _placed(fault: Fault, section: str, said_at: Callable[[str], str] | None) -> Fault:
    """The fault with full keys: those to be set lie in `section`, those that were found where they were said."""
    if not fault.key:  # of one value: no other key has a part in it, and what a user wrote may look like one
        return replace(fault, key=section)

    def here(name: str) -> str:
        return _path(section, name)

    expected, found = (_in_full(text, said_at or here) for text in (fault.expected, fault.found))
    return Fault(_path(section, fault.key), expected, found, _in_full(fault.fix, here))


def _in_full(text: str, full_key: Callable[[str], str]) -> str:
    return OWN_KEY.sub(lambda match: full_key(match[1]), text)


def unknown_key(key: str, known: Iterable[str]) -> Fault:
    """The fault of a key whose last part is none of those `known` in its section."""
    return Fault(key, "a key of a recipe", "unknown key", did_you_mean(key.rpartition(".")[-1], known))


def shown(value: Any) -> str:
    """A value as a message shows it: no more than a line, no whole section."""
    if isinstance(value, dict | list | tuple):
        return "a section" if isinstance(value, dict) else "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def _wrong_value(key: str, item: Any) -> Fault:
    kind, value = item["type"], item["input"]
    fix = f"set {key} to such a value, in the recipe or by --set"
    if KINDS.get(kind) == "a section":
        fix = f"write [{key}], and its settings below it"
    return Fault(key, KINDS.get(kind) or item["msg"].removeprefix("Input should be "), shown(value), fix)


def _no_list(key: str, item: Any, model: Any) -> Fault:
    """The fault of a value that should be a list, with the list that is most likely meant."""
    value, field = item["input"], _fields(model, item["loc"][:-1])[item["loc"][-1]]
    of = get_args(field.annotation)[0]
    if of not in (str, int):
        fix = f"write each as a table below a line [[{key}]], in double brackets, or {OVERRIDES_SET}"
        return Fault(key, f"a list of tables, each [[{key}]]", shown(value), fix)
    kind = "whole numbers, as [16, 32]" if of is int else 'text, as ["...", "..."]'
    meant = toml_list(_parts(value), of)
    fix = f"set {key} to {meant}" if meant else f"set {key} to such a list, in the recipe or by --set"
    return Fault(key, f"a list of {kind}", shown(value), fix)


def _parts(value: Any) -> list[Any]:
    """What a value that is no list may list: what commas part, or what was set by its place."""
    if isinstance(value, dict):
        return list(value.values()) if all(map(str.isdecimal, value)) else []
    if not isinstance(value, str):
        return [value]
    if value.startswith("["):  # a list whose quotes a shell took away
        value = value.strip("[]")
    return [part for part in (part.strip(" \"'") for part in value.split(",")) if part]


def toml_list(values: Iterable[Any], of: type) -> str:
    """These values as a list in TOML; empty where they do not fit it, and `[]` of text where there are none."""
    if of is int:
        values = [int(v) if isinstance(v, str) and v.isdecimal() and len(v) < MOST_DIGITS else v for v in values]
    values = list(values)
    fitting = all(type(value) is of for value in values) and (of is str or values)
    return f"[{', '.join(json.dumps(value, ensure_ascii=False) for value in values)}]" if fitting else ""


def _path(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if part != "")


def _fields(model: Any, loc: Sequence[Any]) -> dict[str, Any]:
    """The fields of the section at `loc`; a number is a place in a list of sections."""
    for part in loc:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            model = next(iter(get_args(annotation)), annotation)
    return model.model_fields

"""Whether an artifact is what a recipe describes: what the stages before made it with, beside what is asked."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolchain.artifact import Artifact, hash_file
from toolchain.errors import DtoolError
from toolchain.recipe import NEEDS, STAGE_SECTIONS, Recipe, find_data

QUANTIZED = STAGE_SECTIONS["quantize"]


def check_source(source: Artifact, recipe: Recipe, sections: Sequence[str] = QUANTIZED) -> None:
    """Refuse a source that is not what the recipe describes, in either direction: its floats, and these sections."""
    for key, wanted, found in _differences(source, recipe, sections):
        raise DtoolError(
            f"{source.path} is not what the recipe describes",
            expected=f"{key} {_shown(wanted)}",
            found=f"{key} {_shown(found)}, from stage {source.manifest.stage}",
            fix=_way_out(source, key, found),
        )


def _differences(source: Artifact, recipe: Recipe, sections: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """Keys of the recipe with what it says and what the source was made with."""
    floats = {"compute_dtype": source.manifest.details.get("compute_dtype")}
    if recipe.context_len is not None:
        floats["context_len"] = source.json("decoder.json")["context_len"]
    for key, found in floats.items():
        if getattr(recipe, key) != found:
            yield key, getattr(recipe, key), found
    plain = Recipe(schema_version=1, about="").sections("quantize")  # what an export is
    made = plain | {name: source.manifest.recipe[name] for name in plain if name in source.manifest.recipe}
    mixed = bool(recipe.overrides or made["overrides"])
    made, asked = _used(made, mixed=mixed), _used(recipe.sections("quantize"), mixed=mixed)
    if "calibration" not in source.manifest.lineage or not recipe.needs_calibration:
        made["calibration"] = asked["calibration"] = {}  # nothing was measured, or what was is told by other keys
    elif _is_same_text(source, recipe):
        made["calibration"]["data"] = asked["calibration"]["data"]
    for section in sections:
        wanted, found = asked[section], made[section]
        if not isinstance(wanted, dict):
            wanted, found = {"": wanted}, {"": found}
        for name in dict.fromkeys(("format", *wanted, *found)):
            if wanted.get(name) != found.get(name):
                yield f"{section}.{name}".rstrip("."), wanted.get(name), found.get(name)


def _used(sections: Mapping[str, Any], *, mixed: bool) -> dict[str, Any]:
    """The sections of the quantize stage without the keys that do nothing beside the others: what NEEDS says of them.

    With `mixed` overrides what the sections say of matrices rules none of them for sure, and stays.
    """
    used = {name: dict(value) if isinstance(value, dict) else value for name, value in sections.items()}
    by_matrix = ("weights", "activations") if mixed else ()
    for section in (name for name in used if name in NEEDS):
        for names, needed, values in NEEDS[section]:
            of, key = needed.split(".")
            if of not in by_matrix and sections[of].get(key) not in values:
                used[section] = {name: value for name, value in used[section].items() if name not in names}
    if not by_matrix and sections["weights"]["format"] == sections["kv_cache"]["format"] == "none":
        used["rotation"] = used["smoothing"] = {}
    return used


def _is_same_text(source: Artifact, recipe: Recipe) -> bool:
    """Whether the recipe's calibration text, which this host need not have, is that of the source."""
    try:
        path = find_data(recipe.calibration.data)
    except DtoolError:
        return False
    return hash_file(path) == source.manifest.lineage["calibration"]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value is None else str(value)


def _way_out(source: Artifact, key: str, found: Any) -> str:
    """What to do about a key that differs; a plain value can be given on the command line."""
    stages = "`dtool export`" if source.manifest.stage == "export" and "." not in key else "`dtool quantize`"
    if "." not in key and source.manifest.stage != "export":
        stages = "`dtool export` and `dtool quantize`"
    if key == "overrides" or found is None or isinstance(found, list):
        return f"run {stages} with this recipe first, or give the one it was made with"
    return f"run {stages} with this recipe first, or give the one it was made with: --set {key}={_shown(found)}"

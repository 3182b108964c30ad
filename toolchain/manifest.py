"""The manifest of an artifact: what it is, what it was made from, and the digest of every file in it.

A manifest is read by later stages, on other machines and by other versions. So its fields are checked
when it is read: what they hold must have the type that the stages expect, and a field that is not
there is refused by name where a stage asks for it. Fields that this version does not know are kept.
"""

from typing import Annotated, Any, NoReturn

import pydantic

from toolchain.errors import DtoolError, name_list
from toolchain.formats import FORMATS


class Fields(pydantic.BaseModel, extra="allow", strict=True):
    """The known fields of a part of a manifest, to check their types; the defaults stand for fields left out."""


class Section(dict[str, Any]):
    """A part of a manifest: a field that is not there is a user's error, as the artifact is another version's."""

    def __missing__(self, key: str) -> NoReturn:
        raise DtoolError(
            f"the manifest of the artifact does not say {key!r}",
            expected=f"{key!r} among its fields",
            found=name_list(self, 20) or "none",
            fix="make the artifact again with this version of dtool",
        )


def _section(value: Any) -> Any:
    """The same value with every object in it as a Section."""
    if isinstance(value, dict):
        return Section({key: _section(item) for key, item in value.items()})
    return [_section(item) for item in value] if isinstance(value, list) else value


def _known_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"one of {', '.join(FORMATS)}")
    return name


FormatName = Annotated[str, pydantic.AfterValidator(_known_format)]


class Range(Fields):
    """Sizes that an engine was built for."""

    min: int = 1
    max: int = 1


class EngineFields(Fields):
    """The recipe's engine."""

    batch: Range = Range()
    prompt_len: Range = Range()


class RecipeFields(Fields):
    """The sections of the recipe that shaped the artifact, and those of the stages before."""

    weights: dict[str, Any] = {}
    activations: dict[str, Any] = {}
    rotation: dict[str, Any] = {}
    smoothing: dict[str, Any] = {}
    kv_cache: dict[str, Any] = {}
    calibration: dict[str, Any] = {}
    overrides: list[dict[str, Any]] = []
    engine: EngineFields = EngineFields()


class Plan(Fields):
    """Where a phase's engine lies."""

    file: str
    profile: int


class TargetFields(Fields):
    """What an engine runs on, and the sizes it was built for."""

    backend: str = ""
    compiler: dict[str, str] = {}
    targets: list[str] = []
    compute_capabilities: list[str] = []
    kv_capacity: int | None = None
    max_batch: int | None = None
    max_prompt: int | None = None
    engines: dict[str, Plan] = {}
    weights_from: dict[str, str] = {}
    plugin_libraries: list[str] = []
    weight_streaming_budget_bytes: int = 0
    version_compatible: bool = False
    needs_exact_u8s8: bool = False


class NotQuantized(Fields):
    """Layers whose cache keeps values."""

    dtype: FormatName
    layers: list[int]


class ContractFields(Fields):
    """How the cache is laid out."""

    dtype: FormatName = "float32"
    token_scales: bool = False
    not_quantized: NotQuantized = NotQuantized(dtype="float32", layers=[])
    finite_slots: bool = False


class DetailFields(Fields):
    """How the model was exported and quantized."""

    compute_dtype: FormatName = "float32"
    source_dtype: FormatName = "float32"
    stored_names: dict[str, list[str]] = {}
    kv_format: str = ""
    weight_format: str = ""
    quantized: dict[str, str] = {}
    rounded_inputs: dict[str, list[str]] = {}
    not_quantized: list[str] = []


def _fields_like(known: type[Fields]) -> pydantic.AfterValidator:
    """A check that the known fields of a section have their types."""

    def check(section: dict[str, Any]) -> dict[str, Any]:
        known.model_validate(section)
        return _section(section)

    return pydantic.AfterValidator(check)


class FileEntry(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Size and digest of one file of an artifact."""

    bytes: int
    sha256: str


class Manifest(pydantic.BaseModel, frozen=True, extra="forbid"):
    """What an artifact is, what it was made from, and the digest of every file in it."""

    schema_version: int
    stage: str
    key: str
    lineage: Annotated[dict[str, str], pydantic.AfterValidator(_section)]
    recipe: Annotated[dict[str, Any], _fields_like(RecipeFields)]
    versions: dict[str, str]
    target: Annotated[dict[str, Any], _fields_like(TargetFields)]
    kv_contract: Annotated[dict[str, Any], _fields_like(ContractFields)]
    details: Annotated[dict[str, Any], _fields_like(DetailFields)]
    files: dict[str, FileEntry]

"""The attention plugin of an artifact: built for its nodes and targets, and what is in it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolchain.artifact import open_artifact
from toolchain.engine.profiles import attention_specs
from toolchain.engine.targets import TENSORRT, Target, targets_named
from toolchain.errors import DtoolError
from toolchain.ops.kernels.tiles import SHARED_LIMIT
from toolchain.recipe import Recipe
from toolchain.report import Page, Table

Say = Callable[[str], None]


def build_plugin_for(source: Path, recipe: Recipe, out: Path, *, force: bool, report: Say) -> dict[str, Any]:
    """Build the plugin library for an artifact's attention nodes at `out`; what the library says of itself.

    Raises DtoolError for a target without kernels, a missing tool, or an output that exists.
    """
    if out.exists() and not force:
        raise DtoolError(
            f"{out} exists", expected="a path that is free", found="a file", fix="choose another, or --force"
        )
    artifact = open_artifact(source, ("export", "quantize"))
    targets = targets_named(recipe.engine.targets, TENSORRT)
    require_kernels(targets)
    from toolchain.ops.plugin.build import build_plugin

    dtype = str(artifact.manifest.details["compute_dtype"])
    return build_plugin(attention_specs(artifact), dtype, [t.sm for t in targets], out, report=report).description


def require_kernels(targets: Sequence[Target]) -> None:
    """Raise DtoolError naming the first target there are no attention kernels for."""
    lacking = [t for t in targets if t.sm not in SHARED_LIMIT]
    if lacking:
        raise DtoolError(
            f"there are no attention kernels for {lacking[0].name} ({lacking[0].gpus})",
            expected=f"targets among {', '.join(f'sm{sm}' for sm in SHARED_LIMIT)}",
            found=", ".join(t.name for t in targets),
            fix="leave that target out, or --set engine.attention=native",
        )


def plugin_page(description: Mapping[str, Any]) -> Page:
    """A library's kernels with their tiles and what they use."""
    rows = tuple(
        (
            f"sm{kernels['sm']}",
            description["specs"][kernels["spec"]]["cache_format"],
            kernel["name"],
            ", ".join(f"{name} {size}" for name, size in kernel["tile"].items()),
            kernel["num_warps"],
            kernel["registers"],
            kernel["spill_bytes"],
            kernel["shared_bytes"],
        )
        for kernels in description["sets"]
        for kernel in kernels["kernels"]
    )
    columns = ("target", "cache", "kernel", "tile", "warps", "registers", "spill bytes", "shared bytes")
    facts = (("abi", str(description["abi"])), *((name, str(value)) for name, value in description["versions"].items()))
    return Page("Attention plugin", facts=facts, parts=(Table("Kernels", columns, rows),))

"""The attention plugin of an artifact: built for its nodes and targets, and what is in it."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolchain.artifact import enclosing_artifact, open_artifact, real_place
from toolchain.engine.library import describe_library
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
    _check_library_path(out, force=force)
    artifact = open_artifact(source, ("export", "quantize"))
    if not recipe.engine.targets:
        raise DtoolError(
            "the plugin needs a target",
            expected=f"engine.targets with one or more of {', '.join(f'sm{sm}' for sm in SHARED_LIMIT)}",
            found="none",
            fix="for example --set 'engine.targets=[\"sm89\"]'",
        )
    targets = targets_named(recipe.engine.targets, TENSORRT)
    require_kernels(targets)
    dtype = str(artifact.manifest.details["compute_dtype"])
    if dtype == "float32":
        raise DtoolError(
            "the attention kernels do not compute in float32",
            expected="an artifact exported in float16 or bfloat16",
            found=f"compute_dtype {dtype} in {artifact.path}",
            fix="export again with --set compute_dtype=float16",
        )
    if recipe.engine.attention != "plugin":
        report("note: the recipe's engine.attention is native, which uses no plugin")
    from toolchain.ops.plugin.build import build_plugin

    return build_plugin(attention_specs(artifact), dtype, [t.sm for t in targets], out, report=report).description


def _check_library_path(out: Path, *, force: bool) -> None:
    """Refuse an output that cannot be, lies in an artifact, or would replace something else than our library."""
    folder = real_place(out).parent
    problem = ""
    if out.is_dir():
        problem = "is a folder"
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "cannot be written: its folder is not there, or closed"
    elif enclosing_artifact(folder):
        problem = "lies in an artifact"
    elif out.exists() and not (force and _is_ours(out)):
        problem = "exists" + (", and is no library dtool built" if not _is_ours(out) else "")
    if problem:
        raise DtoolError(
            f"{out} {problem}",
            expected="a free path for a library, or one of ours with --force",
            found=problem,
            fix="choose another path" + (", or --force" if problem == "exists" else ""),
        )


def _is_ours(path: Path) -> bool:
    try:
        return describe_library(path) is not None
    except DtoolError:
        return False


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
            _cache_name(description["specs"][kernels["spec"]]),
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


def _cache_name(spec: Mapping[str, Any]) -> str:
    return spec["cache_format"] + (", scales per token" if spec["token_scales"] else "")

"""What an export costs: CPU seconds, wall seconds, peak memory and bytes of a cold `dtool export`."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolchain.bench import measured
from toolchain.errors import DtoolError
from toolchain.memory import ending
from toolchain.model.config import DecoderConfig
from toolchain.model.hf import config_from_hf, stored_parts
from toolchain.report import Page, Table
from toolchain.tensor_file import build_header

DTOOL = (sys.executable, "-m", "toolchain.cli")


def measure_export(model: Path, recipe_name: str, *, command: Sequence[str] = DTOOL) -> dict[str, Any]:
    """Cost of `dtool export MODEL -r RECIPE` as a cold process; the output is thrown away.

    Keys: `cpu_s` (user + system), `wall_s`, `peak_rss_bytes` (largest process, mapped files
    included), `bytes_written` (sum of the files' lengths), `bytes_stored` (on disk: less where files
    have holes), `model`, `recipe`, `formulas`. The output goes to the system's temporary folder,
    which must have room for it. Raises DtoolError when the export fails.
    """
    with tempfile.TemporaryDirectory(prefix="dtool-bench-") as scratch:
        out = Path(scratch) / "export"
        cost = run_cold([*command, "export", str(model), "-r", recipe_name, "-o", str(out)])
        if cost["exit"] != 0:
            raise DtoolError(
                f"the export of {model} failed ({ending(cost['exit'])})",
                expected="a finished export to measure",
                found=str(cost["output_tail"]).strip() or "no output",
                fix="run the same `dtool export` by hand",
            )
        written, stored = folder_bytes(out)
    return {
        "model": model.resolve().name,
        "recipe": recipe_name,
        "cpu_s": cost["cpu_s"],
        "wall_s": cost["wall_s"],
        "peak_rss_bytes": cost["peak_rss_bytes"],
        "bytes_written": written,
        "bytes_stored": stored,
        "formulas": {
            "cpu_s": "user + system seconds of the process and the children it waited for, start of Python included",
            "peak_rss_bytes": "largest resident size of any one of these processes, mapped files included",
        },
    }


def run_cold(command: Sequence[str], python: str = sys.executable) -> dict[str, Any]:
    """What `measured.run_measured` says of a command, run from a process too small to blur its peak."""
    line = [python, "-P", str(Path(measured.__file__)), *command]  # -P: our siblings must not shadow modules
    done = subprocess.run(line, capture_output=True, text=True, check=True)  # noqa: S603 - our own program
    return json.loads(done.stdout)


def folder_bytes(folder: Path) -> tuple[int, int]:
    """Lengths of all files of a folder, and the bytes their blocks take on disk (0, 0 when there is none)."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(s.st_size for s in stats), sum(s.st_blocks * 512 for s in stats)


def write_sparse_checkpoint(folder: Path, config_dict: Mapping[str, Any]) -> int:
    """Write a checkpoint of a model's true shape whose weights are holes; bytes it pretends to hold.

    For measures of size and memory: all weights read as zero. `config_dict` is a config.json of a
    family dtool knows; its dtype is that of the weights. No tokenizer.
    """
    config = config_from_hf(dict(config_dict), {})
    header, ranges = build_header({n: (config.dtype, s) for n, s in stored_shapes(config_dict, config).items()})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config_dict), indent=2) + "\n", "utf-8")
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(header)
        stream.truncate(max(offset + length for offset, length in ranges.values()))
    return sum(length for _, length in ranges.values())


def stored_shapes(document: Mapping[str, Any], config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint with this config.json must hold."""
    parts = stored_parts(dict(document), config).values()
    return {name: shape for stored in parts for name, shape in zip(stored.names, stored.shapes, strict=True)}


def cost_page(cost: Mapping[str, Any]) -> Page:
    """What `measure_export` found, as a page."""
    rows = (
        ("CPU", f"{cost['cpu_s']:.2f} s"),
        ("wall", f"{cost['wall_s']:.2f} s"),
        ("peak memory", f"{cost['peak_rss_bytes'] / 1e6:,.0f} MB"),
        ("written", f"{cost['bytes_written'] / 1e6:,.0f} MB"),
        ("on disk", f"{cost['bytes_stored'] / 1e6:,.0f} MB"),
    )
    facts = (("model", str(cost["model"])), ("recipe", str(cost["recipe"])))
    return Page("Cost of a cold export", facts=facts, parts=(Table("", ("what", "value"), rows),))

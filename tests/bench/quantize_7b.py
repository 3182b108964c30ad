"""Memory and time of quantizing a 7B shape: float16, real random bytes, the default calibration. Not a test.

    python tests/bench/quantize_7b.py --work DIR [--layers N] [--case NAME ...] [--keep]

Writes an export of Llama 2 7B's widths in DIR (0.4 GB a layer; --keep leaves it for the next run), quantizes it
in a process of its own per case, and prints a table and JSON. What a layer costs does not depend on their number,
but for rtn, whose time is that of the disk. Exit 1: 6 GiB or more in memory.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from load_7b import LLAMA_7B

from toolchain.artifact import CHUNK_BYTES, hash_file, new_folder
from toolchain.bench.export_cost import run_cold, write_sparse_checkpoint
from toolchain.report import Page, Table, render_text
from toolchain.tensor_file import TensorEntry, read_header

BAR_BYTES = 6 << 30
WEIGHTS = "weights.safetensors"
INT8, INT4 = ("weights.format=int8",), ("weights.format=int4", "weights.group_size=128")
GPTQ = ("weights.algorithm=gptq", "weights.clip=search")
ROTATED = ("rotation.stream=true", "rotation.values=true", "rotation.feed_forward=true")
STATIC = ("activations.format=int8", "activations.granularity=tensor", "activations.excess_channels=8")
CASES = {
    "rtn-int8": INT8,
    "gptq-int8": INT8 + GPTQ,
    "gptq-int4": INT4 + GPTQ,
    "rotated-gptq-int4": INT4 + GPTQ + ROTATED,
    "rotated-gptq-w8a8": INT8 + GPTQ + ROTATED + STATIC,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the export and the output")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--set", action="append", default=[], help="of every recipe: calibration.samples=8")
    parser.add_argument("--keep", action="store_true", help="leave the export for another run")
    parser.add_argument("--dtool", default=f"{sys.executable} -m toolchain.cli", help="our command line")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    dtool, export = shlex.split(options.dtool), options.work / f"llama-7b-export-{options.layers}"
    if not export.exists():
        write_export(dtool, export, options.layers)
    parameters = sum(math.prod(e.shape) for e in quantized_entries(export))
    costs = []
    for case in options.case or CASES:
        costs.append({"case": case} | quantize(dtool, export, CASES[case] + tuple(options.set)))
        print(json.dumps(costs[-1]), file=sys.stderr, flush=True)
    if not options.keep:
        shutil.rmtree(export)
    for cost in costs:
        cost["wall_s_per_billion"] = cost["wall_s"] / parameters * 1e9
        cost["cpu_s_per_billion"] = cost["cpu_s"] / parameters * 1e9
    print(render_text(Page("Quantizing a 7B shape", parts=(cost_table(costs, options.layers, parameters),))))
    print(json.dumps({"layers": options.layers, "parameters": parameters, "costs": costs}, indent=2))
    return int(any(cost["peak_rss_bytes"] >= BAR_BYTES for cost in costs))


def quantized_entries(export: Path) -> list[TensorEntry]:
    return [e for n, e in read_header(export / WEIGHTS).items() if n.endswith("_proj.weight")]


def write_export(dtool: list[str], export: Path, layers: int) -> None:
    """A float16 export of a checkpoint of holes, whose weights are then drawn at random."""
    model = export.with_suffix(".model")
    shutil.rmtree(model, ignore_errors=True)
    write_sparse_checkpoint(model, LLAMA_7B | {"num_hidden_layers": layers, "torch_dtype": "float16"})
    write_byte_tokenizer(model)
    with new_folder(export) as partial:
        done = run_cold([*dtool, "export", str(model), "-r", "fp16-rtx", "-o", str(partial / "export")])
        if done["exit"]:
            sys.exit(done["output_tail"])
        for path in (partial / "export").iterdir():
            path.rename(partial / path.name)
        (partial / "export").rmdir()
        draw_weights(partial)
    shutil.rmtree(model)


def write_byte_tokenizer(folder: Path) -> None:
    """One token per byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def draw_weights(export: Path) -> None:
    """Norms become ones, all else random, in place; the manifest learns the new hash."""
    rng = np.random.default_rng(0)
    with (export / WEIGHTS).open("r+b") as stream:
        for name, entry in read_header(export / WEIGHTS).items():
            stream.seek(entry.offset)
            if "norm" in name:
                stream.write(np.ones(entry.shape, "<f2").tobytes())
            else:
                stream.writelines(random_float16(rng, entry.length))
    manifest = json.loads((export / "manifest.json").read_text())
    manifest["files"][WEIGHTS]["sha256"] = hash_file(export / WEIGHTS)
    (export / "manifest.json").write_text(json.dumps(manifest))


def random_float16(rng: np.random.Generator, length: int) -> Iterator[bytes]:
    """Any sign and mantissa, exponents of 2^-8 to 2^-5."""
    for begin in range(0, length, CHUNK_BYTES):
        bits = rng.integers(0, 1 << 16, min(CHUNK_BYTES, length - begin) // 2, dtype=np.uint16)
        yield ((bits & 0x83FF) | ((7 + (bits >> 10 & 3)) << 10)).astype("<u2").tobytes()


def quantize(dtool: list[str], export: Path, settings: tuple[str, ...]) -> dict[str, float]:
    """What `dtool quantize` costs as a cold process; its output is thrown away."""
    out = export.with_suffix(".quantized")
    shutil.rmtree(out, ignore_errors=True)
    sets = [word for item in ("compute_dtype=float16", *settings) for word in ("--set", item)]
    cost = run_cold([*dtool, "quantize", str(export), "-r", "fp32", "-o", str(out), *sets])
    shutil.rmtree(out, ignore_errors=True)
    if cost["exit"]:
        sys.exit(cost["output_tail"])
    return {key: cost[key] for key in ("wall_s", "cpu_s", "peak_rss_bytes")}


def cost_table(costs: list[dict[str, float]], layers: int, parameters: int) -> Table:
    rows = tuple(
        (c["case"], c["peak_rss_bytes"] / (1 << 20), c["wall_s"], c["cpu_s"], c["wall_s_per_billion"],
         c["cpu_s_per_billion"])
        for c in costs
    )  # fmt: skip
    columns = ("case", "peak MiB", "wall s", "CPU s", "wall s / 1e9", "CPU s / 1e9")
    note = (
        f"{layers} layers, {parameters / 1e9:.2f} billion quantized parameters; the bar is {BAR_BYTES >> 20} MiB; "
        f"load average of the last minute {os.getloadavg()[0]:.1f}"
    )
    return Table("Cold processes", columns, rows, note)


if __name__ == "__main__":
    sys.exit(main())

"""Memory of exporting a 7B checkpoint with real bytes: sharded, random weights, every tensor accounted for. Not a test.

    python tests/bench/load_7b.py --work DIR [--recipe NAME] [--format bin] [--layers N] [--keep]

Makes the checkpoint in DIR once (13.5 GB of bfloat16 in three shards; --keep leaves it for the next run),
exports it in a process of its own and prints JSON. Exit 1: more than 3 GiB, or tensors are not the same.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llama_8b import LLAMA_8B

from toolchain.artifact import CHUNK_BYTES, new_folder
from toolchain.bench.export_cost import folder_bytes, run_cold, stored_shapes
from toolchain.model.checkpoint import open_checkpoint
from toolchain.model.hf import config_from_hf
from toolchain.tensor_file import TensorEntry, build_header, read_header, write_stream

LLAMA_7B = LLAMA_8B | {
    "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "rope_theta": 10000.0, "rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PARAMETERS = 6_738_415_616
BAR_BYTES = 3 << 30
SHARDS = 3
SAMPLE = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint and the output")
    parser.add_argument("--recipe", default="fp16-rtx", help="recipe of the export")
    parser.add_argument("--format", choices=["safetensors", "bin"], default="safetensors")
    parser.add_argument("--layers", type=int, default=LLAMA_7B["num_hidden_layers"])
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint for another run")
    parser.add_argument("--dtool", default=f"{sys.executable} -m toolchain.cli", help="our command line")
    options = parser.parse_args()
    document = LLAMA_7B | {"num_hidden_layers": options.layers}
    model, out = options.work / f"llama-7b-shape-{options.layers}-{options.format}", options.work / "load-7b-export"
    require_room(options.work, document, there=model.exists(), pickles=options.format == "bin")
    if not model.exists():
        write_checkpoint(model, document, pickles=options.format == "bin")
    shutil.rmtree(out, ignore_errors=True)
    try:
        begin = time.perf_counter()
        checkpoint = open_checkpoint(model)
        opened_s = time.perf_counter() - begin
        cost = run_cold([*shlex.split(options.dtool), "export", str(model), "-r", options.recipe, "-o", str(out)])
        if cost["exit"]:
            print(cost["output_tail"], file=sys.stderr)
            return 1
        wrong = differing(model, out)
        written = folder_bytes(out)[0]
    finally:
        shutil.rmtree(out, ignore_errors=True)
        if not options.keep:
            shutil.rmtree(model)
    elements = sum(math.prod(p.shape) for p in checkpoint.parameters.values())
    result = {
        "peak_memory_mb": round(cost["peak_rss_bytes"] / 1e6),
        "bar_mb": round(BAR_BYTES / 1e6),
        "wall_s": round(cost["wall_s"], 1),
        "cpu_s": round(cost["cpu_s"], 1),
        "opened_s": round(opened_s, 3),
        "tensors": sum(len(p.parts) for p in checkpoint.parameters.values()),
        "parameters": elements,
        "bytes_read": sum(e.length for p in checkpoint.parameters.values() for e in p.parts),
        "bytes_written": written,
        "differing": wrong,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(result, indent=2))
    whole = options.layers != LLAMA_7B["num_hidden_layers"] or elements == PARAMETERS
    return int(bool(wrong) or not whole or cost["peak_rss_bytes"] >= BAR_BYTES)


def require_room(work: Path, document: dict[str, Any], *, there: bool, pickles: bool) -> None:
    """Stop before anything is written when checkpoint and export do not fit beside each other."""
    work.mkdir(parents=True, exist_ok=True)
    size = 2 * sum(map(math.prod, stored_shapes(document, config_from_hf(document, {})).values()))
    shard = size // SHARDS if pickles else 0
    needed, free = size * (1 if there else 2) + shard + (1 << 30), shutil.disk_usage(work).free
    print(f"{needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free in {work}", file=sys.stderr)
    if needed > free:
        sys.exit("too little room: free some, or give another --work")


def write_checkpoint(folder: Path, document: dict[str, Any], *, pickles: bool) -> None:
    """A sharded checkpoint of random finite bfloat16, written a chunk at a time."""
    shapes = stored_shapes(document, config_from_hf(document, {}))
    names, ending = list(shapes), "bin" if pickles else "safetensors"
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    with new_folder(folder) as partial:
        for number in range(SHARDS):
            members = names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS]
            header, ranges = build_header({name: ("bfloat16", shapes[name]) for name in members})
            shard = partial / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
            write_stream(shard, header, (c for _, length in ranges.values() for c in random_bfloat16(rng, length)))
            if pickles:
                shard = as_pickle(shard)
            weight_map |= dict.fromkeys(members, shard.name)
        index = f"pytorch_model.{ending}.index.json" if pickles else f"model.{ending}.index.json"
        (partial / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (partial / "config.json").write_text(json.dumps(document))


def random_bfloat16(rng: np.random.Generator, length: int) -> Iterator[bytes]:
    """Any sign and mantissa, exponents of 2^-8 to 2^-5."""
    for begin in range(0, length, CHUNK_BYTES):
        bits = rng.integers(0, 1 << 16, min(CHUNK_BYTES, length - begin) // 2, dtype=np.uint16)
        yield ((bits & 0x807F) | ((119 + (bits >> 7 & 3)) << 7)).astype("<u2").tobytes()


def as_pickle(shard: Path) -> Path:
    """The same tensors as torch.save writes them; the file they came from is removed."""
    import torch
    from safetensors.torch import load_file

    pickle = shard.with_suffix(".bin")
    torch.save(load_file(shard), pickle)
    shard.unlink()
    return pickle


def differing(model: Path, out: Path) -> list[str]:
    """Parameters of the export that are absent, of another shape, or that begin or end otherwise than their parts."""
    exported, wrong = read_header(out / "weights.safetensors"), []
    parameters = open_checkpoint(model).parameters
    for name, parameter in parameters.items():
        entry, position = exported.get(name), 0
        if entry is None or entry.shape != parameter.shape:
            wrong.append(name)
            continue
        for part in parameter.parts:
            count = math.prod(part.shape)
            ends = (0, max(count - SAMPLE, 0))
            wrong += [name for at in ends if not np.array_equal(numbers(part, at), numbers(entry, position + at))]
            position += count
    return wrong + sorted(set(exported) - set(parameters))


def numbers(entry: TensorEntry, at: int) -> np.ndarray:
    """Some elements of a tensor as float32."""
    size = {"float32": 4}.get(entry.dtype, 2)
    with entry.path.open("rb") as stream:
        stream.seek(entry.offset + size * at)
        data = stream.read(size * min(SAMPLE, math.prod(entry.shape) - at))
    if entry.dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, {"float32": "<f4", "float16": "<f2"}[entry.dtype]).astype("<f4")


if __name__ == "__main__":
    sys.exit(main())

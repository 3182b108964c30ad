"""How export time grows with depth, interleaved: tiny models of 2, 8 and 32 layers. Not a test.

    python tests/bench/export_depth.py [--rounds N]

Bars: a tiny model in at most 6 s; 32 layers in at most 2.5 times the time of 8.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from llama_8b import LLAMA_8B

from toolchain.bench.export_cost import measure_export, write_sparse_checkpoint

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rope_scaling": None,
    "torch_dtype": "float32",
}
DEPTHS = (2, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    wall: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    cpu: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    with tempfile.TemporaryDirectory() as scratch:
        for depth in DEPTHS:
            write_sparse_checkpoint(Path(scratch) / str(depth), LLAMA_8B | TINY | {"num_hidden_layers": depth})
        for _ in range(rounds):
            for depth in DEPTHS:
                cost = measure_export(Path(scratch) / str(depth), "fp32")
                wall[depth].append(cost["wall_s"])
                cpu[depth].append(cost["cpu_s"])
    medians = {name: {d: statistics.median(v[d]) for d in DEPTHS} for name, v in (("wall_s", wall), ("cpu_s", cpu))}
    ratios = {name: round(values[32] / values[8], 2) for name, values in medians.items()}
    print(json.dumps({"medians": medians, "32 to 8 layers": ratios, "load_average": os.getloadavg()[0]}, indent=2))


if __name__ == "__main__":
    main()

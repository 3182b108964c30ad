"""Cost of exporting an 8B model: true shape, weights that are holes. Not a test.

    python tests/bench/export_8b.py --work DIR --recipe NAME [--layers N]

The recipe should keep bfloat16: a conversion stores 16 GB of real zeros.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from llama_8b import LLAMA_8B

from toolchain.bench.export_cost import measure_export, write_sparse_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint and the output")
    parser.add_argument("--recipe", required=True, help="recipe of the export")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--dtool", default=f"{sys.executable} -m toolchain.cli", help="our command line")
    options = parser.parse_args()
    model = options.work / f"llama-8b-shape-{options.layers}"
    options.work.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(options.work)  # the output belongs on the same disk
    shutil.rmtree(model, ignore_errors=True)
    pretended = write_sparse_checkpoint(model, LLAMA_8B | {"num_hidden_layers": options.layers})
    cost = measure_export(model, options.recipe, command=shlex.split(options.dtool))
    shutil.rmtree(model)
    print(json.dumps(cost | {"weight_bytes": pretended, "load_average": os.getloadavg()[0]}, indent=2))


if __name__ == "__main__":
    main()

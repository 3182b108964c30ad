"""Where the time of quantizing goes: CPU seconds by torch operator, one thread. Not a test.

    python tests/bench/quantizer_time.py --export EXPORT --work DIR [--case NAME ...] [--samples 16]

Cases are those of quantizer_accuracy.py. First without the profiler, whose own time counts against small operators.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import torch
from quantizer_accuracy import CASES
from torch.profiler import ProfilerActivity, profile

from toolchain.quantize import qdq, stream  # noqa: F401 - before the clock starts
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe import parse_recipe

SHOWN = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in options.case or ("static-smooth-0.85", "token-rotated-gptq"):
        sections = CASES[name] | {"calibration": CASES[name].get("calibration", {}) | {"samples": options.samples}}
        recipe = parse_recipe({"schema_version": 1, "about": name} | sections, name)
        plain = cpu_seconds(options, recipe)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            cpu_seconds(options, recipe)
        operators = {event.key: event.self_cpu_time_total / 1e6 for event in seen.key_averages()}
        largest = sorted(operators.items(), key=lambda item: -item[1])[:SHOWN]
        print(f"{name}: {plain:.1f} CPU s; operators {sum(operators.values()):.1f} s under the profiler")
        for operator, seconds in largest:
            print(f"  {operator:24} {seconds:6.1f} s")
        document = {"case": name, "cpu_s": plain, "operators_s": operators, "load_average": os.getloadavg()[0]}
        print(json.dumps(document), flush=True)


def cpu_seconds(options: argparse.Namespace, recipe) -> float:
    out = options.work / "timed"
    shutil.rmtree(out, ignore_errors=True)
    begin = time.process_time()
    quantize_artifact(options.export, recipe, out, report=lambda _: None)
    seconds = time.process_time() - begin
    shutil.rmtree(out)
    return seconds


if __name__ == "__main__":
    main()

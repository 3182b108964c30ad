"""Whether a model's artifacts have the same hashes with one thread as with more. Not a test.

    python tests/bench/same_hashes.py --model MODEL --work DIR [--recipe int8 ...] [--threads 1 2] [--set K=V ...]

Every recipe (all of `recipes/` that quantize when none is named) is exported and quantized once for each number of
threads, each stage in a process of its own, and built where its engine is ONNX Runtime's. A row of the table says
whether the manifests of a stage are the same byte for byte, and so all its files; otherwise which files differ. CPU
seconds are those of all threads. DIR must not exist; it is left behind where something differs.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from toolchain.recipe import RECIPES_DIR, load_recipe


def run_stage(threads, *arguments):
    """Run dtool with so many threads; its seconds of wall clock and of CPU."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "toolchain.cli", *map(str, arguments)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dtool {' '.join(command[3:])}\n{done.stderr}")
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_artifacts(model, folder, recipe, threads, settings):
    """Export, quantize and build; the seconds of each stage by its name."""
    changes = [part for setting in settings for part in ("--set", setting)]
    chosen = ("-r", recipe, *changes)
    seconds = {"export": run_stage(threads, "export", model, "-o", folder / "export", *chosen)}
    seconds["quantize"] = run_stage(threads, "quantize", folder / "export", "-o", folder / "quantize", *chosen)
    if load_recipe(recipe).engine.backend == "onnxruntime":
        seconds["engine"] = run_stage(threads, "build-engine", folder / "quantize", "-o", folder / "engine", *chosen)
    return seconds


def differences(first, other):
    """What of two artifacts is not the same: names of files, or of other parts of the manifest."""
    ours, theirs = (json.loads((path / "manifest.json").read_text()) for path in (first, other))
    names = {*ours["files"], *theirs["files"]}
    files = [name for name in sorted(names) if ours["files"].get(name) != theirs["files"].get(name)]
    return files + [f"manifest: {key}" for key in ours if key != "files" and ours[key] != theirs.get(key)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--recipe", nargs="*", default=[])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    options = parser.parse_args()
    recipes = options.recipe or sorted(path.stem for path in RECIPES_DIR.glob("*.toml"))
    options.work.mkdir(parents=True)
    counts = " ".join(f"{f'{n} threads: wall, CPU s':>26}" for n in options.threads)
    print(f"{'recipe':<16}{'stage':<10}{counts}  hashes")
    same = True
    for recipe in (name for name in recipes if load_recipe(name).quantizes):
        seconds = {}
        for threads in options.threads:
            folder = options.work / recipe / str(threads)
            seconds[threads] = make_artifacts(options.model, folder, recipe, threads, options.settings)
        first, *others = (options.work / recipe / str(threads) for threads in options.threads)
        for stage in seconds[options.threads[0]]:
            found = sorted({name for other in others for name in differences(first / stage, other / stage)})
            times = " ".join(f"{wall:>17.1f} {cpu:>8.1f}" for wall, cpu in (s[stage] for s in seconds.values()))
            print(f"{recipe:<16}{stage:<10}{times}  {', '.join(found) or 'the same'}", flush=True)
            same = same and not found
        if same:
            shutil.rmtree(options.work / recipe)
    if same:
        options.work.rmdir()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m toolchain.bench.gpu_check`: everything that only a GPU can show about the kernels, in one short run.

Numerics and speed of the attention kernels against bars, the plugin library and engines where given, and
sweeps of tiles for tuning. Written for a lent machine with torch and Triton and nothing else: dtool need
not be installed, and what is missing is skipped by name. Each check stands alone: one that raises is a
failure, and the next one runs, unless the GPU itself is lost. A check that begins after the time budget
is used up is skipped. The table comes last, so that the end of the output holds it; the JSON document
is rewritten after every check, so that a run that is killed leaves what it has.

Exit codes: 0 no bar failed, 3 one failed or a check raised, 1 no GPU or a file that cannot be written.
"""

import argparse
import functools
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain.bench.gpu_results import (
    EXIT_NO_GPU,
    Budget,
    Result,
    crashed,
    exit_code,
    first_line,
    render_table,
    skipped,
    write_document,
)

SECONDS = 300.0
DEVICE = "cuda"
DTYPES = ("float16", "bfloat16")
CACHES = ("none", "int8", "fp8_e4m3")
COMPILERS = 16
COMPILE_SHARE = 0.35
"""Of the budget: after it no more kernels are compiled ahead, should that be slower than thought."""
NO_GPU = "dtool gpu-check: no CUDA GPU that torch can use on this machine"

Say = Callable[[str], None]
Outcome = Result | Iterable[Result] | None


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, what runs it, the cache format it is about, and the modules it cannot do without."""

    name: str
    run: Callable[[], Outcome]
    cache: str = ""
    needs: tuple[str, ...] = ("triton",)

    @property
    def group(self) -> str:
        """The first word of its name, which the table shows before the whole."""
        return self.name.split()[0]

    def skip(self, reason: str) -> Result:
        """Itself, not run."""
        return skipped(self.group, reason, self.name)


@dataclass(slots=True)
class Run:
    """What the checks share: what was asked for, and the numbers later checks are relative to."""

    budget: Budget
    plugin_library: Path | None = None
    engines: tuple[Path, ...] = ()
    device: str = DEVICE
    facts: dict[str, Any] = field(default_factory=dict)
    bandwidth: float = float("nan")
    library: Any = None


def run_checks(
    checks: Iterable[Check],
    budget: Budget,
    *,
    say: Say = lambda _: None,
    save: Callable[[Sequence[Result]], None] = lambda _: None,
    unusable: Callable[[str], str] = lambda _: "",
    gpu_lost: Callable[[], str] = lambda: "",
) -> list[Result]:
    """Run checks in order.

    Args:
        checks: what to run.
        budget: no check begins after it.
        say: told how long each check took.
        save: told all results after each check.
        unusable: why a cache format cannot be used on this GPU, or nothing.
        gpu_lost: why no further check can run, or nothing; asked after a failure.
    """
    results: list[Result] = []
    lost = ""
    for check in checks:
        missing = [name for name in check.needs if importlib.util.find_spec(name) is None]
        begin = budget.used
        if lost:
            results.append(check.skip(f"the GPU is lost since {lost}"))
        elif missing:
            results.append(check.skip(f"no {', '.join(missing)} here"))
        elif reason := unusable(check.cache):
            results.append(check.skip(reason))
        elif budget.left <= 0:
            results.append(check.skip(f"the {budget.seconds:g} s are used up"))
        else:
            ran = _run_one(check)
            results += ran
            if any(r.verdict == "FAIL" for r in ran) and gpu_lost():
                lost = check.name
            say(f"[{budget.used:5.1f} s] {check.name}: {budget.used - begin:.1f} s")
        save(results)
    return results


def _run_one(check: Check) -> list[Result]:
    """The results of a check; what it found before it raised stays."""
    found: list[Result] = []
    try:
        outcome = check.run()
        for result in [outcome] if isinstance(outcome, Result) else outcome or ():
            found.append(result)  # noqa: PERF402 - one at a time: what is there when the next one raises stays
    except Exception as error:  # noqa: BLE001 - whatever a check raises is its result, and the rest goes on
        found.append(crashed(check.group, check.name, error))
    return found


def all_checks(run: Run) -> Iterator[Check]:
    """Everything, the bars first and the sweeps last."""
    from toolchain.bench import gpu_speed as speed

    timer, device, bind = speed.CudaTimer(), run.device, functools.partial
    yield Check("environment", bind(environment, run, timer), needs=())
    yield Check("compile", bind(_compile, run))
    for dtype in DTYPES:
        for cache in CACHES:
            yield Check(f"numerics {dtype} {cache}", bind(_numerics, cache, dtype, device), cache)
    for shape in speed.DECODE_CASES:
        # the bandwidth is known only when the check runs
        yield Check(
            f"decode {shape.cache}",
            lambda s=shape: speed.decode_speed(s, device, attend, timer, run.bandwidth),
            shape.cache,
        )
    for shape in speed.PREFILL_CASES:
        name = f"prefill T {shape.tokens} b{shape.batch}"
        yield Check(name, bind(speed.prefill_speed, shape, device, attend, timer))
    yield Check("plugin", bind(_plugin, run, timer))
    for folder in run.engines:
        yield Check(f"engine {folder.name}", bind(_engine, folder), needs=())
    if not run.engines:
        yield Check("engine", lambda: skipped("engine", "no --engine given"), needs=())
    for cache in CACHES:
        yield Check(
            f"decode {cache} elsewhere",
            lambda c=cache: speed.decode_elsewhere(c, device, attend, timer, run.bandwidth),
            cache,
        )
    for cache in CACHES[1:]:
        yield Check(f"prefill {cache}", bind(speed.prefill_codes, cache, device, attend, timer), cache)
    yield from _sweeps(run, timer)


def _sweeps(run: Run, timer: Any) -> Iterator[Check]:
    from toolchain.bench import gpu_sweep as sweep
    from toolchain.bench.gpu_speed import DECODE_CASES, Shape

    tuning, bind = sweep.Tuning(run.device, attend, timer, run.budget, compilers()), functools.partial
    for shape in DECODE_CASES:
        yield Check(f"sweep decode {shape.cache}", bind(sweep.sweep_decode, shape, tuning), shape.cache)
    for cache in CACHES[:2]:
        yield Check(f"sweep prefill {cache}", bind(sweep.sweep_prefill, Shape(cache, 4096, 1), tuning), cache)
    for cache in CACHES:
        yield Check(f"sweep splits {cache}", bind(sweep.sweep_splits, cache, tuning), cache)
    # last: the profiler stays attached to the process
    yield Check("kernel times", lambda: sweep.kernel_breakdown(usable_caches(run.device), run.device, attend))


def attend(*arguments: Any, **options: Any) -> Any:
    """`launch.attend`, imported at its first call: without Triton its checks are skipped instead."""
    from toolchain.ops.kernels import launch

    return launch.attend(*arguments, **options)


def usable_caches(device: str) -> tuple[str, ...]:
    """The cache formats this GPU has conversions for."""
    from toolchain.bench.gpu_speed import capability
    from toolchain.ops.kernels.bindings import FP8_SM

    return CACHES if capability(device) >= FP8_SM else CACHES[:2]


def compilers() -> int:
    """Kernels compiled at a time."""
    return min(COMPILERS, os.cpu_count() or 1)


def environment(run: Run, timer: Any) -> Result:
    """GPU, driver and versions, and the copy bandwidth that decode is compared with."""
    import torch

    from toolchain.bench.gpu_speed import capability, copy_bandwidth

    properties = torch.cuda.get_device_properties(run.device)
    triton = importlib.util.find_spec("triton") and importlib.import_module("triton").__version__
    run.facts |= {
        "gpu": properties.name,
        "sm": capability(run.device),
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": driver_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton or "none",
        "cuda": torch.version.cuda,
    }
    run.bandwidth = copy_bandwidth(run.device, timer)
    run.facts["copy_bytes_per_s"] = run.bandwidth
    facts = run.facts
    versions = f"driver {facts['driver']} torch {facts['torch']} triton {facts['triton']}"
    case = f"{facts['gpu']} sm{facts['sm']} {versions}"
    return Result("environment", case, run.bandwidth / 1e9, "GB/s copy", details=dict(facts))


def driver_version() -> str:
    """The NVIDIA driver's version as nvidia-smi tells it, or `unknown`."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
        return first_line(done.stdout)
    return "unknown"


def _compile(run: Run) -> Result:
    """Compile what the numerics and the timings run, side by side; the sweeps compile their own."""
    from toolchain.bench.gpu_numerics import scenarios_for
    from toolchain.bench.gpu_speed import DECODE_CASES
    from toolchain.bench.gpu_sweep import Compile, compile_ahead, default_kernels

    begin = run.budget.used
    wanted: list[Compile] = []
    for cache in usable_caches(run.device):
        for shape in DECODE_CASES:
            wanted += default_kernels(shape.spec, shape.dtype, run.device) if shape.cache == cache else []
        for dtype in DTYPES:
            for scenario in scenarios_for(dtype, cache):
                wanted += default_kernels(scenario.spec, dtype, run.device)
    done = 0
    while done < len(wanted) and run.budget.used < COMPILE_SHARE * run.budget.seconds:
        batch = wanted[done : done + 2 * compilers()]
        compile_ahead(batch, compilers())
        done += len(batch)
    case = f"{done} of {len(wanted)} kernels, {compilers()} at a time; the rest at their first launch"
    return Result("compile", case, run.budget.used - begin, "s")


def _numerics(cache: str, dtype: str, device: str) -> Result:
    from toolchain.bench.gpu_numerics import check_numerics

    return check_numerics(cache, dtype, device, attend)


def _plugin(run: Run, timer: Any) -> Iterator[Result]:
    """The given library, or one built here; skipped with the reason when it cannot be built."""
    from toolchain.bench.gpu_built import build_library, check_plugin, plugin_speed
    from toolchain.errors import DtoolError
    from toolchain.ops.plugin.entry import PluginLibrary

    with tempfile.TemporaryDirectory() as scratch:
        path = run.plugin_library
        if path is None:
            try:
                path = build_library(usable_caches(run.device), Path(scratch), run.device)
            except DtoolError as error:
                yield skipped("plugin", f"no --plugin-library given; {first_line(str(error))}")
                return
        library = PluginLibrary(path)
        yield from check_plugin(library, run.device, attend, timer)
        speed = plugin_speed(library, run.device, timer, run.bandwidth)
        if speed is not None:
            yield speed


def _engine(folder: Path) -> Iterator[Result]:
    """One engine; skipped when this environment lacks TensorRT or what dtool itself needs."""
    from toolchain.bench.gpu_built import check_engine, missing_for_engine

    missing = missing_for_engine(folder)
    if missing:
        yield skipped("engine", missing, folder.name)
    else:
        yield from check_engine(folder)


def gpu_check(
    *,
    json_file: Path | None = None,
    plugin_library: Path | None = None,
    engines: Sequence[Path] = (),
    seconds: float = SECONDS,
    say: Say = print,
) -> int:
    """Run everything, print the table and return the exit code.

    Args:
        json_file: where the JSON document goes.
        plugin_library: a library of `dtool build-plugin`; one is built when None and the tools are here.
        engines: folders that `dtool build-engine` wrote.
        seconds: time budget; no check begins after it.
        say: prints a line.
    """
    import torch

    if not torch.cuda.is_available():
        say(NO_GPU)
        return EXIT_NO_GPU
    run = Run(Budget(seconds), plugin_library, tuple(engines))

    def save(results: Sequence[Result]) -> None:
        if json_file is not None:
            facts = {"environment": run.facts, "budget_s": seconds, "seconds": run.budget.used}
            write_document(json_file, results, facts)

    try:
        save([])  # a path that cannot be written is known before the work
    except OSError as error:
        say(f"dtool gpu-check: {json_file} cannot be written: {error.strerror}")
        return EXIT_NO_GPU
    torch.manual_seed(0)
    results = run_checks(all_checks(run), run.budget, say=say, save=save, unusable=_unusable, gpu_lost=_gpu_lost)
    say(render_table(results))
    return exit_code(results)


def _unusable(cache: str) -> str:
    return "" if not cache or cache in usable_caches(DEVICE) else f"this GPU has no conversions for {cache}"


def _gpu_lost() -> str:
    """Why the GPU takes no more work; empty while it does. An illegal access ends a CUDA context for good."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=DEVICE).item()
    except Exception as error:  # noqa: BLE001 - any error here means the same
        return first_line(str(error))
    return ""


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name something")
    return Path(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, by argparse: this must run where click is not."""
    parser = argparse.ArgumentParser(prog="python -m toolchain.bench.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=_path, metavar="FILE", help="write all results there")
    parser.add_argument("--plugin-library", type=_path, metavar="FILE", help="a library of `dtool build-plugin`")
    parser.add_argument("--engine", type=_path, metavar="DIR", action="append", default=[], help="may be repeated")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="N", help="time budget (default 300)")
    options = parser.parse_args(arguments)
    return gpu_check(
        json_file=options.json,
        plugin_library=options.plugin_library,
        engines=options.engine,
        seconds=options.seconds,
        say=functools.partial(print, flush=True),
    )


if __name__ == "__main__":
    sys.exit(main())

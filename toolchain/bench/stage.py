"""`dtool bench`: an artifact against the float32 torch decoder of its checkpoint, in one run."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic

from toolchain.artifact import Artifact, open_artifact
from toolchain.bench.latency import FORMULAS, CaseResult, FirstCall, Spread, check_bench, compare_runners, prepare
from toolchain.bench.memory import (
    BANDWIDTH_METHOD,
    MBU_FORMULA,
    PeakMemory,
    StepBytes,
    artifact_step_bytes,
    bandwidth_utilization,
    eager_step_bytes,
    measure_bandwidth,
    measure_peak,
    use_threads,
)
from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig
from toolchain.recipe import Recipe
from toolchain.recipe_sections import Bench
from toolchain.report import Bars, Measured, Page, Table
from toolchain.runners.open import eager_runner, open_runner
from toolchain.runners.runner import Runner, artifact_limits

PACKAGES = ("dtool", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch")
BUSY_LOAD = 0.5
SPEEDUP_FORMULA = (
    "engine rate / eager rate at the longest prompt, of medians; *_best of the fastest sample of each side, "
    "which other load on the machine moves less"
)
SIDES = ("engine", "eager")


class Side(pydantic.BaseModel, frozen=True, extra="forbid"):
    """One side. The rates and spreads here are those of the longest prompt; `cases` has every length.

    `load_ms` is opening the model and making its sessions, the backend's import included.
    """

    runner: str
    load_ms: Measured
    first_call: FirstCall
    ttft_ms: Spread
    tpot_ms: Spread
    tpot_mean_ms: Measured
    prefill_tokens_per_s: Measured
    decode_tokens_per_s: Measured
    end_to_end_tokens_per_s: Measured
    peak_memory_bytes: int
    anonymous_memory_bytes: int
    step_bytes: StepBytes | None
    mbu: Measured | None
    cases: tuple[CaseResult, ...]


class Environment(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Where and with what it was measured. `load_average` is the machine's over the minute before."""

    cpu: str
    cores: int
    threads: int
    clock: str
    load_average: Measured
    memory_bandwidth_gb_s: Measured
    mbu: Measured | None
    versions: dict[str, str]


class BenchReport(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Both sides, the machine, and what every number means."""

    candidate: str
    stage: str
    engine: Side
    eager: Side
    speedup: dict[str, Measured]
    environment: Environment
    settings: Bench
    formulas: dict[str, str]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The report as plain JSON types: bench.json."""
        return self.model_dump(mode="json")

    def page(self) -> Page:
        """The report as a page."""
        return _page(self)


def bench_artifact(
    candidate: Path, recipe: Recipe, *, model: Path | None, report: Callable[[str], None] = print
) -> BenchReport:
    """Latency, rates, peak memory and bandwidth use of `candidate` and of eager torch on `model`.

    Raises DtoolError when `candidate` is no runnable artifact, `model` is None or no checkpoint, or
    the bench does not fit the engine.
    """
    if model is None:
        raise DtoolError(
            "bench needs the checkpoint",
            expected="the Hugging Face folder the artifact was made from: eager torch is the other side",
            found="none given",
            fix="add --model FOLDER",
        )
    artifact = open_artifact(candidate)
    load_average = os.getloadavg()[0]
    bench, config = recipe.bench, artifact.read("decoder.json", DecoderConfig)
    check_bench(str(candidate), bench, artifact_limits(artifact), config.context_len)
    threads = use_threads(bench.threads)
    runners, load_ms = _open_both(candidate, model, bench.threads)
    device = getattr(runners["engine"], "torch_device", "cpu")
    before_gb_s = measure_bandwidth(device)
    step_bytes = {
        "engine": artifact_step_bytes(artifact, runners["engine"].config),
        "eager": eager_step_bytes(runners["eager"].config),
    }
    measured = compare_runners(runners, bench, report=report)
    names = {name: runner.name for name, runner in runners.items()}
    context_len = runners["engine"].config.context_len
    del runners  # their memory must not press on the measurements that follow
    bandwidth = max(before_gb_s, measure_bandwidth(device))  # other load can only lower it
    report(f"memory bandwidth {bandwidth:.1f} GB/s with {threads} threads")
    sides: dict[str, Side] = {}
    for name, path in zip(SIDES, (candidate, model), strict=True):
        peak = measure_peak(path, bench, eager=name == "eager", context_len=context_len)
        report(f"{name}: peak memory {peak.peak_bytes / 1e6:.0f} MB")
        sides[name] = _side(
            names[name], load_ms[name], measured[name], peak=peak, step=step_bytes[name], bandwidth_gb_s=bandwidth
        )
    environment = _environment(threads, load_average, bandwidth, sides["engine"].mbu)
    return _assemble(artifact, sides, environment, bench, report)


def _open_both(candidate: Path, model: Path, threads: int) -> tuple[dict[str, Runner], dict[str, float]]:
    runners: dict[str, Runner] = {}
    openers: dict[str, Callable[[], Runner]] = {
        "engine": lambda: open_runner(candidate, threads=threads),
        "eager": lambda: eager_runner(
            model, getattr(runners["engine"], "torch_device", "cpu"), runners["engine"].config.context_len
        ),
    }
    load_ms: dict[str, float] = {}
    for name, opener in openers.items():
        begin = time.perf_counter()
        runners[name] = opener()
        prepare(runners[name])
        load_ms[name] = (time.perf_counter() - begin) * 1e3
    return runners, load_ms


def _side(
    runner: str,
    load_ms: float,
    measured: tuple[FirstCall, tuple[CaseResult, ...]],
    *,
    peak: PeakMemory,
    step: StepBytes | None,
    bandwidth_gb_s: float,
) -> Side:
    first_call, cases = measured
    head = max(cases, key=lambda c: c.prompt_tokens)
    mbu = step and bandwidth_utilization(
        step,
        batch=head.batch,
        prompt_tokens=head.prompt_tokens,
        new_tokens=head.new_tokens,
        tpot_ms=head.tpot_ms.p50,
        bandwidth_gb_s=bandwidth_gb_s,
    )
    return Side(
        runner=runner,
        load_ms=load_ms,
        first_call=first_call,
        ttft_ms=head.ttft_ms,
        tpot_ms=head.tpot_ms,
        tpot_mean_ms=head.tpot_mean_ms,
        prefill_tokens_per_s=head.prefill_tokens_per_s,
        decode_tokens_per_s=head.decode_tokens_per_s,
        end_to_end_tokens_per_s=head.end_to_end_tokens_per_s,
        peak_memory_bytes=peak.peak_bytes,
        anonymous_memory_bytes=peak.anonymous_bytes,
        step_bytes=step,
        mbu=mbu,
        cases=cases,
    )


def _environment(threads: int, load_average: float, bandwidth_gb_s: float, mbu: float | None) -> Environment:
    return Environment(
        cpu=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        threads=threads,
        clock=time.get_clock_info("perf_counter").implementation,
        load_average=load_average,
        memory_bandwidth_gb_s=bandwidth_gb_s,
        mbu=mbu,
        versions={"python": platform.python_version(), **_installed(PACKAGES)},
    )


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    present = {d.name.lower() for d in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in packages if name in present}


def _assemble(
    artifact: Artifact, sides: dict[str, Side], environment: Environment, bench: Bench, report: Callable[[str], None]
) -> BenchReport:
    engine, eager = sides["engine"], sides["eager"]
    notes = tuple(find_notes(engine, eager, environment, bench))
    for note in notes:
        report(note)
    return BenchReport(
        candidate=artifact.path.resolve().name,
        stage=artifact.manifest.stage,
        engine=engine,
        eager=eager,
        speedup={
            "decode": engine.decode_tokens_per_s / eager.decode_tokens_per_s,
            "prefill": engine.prefill_tokens_per_s / eager.prefill_tokens_per_s,
            "decode_best": eager.tpot_ms.min / engine.tpot_ms.min,
            "prefill_best": eager.ttft_ms.min / engine.ttft_ms.min,
        },
        environment=environment,
        settings=bench,
        formulas=FORMULAS | {"mbu": MBU_FORMULA, "memory_bandwidth_gb_s": BANDWIDTH_METHOD, "speedup": SPEEDUP_FORMULA},
        notes=notes,
    )


def find_notes(engine: Side, eager: Side, environment: Environment, bench: Bench) -> list[str]:
    """What a reader must know before quoting the numbers."""
    notes: list[str] = []
    for ours, theirs in zip(engine.cases, eager.cases, strict=True):
        rates = (
            ("decode", ours.decode_tokens_per_s, theirs.decode_tokens_per_s),
            ("prefill", ours.prefill_tokens_per_s, theirs.prefill_tokens_per_s),
        )
        for what, fast, slow in rates:
            if fast <= slow:
                notes.append(
                    f"warning: the engine is not faster than eager: {what} at prompt {ours.prompt_tokens}: "
                    f"{fast:.1f} against {slow:.1f} tok/s ({fast / slow:.2f} x)"
                )
    if bench.warmup == 0:
        notes.append("no warm-up was asked for: only the first call is left out")
    if environment.load_average > BUSY_LOAD:
        # Seen with SmolLM2-135M: decode 1.5 x of eager when quiet, 3.9 x of medians at a load of 5.6.
        notes.append(
            f"the machine was busy before the run: load average {environment.load_average:.2f}; torch's threads "
            "lose more by that than ONNX Runtime's, so medians flatter the engine: read speedup.*_best"
        )
    if engine.step_bytes is None:
        notes.append("no bandwidth use of the engine: its files hold no weights by name")
    return notes


def _page(report: BenchReport) -> Page:
    environment, bench = report.environment, report.settings
    facts = (
        ("candidate", f"{report.candidate} ({report.stage}, {report.engine.runner})"),
        ("processor", f"{environment.cpu}, {environment.threads} of {environment.cores} cores"),
        ("bandwidth", f"{environment.memory_bandwidth_gb_s:.1f} GB/s measured"),
        ("bandwidth use", _percent(report.engine.mbu) + f" engine, {_percent(report.eager.mbu)} eager"),
        ("runs", f"{bench.repeats} in turns after {bench.warmup} warm-up, batch {bench.batch}"),
        ("speed", _speed(report.speedup)),
        *(("note", note) for note in report.notes),
    )
    return Page(f"Bench of {report.candidate}", facts=facts, parts=(*_tables(report), *_bars(report)))


def _speed(speedup: dict[str, float]) -> str:
    parts = [f"{k} {speedup[k]:.2f} x (fastest samples {speedup[f'{k}_best']:.2f} x)" for k in ("decode", "prefill")]
    return ", ".join(parts) + " of eager"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share * 100:.0f} %"


def _tables(report: BenchReport) -> tuple[Table, ...]:
    pairs = [(name, side) for name, side in zip(SIDES, (report.engine, report.eager), strict=True)]
    cases = sorted(((c.prompt_tokens, name, c) for name, side in pairs for c in side.cases), key=lambda row: row[0])
    spread_heads = ("side", "prompt", "p50", "p90", "p99", "min", "samples")

    def spreads(field: str) -> tuple[tuple[Any, ...], ...]:
        found = ((name, tokens, getattr(case, field)) for tokens, name, case in cases)
        return tuple((name, tokens, s.p50, s.p90, s.p99, s.min, s.samples) for name, tokens, s in found)

    rates = tuple(
        (name, n, c.prefill_tokens_per_s, c.decode_tokens_per_s, c.end_to_end_tokens_per_s) for n, name, c in cases
    )
    once = tuple(
        (n, s.load_ms, s.first_call.prefill_ms, s.first_call.decode_ms, s.peak_memory_bytes / 1e6,
         s.anonymous_memory_bytes / 1e6, None if s.step_bytes is None else s.step_bytes.weight_bytes / 1e6)
        for n, s in pairs
    )  # fmt: skip
    once_heads = ("side", "load ms", "first prefill ms", "first decode ms", "peak MB", "anonymous MB", "weights MB")
    return (
        Table("Time to the first token, ms", spread_heads, spreads("ttft_ms"), FORMULAS["ttft_ms"]),
        Table("Time per output token, ms", spread_heads, spreads("tpot_ms"), FORMULAS["tpot_ms"]),
        Table(
            "Rates, tokens/s",
            ("side", "prompt", "prefill", "decode", "end to end"),
            rates,
            "; ".join(f"{k}: {FORMULAS[f'{k}_tokens_per_s']}" for k in ("prefill", "decode", "end_to_end")),
        ),
        Table(
            "Once per process",
            once_heads,
            once,
            "peak: everything resident, mapped weight files too, in a process of its own; "
            "anonymous: not backed by a file, at its end",
        ),
    )


def _bars(report: BenchReport) -> tuple[Bars, ...]:
    sides = (("engine", report.engine), ("eager", report.eager))
    longest = max(report.settings.prompt_lens)
    return (
        Bars(f"Decode at prompt {longest}", "tok/s", tuple((n, s.decode_tokens_per_s) for n, s in sides)),
        Bars(f"Prefill at prompt {longest}", "tok/s", tuple((n, s.prefill_tokens_per_s) for n, s in sides)),
        Bars("Peak memory", "MB", tuple((n, s.peak_memory_bytes / 1e6) for n, s in sides)),
    )

"""Time of prefill and decode, of two runners in turns.

    TTFT = prefill of the prompt + choice of the first token
    TPOT = (total - TTFT) / (N - 1)              N tokens come out: the first, then N - 1 decode steps
    prefill tok/s = B S / TTFT     decode tok/s = B 1000 / TPOT [ms]     end-to-end tok/s = B N / total

What goes wrong elsewhere, and the rule here (field faults K-01 to K-03): building and loading are
timed apart; the first prefill and the first decode step have their own field; warm-up is counted
and reported, none at all is said; the clock stops after the runner has been waited for, once per
region; the token is chosen inside the region, since no user gets logits; tokens are all N that come
out, never N - 1 with the time of N. Both runners work on the same prompts in the same loop, so that
load and clocks of the machine hit both. A pause before each turn lets the other's spinning threads
go to sleep. One cache per runner and prompt length is used again, as a server does: only its
lengths are set to zero.

Legend: B batch, S prompt tokens, N tokens that come out, V vocab.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pydantic

from toolchain.errors import DtoolError
from toolchain.recipe_sections import Bench
from toolchain.report import Measured
from toolchain.runners.runner import Array, KVState, Limits, Runner

CAPACITY_STEP = 64
SETTLE_S = 0.05
PROMPT_SEED = 0
SAMPLED_PERCENTILES = (50, 90, 99)

FORMULAS = {
    "ttft_ms": "prefill of the prompt and choice of the first token, runner waited for; one sample per repeat",
    "tpot_ms": "one decode step and choice of its token, runner waited for; one sample per step of every repeat",
    "tpot_mean_ms": "(total - TTFT) / (N - 1), median over the repeats; N = new_tokens + 1 tokens come out",
    "prefill_tokens_per_s": "B * S * 1000 / ttft_ms.p50",
    "decode_tokens_per_s": "B * 1000 / tpot_ms.p50",
    "end_to_end_tokens_per_s": "B * N / total, median over the repeats",
    "percentiles": "linear interpolation between samples; with few samples p99 is near the largest",
}

Clock = Callable[[], float]
Pause = Callable[[float], None]


class Spread(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Milliseconds over `samples` measurements."""

    p50: Measured
    p90: Measured
    p99: Measured
    min: Measured
    samples: int


class FirstCall(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The first prefill and the first decode step of a runner, in no other number."""

    prompt_tokens: int
    prefill_ms: Measured
    decode_ms: Measured


class CaseResult(pydantic.BaseModel, frozen=True, extra="forbid"):
    """One runner at one prompt length."""

    prompt_tokens: int
    new_tokens: int
    batch: int
    capacity: int
    ttft_ms: Spread
    tpot_ms: Spread
    tpot_mean_ms: Measured
    prefill_tokens_per_s: Measured
    decode_tokens_per_s: Measured
    end_to_end_tokens_per_s: Measured
    cache_copy_bytes_per_step: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """Seconds of one generation: its prefill, and each of its decode steps."""

    ttft_s: float
    steps_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Prefill and all steps."""
        return self.ttft_s + sum(self.steps_s)

    @property
    def tpot_s(self) -> float:
        """(total - TTFT) / (N - 1)."""
        return (self.total_s - self.ttft_s) / len(self.steps_s)


@dataclass(slots=True)
class Case:
    """A prompt int64 [B, S] on one runner, with its cache and what was measured."""

    runner: Runner
    prompt: Array
    new_tokens: int
    state: KVState
    generations: list[Generation] = field(default_factory=list)
    copied_bytes: int | None = None


def compare_runners(
    runners: Mapping[str, Runner],
    bench: Bench,
    *,
    clock: Clock = time.perf_counter,
    pause: Pause = time.sleep,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, tuple[FirstCall, tuple[CaseResult, ...]]]:
    """First call and results per prompt length of every runner, measured in turns.

    Raises DtoolError before any work when a case does not fit a runner, and when logits are not finite.
    """
    for runner in runners.values():
        check_cases(runner, bench)
    prompts = make_prompts(min(r.config.vocab_size for r in runners.values()), bench)
    first = {name: _first_call(runner, prompts[0], clock) for name, runner in runners.items()}
    results: dict[str, list[CaseResult]] = {name: [] for name in runners}
    for prompt in prompts:
        cases = {name: new_case(runner, prompt, bench.new_tokens) for name, runner in runners.items()}
        run_in_turns(list(cases.values()), bench.warmup, bench.repeats, clock, pause)
        for name, case in cases.items():
            results[name].append(summarize(case))
            report(describe(name, results[name][-1]))
    return {name: (first[name], tuple(results[name])) for name in runners}


def run_in_turns(cases: Sequence[Case], warmup: int, repeats: int, clock: Clock, pause: Pause) -> None:
    """Run every case once per round: `warmup` rounds are thrown away, `repeats` are kept."""
    for round_number in range(warmup + repeats):
        for case in cases:
            pause(SETTLE_S)
            copied = getattr(case.runner, "copied_cache_bytes", None)
            generation = generate_timed(case, clock)
            if round_number >= warmup:
                case.generations.append(generation)
                if copied is not None:
                    case.copied_bytes = (case.copied_bytes or 0) + case.runner.copied_cache_bytes - copied  # type: ignore[attr-defined]


def generate_timed(case: Case, clock: Clock) -> Generation:
    """Prefill and `new_tokens` decode steps from an empty cache, each timed by itself. Greedy."""
    batch, tokens = case.prompt.shape
    case.state.lengths = np.zeros(batch, np.int64)
    ttft_s, next_ids = _timed_step(case, case.prompt, np.full(batch, tokens, np.int64), clock)
    ones = np.ones(batch, np.int64)
    steps_s: list[float] = []
    for _ in range(case.new_tokens):
        seconds, next_ids = _timed_step(case, next_ids, ones, clock)
        steps_s.append(seconds)
    return Generation(ttft_s, tuple(steps_s))


def _timed_step(case: Case, ids: Array, new_lengths: Array, clock: Clock) -> tuple[float, Array]:
    phase = "decode" if ids.shape[1] == 1 and case.state.lengths.min() > 0 else "prefill"
    begin = clock()
    logits = case.runner.step(case.state, ids, new_lengths, phase)
    wait(case.runner)
    next_ids = logits[:, -1, :].argmax(axis=-1)[:, None].astype(np.int64)
    seconds = clock() - begin
    if not np.isfinite(logits).all():
        raise DtoolError(
            f"{case.runner.name} gives logits that are not finite",
            expected="finite logits on random tokens",
            found=f"NaN or infinity after {int(case.state.lengths.max())} tokens",
            fix="run `dtool parity` first: the speed of a broken model says nothing",
        )
    return seconds, next_ids


def wait(runner: Runner) -> None:
    """Wait for work a runner has only queued. Without `synchronize()` its step has returned finished numbers."""
    synchronize = getattr(runner, "synchronize", None)
    if synchronize is not None:
        synchronize()


def prepare(runner: Runner) -> None:
    """Make the sessions a runner would make on first use, so that this counts as loading."""
    session = getattr(runner, "session", None)
    if session is not None:
        session("prefill")
        session("decode")


def _first_call(runner: Runner, prompt: Array, clock: Clock) -> FirstCall:
    generation = generate_timed(new_case(runner, prompt, 1), clock)
    return FirstCall(
        prompt_tokens=prompt.shape[1], prefill_ms=generation.ttft_s * 1e3, decode_ms=generation.steps_s[0] * 1e3
    )


def new_case(runner: Runner, prompt: Array, new_tokens: int) -> Case:
    """A case with its own cache."""
    batch, tokens = prompt.shape
    return Case(runner, prompt, new_tokens, runner.new_state(batch, capacity_for(runner, tokens + new_tokens)))


def capacity_for(runner: Runner, tokens: int) -> int:
    """Slots for `tokens`, rounded up to 64 where the engine and the model allow it."""
    rounded = -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
    return min(rounded, largest_capacity(runner))


def largest_capacity(runner: Runner) -> int:
    """The most slots a runner's cache can have."""
    limits = getattr(runner, "limits", Limits())
    return min(limits.capacity or runner.config.context_len, runner.config.context_len)


def check_cases(runner: Runner, bench: Bench) -> None:
    """Refuse prompt lengths and batches a runner cannot take. Raises DtoolError."""
    check_bench(runner.name, bench, getattr(runner, "limits", Limits()), runner.config.context_len)


def check_bench(name: str, bench: Bench, limits: Limits, context_len: int) -> None:
    """Refuse prompt lengths and batches beyond the limits of an engine of that name, and the model's positions."""
    longest = max(bench.prompt_lens, default=0)
    if longest < 1 or min(bench.prompt_lens) < 1:
        raise DtoolError(
            "bench.prompt_lens has nothing to time",
            expected="lengths of 1 or more",
            found=str(longest),
            fix="--set 'bench.prompt_lens=[32, 256]'",
        )
    capacity = min(limits.capacity or context_len, context_len)
    bounds = (
        ("bench.batch", bench.batch, limits.min_batch, limits.max_batch),
        ("the shortest of bench.prompt_lens", min(bench.prompt_lens), limits.min_prompt, None),
        ("the longest of bench.prompt_lens", longest, 1, limits.max_prompt),
        ("the longest prompt and bench.new_tokens", longest + bench.new_tokens, 1, capacity),
    )
    for what, value, least, most in bounds:
        if value < least or (most is not None and value > most):
            few = value < least
            raise DtoolError(
                f"{name} cannot run this bench: {what} is {value}",
                expected=f"at least {least}" if few else f"at most {most}",
                found=str(value),
                fix=f"ask for {'more' if few else 'less'} with --set bench.…, or build an engine with a larger range",
            )


def make_prompts(vocab: int, bench: Bench) -> list[Array]:
    """Random ids int64 [B, S] per prompt length, the same on every run."""
    rng = np.random.default_rng(PROMPT_SEED)
    return [rng.integers(0, vocab, (bench.batch, tokens), dtype=np.int64) for tokens in bench.prompt_lens]


def spread_ms(seconds: Sequence[float]) -> Spread:
    """Percentiles in milliseconds of samples in seconds."""
    p50, p90, p99 = (float(p) * 1e3 for p in np.percentile(np.asarray(seconds), SAMPLED_PERCENTILES))
    return Spread(p50=p50, p90=p90, p99=p99, min=min(seconds) * 1e3, samples=len(seconds))


def summarize(case: Case) -> CaseResult:
    """The measured numbers of a case, by the formulas above."""
    batch, tokens = case.prompt.shape
    runs = case.generations
    ttft = spread_ms([g.ttft_s for g in runs])
    tpot = spread_ms([s for g in runs for s in g.steps_s])
    steps = len(runs) * case.new_tokens
    return CaseResult(
        prompt_tokens=tokens,
        new_tokens=case.new_tokens,
        batch=batch,
        capacity=case.state.capacity,
        ttft_ms=ttft,
        tpot_ms=tpot,
        tpot_mean_ms=float(np.median([g.tpot_s for g in runs])) * 1e3,
        prefill_tokens_per_s=batch * tokens * 1e3 / ttft.p50,
        decode_tokens_per_s=batch * 1e3 / tpot.p50,
        end_to_end_tokens_per_s=batch * (case.new_tokens + 1) / float(np.median([g.total_s for g in runs])),
        cache_copy_bytes_per_step=None if case.copied_bytes is None else case.copied_bytes // steps,
    )


def describe(name: str, case: CaseResult) -> str:
    """One line for the terminal while the bench runs."""
    return (
        f"{name}: prompt {case.prompt_tokens}, TTFT {case.ttft_ms.p50:.1f} ms, TPOT {case.tpot_ms.p50:.2f} ms, "
        f"prefill {case.prefill_tokens_per_s:.0f} tok/s, decode {case.decode_tokens_per_s:.1f} tok/s"
    )

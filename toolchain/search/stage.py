"""`dtool search`: a budget in, the cheapest mix of formats that meets it out, as a recipe anyone can rerun.

    1. what every format of every unit costs alone is measured (`sensitivity`)
    2. the sums make an integer program, solved exactly (`solve`)
    3. the mix is quantized for real by the recipe as it is written, and measured on the same text
    4. the measured loss over the sum corrects the sum, and 2 and 3 are repeated, at most ROUNDS times

The rise of the NLL is estimated by the KL: over text that the model itself writes they have the same mean, and the
KL has none of the sampling noise that would let a search pick lucky units; step 4 brings in what the text says.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain.artifact import Artifact, enclosing_artifact, open_artifact, real_place, write_atomic
from toolchain.engine.preflight import check_export
from toolchain.engine.source import check_source
from toolchain.errors import DtoolError
from toolchain.model.caches import caches_of
from toolchain.model.config import DecoderConfig
from toolchain.quantize.calibration import calibration_blocks
from toolchain.quantize.job import plan_recipe
from toolchain.quantize.plan import plan_quantization
from toolchain.quantize.progress import time_span
from toolchain.recipe import Recipe, find_data, load_recipe
from toolchain.search import solve, units
from toolchain.search.budget import Budget, Question, Rounds
from toolchain.search.solve import Problem
from toolchain.search.units import Unit
from toolchain.search.written import recipe_text
from toolchain.tensor_file import TensorEntry, read_header

Report = Callable[[str], None]
WEIGHTS = "weights.safetensors"
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """A mix quantized for real: its bytes of weights and cache, its measured and its estimated loss (nats)."""

    mix: dict[str, str]
    recipe: str
    bytes: int
    cache_bytes: int
    kl: float
    rise: float
    estimated_kl: float


@dataclass(slots=True)
class SearchResult:
    """What a search found: `best` of `trials`, the frontier it lies on, and what every unit costs.

    `capacity`: tokens that a cache is counted for. `heads`: KL (nats) of each KV head by layer, where it was asked
    for. `seconds` of the parts of the work; they are in no document, which repeats byte for byte.
    """

    budget: Budget
    base: str
    formats: tuple[str, ...]
    found: tuple[Unit, ...]
    problem: Problem
    text: str
    capacity: int
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    passed: bool = False
    heads: dict[int, list[float]] | None = None
    frontier: list[dict[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def search_formats(
    source: Path, recipe: Recipe, question: Question, out: Path, *, report: Report = print
) -> SearchResult:
    """Write to `out` the recipe of the cheapest mix that meets the budget, or of the nearest to it.

    `passed` of the result says whether it does. Raises DtoolError before any work for a source that is no export,
    a recipe that no engine can be built of, formats the engine cannot take, megabytes that no mix can meet, missing
    text, or an output that is in the way.
    """
    _check_out(out)
    recipe = recipe.model_copy(update={"about": question.about()})
    exported = open_artifact(source, ("export",))
    config = exported.read("decoder.json", DecoderConfig)
    entries = read_header(exported.file(WEIGHTS))
    check_source(exported, recipe, sections=())
    compute_dtype = str(exported.manifest.details["compute_dtype"])
    plan, _ = plan_recipe(config, recipe, compute_dtype)
    check_export(exported, recipe, plan.weights)
    _check_heads(recipe, question)
    formats = units.choose_formats(recipe, question.formats)
    found = units.find_units(config, recipe)
    choices = {unit.name: units.possible_formats(config, unit, recipe, formats) for unit in found}
    sizes, rest = units.format_bytes(entries, config, recipe, found, choices)
    empty = Problem(sizes, {u: dict.fromkeys(f, 0.0) for u, f in sizes.items()}, rest)
    question.budget.check_bytes(empty)
    ids_BT, described = held_out_text(exported, recipe, question)
    base, capacity = units.base_format(recipe), recipe.engine.kv_capacity
    result = SearchResult(question.budget, base, formats, found, empty, described, capacity)
    with _timed(result, "sensitivity"):
        model, plans = _prepared(exported, entries, config, recipe, found, formats, choices, ids_BT, report)
        result.problem = _measured(model, plans, found, empty, report)
    if question.heads:
        from toolchain.search.heads import head_losses

        with _timed(result, "KV heads"):
            result.heads = head_losses(model, [unit.layer for unit in found if unit.is_cache], report)
    with _timed(result, "search"):
        result.frontier = solve.frontier(result.problem)
        _search(result, source, recipe, model, report)
    assert result.best is not None
    write_atomic(out, result.best.recipe.encode())
    return result


@contextlib.contextmanager
def _timed(result: SearchResult, part: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    result.seconds[part] = time.perf_counter() - begin


def _check_out(out: Path) -> None:
    inside = enclosing_artifact(out)
    if out.exists() or inside or not real_place(out).parent.is_dir():
        found = f"the artifact {inside}" if inside else "something is there" if out.exists() else "no such folder"
        raise DtoolError(
            f"the recipe cannot be written to {out}", expected="a free path in a folder, outside artifacts",
            found=found, fix="choose another path",
        )  # fmt: skip


def _check_heads(recipe: Recipe, question: Question) -> None:
    if question.heads and recipe.kv_cache.format == "none":
        raise DtoolError(
            "there is no quantized cache whose heads could be measured",
            expected="kv_cache.format other than none with --heads",
            found="kv_cache.format none",
            fix="leave --heads out, or --set kv_cache.format=int8",
        )


def held_out_text(exported: Artifact, recipe: Recipe, question: Question) -> tuple[Any, str]:
    """Token ids int64 [blocks, seq_len] for the measuring, and what they are.

    Of the calibration text the blocks after those that calibration takes, at most as long as those; of any other
    text the first. Raises DtoolError when it is too short.
    """
    c, own = recipe.calibration, question.text in (None, recipe.calibration.data)
    positions = int(exported.json("decoder.json")["context_len"])
    if question.seq_len > positions:
        raise DtoolError(
            "the blocks to measure on are longer than the model's positions",
            expected=f"--seq-len of at most {positions} (context_len)",
            found=str(question.seq_len),
            fix="measure on shorter blocks",
        )
    path = find_data(c.data) if question.text is None else find_data(question.text, "--text")
    taken, seq_len, seed = (c.samples, c.seq_len, c.seed) if own else (0, question.seq_len, 0)
    chat = own and c.chat
    fix = "name a longer text with --text, or ask for fewer --blocks" + ("" if own else " or a shorter --seq-len")
    asked = {"blocks": question.blocks, "seq_len": seq_len, "seed": seed, "skip": taken, "fix": fix}
    ids = _blocks(exported, path, chat, asked)
    ids = ids[:, : question.seq_len]
    described = f"{len(ids)} blocks of {ids.shape[1]} tokens of {path.name}"
    return ids.clone(), described + (", none of them calibrated on" if own else "")


def _blocks(exported: Artifact, path: Path, chat: bool, asked: dict[str, Any]) -> Any:
    import torch

    from toolchain.text import load_tokenizer, read_texts, token_blocks

    tokenizer = load_tokenizer(exported.path)
    return torch.from_numpy(token_blocks(read_texts(path, tokenizer if chat else None), tokenizer, **asked))


def _prepared(
    exported: Artifact,
    entries: Mapping[str, TensorEntry],
    config: DecoderConfig,
    recipe: Recipe,
    found: Sequence[Unit],
    formats: Sequence[str],
    choices: Mapping[str, Sequence[str]],
    ids_BT: Any,
    report: Report,
) -> tuple[Any, dict[str, Any]]:
    """The float model over the text, and the plan of each format taken by all units that can."""
    from toolchain.model.load import load_artifact_decoder
    from toolchain.search.sensitivity import prepare_model

    free = {u.name: () if u.is_cache else choices[u.name] for u in found}  # caches keep their own: it is measured
    mixes = [{unit: f if f in taken else choices[unit][0] for unit, taken in free.items()} for f in formats]
    recipes = [units.mixed_recipe(recipe, found, mix, recipe.about) for mix in mixes]
    static = any(plan_quantization(config, r).static for r in recipes)
    changed = recipe.rotation.is_on or recipe.smoothing.is_on or recipe.kv_cache.is_static
    blocks = calibration_blocks(exported.path, recipe, config) if static or changed else None
    decoder = load_artifact_decoder(exported)
    model = prepare_model(decoder, entries, recipes, blocks, ids_BT, report)
    return model, {f: plan_quantization(config, r) for f, r in zip(formats, recipes, strict=True)}


def _measured(model: Any, plans: Mapping[str, Any], found: Sequence[Unit], empty: Problem, report: Report) -> Problem:
    """The problem with the measured loss of every unit in every format, and of all that is no choice."""
    first = next(iter(plans.values()))
    names = {name for unit in found for name in unit.matrices}
    fixed = [name for name in first.weights if name not in names]
    loss = {unit: dict(values) for unit, values in empty.loss.items()}
    asked = [(u, f) for u in found for f in empty.bytes[u.name] if f != "none"]
    begin = time.perf_counter()
    for done, (unit, fmt) in enumerate(asked, 1):
        plan = plans.get(fmt, first)
        with model.quantized_cache(unit.layer) if unit.is_cache else model.quantized(unit.matrices, plan):
            kl = model.loss_from(unit.layer).kl
        loss[unit.name][fmt] = kl
        left = (time.perf_counter() - begin) / done * (len(asked) - done)
        report(f"{done} of {len(asked)}: {unit.name} in {fmt} costs {kl:.3g} nats; {time_span(left)} left")
    kept = 0.0
    if fixed:
        with model.quantized(fixed, first):
            kept = model.loss_from(0).kl
        report(f"what is no choice costs {kept:.3g} nats")
    return Problem(empty.bytes, loss, empty.fixed_bytes, kept)


def _search(result: SearchResult, source: Path, recipe: Recipe, model: Any, report: Report) -> None:
    """Solve, quantize for real, correct the estimate by what was measured, and again."""
    rounds = Rounds(result.budget, result.problem)
    for number in range(1, ROUNDS + 1):
        mix = rounds.propose()
        if mix is None:
            break
        text = recipe_text(units.mixed_recipe(recipe, result.found, mix, recipe.about))
        size, cached, loss = _quantized_loss(source, text, model)
        size += cached
        trial = Trial(mix, text, size, cached, loss.kl, loss.rise, result.problem.loss_of(mix))
        result.trials.append(trial)
        met = result.budget.is_met(trial.bytes, trial.kl, trial.rise)
        report(
            f"round {number}: {size / 1e6:.1f} MB, KL {loss.kl:.4g} (estimated {trial.estimated_kl:.4g}), "
            f"rise {loss.rise:.4g} nats: {'meets' if met else 'misses'} the budget"
        )
        rounds.learn(trial.mix, result.budget.measured(trial.kl, trial.rise), met=met)
    meeting = [t for t in result.trials if result.budget.is_met(t.bytes, t.kl, t.rise)]
    result.passed = bool(meeting)
    nearest = lambda t: result.budget.measured(t.kl, t.rise)  # noqa: E731
    result.best = min(meeting, key=lambda t: (t.bytes, t.kl)) if meeting else min(result.trials, key=nearest)


def _quantized_loss(source: Path, text: str, model: Any) -> tuple[int, int, Any]:
    """Bytes of the weights, of the cache, and the loss of what `dtool quantize` makes of the written recipe."""
    import torch

    from toolchain.model.load import load_artifact_decoder
    from toolchain.quantize.stage import quantize_artifact
    from toolchain.search.sensitivity import POSITIONS

    with tempfile.TemporaryDirectory(prefix="dtool-search-") as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(text, "utf-8")
        recipe = load_recipe(str(path))
        artifact = open_artifact(source, ("export",), check_hashes=False)
        if recipe.quantizes and _rounds_something(recipe, artifact):
            artifact = quantize_artifact(source, recipe, Path(folder) / "quantized", report=lambda _: None)
        decoder = load_artifact_decoder(artifact, "float32")
        size = sum(entry.length for entry in read_header(artifact.file(WEIGHTS)).values())
        caches = caches_of(artifact.manifest.kv_contract, decoder.config.num_hidden_layers)
        cached = units.cache_bytes(decoder.config, caches, recipe.engine.kv_capacity)
        batch, new = model.ids_BT.shape
        with torch.inference_mode():
            past_B = torch.zeros(batch, dtype=torch.int64)
            x_BTE = decoder.hidden_states(model.ids_BT, past_B, decoder.new_caches(batch, new))
            rows = x_BTE.flatten(0, 1).split(POSITIONS)
            return size, cached, model.compare(decoder.logits(part[None])[0] for part in rows)


def _rounds_something(recipe: Recipe, artifact: Artifact) -> bool:
    config = artifact.read("decoder.json", DecoderConfig)
    return bool(plan_quantization(config, recipe).weights) or recipe.kv_cache.format != "none"

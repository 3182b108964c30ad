"""`dtool run`: every stage of a recipe, resumable.

OUT holds one folder per stage and one pair of files per proof. A stage's key is the hash of all it
depends on; a finished folder with the right key and intact files is reused, anything else is made
again. So a run that was killed redoes only what was unfinished, and ends with the same hashes.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain.artifact import (
    PAGE_MARK,
    Artifact,
    check_output,
    dump_json,
    hash_json,
    locked,
    open_artifact,
    read_json,
    write_atomic,
)
from toolchain.errors import DtoolError, GateFailed, name_list
from toolchain.model.config import DecoderConfig
from toolchain.processor import installed_gpus
from toolchain.recipe import Recipe, find_data
from toolchain.recipe_sections import Engine
from toolchain.report import Page, Table, render_html
from toolchain.runners.runner import Limits, recipe_limits

Report = Callable[[str], None]
STAGES, PROOFS = ("export", "quantized", "engine"), ("parity", "bench")
PROOF_FILES = tuple(f"{name}.{end}" for name in PROOFS for end in ("json", "html"))
GENERATOR = {"generator": "dtool"}
"""In every JSON file of a proof, as PAGE_MARK is in its page: such a file may be written anew or removed."""
UNMARKED = {
    "parity.json": {"verdict", "rows", "facts", "notes", "divergence", "key"},
    "bench.json": {"candidate", "stage", "engine", "eager", "speedup", "environment"},
}
"""The keys by which a proof is known that a version of dtool wrote before it marked its files."""
VERDICTS = {
    "passed": "passed: the same model, up to",
    "failed": "failed: a gate was missed, with",
    "undecided": "undecided: the text does not decide every gate, with",
}
SAMPLES = ("prompt", "decode")
"""Phases of a proof that its gates hold for."""
ENGINE = "the recipe's engine"
OURS = (*STAGES, *PROOFS, "statistics")
"""First parts of the names a run writes, and of a folder that a user may give."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The folders a run made or reused, and the documents of its proofs; `failure` where a gate failed."""

    artifacts: dict[str, Artifact]
    parity: dict[str, Any]
    bench: dict[str, Any] | None
    failure: GateFailed | None = None

    def document(self) -> dict[str, Any]:
        """The result as JSON types."""
        made = {name: {"path": str(a.path), "identity": a.identity} for name, a in self.artifacts.items()}
        return {"artifacts": made, "parity": self.parity, "bench": self.bench}


@dataclass(slots=True)
class _Stages:
    """The stages of a run in their order: what is finished is reused, the rest is made."""

    out: Path
    report: Report
    artifacts: dict[str, Artifact] = field(default_factory=dict)

    def take(self, name: str, key: str, make: Callable[[Path, bool], Artifact]) -> Artifact:
        """The artifact of a stage; `make` gets its folder, and whether something is there to be replaced."""
        folder = self.out / name
        found = reusable(folder, key, self.report)
        if found is not None:
            self.report(f"{name}: reused, nothing it depends on has changed")
        else:
            self.report(f"{name}: working")
            self._forget_proofs()
            self._leave_link(folder)
            found = make(folder, folder.exists())
        self.artifacts[name] = found
        return found

    def drop(self, name: str) -> None:
        """Remove what an earlier run made by a stage that the recipe no longer has."""
        folder = self.out / name
        self._leave_link(folder)
        if folder.exists():
            self._forget_proofs()
            with locked(folder):
                shutil.rmtree(folder)
            self.report(f"{name}: removed, this recipe quantizes nothing")

    def _leave_link(self, folder: Path) -> None:
        """Remove a link to an artifact of another run, which serves as it is or not at all: nobody said --force."""
        if folder.is_symlink():
            self.report(f"{folder.name}: was a link to {folder.readlink()}, which stays as it is")
            folder.unlink()

    def _forget_proofs(self) -> None:
        """Remove what an earlier run found out about an engine that is now made again."""
        for path in (self.out / name for name in PROOF_FILES):
            if path.is_file():
                path.unlink()
                self.report(f"{path.name}: removed, it was of what is made again")


def run_pipeline(
    model: Path,
    recipe: Recipe,
    out: Path,
    *,
    bench: bool,
    report: Report,
    plugin_libraries: Sequence[Path] = (),
    statistics: Path | None = None,
) -> RunResult:
    """Export, quantize, build, prove and time `model` into `out`; nothing is timed when a gate fails.

    `statistics`: a folder that keeps what calibration saw, for other recipes.
    """
    check_inputs(model, recipe, out, bench=bench, plugin_libraries=plugin_libraries)
    from toolchain.engine.stage import build_engine, engine_key
    from toolchain.export.stage import export_checkpoint, export_key
    from toolchain.quantize.stage import check_statistics, quantize_artifact, quantize_key

    if statistics is not None:
        check_statistics(statistics, out / "quantized")
    stages = _Stages(out, report)
    current = stages.take(
        "export",
        export_key(model, recipe),
        lambda folder, force: export_checkpoint(model, recipe, folder, force=force, report=report),
    )
    if recipe.quantizes:
        exported = current
        current = stages.take(
            "quantized",
            quantize_key(exported, recipe),
            lambda folder, force: quantize_artifact(
                exported.path, recipe, folder, force=force, statistics=statistics, report=report
            ),
        )
    else:
        stages.drop("quantized")
    source = current
    engine = stages.take(
        "engine",
        engine_key(source, recipe, plugin_libraries),
        lambda folder, force: build_engine(
            source.path, recipe, folder, force=force, plugin_libraries=plugin_libraries, report=report
        ),
    )
    proved = engine if runs_here(engine) else source
    parity, failure = _parity(proved, source, model, recipe, out, report)
    timed = _bench(proved, model, recipe, out, report) if bench and failure is None else None
    return RunResult(stages.artifacts, parity, timed, failure)


def runs_here(engine: Artifact) -> bool:
    """Whether this machine can run an engine: the embedded ones anywhere, others on a GPU they are for."""
    return _runs_here(engine.manifest.target["backend"], engine.manifest.target["targets"])


def _runs_here(backend: str, targets: Sequence[str]) -> bool:
    """No targets: TensorRT takes the GPU that it finds."""
    if backend == "onnxruntime":
        return True
    return any(not targets or f"sm{gpu.sm}" in targets for gpu in installed_gpus())


def check_inputs(
    model: Path, recipe: Recipe, out: Path, *, bench: bool = False, plugin_libraries: Sequence[Path] = ()
) -> None:
    """Everything that can be refused before hours of work is refused here."""
    from toolchain.engine import preflight
    from toolchain.model.checkpoint import open_checkpoint
    from toolchain.quantize.calibration import calibration_blocks
    from toolchain.quantize.job import plan_recipe
    from toolchain.quantize.stored import check_scheme, needs_calibration

    check_folder(out)
    checkpoint = open_checkpoint(model, recipe.context_len)
    plan, _ = plan_recipe(checkpoint.config, recipe, recipe.compute_dtype)
    preflight.check_inputs(recipe, checkpoint.config, plan.weights, plugin_libraries)
    find_data(recipe.parity.data)
    check_scheme(None if checkpoint.foreign is None else checkpoint.foreign.scheme, recipe)
    measures = needs_calibration(recipe, plan, checkpoint.config, None)
    if measures and recipe.weights.algorithm != "stored":  # else the stage tells what is to be measured
        calibration_blocks(model, recipe, checkpoint.config)
    engine = recipe.engine
    check_parity(model, recipe, checkpoint.config)
    if bench:
        from toolchain.bench.latency import check_bench

        check_bench(ENGINE, recipe.bench, limits_here(engine), checkpoint.config.context_len)


def limits_here(engine: Engine) -> Limits:
    """Those of what will be proved and timed: the engine where this machine will run it, else what it is built from."""
    return recipe_limits(engine) if _runs_here(engine.backend, engine.targets) else Limits()


def check_parity(model: Path, recipe: Recipe, config: DecoderConfig) -> None:
    """What the proof would refuse of what `run` will prove here."""
    from toolchain.parity.rows import fit_rows, held_out_ids
    from toolchain.parity.stage import layers_are_hidden

    engine, parity = recipe.engine, recipe.parity
    sizes = fit_rows(ENGINE, parity, limits_here(engine), config.context_len)
    plans = engine.backend != "onnxruntime" and _runs_here(engine.backend, engine.targets)
    if plans and parity.fake_quant.layer_error_median is not None:
        raise layers_are_hidden(f"engine.backend {engine.backend}, which this machine runs")
    held_out_ids(model, parity, sizes.seq_len, config)


def check_folder(out: Path) -> None:
    """Refuse a folder with anything in it that no run wrote."""
    if out.exists() and not out.is_dir():
        raise DtoolError(
            f"{out} is not a folder", expected="a folder for the stages", found="a file", fix="choose another path"
        )
    if not out.exists():
        return
    foreign = [p.name for p in out.iterdir() if p.name.lstrip(".").split(".")[0] not in OURS]
    foreign += [name for name in PROOF_FILES if (out / name).exists() and not _is_proof(out / name)]
    if foreign:
        raise DtoolError(
            f"{out} holds what dtool did not write",
            expected="a new folder, or that of an earlier run",
            found=name_list(sorted(foreign), 20),
            fix="choose another folder, or move these away",
        )
    for name in STAGES:
        check_output(out / name, force=True)


def _is_proof(path: Path) -> bool:
    """Whether a run wrote this JSON file or page."""
    if not path.is_file():
        return False
    if path.suffix == ".html":
        return PAGE_MARK in path.read_bytes()[:1000].decode("utf-8", "replace")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and (is_marked(document) or UNMARKED[path.name] <= set(document))


def is_marked(document: dict[str, Any]) -> bool:
    """Whether the JSON of a proof is of the kind that this version writes."""
    return GENERATOR.items() <= document.items()


def reusable(folder: Path, key: str, report: Report) -> Artifact | None:
    """The finished artifact in `folder` when it has this key and every file is intact."""
    if not folder.exists():
        return None
    try:
        artifact = open_artifact(folder, check_hashes=True)
    except DtoolError as error:
        report(f"{folder.name}: made again: {error.problem}")
        return None
    if artifact.manifest.key != key:
        report(f"{folder.name}: made again: an input, the recipe or a version has changed")
        return None
    return artifact


def _parity(
    candidate: Artifact, source: Artifact, model: Path, recipe: Recipe, out: Path, report: Report
) -> tuple[dict[str, Any], GateFailed | None]:
    """The document of the proof, and its failure."""
    from toolchain.parity.stage import WAYS_OUT, run_parity

    key = hash_json({"candidate": candidate.identity, "parity": recipe.parity.model_dump(mode="json")})
    path = out / "parity.json"
    if path.is_file():
        document = read_json(path, fix=f"remove {path.name}")
        if is_marked(document) and document.get("key") == key and document.get("verdict") == "passed":
            report("parity: reused, it passed for these very files")
            return document, None
    report("parity: comparing with eager and with the exact quantized arithmetic")
    result = run_parity(candidate.path, recipe, model=model, source=source.path, report=report)
    document = result.document() | {"key": key}
    write_report(out, "parity", document, result.page())
    return document, result.failure(f"see {out / 'parity.html'}; {WAYS_OUT}")


def _bench(candidate: Artifact, model: Path, recipe: Recipe, out: Path, report: Report) -> Any:
    from toolchain.bench.stage import bench_artifact

    report("bench: timing the engine and eager torch in turns")
    result = bench_artifact(candidate.path, recipe, model=model, report=report)
    write_report(out, "bench", result.document(), result.page())
    return result.document()


def write_report(folder: Path, name: str, document: dict[str, Any], page: Page) -> None:
    """`name`.json and `name`.html in `folder`."""
    write_atomic(folder / f"{name}.json", dump_json(document | GENERATOR).encode())
    write_atomic(folder / f"{name}.html", render_html(page).encode())


def summary_page(result: RunResult, recipe: Recipe) -> Page:
    """One table a newcomer understands: what was made, what it costs, how fast it is."""
    from toolchain.parity.page import parity_title

    rows: list[tuple[str, str]] = []
    for name, artifact in result.artifacts.items():
        size = sum(entry.bytes for entry in artifact.manifest.files.values())
        rows.append((name, f"{size / 1e6:,.0f} MB in {artifact.path}"))
    rows.append(("parity", VERDICTS[result.parity["verdict"]]))
    distance, same = _worst(result.parity, "kl_mean", max), _worst(result.parity, "top1_agreement", min)
    rows.append(("  distance", _distance_text(distance, result.parity)))
    rows.append(("  same top token", _agreement_text(same)))
    if result.bench is not None:
        engine, eager = result.bench["engine"], result.bench["eager"]
        ttft = engine["ttft_ms"]["p50"], eager["ttft_ms"]["p50"]
        rate = engine["decode_tokens_per_s"], eager["decode_tokens_per_s"]
        rows.append(("first token", f"{ttft[0]:,.0f} ms (torch {ttft[1]:,.0f} ms)"))
        rows.append(("decode", f"{rate[0]:,.1f} tokens/s (torch {rate[1]:,.1f}): {rate[0] / rate[1]:.1f} times"))
        peak = engine["peak_memory_bytes"], eager["peak_memory_bytes"]
        rows.append(("peak memory", f"{peak[0] / 1e6:,.0f} MB (torch {peak[1] / 1e6:,.0f} MB)"))
    title, facts = parity_title(result.parity["facts"]), (("recipe", recipe.about),)
    return Page(title, result.parity["verdict"], facts, (Table("", ("what", "result"), tuple(rows)),))


def _worst(parity: dict[str, Any], metric: str, worst: Callable[..., Any]) -> dict[str, Any] | None:
    """The worse of the two samples against float32 torch; None where one is not finite, or none was run."""
    rows = [row for row in parity["rows"] if row["reference"] == "eager" and row["metric"] == metric]
    rows = [row for row in rows if row["phase"] in SAMPLES]
    if not rows or any(row["value"] is None for row in rows):
        return None
    return worst(rows, key=lambda row: row["value"])


def _distance_text(row: dict[str, Any] | None, parity: dict[str, Any]) -> str:
    """The KL with its bounds, and on how much text at which confidence they hold."""
    if row is None:
        return "no finite KL to fp32 torch"
    high = "no bound" if row["high"] is None else f"{row['high']:.4f}"
    bounds = f"{row['low']:.4f} to {high} at {100 * parity['confidence']:g} %, {parity['rows_of_text']} rows"
    return f"{row['value']:.4f} nats of KL to fp32 torch, 0 is equal ({row['phase']}; {bounds})"


def _agreement_text(row: dict[str, Any] | None) -> str:
    if row is None:
        return "unknown"
    return (
        f"{100 * row['value']:.1f} % of positions ({row['phase']}; {100 * row['low']:.1f} to {100 * row['high']:.1f} %)"
    )

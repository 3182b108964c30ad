"""How often a proof is wrong: right artifacts that fail, and planted faults that pass. Not a test.

    python tests/bench/parity_error_rates.py --model MODEL --work DIR [--recipe NAME ...] [--pool 64] [--draws 200]
        [--only right|faults]

Every recipe is made once into DIR (`dtool run` without its proof) and a pool of rows of the evaluation text is walked
once. A draw is the pool in another order: the proof looks at the first 8 rows of it, then at 16, and so on, as
`dtool parity` does, with the recipe's own gates. The table says how many draws pass, fail and stay undecided, how many
rows they took, and how the gated values of the first look are spread.

Faults are planted in copies of the quantized artifact, in three layers each. Faults of stored values need no text:
`parity.weights` must name the matrix. Faults of the graph must not pass the gate of layers in any draw, and the layer
that is named must be the one with the fault.
"""

import argparse
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import onnx

from tests.conftest import seal
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.model.load import load_artifact_decoder, load_decoder
from toolchain.parity import layerwise, stage
from toolchain.parity.metrics import LogitComparison
from toolchain.parity.rows import fit_rows, held_out_ids
from toolchain.parity.statistics import combine, look_confidence
from toolchain.parity.weights import match_weights
from toolchain.pipeline import run_pipeline
from toolchain.recipe import load_recipe
from toolchain.runners.runner import artifact_limits
from toolchain.tensor_file import read_header, read_tensor, tensor_bytes

RECIPES = ("fp32", "int8", "int8-w8a8", "int8-w8a8-gptq")
SEED = 0


def note(text):
    print(text, flush=True)


def make_artifacts(model, recipe, out):
    """The artifacts of a recipe; the proof of the run is not looked at, this script makes its own."""
    few = recipe.model_copy(update={"parity": recipe.parity.model_copy(update={"max_blocks": 1, "blocks": 1})})
    try:
        result = run_pipeline(model, few, out, bench=False, report=lambda _: None)
    except DtoolError as error:
        raise SystemExit(str(error)) from error
    return result.artifacts


def walk_pool(artifacts, model, recipe, pool):
    """Every comparison of a proof over the whole pool, and the rows of it."""
    engine = artifacts["engine"]
    source = artifacts.get("quantized", artifacts["export"])
    runner = stage.open_runner(engine.path)
    references = stage._references(engine, recipe, [], model=model, weights=source.path, device="cpu")
    parity = recipe.parity.model_copy(update={"max_blocks": pool})
    sizes = fit_rows("engine", parity, artifact_limits(engine), runner.config.context_len)
    blocks, _ = held_out_ids(engine.path, parity, sizes.seq_len, runner.config)
    sample = stage._Sample()
    stage._take_rows(sample, blocks, sizes, engine, runner, references, recipe, note)
    return engine, runner, references, sample


def subset(sample, rows):
    """The sample as if only these rows had been taken."""
    chosen = set(rows)
    logits = {}
    for key, comparison in sample.logits.items():
        inside = [row in chosen for row in comparison.parts["row"]]
        known = len(comparison.parts["nll_reference"]) == len(inside)
        parts = {}
        for name, values in comparison.parts.items():
            if name.startswith("nll") and not known:
                parts[name] = values  # one fewer a row, and no gate reads them
            else:
                parts[name] = list(itertools.compress(values, inside))
        logits[key] = LogitComparison(parts)
    layers = [np.concatenate(sample.layers, axis=1)[:, list(rows)]] if sample.layers else []
    return stage._Sample(len(rows), logits, layers)


def prove(draw, looks, walked, recipe):
    """The verdict of one draw, the rows it took, and the gated rows of its first look."""
    engine, runner, references, sample = walked
    gates = stage._self_gates(runner, recipe, [])
    confidence = look_confidence(recipe.parity.confidence, len(looks))
    first = None
    for end in looks:
        taken = subset(sample, draw[:end])
        rows = stage._sampled_rows(engine, runner, taken, references, gates, confidence)
        first = first or [row for row in rows if row.gate is not None and row.metric != "nonfinite_logits"]
        verdict = combine([row.verdict for row in rows])
        if verdict != "undecided":
            break
    return verdict, end, first, [row for row in rows if row.verdict == "failed"]


def right_artifact(name, walked, recipe, draws):
    """Verdicts over many draws, and how the gated values are spread."""
    sample = walked[-1]
    looks = stage.look_sizes(sample.rows, recipe.parity.blocks)
    random = np.random.default_rng(SEED)
    verdicts, taken, spread = [], [], {}
    for _ in range(draws):
        verdict, rows, first, _ = prove(random.permutation(sample.rows), looks, walked, recipe)
        verdicts.append(verdict)
        taken.append(rows)
        for row in first:
            bounds = (row.low, row.value, row.high, row.gate)
            spread.setdefault((row.reference, row.phase, row.metric), []).append(bounds)
    counts = {verdict: verdicts.count(verdict) for verdict in ("passed", "failed", "undecided")}
    longer = np.mean(np.array(taken) > looks[0])
    rows_text = f"median {np.median(taken):g}, most {max(taken)}, more than one look in {longer:.1%}"
    note(f"{name}: {counts} in {draws} draws from {sample.rows} rows; rows taken: {rows_text}")
    for (reference, phase, metric), values in spread.items():
        lows, found, highs, gates = zip(*values, strict=True)
        middle = f"{np.median(found):.3g} [{min(found):.3g}, {max(found):.3g}]"
        bounds = "no bounds"
        if None not in lows and None not in highs:
            bounds = f"bounds {min(lows):.3g} to {max(highs):.3g}"
        note(f"    {reference} / {phase} {metric}: {middle}, {bounds}, gate {min(gates):.3g}")
    return {"recipe": name, "draws": draws, "verdicts": counts, "rows": taken}


def spoil_tensor(folder, out, change):
    """A copy with stored tensors changed: {name: function}."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    entries = read_header(out / "weights.safetensors")
    with (out / "weights.safetensors").open("r+b") as stream:
        for name, function in change.items():
            stream.seek(entries[name].offset)
            stream.write(tensor_bytes(function(read_tensor(entries[name]).clone())))
    return seal(out)


def scaled(scale):
    return scale * 1.1


def flipped(codes):
    codes[3] = -codes[3]
    return codes


def stored_faults(config, layer):
    """Name, changes, and the parts that may be named."""
    prefix = f"model.layers.{layer}."
    q_rows, dim = config.qkv_sizes[0], config.head_dim

    def exchange(rows):
        first, second = slice(q_rows, q_rows + dim), slice(q_rows + dim, q_rows + 2 * dim)
        rows[first], rows[second] = rows[second].clone(), rows[first].clone()
        return rows

    qkv, down = f"{prefix}self_attn.qkv_proj.weight", f"{prefix}mlp.down_proj.weight"
    return {
        "one layer's scale 10 % off": {f"{down}_scale": scaled},
        "a channel's sign": {down: flipped},
        "two KV heads swapped": {qkv: exchange, f"{qkv}_scale": exchange},
    }


def spoil_graph(folder, out, layer, change):
    """A copy whose attention of one layer has a body of its own, changed by `change(function, node)`."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    path = out / "evaluation.onnx"
    model = onnx.load(str(path), load_external_data=False)
    node = [node for node in model.graph.node if node.op_type == "FusedAttention"][layer]
    function = next(f for f in model.functions if f.name == "FusedAttention" and f.overload == node.overload)
    own = onnx.FunctionProto()
    own.CopyFrom(function)
    own.overload = f"{function.overload}_fault"
    node.overload = own.overload
    change(own, node)
    model.functions.append(own)
    path.write_bytes(model.SerializeToString())
    return seal(out)


def add_one(function, name, changed, before):
    """Insert `changed = name + 1` in front of the node at place `before`."""
    added = onnx.helper.make_node("Add", [name, "fa_one"], [changed])
    function.node.insert(before, added)


def rope_shifted(function, _node):
    place = next(i for i, n in enumerate(function.node) if n.op_type == "RotaryEmbedding" and "fa_q_ready" in n.output)
    function.node[place].input[3] = "fa_positions_shifted"
    add_one(function, "fa_positions", "fa_positions_shifted", place)


def mask_shifted(function, _node):
    place = next(i for i, n in enumerate(function.node) if n.op_type == "LessOrEqual")
    function.node[place].input[1] = "fa_query_positions_shifted"
    add_one(function, "fa_query_positions", "fa_query_positions_shifted", place)


def keys_scale_for_values(_function, node):
    node.input[7] = node.input[6]


def graph_faults(token_scales):
    faults = {"RoPE shifted by one": rope_shifted, "mask off by one": mask_shifted}
    return faults if token_scales else faults | {"K scales used for V": keys_scale_for_values}


def plant_faults(name, artifacts, model, recipe, pool, draws, work):
    """Every fault in three layers: how many draws find it and name its layer."""
    source = artifacts["quantized"]
    checkpoint = load_decoder(model)
    config, found = checkpoint.config, []
    layers = (0, config.num_hidden_layers // 2, config.num_hidden_layers - 1)
    rotates = recipe.rotation.values
    for layer in layers:
        for fault, change in stored_faults(config, layer).items():
            bad = open_artifact(spoil_tensor(source.path, work / "spoilt", change))
            stored = load_artifact_decoder(bad, "float32")
            matches = match_weights(stored, checkpoint, rotates_values=rotates, smooths=False, smooths_keys=False)
            named = [match.part for match in matches if match.fault]
            right = bool(named) and all(part.startswith(f"model.layers.{layer}.") for part in named)
            found.append((fault, layer, draws if right else 0))
            note(f"    {name}, layer {layer}: {fault}: {'named ' + ', '.join(named[:2]) if named else 'NOT FOUND'}")
    parity = recipe.parity.model_copy(update={"max_blocks": pool})
    ids, _ = held_out_ids(source.path, parity, layerwise.TOKENS, config)
    looks = stage.look_sizes(len(ids), parity.blocks)
    confidence = look_confidence(parity.confidence, len(looks))
    exact = load_artifact_decoder(source)
    for layer in layers:
        for fault, change in graph_faults(recipe.kv_cache.granularity == "token").items():
            bad = open_artifact(spoil_graph(source.path, work / "spoilt", layer, change))
            errors_LRT = layerwise.layer_errors(bad, exact, ids)
            random, hits = np.random.default_rng(SEED), 0
            for _ in range(draws):
                order = random.permutation(len(ids))
                for end in looks:
                    median, _ = layerwise.layer_rows(errors_LRT[:, order[:end]], recipe.parity.fake_quant, confidence)
                    if median.verdict != "undecided":
                        break
                hits += median.verdict != "passed" and median.where == f"layers.{layer}"
            found.append((fault, layer, hits))
            size = np.median(errors_LRT[layer])
            note(f"    {name}, layer {layer}: {fault}: found and named in {hits} of {draws} draws (error {size:.2g})")
    return [{"recipe": name, "fault": f, "layer": layer, "found": hits, "draws": draws} for f, layer, hits in found]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--recipe", nargs="*", default=list(RECIPES))
    parser.add_argument("--pool", type=int, default=64)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--only", choices=["right", "faults"], help="half of it: right artifacts, or planted faults")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    document = []
    for name in options.recipe:
        recipe = load_recipe(name)
        artifacts = make_artifacts(options.model, recipe, options.work / name)
        if options.only != "faults":
            walked = walk_pool(artifacts, options.model, recipe, options.pool)
            document.append(right_artifact(name, walked, recipe, options.draws))
            del walked
        if options.only != "right" and "quantized" in artifacts:
            document += plant_faults(name, artifacts, options.model, recipe, options.pool, options.draws, options.work)
    (options.work / "error_rates.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

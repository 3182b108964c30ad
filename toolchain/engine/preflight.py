"""What can be refused before any work: sizes, targets and libraries here, the rules of the graphs in `rules`."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from toolchain.artifact import Artifact
from toolchain.engine.profiles import ENGINE_PHASES
from toolchain.engine.rules import RULES, Facts, check_attention, check_options, check_tools
from toolchain.engine.targets import Target, require_format, targets_named
from toolchain.errors import DtoolError
from toolchain.graph_io import GRAPH_FILES, load_graph
from toolchain.model.config import DecoderConfig
from toolchain.processor import installed_gpus
from toolchain.recipe import BACKEND_MODULES, Recipe
from toolchain.recipe_sections import Engine


def preflight(source: Artifact, recipe: Recipe, plugin_libraries: Sequence[Path] = ()) -> tuple[Target, ...]:
    """The targets to compile for, once every rule has passed. Raises DtoolError; takes well under a second."""
    engine = recipe.engine
    targets = check_machine(engine, plugin_libraries)
    check_engine(engine, source.read("decoder.json", DecoderConfig))
    facts = Facts(source, engine, targets, _load_graphs(source), tuple(plugin_libraries))
    for rule in RULES[engine.backend]:
        rule(facts)
    return targets


def check_machine(engine: Engine, plugin_libraries: Sequence[Path] = ()) -> tuple[Target, ...]:
    """The targets to compile for, where this machine has all that compiling needs: GPU, packages, tools, libraries."""
    targets = _targets(engine)
    require_backend(engine.backend)
    _check_libraries(engine, plugin_libraries)
    check_tools(engine, targets, plugin_libraries)
    return targets


def check_engine(engine: Engine, config: DecoderConfig) -> None:
    """Refuse what an engine of this recipe cannot do for a model, as far as its config tells, on whatever machine."""
    check_options(engine)
    check_sizes(engine, config)
    check_heads(engine, config)


def check_heads(engine: Engine, config: DecoderConfig) -> None:
    """Refuse heads and soft caps of a model that the engine's attention does not compute."""
    check_attention(engine, config.head_dim, config.attention_softcap, "every layer, by the model's config")


def check_inputs(
    recipe: Recipe, config: DecoderConfig, matrices: Iterable[str], plugin_libraries: Sequence[Path] = ()
) -> None:
    """All that `preflight` will refuse on this machine and that is known before there is a graph.

    `matrices`: those that the recipe quantizes.
    """
    check_machine(recipe.engine, plugin_libraries)
    check_combination(recipe, matrices)
    check_engine(recipe.engine, config)


def check_export(source: Artifact, recipe: Recipe, matrices: Iterable[str]) -> None:
    """What `preflight` will refuse of what the recipe makes of an export, on a host that has GPU and packages.

    `matrices`: those that are quantized.
    """
    engine = recipe.engine
    check_combination(recipe, matrices)
    targets = _named_targets(engine)
    if targets and engine.attention == "plugin":
        from toolchain.engine.plugin import require_kernels

        require_kernels(targets)
    check_engine(engine, source.read("decoder.json", DecoderConfig))
    facts = Facts(source, engine, targets, _load_graphs(source))
    for rule in RULES[engine.backend]:
        rule(facts)


def check_formats(recipe: Recipe, matrices: Iterable[str] | None = None) -> None:
    """Refuse formats of weights, cache or computing that a target the recipe names does not have.

    `matrices`: those that are quantized, where the model is known.
    """
    engine = recipe.engine
    if engine.backend == "onnxruntime" or not engine.targets:
        return
    targets = targets_named(engine.targets, engine.backend)
    for keys, fmt in _asked_formats(recipe, matrices):
        key = " and ".join(keys)
        require_format(targets, fmt, f"{key} {fmt}", f"leave that target out, or choose another {key}")


def check_combination(recipe: Recipe, matrices: Iterable[str] | None = None) -> None:
    """Refuse formats that the recipe's backend, attention or targets do not have, on whatever machine."""
    check_formats(recipe, matrices)
    for refusal in engine_refusals(recipe, matrices):
        raise refusal


def engine_refusals(recipe: Recipe, matrices: Iterable[str] | None = None) -> Iterator[DtoolError]:
    """The formats of a recipe, for these matrices, that its engine cannot take on any target."""
    engine = recipe.engine
    attention = "" if engine.backend == "onnxruntime" else f" with {engine.attention} attention"
    for keys, fmt in _asked_formats(recipe, matrices):
        key = " and ".join(keys)
        if engine.backend == "onnxruntime":
            possible, fix = ("float32",) if key == "compute_dtype" else ("none", "int8"), "a TensorRT backend"
        elif key == "compute_dtype":
            possible, fix = ("float16", "bfloat16"), "engine.backend onnxruntime"
        elif key == "kv_cache.format" and engine.attention == "native":
            possible, fix = ("none",), "engine.attention plugin"
        else:
            continue
        if fmt not in possible:
            yield DtoolError(
                f"engine.backend {engine.backend}{attention} cannot take {key} {fmt}",
                expected=f"{key} {' or '.join(possible)}",
                found=fmt,
                fix=" ".join(f"--set {key}={possible[-1]}" for key in keys) + f", or use {fix}",
            )


def quantized_notes(recipe: Recipe, config: DecoderConfig, matrices: Iterable[str] | None = None) -> list[str]:
    """What to know before quantizing what the recipe's engine cannot take; what no target has is refused."""
    check_formats(recipe, matrices)
    refusals = list(engine_refusals(recipe, matrices))
    try:
        check_heads(recipe.engine, config)
    except DtoolError as refusal:
        refusals.append(refusal)
    runs = "parity and generate run the quantized artifact, build-engine will refuse it"
    return [f"{refusal.problem}: {runs} ({refusal.fix})" for refusal in refusals]


def _asked_formats(recipe: Recipe, matrices: Iterable[str] | None) -> list[tuple[tuple[str, ...], str]]:
    """The number formats that a recipe makes of a model, each with its keys."""
    weights = ((keys, fmt) for fmt, keys in recipe.weight_formats(matrices).items())
    return [(("compute_dtype",), recipe.compute_dtype), *weights, (("kv_cache.format",), recipe.kv_cache.format)]


def require_backend(backend: str) -> None:
    """Raise DtoolError when the backend's package is not installed."""
    module, extra = BACKEND_MODULES[backend]
    if importlib.util.find_spec(module) is None:
        raise DtoolError(
            f"the {backend} backend is not installed",
            expected=f"the Python module {module}",
            found="no such module",
            fix=f'pip install "dtool[{extra}]"',
        )


def _named_targets(engine: Engine) -> tuple[Target, ...]:
    """The targets that the recipe names; tensorrt may leave them to the machine it runs on."""
    if engine.backend == "onnxruntime" or (engine.backend == "tensorrt" and not engine.targets):
        return ()
    return targets_named(engine.targets, engine.backend)


def _targets(engine: Engine) -> tuple[Target, ...]:
    """The recipe's targets; TensorRT compiles for the GPU of this machine, which must be what they say."""
    if engine.backend != "tensorrt":
        return _named_targets(engine)
    gpus = installed_gpus()
    if not gpus:
        raise DtoolError(
            "tensorrt compiles on the GPU it compiles for, and this machine has none",
            expected="a machine with an NVIDIA GPU and its driver",
            found="no GPU",
            fix="run this on the GPU host, or use engine.backend tensorrt-rtx, which compiles without one",
        )
    targets = targets_named(engine.targets or (f"sm{gpus[0].sm}",), engine.backend)
    if engine.hardware_compatibility == "none" and [t.sm for t in targets] != [gpus[0].sm]:
        raise DtoolError(
            "tensorrt compiles for the GPU of this machine alone",
            expected=f"engine.targets of sm{gpus[0].sm} ({gpus[0].name}), or none",
            found=", ".join(t.name for t in targets),
            fix="build on a host with that GPU, or set engine.hardware_compatibility",
        )
    return targets


def _check_libraries(engine: Engine, plugin_libraries: Sequence[Path]) -> None:
    for library in plugin_libraries:
        if not library.is_file():
            raise DtoolError(
                f"no plugin library at {library}",
                expected="a shared library with TensorRT plugins",
                found="a folder" if library.is_dir() else "no such file",
                fix="give its path: --plugin-library FILE",
            )
    twice = next((p for i, p in enumerate(plugin_libraries) if p.name in {q.name for q in plugin_libraries[:i]}), None)
    if twice is not None:
        raise DtoolError(
            f"two plugin libraries are called {twice.name}",
            expected="libraries of different names: they travel in one folder",
            found=", ".join(map(str, plugin_libraries)),
            fix="give each once, or rename one",
        )
    if plugin_libraries and engine.backend == "onnxruntime":
        raise DtoolError(
            "the embedded backend loads no plugins",
            expected="engine.backend tensorrt or tensorrt-rtx",
            found=f"--plugin-library {plugin_libraries[0]} with engine.backend onnxruntime",
            fix="leave the library out, or choose another backend",
        )


def check_sizes(engine: Engine, config: DecoderConfig) -> None:
    """Refuse a cache longer than the model's positions, and prompts longer than the cache."""
    if engine.kv_capacity > config.context_len:
        raise DtoolError(
            "the cache is longer than the model's positions",
            expected=f"engine.kv_capacity of at most {config.context_len} (context_len)",
            found=str(engine.kv_capacity),
            fix=f"--set engine.kv_capacity={config.context_len}" + _shorter_prompts(engine, config.context_len),
        )
    if engine.prompt_len.max > engine.kv_capacity:
        raise DtoolError(
            "the longest prompt does not fit the cache",
            expected=f"engine.prompt_len.max of at most {engine.kv_capacity} (engine.kv_capacity)",
            found=str(engine.prompt_len.max),
            fix=_shorter_prompts(engine, engine.kv_capacity).strip() + ", or raise engine.kv_capacity",
        )


def _shorter_prompts(engine: Engine, capacity: int) -> str:
    """What to add to a command so that the prompts fit a cache; nothing where they do."""
    if engine.prompt_len.max <= capacity:
        return ""
    fitting = ", ".join(f"{name}={min(value, capacity)}" for name, value in engine.prompt_len)
    return f" --set 'engine.prompt_len={{{fitting}}}'"


def _load_graphs(source: Artifact) -> dict[str, Any]:

    return {phase: load_graph(source.file(GRAPH_FILES[phase])) for phase in ENGINE_PHASES}

"""No input of any command ends in a traceback, nor in the message of a bug: seeded mutations of all of them.

Each case is a command over a mutated copy of something whole. It must succeed, or refuse with an exit
code of its own. What was found this way is kept as rows of the tests of the modules that were mended.
"""

import json
import random
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.conftest import seal
from tests.fetch.tiny_gguf import write_tiny_gguf
from tests.mutations import mutate_bytes, mutate_file, mutate_header, mutate_json, mutate_tree, to_toml
from tests.test_cli import RECIPE, call
from toolchain import guard

CASES = 3
"""Of each kind in the default tests; `make matrix` runs many more."""
MANY = 40


@pytest.fixture(scope="module")
def whole(tiny_text, texts, tmp_path_factory):
    """One of everything: checkpoint, recipe, GGUF, and the artifacts of a run."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(**texts))
    write_tiny_gguf(folder / "tiny.gguf")
    call("run", tiny_text, "-r", recipe, "-o", folder / "run", "--no-bench")
    shutil.copytree(tiny_text, folder / "model")
    return folder


@pytest.fixture(autouse=True)
def no_bug(monkeypatch, tmp_path):
    """Raise, through everything, what the last guard would report as a bug."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # where a name that is no path lands

    def reached(error):
        raise AssertionError("an input reached the last guard") from error

    monkeypatch.setattr(guard, "bug", reached)


def attempt(case, *arguments):
    """Run a command that may refuse, but in dtool's own words."""
    from click.testing import CliRunner

    from tests.test_cli import _Main

    line = " ".join(map(str, arguments))
    try:
        result = CliRunner().invoke(_Main(), [str(a) for a in arguments], catch_exceptions=False)
    except BaseException as error:
        raise AssertionError(f"dtool {line}\n  with {case}") from error
    assert result.exit_code in (0, 1, 2, 3), f"dtool {line}\n  with {case}: {result.output}"
    assert "Traceback" not in result.output
    return result


def mutated_checkpoint(rng, whole, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(whole / "model", folder)
    kind = rng.randrange(8)
    if kind < 4:
        return folder, mutate_json(rng, folder / "config.json")
    if kind == 4:
        return folder, mutate_file(rng, folder / "config.json")
    if kind == 5:
        return folder, mutate_header(rng, folder / "model.safetensors")
    if kind == 6:
        return folder, mutate_file(rng, folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors", "b": "c"}, "metadata": {}}')
    return folder, mutate_json(rng, index) if rng.random() < 0.5 else mutate_file(rng, index)


def fuzz_checkpoint(rng, whole, tmp_path):
    folder, case = mutated_checkpoint(rng, whole, tmp_path)
    attempt(case, "inspect", folder)
    attempt(case, "export", folder, "-r", whole / "recipe.toml", "-o", tmp_path / "out")
    attempt(case, "generate", folder, "-p", "hello", "-n", 3)


def fuzz_gguf(rng, whole, tmp_path):
    data, case = mutate_bytes(rng, (whole / "tiny.gguf").read_bytes())
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    attempt(case, "inspect", path)
    attempt(case, "export", path, "-r", whole / "recipe.toml", "-o", tmp_path / "out")


def fuzz_recipe(rng, whole, tmp_path):
    path, text = tmp_path / "recipe.toml", (whole / "recipe.toml").read_bytes()
    if rng.random() < 0.3:
        data, case = mutate_bytes(rng, text)
    else:
        document = tomllib.loads(text.decode())
        case = mutate_tree(rng, document)
        data = to_toml(document).encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    run = whole / "run"
    attempt(case, "quantize", run / "export", "-r", path, "-o", tmp_path / "q")
    attempt(case, "build-engine", run / "quantized", "-r", path, "-o", tmp_path / "e")
    attempt(case, "parity", run / "engine", "-r", path, "-m", whole / "model", "--source", run / "quantized")
    attempt(case, "search", run / "export", "-r", path, "--budget-kl", "1", "--blocks", 1, "-o", tmp_path / "s.toml")


def fuzz_set(rng, whole, tmp_path):
    document = tomllib.loads((whole / "recipe.toml").read_text())
    key = rng.choice([f"{s}.{k}" for s, t in document.items() if isinstance(t, dict) for k in t] + ["overrides", "a.b"])
    value = rng.choice(
        ["", "1", "-1", "0", "1e999", "nan", "x", "[]", "[1]", "{}", "{a=1}", "true", "[" * 3000, "9" * 5000, '"']
    )
    change = f"{key}={value}"
    attempt(change, "quantize", whole / "run" / "export", "-r", "int8", "--set", change, "-o", tmp_path / "q")


ARTIFACTS = ("export", "quantized", "engine")


def mutated_artifact(rng, whole, tmp_path):
    stage = rng.choice(ARTIFACTS)
    folder = tmp_path / stage
    shutil.copytree(whole / "run" / stage, folder)
    kind = rng.randrange(6)
    if kind < 2:
        return stage, folder, mutate_json(rng, folder / "manifest.json")
    if kind == 2:
        return stage, folder, mutate_file(rng, folder / "manifest.json")
    name = rng.choice([p.name for p in folder.iterdir() if p.is_file() and p.name != "manifest.json"])
    path = folder / name
    if path.suffix == ".json":
        case = mutate_json(rng, path)
    elif path.suffix == ".safetensors" and rng.random() < 0.7:
        case = mutate_header(rng, path)
    else:
        case = mutate_file(rng, path)
    if path.suffix == ".onnx":  # its digest tells; what a graph of another make may hold has no end
        return stage, folder, case
    return stage, seal(folder), case


def fuzz_artifact(rng, whole, tmp_path):
    stage, folder, case = mutated_artifact(rng, whole, tmp_path)
    recipe = whole / "recipe.toml"
    attempt(case, "inspect", folder)
    attempt(case, "verify", folder)
    attempt(case, "generate", folder, "-p", "hello", "-n", 3)
    if stage == "export":
        attempt(case, "quantize", folder, "-r", recipe, "-o", tmp_path / "q")
    if stage == "quantized":
        attempt(case, "build-engine", folder, "-r", recipe, "-o", tmp_path / "e")
    source = ("--source", whole / "run" / "quantized") if stage == "engine" else ()
    attempt(case, "parity", folder, "-r", recipe, "-m", whole / "model", *source)


NUMBERS = ("-1", "0", "1", "2", "7", "1000000", "1" + "0" * 30, "1e999", "nan", "-inf", "x", "")


def fuzz_options(rng, whole, tmp_path):
    engine = whole / "run" / rng.choice(ARTIFACTS)
    options = {
        "generate": ("-n", "--capacity", "--temperature", "--top-k", "--top-p", "--seed"),
        "inspect": ("--gpu", "--context", "--batch", "--weights", "--cache"),
    }
    command = rng.choice(list(options))
    path = rng.choice((engine, whole / "model"))
    given = [part for name in rng.sample(options[command], 2) for part in (name, rng.choice(NUMBERS))]
    fixed = ("-p", "hi", "--capacity", "9") if command == "generate" else ()
    attempt("", command, path, *fixed, *given)
    search = ("--budget-kl", "--budget-rise", "--budget-mb", "--formats", "--text", "--blocks", "--seq-len")
    given = [part for name in rng.sample(search, 2) for part in (name, rng.choice(NUMBERS))]
    attempt("", "search", engine, "-r", whole / "recipe.toml", *given, "-o", tmp_path / "s.toml")


def fuzz_text(rng, whole, tmp_path):
    """Calibration and evaluation text: lines that are no passages, bytes that are no text."""
    recipe = tomllib.loads((whole / "recipe.toml").read_text())
    path = tmp_path / "text.jsonl"
    lines = Path(recipe["calibration"]["data"]).read_text("utf-8").splitlines()
    if rng.random() < 0.5:
        data, case = mutate_bytes(rng, "\n".join(lines).encode())
        path.write_bytes(data)
    else:
        document = json.loads(lines[0])
        case = mutate_tree(rng, document)
        path.write_text("\n".join([json.dumps(document), *lines[1:]]))
    data = ("--set", f"calibration.data={path}", "--set", f"parity.data={path}")
    run = whole / "run"
    attempt(case, "quantize", run / "export", "-r", whole / "recipe.toml", *data, "-o", tmp_path / "q")
    attempt(case, "parity", run / "export", "-r", whole / "recipe.toml", *data, "-m", whole / "model")


def fuzz_paths(rng, whole, tmp_path):
    """Every command with something else than it wants in the place of every path."""
    loop, blank = tmp_path / "loop", tmp_path / "blank"
    loop.symlink_to(loop)
    blank.mkdir()
    odd = (loop, blank, tmp_path / "none", tmp_path / ("n" * 300), "/dev/null", "/proc/self", "org/name", "\udcff")
    real = (whole / "model", whole / "tiny.gguf", whole / "recipe.toml", *(whole / "run" / name for name in ARTIFACTS))
    where = [rng.choice(odd + real) for _ in range(3)]
    recipe = rng.choice((*odd, whole / "recipe.toml", whole / "recipe.toml", "int8", "int8-rtx"))
    out = rng.choice((tmp_path / "out", tmp_path / "deep" / "out", whole / "recipe.toml" / "out", loop, "/proc/out"))
    commands = {
        "export": (where[0], "-r", recipe, "-o", out),
        "quantize": (where[0], "-r", recipe, "-o", out),
        "search": (where[0], "-r", recipe, "--budget-kl", 1, "-o", out),
        "build-engine": (where[0], "-r", recipe, "-o", out, "--plugin-library", where[1]),
        "build-plugin": (where[0], "-r", recipe, "-o", out),
        "parity": (where[0], "-r", recipe, "-m", where[1], "--source", where[2]),
        "bench": (where[0], "-r", recipe, "-m", where[1], "--html", where[2]),
        "generate": (where[0], "-p", "hi", "-n", 2),
        "inspect": (where[0], "--html", where[1]),
        "verify": (where[0],),
        "run": (where[0], "-r", recipe, "-o", blank, "--no-bench"),
        "fetch": (rng.choice(("no-such-model", "calibratio")), "-o", out),
    }
    for command in rng.sample(list(commands), 4):
        attempt("odd paths", command, *commands[command])


FUZZERS = {
    "text": fuzz_text,
    "paths": fuzz_paths,
    "checkpoint": fuzz_checkpoint,
    "gguf": fuzz_gguf,
    "recipe": fuzz_recipe,
    "set": fuzz_set,
    "artifact": fuzz_artifact,
    "options": fuzz_options,
}


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("name", FUZZERS)
@pytest.mark.filterwarnings("ignore")
def test_no_input_reaches_the_last_guard(whole, tmp_path, name, seed):
    FUZZERS[name](random.Random(f"{name} {seed}"), whole, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FUZZERS)
@pytest.mark.filterwarnings("ignore")
def test_no_input_of_many_reaches_the_last_guard(whole, tmp_path, name):
    for seed in range(CASES, MANY):
        folder = tmp_path / str(seed)
        folder.mkdir()
        FUZZERS[name](random.Random(f"{name} {seed}"), whole, folder)
        shutil.rmtree(folder)

"""The commands as a user types them: outputs, exit codes, messages, and runs that are killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner

from toolchain import cli
from toolchain.artifact import MANIFEST, open_artifact

RECIPE = """
schema_version = 1
about = "test"
[weights]
format = "int8"
skip = []
[kv_cache]
format = "int8"
[calibration]
data = "{calibration}"
samples = 4
seq_len = 48
[engine]
kv_capacity = 64
prompt_len = {{ min = 1, opt = 8, max = 64 }}
[parity]
data = "{evaluation}"
blocks = 3
seq_len = 32
decode_steps = 4
[parity.eager]
kl_mean = 5.0
[bench]
prompt_lens = [8]
new_tokens = 4
repeats = 2
"""


@pytest.fixture
def recipe(texts, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(**texts))
    return path


def call(*arguments, code=0):
    """Run a command in this process through the real entry point; (stdout, stderr)."""
    result = CliRunner().invoke(_Main(), [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


class _Main(cli.click.Command):
    """The entry point `main`, as click's test runner wants it."""

    def __init__(self):
        super().__init__("dtool")

    def main(self, args, **_):
        argv, sys.argv = sys.argv, ["dtool", *args]
        try:
            cli.main()
        finally:
            sys.argv = argv


def test_help_is_instant_and_lists_every_command():
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "toolchain.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.perf_counter() - start < 5
    for name in (
        "fetch",
        "export",
        "quantize",
        "build-engine",
        "parity",
        "bench",
        "generate",
        "run",
        "inspect",
        "search",
        "verify",
    ):
        assert f"  {name}" in result.stdout
    assert not any(heavy in result.stderr for heavy in ("| torch", "| onnx", "| numpy", "| transformers"))


def test_every_stage_by_hand_and_by_run_gives_the_same_artifacts(tiny_text, recipe, tmp_path):
    by_hand = {name: tmp_path / name for name in ("export", "quantized", "engine")}
    out, _ = call("export", tiny_text, "-r", recipe, "-o", by_hand["export"])
    assert "past_key_values.0.key" in out
    call("quantize", by_hand["export"], "-r", recipe, "-o", by_hand["quantized"])
    call("build-engine", by_hand["quantized"], "-r", recipe, "-o", by_hand["engine"])
    out, _ = call(
        "parity", by_hand["engine"], "-r", recipe, "-m", tiny_text, "--source", by_hand["quantized"], "--json"
    )
    assert json.loads(out)["verdict"] == "passed"
    call("run", tiny_text, "-r", recipe, "-o", tmp_path / "run", "--no-bench")
    for name, folder in by_hand.items():
        assert (tmp_path / "run" / name / MANIFEST).read_bytes() == (folder / MANIFEST).read_bytes()
    assert json.loads((tmp_path / "run" / "parity.json").read_text())["verdict"] == "passed"
    assert "<html" in (tmp_path / "run" / "parity.html").read_text()


def test_run_takes_up_what_is_finished_and_redoes_what_is_damaged_or_changed(tiny_text, recipe, tmp_path):
    out = tmp_path / "run"
    call("run", tiny_text, "-r", recipe, "-o", out, "--no-bench")
    hashes = {n: (out / n / MANIFEST).read_bytes() for n in ("export", "quantized", "engine")}
    _, err = call("run", tiny_text, "-r", recipe, "-o", out, "--no-bench")
    assert err.count("reused") == 4
    with (out / "quantized" / "weights.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")
    _, err = call("run", tiny_text, "-r", recipe, "-o", out, "--no-bench")
    assert "quantized: made again" in err
    assert {n: (out / n / MANIFEST).read_bytes() for n in hashes} == hashes
    _, err = call("run", tiny_text, "-r", recipe, "-o", out, "--no-bench", "--set", "engine.kv_capacity=96")
    assert "quantized: reused" in err
    assert "engine: made again" in err


def test_run_and_quantize_share_statistics(tiny_text, recipe, tmp_path):
    out = tmp_path / "run"
    kept = out / "statistics"
    call("run", tiny_text, "-r", recipe, "-o", out, "--no-bench", "--statistics", kept)
    files = {path: path.stat().st_mtime_ns for path in kept.rglob("*") if path.is_file()}
    assert [path.suffix for path in sorted(files)] == [".safetensors", ".sha256"] * 2
    call("quantize", out / "export", "-r", recipe, "-o", tmp_path / "q", "--statistics", kept)
    assert (tmp_path / "q" / MANIFEST).read_bytes() == (out / "quantized" / MANIFEST).read_bytes()
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*") if path.is_file()} == files
    _, err = call("run", tiny_text, "-r", recipe, "-o", out, "--no-bench", "--statistics", kept)
    assert err.count("reused") == 4


def test_run_killed_at_any_moment_ends_with_the_same_hashes(tiny_text, recipe, tmp_path):
    call("run", tiny_text, "-r", recipe, "-o", tmp_path / "whole", "--no-bench")
    out = tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "toolchain.cli",
        "run",
        str(tiny_text),
        "-r",
        str(recipe),
        "-o",
        str(out),
        "--no-bench",
    ]
    for delay in (0.8, 3.0, 6.0):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(delay)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for folder in out.glob("[!.]*"):
            if folder.is_dir():
                open_artifact(folder, check_hashes=True)
    call("run", tiny_text, "-r", recipe, "-o", out, "--no-bench")
    for name in ("export", "quantized", "engine"):
        assert (out / name / MANIFEST).read_bytes() == (tmp_path / "whole" / name / MANIFEST).read_bytes()


def test_failed_gate_exits_3_and_names_it(tiny_text, recipe, tmp_path):
    call("run", tiny_text, "-r", recipe, "-o", tmp_path / "run", "--no-bench")
    _, err = call(
        "run",
        tiny_text,
        "-r",
        recipe,
        "-o",
        tmp_path / "run",
        "--no-bench",
        "--set",
        "parity.eager.kl_mean=1e-9",
        code=3,
    )
    assert "parity failed" in err
    assert "kl_mean" in err
    assert json.loads((tmp_path / "run" / "parity.json").read_text())["verdict"] == "failed"


def test_bench_reports_both_sides(tiny_text, recipe, tmp_path):
    call("export", tiny_text, "-r", recipe, "-o", tmp_path / "x")
    plain = ("--set", "weights.format=none", "--set", "kv_cache.format=none")
    call("build-engine", tmp_path / "x", "-r", recipe, *plain, "-o", tmp_path / "e")
    out, _ = call("bench", tmp_path / "e", "-r", recipe, "-m", tiny_text, "--json", "--html", tmp_path / "b.html")
    document = json.loads(out)
    for side in ("engine", "eager"):
        assert {"ttft_ms", "tpot_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_memory_bytes"} <= set(
            document[side]
        )
        assert set(document[side]["tpot_ms"]) >= {"p50", "p90", "p99"}
    assert {"memory_bandwidth_gb_s", "mbu"} <= set(document["environment"])
    assert (tmp_path / "b.html").read_text().startswith("<!doctype html>")


def test_generate_streams_and_counts(tiny_text, recipe, tmp_path):
    call("export", tiny_text, "-r", recipe, "-o", tmp_path / "x")
    texts = set()
    for path in (tiny_text, tmp_path / "x"):
        out, _ = call("generate", path, "--chat", "-p", "hello", "-n", "12", "--json")
        document = json.loads(out)
        assert document["prompt_tokens"] == 1 + len("user\nhello") + 1 + 1
        assert document["finish"] in ("length", "stop")
        texts.add(document["text"])
    assert len(texts) == 1
    _, err = call("generate", tmp_path / "x", "-p", "abc", "-n", "20", "--capacity", "8")
    assert "[cache full]" in err
    assert "320 rows, 258 tokens" in err


def test_inspect_shows_checkpoint_and_artifact(tiny_text, recipe, tmp_path):
    out, _ = call("inspect", tiny_text, "--json")
    assert json.loads(out)["parameters"] == 320 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64
    call("export", tiny_text, "-r", recipe, "-o", tmp_path / "x")
    out, _ = call("inspect", tmp_path / "x")
    assert "past_key_values.0.key" in out
    call("verify", tmp_path / "x")


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["export", "{none}", "-r", "fp32", "-o", "{out}"], 1, ["not a checkpoint", "expected", "found"]),
        (["export", "{model}", "-r", "fp23", "-o", "{out}"], 1, ["no recipe 'fp23'", "fp32"]),
        (["export", "{model}", "-r", "fp32", "-o", "{model}"], 1, ["overlaps"]),
        (["export", "{model}", "-r", "fp32", "-o", "{model}/config.json"], 1, ["overlaps"]),
        (
            ["export", "{model}", "-r", "fp32", "--set", "weights.formt=int8", "-o", "{out}"],
            1,
            ["weights.formt", "format"],
        ),
        (["quantize", "{model}", "-r", "int8", "-o", "{out}"], 1, ["not a dtool artifact"]),
        (
            [
                "run",
                "{model}",
                "-r",
                "int8",
                "--set",
                "parity.data=no.jsonl",
                "--set",
                "engine.kv_capacity=64",
                "-o",
                "{out}",
            ],
            1,
            ["no.jsonl", "fetch"],
        ),
        (["parity", "{none}", "-r", "fp32"], 1, ["not a dtool artifact"]),
        (["generate", "{none}", "-p", "x"], 1, ["tokenizer"]),
        (["verify", "{none}"], 1, ["not a dtool artifact"]),
        (["fetch", "smollm2-136m", "-o", "{out}"], 1, ["smollm2-135m"]),
        (["fetch", "smollm2-135m"], 2, ["-o FOLDER"]),
        (["export", "{model}"], 2, ["--recipe"]),
        (["exprot"], 2, ["exprot"]),
    ],
)
def test_mistakes_end_at_once_with_what_to_do(tiny_text, tmp_path, arguments, code, texts):
    places = {"model": tiny_text, "none": tmp_path / "none", "out": tmp_path / "out"}
    start = time.perf_counter()
    _, err = call(*(a.format(**places) for a in arguments), code=code)
    assert time.perf_counter() - start < 5
    assert "Traceback" not in err
    for text in texts:
        assert text in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "options"),
    [("quantize", ()), ("run", ()), ("build-engine", ()), ("search", ("--budget-kl", "1"))],
)
def test_what_does_nothing_is_told_by_the_command_it_is_for(command, options, tmp_path):
    changes = ("kv_cache.format=none", "engine.attention=native")
    sets = [part for change in changes for part in ("--set", change)]
    _, err = call(command, tmp_path / "none", "-r", "int8", *sets, *options, "-o", tmp_path / "out", code=1)
    told = [line for line in err.splitlines() if line.startswith("note: ") and " do" in line]
    cache, engine = "note: kv_cache.granularity does nothing", "note: engine.attention does nothing"
    assert any(line.startswith(cache) for line in told) == (command != "build-engine")
    assert any(line.startswith(engine) for line in told) == (command in ("run", "build-engine"))


def test_a_file_size_limit_is_named_before_any_work_with_the_bytes_needed(tiny_text, recipe, tmp_path):
    script = """
        import resource, runpy, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        runpy.run_module("toolchain.cli", run_name="__main__")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    command += ["export", str(tiny_text), "-r", str(recipe), "-o", str(tmp_path / "deep" / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    needed = re.search(r"a limit of at least ([\d,]+) bytes", result.stderr)
    assert int(needed[1].replace(",", "")) > 100_000
    assert "100,000 bytes (ulimit -f)" in result.stderr
    assert "free some space" not in result.stderr
    assert not (tmp_path / "deep").exists()


def test_symlinked_and_odd_paths_work(tiny_text, recipe, tmp_path):
    folder = tmp_path / "ó dèl 模型 #1"
    shutil.copytree(tiny_text, folder / "real")
    (folder / "link").symlink_to(folder / "real")
    call("run", folder / "link", "-r", recipe, "-o", folder / "run", "--no-bench")
    call("run", tiny_text, "-r", recipe, "-o", tmp_path / "plain", "--no-bench")
    for name in ("export", "quantized", "engine"):
        assert (folder / "run" / name / MANIFEST).read_bytes() == (tmp_path / "plain" / name / MANIFEST).read_bytes()


def test_damaged_artifact_is_refused_by_every_command_that_reads_it(tiny_text, recipe, tmp_path):
    call("run", tiny_text, "-r", recipe, "-o", tmp_path / "run", "--no-bench")
    for name in ("export", "quantized", "engine"):
        with (tmp_path / "run" / name / "weights.safetensors").open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            last = stream.read(1)[0]
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([last ^ 1]))
    folders = {name: tmp_path / "run" / name for name in ("export", "quantized", "engine")}
    out = ("-r", recipe, "-o", tmp_path / "out")
    commands = [
        ("quantize", folders["export"], *out),
        ("build-engine", folders["quantized"], *out),
        ("parity", folders["engine"], "-r", recipe, "-m", tiny_text, "--source", folders["quantized"]),
        ("generate", folders["engine"], "-p", "x"),
        ("bench", folders["engine"], "-r", recipe, "-m", tiny_text),
    ]
    for command in commands:
        _, err = call(*command, code=1)
        assert "is damaged" in err
    assert not (tmp_path / "out").exists()


def test_force_never_replaces_the_source(tiny_text, recipe, tmp_path):
    call("export", tiny_text, "-r", recipe, "-o", tmp_path / "x")
    _, err = call("quantize", tmp_path / "x", "-r", recipe, "-o", tmp_path / "x", "--force", code=1)
    assert "overlaps" in err
    open_artifact(tmp_path / "x", ("export",))


def test_run_into_a_foreign_folder_is_refused(tiny_text, recipe, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    _, err = call("run", tiny_text, "-r", recipe, "-o", tmp_path / "mine", "--no-bench", code=1)
    assert "notes.txt" in err


def test_text_that_is_not_utf8_and_nonsense_sampling_are_refused(tiny_text):
    _, err = call("generate", tiny_text, "-p", "a\udcffb", code=1)
    assert "UTF-8" in err
    _, err = call("generate", tiny_text, "-p", "a", "--temperature", "nan", code=1)
    assert "sampling options" in err


def test_terminated_command_leaves_nothing(tiny_text, recipe, tmp_path):
    command = [
        sys.executable,
        "-m",
        "toolchain.cli",
        "export",
        str(tiny_text),
        "-r",
        str(recipe),
        "-o",
        str(tmp_path / "d" / "x"),
    ]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("d/.x.partial")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.terminate()
    assert child.wait() == 143
    assert list((tmp_path / "d").iterdir()) == []


def test_a_page_never_replaces_another_file_nor_lies_in_an_artifact(exported, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("precious")
    for path, text in (
        (note, "something dtool did not write"),
        (exported / "decoder.json", "would lie in an artifact"),
        (tmp_path / "no" / "page.html", "no such folder"),
    ):
        _, stderr = call("inspect", exported, "--html", path, code=1)
        assert text in stderr
    assert note.read_text() == "precious"
    page = tmp_path / "page.html"
    for _ in range(2):  # its own page may be written anew
        call("inspect", exported, "--html", page)
    assert "generator" in page.read_text()

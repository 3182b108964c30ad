"""How commands end: every failure in one message and an exit code, and output that cannot fail finished work."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import torch

from tests.conftest import save_tiny
from tests.test_cli import call
from toolchain import cli, guard, memory
from toolchain.errors import DtoolError
from toolchain.memory import Room, memory_error, require_memory, require_torch
from toolchain.recipe import RECIPES_DIR


def end_of(monkeypatch, error, code=1):
    """What a user sees when a command fails with `error`."""

    def command(**_):
        raise error

    monkeypatch.setattr(cli.dtool, "main", command)
    return call(code=code)[1]


def run(*arguments, **environment):
    """A command in a process of its own."""
    command = [sys.executable, "-m", "toolchain.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, env={**os.environ, **environment})


# bugs


def test_an_unknown_failure_is_a_bug_with_its_traceback_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = end_of(monkeypatch, KeyError("no such thing"))
    assert "this is a bug" in text
    assert "KeyError: 'no such thing'" in text
    assert re.search(r"dtool \d+\.\d+", text)
    assert "Traceback" not in text
    (report,) = tmp_path.iterdir()
    assert str(report) in text
    assert "Traceback" in report.read_text("utf-8")
    assert "torch" in report.read_text("utf-8")


def test_a_bug_without_room_for_its_file_is_still_told(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    text = end_of(monkeypatch, RuntimeError("odd"))
    assert "RuntimeError: odd" in text
    assert "DTOOL_TRACEBACK=1" in text


@pytest.mark.parametrize("error", [RuntimeError("odd"), DtoolError("a", expected="b", found="c", fix="d")])
def test_developers_see_tracebacks_when_they_ask(monkeypatch, tmp_path, error):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("DTOOL_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in end_of(monkeypatch, error)


def test_the_end_of_a_file_that_a_library_meets_is_no_interrupt(tmp_path, monkeypatch):
    """click takes an EOFError for Ctrl-D."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def read(**_):
        raise EOFError("ran out of input")

    monkeypatch.setattr(cli.dtool.commands["verify"], "callback", read)
    assert "EOFError: ran out of input" in call("verify", tmp_path, code=1)[1]


def test_known_kinds_keep_their_exit_codes(monkeypatch):
    assert "cannot be used" in end_of(monkeypatch, PermissionError(13, "Permission denied", "/some/file"))
    assert "wrong" in end_of(monkeypatch, click.UsageError("wrong"), code=2)
    assert end_of(monkeypatch, click.exceptions.Abort(), code=130) == ""


# memory


def failed_with(error, cause=None):
    try:
        raise error from cause
    except RuntimeError as caught:
        return caught


def numpy_error():
    try:
        np.empty(1 << 40, np.float64)
    except MemoryError as error:
        return error


NO_MEMORY = {
    "numpy": (numpy_error, "8,796.1 GB"),
    "torch": (
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 65536000 bytes."),
        "65.5 MB",
    ),
    "torch, older": (
        lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1048576 bytes."),
        "1.0 MB",
    ),
    "GPU": (
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.2 GiB free."),
        "2.1 GB",
    ),
    "onnxruntime": (lambda: Exception("RUNTIME_EXCEPTION : Exception during initialization: std::bad_alloc"), ""),
    "its arena": (lambda: Exception("Failed to allocate memory for requested buffer of size 4096000"), "4.1 MB"),
    "torch.export": (lambda: failed_with(RuntimeError("Failed to export the model"), MemoryError()), ""),
    "the system": (lambda: OSError(12, "Cannot allocate memory"), ""),
    "the loader": (lambda: ImportError("libx.so: failed to map segment from shared object"), ""),
}


@pytest.mark.parametrize("name", NO_MEMORY)
def test_out_of_memory_is_worded_alike_whichever_library_says_it(monkeypatch, name):
    make, asked = NO_MEMORY[name]
    text = end_of(monkeypatch, make())
    assert "ran out" in text.splitlines()[0]
    assert asked in text
    assert ("CUDA" if name == "GPU" else " free in ") in text
    assert "bug" not in text


@pytest.mark.parametrize(
    "error",
    [RuntimeError("out of resource: shared memory"), ValueError("cannot allocate the roles"), KeyError("memory")],
)
def test_other_failures_are_not_taken_for_memory(error):
    assert memory_error(error) is None


LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1)) << 20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
runpy.run_module("toolchain.cli", run_name="__main__")
"""


def limited(megabytes, *arguments):
    command = [sys.executable, "-c", LIMITED, str(megabytes), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_too_little_memory_ends_in_a_message_in_a_real_process(tiny_text, text_export, tmp_path):
    """Torch alone takes 570 MB of addresses: below, importing it aborts or never returns."""
    done = limited(500, "export", tiny_text, "-r", "fp32", "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "torch do not fit into memory" in done.stderr
    assert "ulimit -v" in done.stderr
    assert not (tmp_path / "out").exists()
    done = limited(500, "generate", tiny_text, "-p", "a")
    assert done.returncode == 1
    assert "memory" in done.stderr.splitlines()[0]
    assert "ulimit -v" in done.stderr


def test_weights_that_cannot_fit_are_refused_before_they_are_read(tiny_text, text_export, monkeypatch):
    monkeypatch.setattr(memory, "memory_at_hand", lambda **_: Room(1000, "this small machine"))
    for path in (tiny_text, text_export):
        text = call("generate", path, "-p", "a", code=1)[1]
        assert "does not fit into memory" in text
        assert "this small machine" in text


def test_what_fits_exactly_is_not_refused(monkeypatch):
    monkeypatch.setattr(memory, "memory_at_hand", lambda **_: Room(1000, "here"))
    require_memory(1000, "a model")
    with pytest.raises(DtoolError, match="does not fit"):
        require_memory(1001, "a model")


def test_torch_that_is_loaded_already_is_not_weighed(monkeypatch):
    monkeypatch.setattr(memory, "memory_at_hand", lambda **_: Room(0, "here"))
    require_torch()


def test_the_least_of_all_limits_is_what_there_is(monkeypatch, tmp_path):
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    for folder, limit in ((tmp_path / "job", "800"), (group, "max")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("700")
        (folder / "memory.stat").write_text("anon 1\nactive_file 30\ninactive_file 20\n")
    (tmp_path / "own").write_text("0::/job/step\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 2 kB\nSwapFree: 0 kB\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "MACHINE", tmp_path / "meminfo")
    assert memory.memory_at_hand().free == 800 - 700 + 50  # pages of files are given back
    (tmp_path / "job" / "memory.max").write_text("max")
    assert memory.memory_at_hand().free == 2 << 10
    assert memory.memory_at_hand(mapped=True).free > 1 << 30


def test_a_child_that_ran_out_of_memory_says_so(tmp_path, monkeypatch, capsys):
    from toolchain.bench import child
    from toolchain.recipe_sections import Bench

    def fail(*_):
        raise RuntimeError("std::bad_alloc")

    monkeypatch.setattr(child, "_open", fail)
    assert child.main([str(tmp_path), Bench().model_dump_json(), "artifact"]) == 1
    assert "memory ran out" in capsys.readouterr().err


def test_a_kernel_compiler_that_was_killed_says_so():
    from toolchain.ops.kernels import compile as kernels

    assert "when memory runs out" in str(kernels._child_failed(-9, ""))
    assert "this machine" in str(kernels._child_failed(-6, "terminate: std::bad_alloc"))
    assert "report it" in str(kernels._child_failed(1, "KeyError"))


# logits that are no numbers


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory, tiny_text):
    """A float16 export whose feed-forward passes 65504, as of a model that was trained in bfloat16."""
    folder = tmp_path_factory.mktemp("overflow")
    model = save_tiny(folder / "model", vocab_size=320, tie_word_embeddings=True, eos_token_id=257)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3000)
        model.model.layers[1].mlp.up_proj.weight.mul_(30)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).write_bytes((tiny_text / name).read_bytes())
    call("export", folder / "model", "-r", "fp32", "--set", "compute_dtype=float16", "-o", folder / "x")
    return folder / "x"


@pytest.mark.parametrize("how", [(), ("--temperature", 0.8), ("--temperature", 1, "--top-k", 3)])
def test_logits_that_are_not_finite_end_the_text(overflowing, how):
    out, err = call("generate", overflowing, "-p", "hello", "-n", 4, *how, code=1)
    assert out == ""
    assert "not finite" in err
    assert "float16" in err
    assert "bfloat16 or float32" in err


# output


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "latin-1", "utf-8"])
def test_output_in_any_encoding_is_written(tiny_text, encoding):
    done = run("inspect", tiny_text, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert b"parameters" in done.stdout
    done = run("inspect", tiny_text, "--json", PYTHONIOENCODING=encoding)
    assert json.loads(done.stdout.decode("utf-8" if encoding == "ascii" else encoding))["parameters"]


def test_tables_keep_their_lines_where_the_encoding_has_none(tiny_text):
    assert b"-----" in run("inspect", tiny_text, PYTHONIOENCODING="cp1252").stdout
    assert b"?" not in run("inspect", tiny_text, PYTHONIOENCODING="cp1252").stdout.split(b"decoder")[0]


def test_a_full_stdout_is_named(tiny_text):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "toolchain.cli", "inspect", str(tiny_text)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "stdout" in done.stderr.splitlines()[0]
    assert "No space left on device" in done.stderr
    assert "Exception ignored" not in done.stderr


def with_closed_pipe(*arguments, closed="stdout"):
    """Run a command whose reader is gone before it writes."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {closed: writer}
    try:
        command = [sys.executable, "-m", "toolchain.cli", *map(str, arguments)]
        return subprocess.run(command, **streams, text=True, check=False)
    finally:
        os.close(writer)


def test_a_reader_that_stops_reading_changes_no_exit_code(tiny_text, text_export, tmp_path):
    done = with_closed_pipe("inspect", tiny_text)
    assert (done.returncode, done.stderr) == (0, "")
    done = with_closed_pipe("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert with_closed_pipe("inspect", tmp_path).returncode == 1
    done = with_closed_pipe("generate", text_export, "-p", "a", "-n", 50)
    assert done.returncode == 0
    assert "[length]" not in done.stderr  # it ends at once


def test_progress_that_nobody_reads_spoils_no_work(tiny_text, tmp_path):
    done = with_closed_pipe("export", tiny_text, "-r", "fp32", "-o", tmp_path / "x", closed="stderr")
    assert done.returncode == 0
    call("verify", tmp_path / "x")


def test_a_closed_stdout_is_no_failure(tiny_text):
    line = f"exec '{sys.executable}' -m toolchain.cli inspect '{tiny_text}' >&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_streams_are_given_back(capsys):
    before = sys.stdout, sys.stderr
    with guard.guarded():
        print("inside")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "inside\n"


def test_recipes_that_windows_wrote_are_read(tmp_path):
    (tmp_path / "r.toml").write_bytes(
        b"\xef\xbb\xbf" + (RECIPES_DIR / "int8.toml").read_bytes().replace(b"\n", b"\r\n")
    )
    text = call("export", tmp_path / "none", "-r", tmp_path / "r.toml", "-o", tmp_path / "out", code=1)[1]
    assert "not a checkpoint" in text

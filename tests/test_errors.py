"""Failures that a user can act on."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import toolchain
from toolchain.errors import DtoolError

FILES = sorted(Path(toolchain.__file__).parent.rglob("*.py"))


def refusals(file):
    """Line and keywords of every call that makes an error."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("DtoolError", "GateFailed"):
            yield node.lineno, {keyword.arg for keyword in node.keywords}


def test_every_error_says_what_was_expected_what_was_found_and_what_to_do():
    found = [(file, line, keys) for file in FILES for line, keys in refusals(file)]
    assert len(found) > 200
    parts = {"expected", "found", "fix"}
    assert [f"{file}:{line} lacks {sorted(parts - keys)}" for file, line, keys in found if parts - keys] == []


@pytest.mark.parametrize(("fix", "lines"), [("x", ["  to do:    x"]), ("x\ny", ["  to do:    x", " " * 12 + "y"])])
def test_the_lines_of_a_part_are_aligned(fix, lines):
    assert str(DtoolError("wrong", fix=fix)).split("\n") == ["wrong", *lines]


SWALLOWS = """
import os, sys
from toolchain import cli

def command(**_):
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except BaseException:
        raise TypeError("expected a message argument")

cli.dtool.main = command
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_that_a_library_makes_another_error_of_keeps_its_exit_code(number):
    command = [sys.executable, "-c", SWALLOWS, str(int(number))]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 128 + number
    assert child.stderr == "interrupted; nothing half-written was left\n"

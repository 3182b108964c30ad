"""Where `--html` may not write, and options that name nothing."""

import click
import pytest

from tests.test_cli import call
from toolchain.bench.gpu_check import main as gpu_check
from toolchain.cli import dtool
from toolchain.option_types import FOLDER, NAME

CASES = [
    ("quantize", "d/made", "-o"),
    ("quantize", "d/made/page.html", "-o"),
    ("quantize", "d", "-o"),
    ("quantize", "seen", "--statistics"),
    ("quantize", "seen/page.html", "--statistics"),
    ("build-engine", "d/../d/made", "-o"),
]


@pytest.mark.parametrize(("command", "page", "written"), CASES)
def test_a_page_that_is_holds_or_lies_in_an_output_is_refused_before_any_work(
    text_export, tmp_path, monkeypatch, command, page, written
):
    monkeypatch.chdir(tmp_path)
    seen = ["--statistics", "seen"] if command == "quantize" else []
    _, stderr = call(command, text_export, "-r", "int8", "-o", "d/made", *seen, "--html", page, code=1)
    assert f"--html and {written} are in each other's way" in stderr
    assert stderr.count("\n") == 4  # the error alone: nothing was begun
    assert list(tmp_path.iterdir()) == []


NAMING = [
    (command.name, parameter)
    for command in dtool.commands.values()
    for parameter in command.params
    if parameter.type in (FOLDER, NAME)
]


@pytest.mark.parametrize(("command", "named"), NAMING, ids=[f"{name} {p.name}" for name, p in NAMING])
def test_an_option_that_names_nothing_is_refused_before_any_work(command, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = []
    for parameter in dtool.commands[command].params:
        if parameter.required or parameter is named:
            value = "" if parameter is named else "calibration" if parameter.name == "name" else "x"
            arguments += [value] if isinstance(parameter, click.Argument) else [parameter.opts[0], value]
    _, stderr = call(command, *arguments, code=2)
    assert "it is empty: name something" in stderr
    assert ("'.' for the current folder" in stderr) == (named.type is FOLDER)
    assert list(tmp_path.iterdir()) == []


def test_every_path_and_name_of_something_is_of_these_types():
    others = {
        parameter.name
        for command in dtool.commands.values()
        for parameter in command.params
        if isinstance(parameter.type, click.Path | click.types.StringParamType) and parameter.type not in (FOLDER, NAME)
    }
    assert others == {"overrides", "formats", "prompt", "gpus", "weights", "cache"}


@pytest.mark.parametrize("option", ["--json", "--plugin-library", "--engine"])
def test_gpu_check_refuses_it_too(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check([option, ""])
    assert f"{option}: it is empty: name something" in capsys.readouterr().err


def test_a_link_to_itself_is_a_usage_error(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for arguments in (("verify", tmp_path / "loop"), ("export", ".", "-r", "int8", "-o", tmp_path / "loop")):
        assert "leads back to itself" in call(*arguments, code=2)[1]

"""Where `--html` may not write."""

import pytest

from tests.test_cli import call

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

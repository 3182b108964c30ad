"""The caps of `tests.isa` hold, and name files that are there."""

import os

import pytest
import torch

from tests import isa


def test_the_files_are_there():
    assert all((isa.ROOT / path.partition("::")[0]).is_file() for path in isa.NUMERIC)


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" not in os.environ, reason="torch is not held to an instruction set")
def test_torch_is_held_to_what_was_asked():
    assert torch.backends.cpu.get_cpu_capability().lower() == os.environ["ATEN_CPU_CAPABILITY"]


def test_what_cannot_run_is_skipped_by_name(monkeypatch, capsys):
    monkeypatch.setattr(isa.shutil, "which", lambda _: None)
    monkeypatch.setattr(isa, "CAPS", {"next": isa.Cap("avx4096"), "haswell": isa.CAPS["haswell"]})
    assert isa.main([]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("next      skipped: this processor has no avx4096")
    assert second.startswith("haswell   skipped: qemu-x86_64 is not installed (apt-get install qemu-user)")


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_a_failure_under_one_cap_is_the_exit_status(monkeypatch, capsys, fails, code):
    monkeypatch.setattr(isa, "CAPS", {"one": isa.Cap(), "two": isa.Cap()})
    monkeypatch.setattr(isa, "reason_to_skip", lambda _: "")
    results = iter([(not fails, "what failed"), (True, "3 passed")])
    monkeypatch.setattr(isa, "run_capped", lambda _: next(results))
    assert isa.main([]) == code
    assert ("FAILED" in capsys.readouterr().out) == fails


def test_an_unknown_cap_is_a_usage_error():
    assert isa.main(["sse9"]) == 2

"""Exports of checkpoints that are already quantized."""

import pytest

from tests.conftest import make_recipe
from tests.model.checkpoint_files import edit_tensors
from tests.model.foreign_writers import CASES, write_case
from tests.quantize.stored_checkpoints import quiet
from toolchain.export.stage import export_checkpoint


@pytest.fixture
def export(monkeypatch, export_with_graphs):
    """As `export_with_graphs`, for tests that look at tensors alone: no graph is traced or written."""
    monkeypatch.setattr("toolchain.export.stage.write_graphs", lambda *_: None)
    monkeypatch.setattr("toolchain.quantize.stage._write_graphs", lambda *_: None)
    return export_with_graphs


@pytest.fixture
def export_with_graphs(tiny, tmp_path):
    def export(case, dtype="float32", change=None):
        """Artifacts of the codes and of the plain numbers, what was written, and the notes."""
        case = CASES[case] if isinstance(case, str) else case
        lines: list[str] = []
        matrices = write_case(tiny[0], tmp_path / "coded", tmp_path / "floats", case)
        if change is not None:
            edit_tensors(tmp_path / "coded", change)
        recipe = make_recipe(compute_dtype=dtype)
        ours = export_checkpoint(tmp_path / "coded", recipe, tmp_path / "ours", report=lines.append)
        plain = export_checkpoint(tmp_path / "floats", recipe, tmp_path / "plain", report=quiet)
        return ours, plain, matrices, "\n".join(lines)

    return export

import sys

import pytest
from bench_runner_stubs import tiny_config, tiny_document

from tests.bench.llama_8b import LLAMA_8B
from toolchain.bench.export_cost import measure_export, run_cold, write_sparse_checkpoint
from toolchain.errors import DtoolError
from toolchain.model.checkpoint import open_checkpoint

STUB = """
import pathlib, sys
args = sys.argv[1:]
assert args[0] == "export" and args[2] == "-r" and args[4] == "-o", args
out = pathlib.Path(args[5]); out.mkdir()
(out / "a").write_bytes(b"x" * 1000)
with (out / "b").open("wb") as f: f.truncate(1 << 20)
data = bytearray(90 << 20); data[::4096] = b"x" * len(data[::4096])
total = 0
for i in range(3_000_000): total += i
"""


def stub(code):
    return (sys.executable, "-c", code)


def test_an_export_is_measured_cold(tmp_path):
    ballast = bytearray(400 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])  # must not show in the child's peak
    cost = measure_export(tmp_path, "int8", command=stub(STUB))
    assert cost["bytes_written"] == 1000 + (1 << 20)
    assert cost["bytes_stored"] < 1 << 20
    assert 90 << 20 < cost["peak_rss_bytes"] < 250 << 20
    assert 0.01 < cost["cpu_s"] < 60
    assert cost["wall_s"] > 0
    assert cost["recipe"] == "int8"


def test_a_failed_export_shows_its_last_words(tmp_path):
    with pytest.raises(DtoolError, match="no such layer") as caught:
        measure_export(tmp_path, "int8", command=stub("import sys; sys.exit('no such layer')"))
    assert "exit status 1" in str(caught.value)


def test_exit_codes_and_output_come_back():
    cost = run_cold(stub("print('hello'); raise SystemExit(3)"))
    assert cost["exit"] == 3
    assert cost["output_tail"].strip() == "hello"


def test_a_sparse_checkpoint_has_the_true_shape_and_no_bytes(tmp_path):
    pretended = write_sparse_checkpoint(tmp_path / "8b", LLAMA_8B)
    assert pretended == 2 * 8_030_261_248
    checkpoint = open_checkpoint(tmp_path / "8b")
    assert checkpoint.parameters["lm_head.weight"].shape == (128256, 4096)
    assert (tmp_path / "8b" / "model.safetensors").stat().st_blocks * 512 < 1 << 20


def test_any_known_family_can_be_made_sparse(tmp_path):
    write_sparse_checkpoint(tmp_path / "tiny", tiny_document())
    assert open_checkpoint(tmp_path / "tiny").config == tiny_config()

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from toolchain.artifact import MANIFEST, TIMINGS, check_output, create_artifact, locked, open_artifact, write_atomic
from toolchain.errors import DtoolError


def write(out, content=b"hello", **kwargs):
    with create_artifact(out, "export", **kwargs) as draft:
        (draft.path / "a.bin").write_bytes(content)
        (draft.path / TIMINGS).write_text("{}")


def test_equal_content_gives_equal_bytes_and_timings_stand_outside(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two")
    assert (tmp_path / "one" / MANIFEST).read_bytes() == (tmp_path / "two" / MANIFEST).read_bytes()
    assert TIMINGS not in open_artifact(tmp_path / "one").manifest.files


def test_failure_leaves_nothing(tmp_path):
    def fail():
        with create_artifact(tmp_path / "out", "export") as draft:
            (draft.path / "a.bin").write_bytes(b"x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused_and_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("data")
    for force in (False, True):
        with pytest.raises(DtoolError, match="already exists"):
            check_output(tmp_path / "mine", force=force)
    assert (tmp_path / "mine" / "precious").read_text() == "data"


def test_force_replaces_an_artifact_alone(tmp_path):
    out = tmp_path / "out"
    write(out)
    with pytest.raises(DtoolError, match="--force"):
        write(out)
    write(out, b"other", force=True)
    assert (out / "a.bin").read_bytes() == b"other"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_failed_replacement_keeps_the_old_one(tmp_path):
    out = tmp_path / "out"
    write(out)
    with pytest.raises(RuntimeError), create_artifact(out, "export", force=True):
        raise RuntimeError
    assert (open_artifact(out, check_hashes=True).path / "a.bin").read_bytes() == b"hello"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda p: (p / "a.bin").write_bytes(b"hell"), "4 bytes"),
        (lambda p: (p / "a.bin").write_bytes(b"jello"), "sha256"),
        (lambda p: (p / "a.bin").unlink(), "missing: a.bin"),
        (lambda p: (p / "b.bin").write_bytes(b""), "not in the manifest: b.bin"),
        (lambda p: (p / MANIFEST).write_text("{"), "is not JSON"),
        (lambda p: (p / MANIFEST).write_text('{"schema_version": 99}'), "schema version"),
        (lambda p: (p / MANIFEST).unlink(), "not a dtool artifact"),
    ],
)
def test_damage_is_named(tmp_path, damage, text):
    write(tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(DtoolError) as failure:
        open_artifact(tmp_path / "out", check_hashes=True)
    assert text in str(failure.value)


def test_wrong_stage_is_refused(tmp_path):
    write(tmp_path / "out")
    with pytest.raises(DtoolError, match="stage 'export'"):
        open_artifact(tmp_path / "out", ("quantize",))


def test_second_writer_is_refused_at_once(tmp_path):
    with locked(tmp_path / "out"), pytest.raises(DtoolError, match="locked"):
        write(tmp_path / "out")
    write(tmp_path / "out")


def test_unwritable_place_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DtoolError, match="cannot be written"):
        write(tmp_path / "file" / "out")


def test_write_atomic_replaces_whole(tmp_path):
    write_atomic(tmp_path / "x" / "f", b"1")
    write_atomic(tmp_path / "x" / "f", b"22")
    assert (tmp_path / "x" / "f").read_bytes() == b"22"
    assert len(list((tmp_path / "x").iterdir())) == 1


def test_killed_writer_leaves_no_artifact_and_the_next_run_succeeds(tmp_path):
    out = tmp_path / "out"
    script = textwrap.dedent(f"""
        import time, pathlib
        from toolchain.artifact import create_artifact
        with create_artifact(pathlib.Path({str(out)!r}), "export") as draft:
            (draft.path / "a.bin").write_bytes(b"half")
            print("ready", flush=True)
            time.sleep(60)
    """)
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not out.exists()
    write(out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    out = tmp_path / "out"
    write(out)
    out.rename(tmp_path / ".out.old")  # what a kill there leaves
    time.sleep(0)
    with pytest.raises(RuntimeError), create_artifact(out, "export"):
        raise RuntimeError
    assert json.loads((out / MANIFEST).read_text())["stage"] == "export"

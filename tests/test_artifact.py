import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from toolchain.artifact import (
    MANIFEST,
    TIMINGS,
    check_output,
    create_artifact,
    explain_os_error,
    locked,
    open_artifact,
    require_room,
    write_atomic,
)
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


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    """It stands for the place it leads to, which is replaced; the second time as well."""
    (tmp_path / "large_disk").mkdir()
    link, place = tmp_path / "out", tmp_path / "large_disk" / "data"
    link.symlink_to(place)
    write(link)  # a link to a free place is a free place
    with pytest.raises(DtoolError, match="--force"):
        write(link)
    for content in (b"second", b"third"):
        write(link, content, force=True)
        assert link.is_symlink()
        assert (place / "a.bin").read_bytes() == content
        assert open_artifact(link, check_hashes=True).path == link
    assert [p.name for p in tmp_path.rglob(".*")] == []


def test_a_link_to_something_else_is_refused_and_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("link", "loop"):
        with pytest.raises(DtoolError, match="already exists"):
            write(tmp_path / name, force=True)
        assert (tmp_path / name).is_symlink()


def test_two_names_of_one_place_have_one_lock(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with locked(tmp_path / "link"), pytest.raises(DtoolError, match="locked"):
        write(tmp_path / "out")


def test_a_file_is_written_through_a_link(tmp_path):
    (tmp_path / "site").mkdir()
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "site" / "index.html")
    for content in (b"1", b"22"):
        write_atomic(link, content)
        assert link.is_symlink()
        assert (tmp_path / "site" / "index.html").read_bytes() == content


def failing(out, error):
    """Fail in the middle of an output."""
    with create_artifact(out, "export"):
        raise error


def test_a_full_disk_is_told_with_the_bytes_that_are_free(tmp_path):
    with pytest.raises(
        DtoolError, match=r"No space left on device \([\s\S]*\d bytes are free[\s\S]*nothing of the output"
    ):
        failing(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_is_not_answered_with_free_space(tmp_path):
    with pytest.raises(DtoolError, match="ulimit -f") as failure:
        failing(tmp_path / "out", OSError(errno.EFBIG, "File too large"))
    assert "free some space" not in str(failure.value)


def test_progress_that_stays_is_named_with_its_size(tmp_path):
    (tmp_path / ".out.progress").mkdir()
    (tmp_path / ".out.progress" / "layer-0.pt").write_bytes(bytes(1234))
    with pytest.raises(DtoolError) as failure:
        failing(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert f"left: {tmp_path / '.out.progress'}, 1,234 bytes" in failure.value.found
    assert "nothing" not in failure.value.fix


def test_a_file_that_cannot_be_read_is_not_called_an_output_that_cannot_be_written(tmp_path):
    source = tmp_path / "model" / "model.safetensors"
    failure = explain_os_error(PermissionError(errno.EACCES, "Permission denied", str(source)), tmp_path / "out")
    assert "cannot be written" not in failure.problem
    assert failure.fix.startswith(f"check {source}")
    ours = str(tmp_path / ".out.partial" / "weights.safetensors")
    failure = explain_os_error(PermissionError(errno.EACCES, "Permission denied", ours), tmp_path / "out")
    assert "cannot be written" in failure.problem


def test_room_is_checked_with_the_bytes_needed_and_free(tmp_path):
    with pytest.raises(DtoolError, match=r"at least 1,000,000,000,000,000,001 bytes free"):
        require_room(tmp_path / "new" / "out", 10**18, beside=1)
    assert list(tmp_path.iterdir()) == []
    require_room(tmp_path / "out", 1)


def test_a_limit_on_file_sizes_is_seen_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    with pytest.raises(DtoolError, match=r"at least 1,001 bytes[\s\S]*1,000 bytes \(ulimit -f\)"):
        require_room(tmp_path / "out", 1001)
    require_room(tmp_path / "out", 1000, beside=1000)


def test_a_failed_rename_puts_the_old_output_back(tmp_path, monkeypatch):
    out, rename = tmp_path / "out", type(tmp_path).rename
    write(out)

    def fail(path, target):
        if path.name == ".out.partial":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", fail)
    with pytest.raises(DtoolError, match="Input/output error"):
        write(out, b"other", force=True)
    assert (open_artifact(out, check_hashes=True).path / "a.bin").read_bytes() == b"hello"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

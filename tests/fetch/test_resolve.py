"""What a user may type as a model: a folder, a GGUF file, a name on the hub; and what is left behind."""

import errno
import fcntl
import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from tiny_gguf import write_tiny_gguf

from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.fetch.gguf_checkpoint import checkpoint_from_gguf
from toolchain.fetch.resolve import resolve_model
from toolchain.model.checkpoint import open_checkpoint
from toolchain.recipe import load_recipe


@pytest.fixture
def unpacked(cache):
    """Where GGUF files are unpacked."""
    return cache.parent / "unpacked"


@pytest.fixture
def hub(tiny, tmp_path, monkeypatch):
    """A stand-in for the hub: repositories by name, each a folder; what was asked and downloaded."""
    import huggingface_hub
    from huggingface_hub import constants

    hub = SimpleNamespace(repos={"org/tiny": tiny[0]}, asked=[], files=[], cache=tmp_path / "hub")

    def names_in(folder):
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def model_info(_, repo, *, revision, timeout):
        hub.asked.append((repo, revision, timeout))
        if repo not in hub.repos:
            raise OSError(f"404 Client Error. Repository Not Found for {repo}.\nMore words")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names_in(hub.repos[repo])])

    def snapshot_download(repo, *, revision, allow_patterns=None, etag_timeout=None, local_files_only=False):
        folder = hub.cache / repo.replace("/", "--")
        if local_files_only:
            if folder.is_dir():
                return str(folder)
            raise FileNotFoundError("Cannot find the revision in the cache. And so on")
        folder.mkdir(parents=True, exist_ok=True)
        for name in names_in(hub.repos[repo]):
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes((hub.repos[repo] / name).read_bytes())
                hub.files.append(name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.chdir(tmp_path)
    return hub


def say(line):
    pass


def refusal(text):
    with pytest.raises(DtoolError) as caught, resolve_model(text, say) as folder:
        open_checkpoint(folder)
    return str(caught.value)


def run_cli(*arguments, **options):
    command = [sys.executable, "-m", "toolchain.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


# folders and GGUF files


def test_a_folder_is_itself(tiny):
    with resolve_model(str(tiny[0]), say) as folder:
        assert folder == tiny[0]


@pytest.mark.parametrize("name", ["tiny.gguf", "tiny.bin", "ó dèl 模型 #1.gguf"])
def test_a_gguf_file_is_unpacked_for_the_run_and_removed(tiny_gguf, tmp_path, unpacked, name):
    source = tiny_gguf.path.rename(tmp_path / name)
    (tmp_path / "m").mkdir()
    checkpoint_from_gguf(source, tmp_path / "m", say)
    lines = []
    with resolve_model(str(source), lines.append) as folder:
        assert folder.name == source.stem
        for path in (tmp_path / "m").iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes()
        assert list(unpacked.iterdir())
    assert not [p for p in unpacked.iterdir() if p.name != ".lock"]
    assert lines == [f"unpacking {name} to safetensors, for this run"]


def test_a_failed_run_or_a_broken_file_leaves_nothing(tiny_gguf, tmp_path, unpacked):
    with pytest.raises(RuntimeError), resolve_model(str(tiny_gguf.path), say):
        raise RuntimeError
    broken = write_tiny_gguf(tmp_path / "broken.gguf", drop="model.norm.weight").path
    assert "model.norm.weight (output_norm.weight)" in refusal(str(broken))
    assert not [p for p in unpacked.iterdir() if p.name != ".lock"]


def test_what_a_killed_run_left_goes_with_the_next_and_a_live_ones_stays(tiny_gguf, unpacked):
    code = (
        "import os, sys\n"
        "from toolchain.fetch.resolve import resolve_model\n"
        "with resolve_model(sys.argv[1], print): os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, tiny_gguf.path], check=False).returncode == 9
    (left,) = (p for p in unpacked.iterdir() if p.name != ".lock")
    live = unpacked / "live"
    live.mkdir()
    with (live / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with resolve_model(str(tiny_gguf.path), say):
            assert not left.exists()
        assert live.is_dir()


def test_without_weights_the_config_alone_is_made(tiny_gguf):
    lines = []
    with resolve_model(str(tiny_gguf.path), lines.append, weights=False) as folder:
        assert {p.name for p in folder.iterdir()} == {
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
        }  # fmt: skip
    assert not lines


def test_a_gguf_file_exports_like_the_folder_made_of_it(tiny_gguf, tmp_path, unpacked):
    (tmp_path / "m").mkdir()
    checkpoint_from_gguf(tiny_gguf.path, tmp_path / "m", say)
    export_checkpoint(tmp_path / "m", load_recipe("fp32", ()), tmp_path / "folder", report=say)
    done = run_cli("export", tiny_gguf.path, "-r", "fp32", "-o", tmp_path / "file")
    assert done.returncode == 0, done.stderr
    assert "unpacking tiny.gguf" in done.stderr
    manifests = [json.loads((tmp_path / out / "manifest.json").read_text()) for out in ("folder", "file")]
    assert manifests[0] == manifests[1]
    assert not [p for p in unpacked.iterdir() if p.name != ".lock"]
    done = run_cli("export", tiny_gguf.path, "-r", "fp32", "-o", tmp_path / "file")
    assert done.returncode == 1
    assert "already exists" in done.stderr
    assert "unpacking" not in done.stderr  # refused before any work


# names on the hub


def test_a_hub_name_gives_the_cached_folder_with_what_a_checkpoint_needs(hub, tiny):
    (tiny[0] / "README.md").write_text("not needed")
    lines = []
    with resolve_model("org/tiny", lines.append) as folder:
        assert open_checkpoint(folder).parameters
    assert sorted(set(hub.files)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert hub.asked == [("org/tiny", None, 10)]
    assert folder.is_dir()  # the hub's cache stays
    assert lines == ["org/tiny is no folder here: asking the hub"]
    (tiny[0] / "README.md").unlink()


def test_every_file_that_decides_how_text_is_read_is_downloaded(hub, tiny_text, tmp_path):
    repo = tmp_path / "text"
    shutil.copytree(tiny_text, repo)
    texts = ["added_tokens.json", "chat_template.jinja", "chat_templates/tools.jinja", "merges.txt", "vocab.json"]
    for name in (*texts, "chat_templates/README.md", "training_args.json"):
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text("{}")
    hub.repos["org/text"] = repo
    with resolve_model("org/text", say):
        pass
    kept = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(set(hub.files)) == sorted([*kept, *texts])


def test_a_revision_is_asked_for(hub):
    with resolve_model("org/tiny@refs/pr/3", say):
        assert hub.asked[0][:2] == ("org/tiny", "refs/pr/3")


def test_shards_are_those_of_the_index_and_pickles_are_left(hub, tiny, tmp_path):
    repo = tmp_path / "sharded"
    repo.mkdir()
    tensors = load_file(tiny[0] / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "odd [1].safetensors": names[9:]}
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, repo / file)
    weight_map = {n: file for file, members in parts.items() for n in members}
    (repo / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (repo / "config.json").write_bytes((tiny[0] / "config.json").read_bytes())
    for other in ("pytorch_model.bin", "consolidated.safetensors", "tiny.gguf", "train.py"):
        (repo / other).write_text("must not be downloaded")
    hub.repos["org/sharded"] = repo
    with resolve_model("org/sharded", say) as folder:
        assert open_checkpoint(folder).parameters
    assert sorted(hub.files) == sorted(["config.json", *parts, "model.safetensors.index.json"])


def test_without_weights_none_are_downloaded(hub):
    with resolve_model("org/tiny", say, weights=False) as folder:
        assert (folder / "config.json").is_file()
    assert sorted(hub.files) == ["config.json", "generation_config.json"]


def test_a_pickle_is_downloaded_where_there_are_no_safetensors(hub, tiny, tmp_path):
    import torch

    repo = tmp_path / "old"
    repo.mkdir()
    torch.save(load_file(tiny[0] / "model.safetensors"), repo / "pytorch_model.bin")
    (repo / "config.json").write_bytes((tiny[0] / "config.json").read_bytes())
    hub.repos["org/old"] = repo
    with resolve_model("org/old", say) as folder:
        assert open_checkpoint(folder).parameters
    assert sorted(hub.files) == ["config.json", "pytorch_model.bin"]


def test_a_repository_without_a_checkpoint_is_refused_with_what_it_has(hub, tmp_path):
    repo = tmp_path / "ggufs"
    repo.mkdir()
    (repo / "m.Q4_K.gguf").write_text("")
    hub.repos["org/ggufs"] = repo
    text = refusal("org/ggufs")
    assert "m.Q4_K.gguf" in text
    assert "download one of its .gguf files and give that file" in text
    assert not hub.files


def test_a_hub_that_does_not_answer_is_met_with_one_short_message(hub):
    text = refusal("org/absent")
    assert "org/absent is no folder here, and the hub does not give it" in text
    assert "404 Client Error" in text
    assert "More words" not in text


@pytest.mark.usefixtures("hub")
def test_a_full_disk_is_not_called_a_hub_that_does_not_answer(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("toolchain.fetch.hub.download_snapshot", full)
    with pytest.raises(OSError, match="No space left on device"), resolve_model("org/tiny", lambda _: None):
        pass


def test_offline_only_the_hubs_cache_is_asked(hub, monkeypatch, tiny):
    from huggingface_hub import constants

    with resolve_model("org/tiny", say):
        pass
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    asked = len(hub.asked)
    with resolve_model("org/tiny", say) as folder:
        assert open_checkpoint(folder).parameters
    assert "Cannot find the revision in the cache" in refusal("org/other")
    assert len(hub.asked) == asked


def test_a_hub_that_does_not_answer_gives_what_its_cache_has_and_says_so(hub):
    with resolve_model("org/tiny", say):
        pass
    hub.repos.clear()
    lines = []
    with resolve_model("org/tiny", lines.append) as folder:
        assert open_checkpoint(folder).parameters
    assert "taking the copy in its cache" in lines[-1]


def test_a_folder_of_that_name_goes_before_the_hub(hub, tiny):
    Path("org").mkdir()
    Path("org/tiny").symlink_to(tiny[0])
    with resolve_model("org/tiny", say) as folder:
        assert folder == Path("org/tiny")
    assert not hub.asked


@pytest.mark.parametrize(
    "text", ["/none/here", "./org/tiny", "../org/tiny", "tiny", "a/b/c", "org/tiny.gguf", "org/", ""]
)
def test_what_is_no_hub_name_is_said_to_be_no_folder(hub, text):
    assert "is not a checkpoint" in refusal(text)
    assert not hub.asked


def test_the_command_line_says_that_the_hub_cannot_be_reached(tmp_path):
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PATH": "/usr/bin:/bin"}
    for command in ("export", "run"):
        done = run_cli(command, "org/absent", "-r", "fp32", "-o", tmp_path / "out", env=environment)
        assert done.returncode == 1, done.stderr
        assert "org/absent is no folder here, and the hub does not give it" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists()
        done = run_cli(command, tmp_path / "absent", "-r", "fp32", "-o", tmp_path / "out", env=environment)
        assert "no such folder" in done.stderr

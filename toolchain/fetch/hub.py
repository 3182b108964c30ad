"""Checkpoints from the Hugging Face hub: what a checkpoint needs of a repository, in the hub's own cache."""

import contextlib
import glob
import json
import os
import re
from pathlib import Path

from toolchain.errors import DtoolError, name_list
from toolchain.tokenizer import is_tokenizer_file

HUB_SECONDS = 10
WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""In the order in which a checkpoint folder is read."""


def download_snapshot(repo: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The hub's cached folder of a repository at a revision, its config, tokenizer and `weights` downloaded.

    Offline (HF_HUB_OFFLINE) the cache alone is asked. Raises what the hub's client raises, and DtoolError
    for a repository without weights dtool reads.
    """
    # Read when huggingface_hub is imported; without it a machine with no route waits much longer.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(HUB_SECONDS))
    import huggingface_hub
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    # One small question first: the download itself tries many times before it gives up.
    info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=HUB_SECONDS)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    first = next((name for name in WEIGHTS if name in names), None)
    if first is None or "config.json" not in names:
        raise _without_weights(repo, names)

    def download(files: list[str]) -> Path:
        exactly = [glob.escape(name) for name in files]
        return Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=exactly, etag_timeout=HUB_SECONDS)
        )

    wanted = {"config.json", first} if weights else {"config.json"}
    folder = download([name for name in names if name in wanted or is_tokenizer_file(name)])
    if weights and first.endswith(".index.json"):
        weight_map = json.loads((folder / first).read_text("utf-8")).get("weight_map", {})
        folder = download(sorted({str(shard) for shard in weight_map.values()} & set(names)))
    return folder


def cached_snapshot(repo: str, revision: str | None = None) -> Path | None:
    """What an earlier download left in the hub's cache, if anything; no network is asked."""
    import huggingface_hub

    with contextlib.suppress(Exception):  # whatever the client raises, there is none
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    return None


def _without_weights(repo: str, names: list[str]) -> DtoolError:
    gguf = [name for name in names if name.endswith(".gguf")]
    return DtoolError(
        f"{repo} on the hub holds no checkpoint dtool reads",
        expected="config.json with safetensors or pytorch_model.bin",
        found=name_list(gguf or names) or "no files",
        fix="download one of its .gguf files and give that file" if gguf else "give another repository",
    )


def reason_of(error: Exception) -> str:
    """The first sentence of what the hub's client says."""
    return re.split(r"\.\s|\n", str(error).strip() or type(error).__name__)[0]

"""What of a calibrated quantization is finished, beside its output, so that a killed run goes on where it was.

A folder `.NAME.progress` next to the output holds every finished layer as it will be stored, and the
activations that enter the next one. It belongs to one key (source, text, recipe, versions): another key
starts anew. Layers are kept before the activations that follow them, each file whole or not there, so
what is found is always a beginning of the same run, and its bytes are those of a run without a break.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolchain.artifact import PROGRESS, hidden_beside

KEY, STREAMS = "key", "streams.pt"


def time_span(seconds: float) -> str:
    """A time as a person waits for it: seconds, or minutes from two on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class Progress:
    """The finished layers of one quantization."""

    def __init__(self, out: Path, key: str) -> None:
        self.folder = hidden_beside(out, PROGRESS)
        if not (self.folder / KEY).is_file() or (self.folder / KEY).read_text() != key:
            self.remove()
            self.folder.mkdir()
            (self.folder / KEY).write_text(key)
        kept = self._read(STREAMS)
        self.first = 0 if kept is None else int(kept["first"])
        """The first layer that is not finished."""
        self.streams: list[torch.Tensor] | None = None if kept is None else kept["streams"]
        """What enters it, by batch; None before the first layer, and where no text was run."""

    def layer(self, index: int) -> Any:
        """A finished layer as it was kept, or None."""
        return self._read(f"layer-{index}.pt") if index < self.first else None

    def keep_layer(self, index: int, layer: Mapping[str, Any]) -> None:
        """Keep a finished layer: tensors, and rows of the report."""
        self._write(f"layer-{index}.pt", dict(layer))

    def keep_streams(self, first: int, streams: list[torch.Tensor] | None) -> None:
        """Keep what enters layer `first`, all before it being kept; None where no text was run."""
        self._write(STREAMS, {"first": first, "streams": streams})

    def remove(self) -> None:
        """Forget all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, name: str) -> Any:
        path = self.folder / name
        return torch.load(path, weights_only=True) if path.is_file() else None

    def _write(self, name: str, value: Any) -> None:
        partial = self.folder / f"{name}.partial"
        with partial.open("wb") as stream:  # given a path, torch hides that the disk is full
            torch.save(value, stream)
        partial.replace(self.folder / name)

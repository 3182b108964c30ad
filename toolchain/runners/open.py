"""From a folder to a runner: a checkpoint runs eagerly, an artifact in the backend it is for."""

from pathlib import Path

from toolchain.artifact import MANIFEST, open_artifact
from toolchain.errors import DtoolError
from toolchain.memory import require_torch
from toolchain.runners.runner import Runner


def open_runner(path: Path, *, threads: int = 0) -> Runner:
    """The runner of a checkpoint folder or an artifact. Raises DtoolError when neither can be run here."""
    if not (path / MANIFEST).is_file():
        return eager_runner(path)
    artifact = open_artifact(path)
    backend = artifact.manifest.target.get("backend", "onnxruntime")
    if backend in ("tensorrt", "tensorrt-rtx"):
        from toolchain.runners.tensorrt import TensorRTRunner

        return TensorRTRunner(artifact)
    if backend != "onnxruntime":
        raise DtoolError(
            f"{path} was compiled by {backend}, which this version of dtool does not know",
            expected="onnxruntime, tensorrt or tensorrt-rtx",
            found=str(backend),
            fix="use the version of dtool that built it, or build the engine again",
        )
    from toolchain.runners.onnx import OnnxRunner

    return OnnxRunner(artifact, threads=threads)


def eager_runner(path: Path, device: str = "cpu", context_len: int | None = None) -> Runner:
    """The fp32 torch decoder of a checkpoint: the reference for what quantization costs.

    `context_len`: that of the artifact it stands against, since some models rotate by it.
    """
    require_torch()
    from toolchain.model.load import load_decoder
    from toolchain.runners.eager import EagerRunner

    return EagerRunner(load_decoder(path, context_len=context_len), device=device)


def fake_quant_runner(path: Path) -> Runner:
    """The torch decoder with the exact arithmetic of an artifact: the reference for the implementation."""
    from toolchain.model.load import load_artifact_decoder
    from toolchain.runners.eager import EagerRunner

    return EagerRunner(load_artifact_decoder(open_artifact(path)), name="fake_quant")

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import save_tiny, seal
from toolchain.artifact import open_artifact
from toolchain.recipe import parse_recipe

needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs dtool[rtx]")


def pytest_collection_modifyitems(items):
    for item in items:
        if "compiles" in item.keywords:
            item.add_marker(needs_rtx)


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory):
    """Kernels compiled once serve every worker of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dtool-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTOOL_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="session")
def make_recipe():
    def make(compute_dtype="float16", sections=None, **engine):
        defaults = {
            "backend": "tensorrt-rtx",
            "targets": ["sm80", "sm89", "sm120"],
            "kv_capacity": 128,
            "prompt_len": {"min": 1, "opt": 32, "max": 64},
        }
        document = {"schema_version": 1, "about": "test", "compute_dtype": compute_dtype}
        return parse_recipe(document | (sections or {}) | {"engine": defaults | engine}, "test")

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A random Llama with grouped-query attention, small enough to compile in a second."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    save_tiny(folder, vocab_size=98)  # even: TensorRT pads an odd head
    return folder


@pytest.fixture(scope="session")
def export_of(checkpoint, tmp_path_factory, make_recipe):
    """The export of the tiny model in a compute type; made once each."""
    from toolchain.export.stage import export_checkpoint

    made = {}

    def export(dtype):
        if dtype not in made:
            out = tmp_path_factory.mktemp("export") / dtype
            made[dtype] = export_checkpoint(checkpoint, make_recipe(dtype), out, report=lambda _: None)
        return made[dtype]

    return export


@pytest.fixture(scope="session")
def fp16(export_of):
    return export_of("float16")


@pytest.fixture
def altered(tmp_path):
    """A copy of an artifact whose graphs and manifest went through functions; digests are kept in step."""
    import onnx

    def alter(source, graph=lambda model: None, manifest=lambda document: None):
        folder = tmp_path / "altered"
        shutil.copytree(source.path, folder)
        document = json.loads((folder / "manifest.json").read_text())
        for name in ("prefill.onnx", "decode.onnx"):
            model = onnx.load(folder / name, load_external_data=False)
            graph(model)
            (folder / name).write_bytes(model.SerializeToString())
            document["files"][name]["bytes"] = (folder / name).stat().st_size
        manifest(document)
        (folder / "manifest.json").write_text(json.dumps(document))
        return open_artifact(seal(Path(folder)))

    return alter

"""The tensorrt backend over a stub of its builder: what it is asked, and what becomes of its answers."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import save_tiny
from toolchain.artifact import TIMINGS
from toolchain.engine import compiler, preflight
from toolchain.engine.stage import build_engine
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.processor import Gpu
from toolchain.recipe import parse_recipe

STUB = Path(__file__).parent / "stub_builder"


def quiet(_):
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory, make_recipe):
    folder = tmp_path_factory.mktemp("tensorrt")
    save_tiny(folder / "model", vocab_size=98, head_dim=32)
    return export_checkpoint(folder / "model", make_recipe(), folder / "export", report=quiet)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A machine with one L4 and the stub as its TensorRT."""
    environment = compiler.child_environment
    find, version = preflight.importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(
        compiler,
        "child_environment",
        lambda folder: environment(folder) | {"PYTHONPATH": f"{environment(folder)['PYTHONPATH']}:{STUB}"},
    )
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda n: find("json" if n == "tensorrt" else n))
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "11.4.0.106" if n == "tensorrt" else version(n))
    monkeypatch.setattr(preflight, "installed_gpus", lambda: (Gpu("NVIDIA L4", 89),))
    monkeypatch.setattr("toolchain.engine.tensorrt.cache_folder", lambda: tmp_path / "cache")
    return tmp_path


def recipe_of(make_recipe, **engine):
    library = {"attention": "plugin", "backend": "tensorrt", "targets": []}
    return make_recipe(**(library | engine))


def asked(engine, name="prefill"):
    return json.loads((engine.path / f"{name}.engine").read_bytes())["asked"]


def test_the_builder_is_asked_what_the_recipe_says(source, host, make_recipe):
    recipe = recipe_of(
        make_recipe,
        optimization_level=4,
        memory_limit_mb=512,
        weight_streaming=True,
        weight_streaming_budget_mb=64,
        refit=True,
        hardware_compatibility="ampere_plus",
        version_compatible=True,
    )
    engine = build_engine(source.path, recipe, host / "e", report=quiet)
    config = asked(engine)
    flags = {"WEIGHT_STREAMING", "REFIT", "VERSION_COMPATIBLE"}
    assert set(config["flags"]) == {f"BuilderFlag.{flag}" for flag in flags}
    assert config["builder_optimization_level"] == 4
    assert config["pools"] == {"MemoryPoolType.WORKSPACE": 512 << 20}
    assert config["hardware_compatibility_level"] == "HardwareCompatibilityLevel.AMPERE_PLUS"
    assert config["previews"] == ["PreviewFeature.ALIASED_PLUGIN_IO_10_03"]
    target = engine.manifest.target
    assert (target["targets"], target["compiler"]) == (["sm89"], {"tensorrt": "11.4.0.106"})
    assert (target["weight_streaming_budget_bytes"], target["refittable"]) == (64 << 20, True)
    assert engine.file(target["plugin_libraries"][0]).stat().st_size > 10_000


@pytest.mark.parametrize("layout", ["separate", "shared"])
def test_each_phase_has_its_profile(source, host, make_recipe, layout):
    engine = build_engine(source.path, recipe_of(make_recipe, layout=layout), host / "e", report=quiet)
    entries = engine.manifest.target["engines"]
    ranges = {p: asked(engine, Path(e["file"]).stem)["profiles"][e["profile"]] for p, e in entries.items()}
    assert ranges["prefill"]["input_ids"] == [[1, 1], [1, 32], [8, 64]]
    assert ranges["decode"]["input_ids"] == [[1, 1], [1, 1], [8, 1]]
    assert ("new_lengths" in ranges["decode"]) == (layout == "shared")
    assert len({e["file"] for e in entries.values()}) == (1 if layout == "shared" else 2)
    report = engine.json("report.json")
    assert all(report["engines"][p]["summary"]["attention"]["fused"] == 2 for p in ("prefill", "decode"))


def test_stripped_plans_travel_with_their_graph_and_weights(source, host, make_recipe):
    engine = build_engine(source.path, recipe_of(make_recipe, strip_weights=True), host / "e", report=quiet)
    assert asked(engine)["flags"] == ["BuilderFlag.STRIP_PLAN"]
    assert engine.manifest.target["weights_from"] == {
        "prefill.engine": "prefill.onnx",
        "decode.engine": "decode.onnx",
    }
    assert {"prefill.onnx", "decode.onnx", "weights.safetensors", "rope.safetensors"} <= set(engine.manifest.files)
    assert (engine.path / "weights.safetensors").read_bytes() == source.file("weights.safetensors").read_bytes()


def timings(engine):
    return [t["timing_cache"] for t in json.loads((engine.path / TIMINGS).read_text()).values() if isinstance(t, dict)]


def test_the_timing_cache_is_made_used_and_ignored_when_it_is_garbage(source, host, make_recipe, capsys):
    recipe = recipe_of(make_recipe)
    one = build_engine(source.path, recipe, host / "one", report=quiet)
    assert timings(one) == ["used", "new"], "decode finds what prefill left"
    (cache,) = (host / "cache" / "timing").iterdir()
    two = build_engine(source.path, recipe, host / "two", report=quiet)
    assert timings(two) == ["used", "used"]
    cache.write_bytes(b"0123456789")
    three = build_engine(source.path, recipe, host / "three", report=quiet)
    assert timings(three) == ["used", "ignored"]
    assert cache.read_bytes() == b"stub timing cache", "a good one replaces it"
    off = build_engine(source.path, recipe_of(make_recipe, timing_cache=False), host / "off", report=quiet)
    assert timings(off) == ["none", "none"]
    assert one.identity == two.identity


def test_progress_of_the_outermost_phase_is_told(source, host, make_recipe, monkeypatch):
    from toolchain.engine import tensorrt

    monkeypatch.setattr(tensorrt, "PROGRESS_EVERY_S", 0.0)
    lines = []
    build_engine(source.path, recipe_of(make_recipe), host / "e", report=lines.append)
    assert [line for line in lines if line.startswith("prefill: Building")] == [
        "prefill: Building 0/2",
        "prefill: Building 1/2",
    ]


@pytest.mark.parametrize(
    ("gpus", "engine", "texts"),
    [
        ((), {}, ["this machine has none", "tensorrt-rtx"]),
        ((Gpu("NVIDIA L4", 89),), {"targets": ["sm90"]}, ["engine.targets of sm89 (NVIDIA L4)", "sm90"]),
        ((Gpu("Tesla T4", 75),), {}, ["no attention kernels for sm75"]),
    ],
)
def test_what_this_machine_cannot_compile_is_refused_at_once(
    source, host, make_recipe, monkeypatch, gpus, engine, texts
):
    monkeypatch.setattr(preflight, "installed_gpus", lambda: gpus)
    with pytest.raises(DtoolError) as caught:
        build_engine(source.path, recipe_of(make_recipe, **engine), host / "e", report=quiet)
    assert all(text in str(caught.value) for text in texts), caught.value
    assert not (host / "e").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("refit", True), ("strip_weights", True), ("version_compatible", True), ("hardware_compatibility", "ampere_plus")],
)
def test_options_tensorrt_rtx_cannot_honour_are_refused(source, make_recipe, tmp_path, option, value):
    with pytest.raises(DtoolError, match=rf"tensorrt-rtx cannot build with engine\.{option}"):
        build_engine(source.path, make_recipe(**{option: value}), tmp_path / "e", report=quiet)


@pytest.mark.compiles
def test_tensorrt_rtx_builds_engines_whose_weights_are_streamed(source, make_recipe, tmp_path):
    recipe = make_recipe(targets=["sm89"], weight_streaming=True, weight_streaming_budget_mb=1)
    engine = build_engine(source.path, recipe, tmp_path / "e", report=quiet)
    assert engine.manifest.target["weight_streaming_budget_bytes"] == 1 << 20


def test_a_budget_without_streaming_is_refused_by_the_recipe(make_recipe):
    with pytest.raises(DtoolError, match=r"weight_streaming_budget_mb\n.*weight_streaming true"):
        parse_recipe({"schema_version": 1, "about": "x", "engine": {"weight_streaming_budget_mb": 5}}, "r")


# ---- libraries ----


@pytest.fixture(scope="module")
def library(source, make_recipe, tmp_path_factory):
    from toolchain.engine.plugin import build_plugin_for, plugin_page

    out = tmp_path_factory.mktemp("library") / "mine.so"
    description = build_plugin_for(source.path, make_recipe(targets=["sm89"]), out, force=False, report=quiet)
    page = plugin_page(description)
    assert len(page.parts[0].rows) == 4
    for name, text in {out: "exists", "": "is a folder", "no/such.so": "cannot be written"}.items():
        with pytest.raises(DtoolError, match=text):
            build_plugin_for(source.path, make_recipe(targets=["sm89"]), out.parent / name, force=False, report=quiet)
    before = source.file("decoder.json").read_bytes()
    with pytest.raises(DtoolError, match="lies in an artifact"):
        build_plugin_for(
            source.path, make_recipe(targets=["sm89"]), source.path / "decoder.json", force=True, report=quiet
        )
    assert source.file("decoder.json").read_bytes() == before
    (out.parent / "mine.txt").write_text("precious")
    with pytest.raises(DtoolError, match="no library dtool built"):
        build_plugin_for(source.path, make_recipe(targets=["sm89"]), out.parent / "mine.txt", force=True, report=quiet)
    return out


@pytest.mark.compiles
def test_a_given_library_of_ours_is_used_instead_of_building_one(source, library, make_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("toolchain.ops.plugin.build.build_plugin", lambda *_, **__: pytest.fail("built again"))
    recipe = make_recipe(targets=["sm89"], attention="plugin")
    engine = build_engine(source.path, recipe, tmp_path / "e", plugin_libraries=[library], report=quiet)
    assert engine.manifest.target["plugin_libraries"] == ["plugin/mine.so"]
    assert engine.file("plugin/mine.so").read_bytes() == library.read_bytes()
    assert "plugin.mine.so" in engine.manifest.lineage


@pytest.mark.compiles
def test_without_its_plugin_the_graph_does_not_compile(source, make_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("toolchain.engine.tensorrt._place_plugins", lambda *_: [])
    recipe = make_recipe(targets=["sm89"], attention="plugin")
    with pytest.raises(DtoolError, match=r"cannot compile prefill[\s\S]*FusedAttention[\s\S]*--plugin-library"):
        build_engine(source.path, recipe, tmp_path / "e", report=quiet)
    assert not (tmp_path / "e").exists()


def libm():
    """The path of a library that is loaded in every process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in lines if "/libm.so" in line or "/libm-" in line)


def test_a_library_that_does_not_fit_is_refused(source, library, make_recipe, tmp_path, altered):
    def build(make, libraries, artifact=source):
        build_engine(artifact.path, make, tmp_path / "e", plugin_libraries=libraries, report=quiet)

    with pytest.raises(DtoolError, match=r"no kernels for this model on sm80"):
        build(make_recipe(targets=["sm80"], attention="plugin"), [library])
    with pytest.raises(DtoolError, match=r"no plugin library at .*nowhere\.so"):
        build(make_recipe(attention="plugin"), [tmp_path / "nowhere.so"])
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(DtoolError, match=r"text\.so cannot be loaded"):
        build(make_recipe(attention="plugin"), [tmp_path / "text.so"])
    (tmp_path / "cut.so").write_bytes(library.read_bytes()[:20000])
    with pytest.raises(DtoolError, match=r"cut\.so is cut short"):
        build(make_recipe(attention="plugin"), [tmp_path / "cut.so"])
    with pytest.raises(DtoolError, match="holds no TensorRT plugins"):
        build(make_recipe(attention="plugin"), [libm()])
    shutil.copyfile(library, tmp_path / "copy.so")
    with pytest.raises(DtoolError, match="one attention plugin too many"):
        build(make_recipe(attention="plugin"), [library, tmp_path / "copy.so"])
    with pytest.raises(DtoolError, match="two plugin libraries are called"):
        build(make_recipe(attention="plugin"), [library, library])
    with pytest.raises(DtoolError, match="one attention plugin too many"):
        build(make_recipe(attention="native"), [library])
    with pytest.raises(DtoolError, match="the embedded backend loads no plugins"):
        build(make_recipe(backend="onnxruntime", targets=[]), [library])

    def cap(model):
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "softcap":
                    attribute.f = 30.0

    capped = altered(source, graph=cap)
    with pytest.raises(DtoolError, match=r"no kernels for this model on sm89"):
        build(make_recipe(targets=["sm89"], attention="plugin"), [library], capped)
    with pytest.raises(DtoolError, match="native attention cannot cap its scores"):
        build(make_recipe(targets=["sm89"]), [], capped)


@pytest.mark.parametrize("kind", ["plan", "layers", "result"])
def test_a_disk_that_fills_while_compiling_is_told_as_that(source, host, make_recipe, monkeypatch, kind):
    """By the system's error and the bytes of the file, not as a compiler that died."""
    from toolchain.engine import tensorrt

    def compile_graph(request, report):
        request.path(kind).symlink_to("/dev/full")
        return compiler.compile_graph(request, report)

    monkeypatch.setattr(tensorrt, "compile_graph", compile_graph)
    with pytest.raises(DtoolError, match=r"e was not written") as failure:
        build_engine(source.path, recipe_of(make_recipe), host / "e", report=quiet)
    assert "No space left on device, for a file of " in failure.value.found
    assert "bytes are free" in failure.value.found
    assert failure.value.fix.startswith("free some space")
    assert "again" not in failure.value.fix

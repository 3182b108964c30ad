"""Engine artifacts for the stub TensorRT, and a walk over every kind of step."""

import shutil

import numpy as np

from tests.conftest import random_ids
from tests.runners.stub_tensorrt import StubDevice, StubTensorRT
from toolchain.artifact import create_artifact, open_artifact
from toolchain.graph_io import graph_io
from toolchain.model.caches import caches_of
from toolchain.model.config import DecoderConfig
from toolchain.runners.tensorrt import TensorRTRunner

CAPACITY, MAX_BATCH, MAX_PROMPT = 32, 4, 16
TARGET = {
    "backend": "tensorrt",
    "compiler": {"tensorrt": "11.4.0.106"},
    "targets": ["sm89"],
    "compute_capabilities": ["8.9"],
    "kv_capacity": CAPACITY,
    "max_batch": MAX_BATCH,
    "max_prompt": MAX_PROMPT,
    "plugin_libraries": [],
}
RTX = {"backend": "tensorrt-rtx", "compiler": {"tensorrt-rtx": "1.7.1.116"}}


def profile(contract, *, prefill, batch=(1, MAX_BATCH), tokens=(1, MAX_PROMPT), new_lengths=True, capacity=CAPACITY):
    low, high = tokens if prefill else (1, 1)
    ranges = {"input_ids": [[batch[0], low], [batch[0], low], [batch[1], high]], "past_lengths": [[b] for b in batch]}
    ranges["past_lengths"].insert(1, [batch[0]])
    if new_lengths:
        ranges["new_lengths"] = ranges["past_lengths"]
    caches = {spec.name: [spec.sized(batch=b, capacity=capacity) for b in batch] for spec in contract.cache_inputs}
    return ranges | {name: [low, low, high] for name, (low, high) in caches.items()}


def make_engine(
    source, out, *, shared=False, batch=(1, MAX_BATCH), tokens=(1, MAX_PROMPT), extra=None, copies=(), **target
):
    """An engine artifact whose plans name the graphs of `source`."""
    exported = open_artifact(source, check_hashes=False)
    config = DecoderConfig.model_validate(exported.json("decoder.json"))
    caches = caches_of(exported.manifest.kv_contract, config.num_hidden_layers)
    contract = graph_io(config, "decode", caches)
    capacity = (extra or {}).get("capacity", CAPACITY)

    def plan(phase, profiles):
        return {"onnx": str(source / f"{phase}.onnx"), "capacity": capacity, "profiles": profiles} | (extra or {})

    prefill = profile(contract, prefill=True, batch=batch, tokens=tokens, capacity=capacity)
    decode = profile(contract, prefill=False, batch=batch, new_lengths=shared, capacity=capacity)
    if shared:
        plans = {"decoder.engine": plan("prefill", [prefill, decode])}
        entries = {p: {"file": "decoder.engine", "profile": i} for i, p in enumerate(("prefill", "decode"))}
    else:
        plans = {"prefill.engine": plan("prefill", [prefill]), "decode.engine": plan("decode", [decode])}
        entries = {p: {"file": f"{p}.engine", "profile": 0} for p in ("prefill", "decode")}
    with create_artifact(out, "engine") as draft:
        shutil.copyfile(source / "decoder.json", draft.path / "decoder.json")
        for name in copies:
            shutil.copyfile(source / name, draft.path / name)
        for name, document in plans.items():
            draft.write_json(name, document)
        for name in target.get("plugin_libraries", ()):
            (draft.path / name).parent.mkdir(exist_ok=True)
            (draft.path / name).write_bytes(b"a library of " + str(out).encode())
        draft.target = TARGET | {"engines": entries} | target
        draft.kv_contract = dict(exported.manifest.kv_contract) | {"capacity": CAPACITY}
        draft.details = dict(exported.manifest.details)
        draft.lineage = {"source": exported.identity}
    return open_artifact(out)


def make_runner(artifact, trt=None, device=None, **options):
    return TensorRTRunner(artifact, device=device or StubDevice(), trt=trt or StubTensorRT(), **options)


def lengths(*values):
    return np.array(values, np.int64)


def walk(runner, seed=0, batch=3, decode_steps=5):
    """Logits of a ragged prefill, a second ragged chunk and decode steps, and the state at the end."""
    state = runner.new_state(batch, CAPACITY)
    first, second = lengths(7, 3, 5)[:batch], lengths(2, 4, 1)[:batch]
    seen = [runner.step(state, random_ids(seed, batch, 7), first, "prefill")]
    seen.append(runner.step(state, random_ids(seed + 1, batch, 4), second, "prefill"))
    ones = np.ones(batch, np.int64)
    seen += [runner.step(state, random_ids(seed + 2 + i, batch, 1), ones, "decode") for i in range(decode_steps)]
    return seen, state


def assert_same(first, second):
    """Equal up to the order in which one engine for both phases sums."""
    for a, b in zip(first, second, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

"""ONNX Runtime on the CPU, over an export, a quantized artifact or an embedded engine.

The cache lives in OrtValues bound as input and output at once, so it is updated in place. Weights
are mapped from the artifact's file and shared by the phases' sessions.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError
from toolchain.formats import FORMATS
from toolchain.graph_io import GRAPH_FILES, GraphIO, Phase, graph_io
from toolchain.memory import memory_error, require_memory
from toolchain.model.caches import CacheFormat, caches_of
from toolchain.model.config import DecoderConfig
from toolchain.processor import probe_integer_products
from toolchain.runners.runner import Array, KVState, artifact_limits, check_state, check_step

CACHES = ("float32", "float16", "int8", "fp8_e4m3")
"""Cache formats this backend computes with."""


class OnnxRunner:
    """Runs the graphs of one artifact; sessions are made when a phase is first used."""

    def __init__(self, artifact: Artifact, *, threads: int = 0) -> None:
        self.artifact = artifact
        self.name = "onnxruntime" if artifact.manifest.stage == "engine" else "onnx"
        self.config = artifact.read("decoder.json", DecoderConfig)
        self.caches = caches_of(artifact.manifest.kv_contract, self.config.num_hidden_layers)
        unknown = [cache.dtype for cache in self.caches if cache.dtype not in CACHES]
        if unknown:
            raise DtoolError(
                f"ONNX Runtime's CPU backend cannot run {unknown[0]} graphs",
                expected=", ".join(CACHES),
                found=unknown[0],
                fix="use compute_dtype float32 or float16 for CPU runs; bfloat16 needs a GPU backend",
            )
        target = artifact.manifest.target
        if target.get("needs_exact_u8s8") and not probe_integer_products():
            raise DtoolError(
                "this CPU saturates in the integer products this engine is made of",
                expected="a CPU with VNNI, as where the engine was built",
                found="16-bit sums of uint8 x int8 products",
                fix="build the engine again on this machine: it then stores its weights in another form",
            )
        mapped = sum(entry.bytes for name, entry in artifact.manifest.files.items() if name.endswith(".safetensors"))
        require_memory(mapped, f"{artifact.path}", mapped=True)
        self.limits = artifact_limits(artifact)
        self.threads = threads
        self.sessions: dict[Phase, Any] = {}
        self.contracts: dict[Phase, GraphIO] = {}

    def new_state(self, batch: int, capacity: int) -> KVState:
        check_state(self.config, self.limits, batch, capacity)
        specs = self.contract("decode").cache_inputs
        caches = [zero_cache(spec.sized(batch=batch, capacity=capacity), spec.dtype) for spec in specs]
        return KVState(capacity, np.zeros(batch, np.int64), caches)

    def step(self, state: KVState, input_ids: Array, new_lengths: Array, phase: Phase) -> Array:
        import onnxruntime

        check_step(self.config, self.limits, state, input_ids, new_lengths, phase)
        session, binding = self.session(phase), self._binding(state, phase)
        feeds = {"input_ids": input_ids, "past_lengths": state.lengths, "new_lengths": new_lengths}
        for spec in self.contract(phase).call_inputs:
            binding.bind_cpu_input(spec.name, np.ascontiguousarray(feeds[spec.name]))
        rows = input_ids.shape[1] if phase == "evaluation" else 1
        logits = np.empty((state.batch, rows, self.config.vocab_size), np.float32)
        binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))  # its own memory
        with refusals_of(self.artifact.path / GRAPH_FILES[phase]):
            session.run_with_iobinding(binding)
        state.lengths = state.lengths + new_lengths
        return logits

    def _binding(self, state: KVState, phase: Phase) -> Any:
        """The state's binding for a phase: its caches are bound once, as input and output at the same time."""
        if phase not in state.bindings:
            binding, contract = self.session(phase).io_binding(), self.contract(phase)
            for spec, cache in zip(contract.cache_inputs, state.caches, strict=True):
                binding.bind_ortvalue_input(spec.name, cache)
            for spec, cache in zip(contract.cache_outputs, state.caches, strict=True):
                binding.bind_ortvalue_output(spec.name, cache)
            state.bindings[phase] = binding
        return state.bindings[phase]

    def contract(self, phase: Phase) -> GraphIO:
        """The inputs and outputs of a phase."""
        if phase not in self.contracts:
            self.contracts[phase] = graph_io(self.config, phase, self.caches)
        return self.contracts[phase]

    def session(self, phase: Phase) -> Any:
        """The session of a phase, made on first use."""
        if phase not in self.sessions:
            self.sessions[phase] = make_session(self.artifact.file(GRAPH_FILES[phase]), self.threads, self.name)
        return self.sessions[phase]


def zero_cache(shape: tuple[int, ...], dtype: str) -> Any:
    """An OrtValue of zeros in a number format; numpy has no name for some of them."""
    import onnxruntime

    fmt = FORMATS[dtype]
    zeros = np.zeros(shape, f"uint{fmt.bits}")
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, fmt.onnx_code)


def run_chunks(
    session: Any, config: DecoderConfig, caches: Sequence[CacheFormat], chunks: Sequence[Array], values: Sequence[str]
) -> list[dict[str, Array]]:
    """The named values of each chunk int64 [B, T], as float32; the cache is carried from one to the next.

    `session` is over an evaluation graph that has these values as outputs.
    """
    import onnxruntime

    contract = graph_io(config, "evaluation", caches)
    pasts, presents = contract.cache_inputs, [spec.name for spec in contract.cache_outputs]
    batch, new = chunks[0].shape
    feeds = {s.name: zero_cache(s.sized(batch=batch, capacity=len(chunks) * new), s.dtype) for s in pasts}
    given, results = {item.name for item in session.get_inputs()}, []
    for i, ids_BT in enumerate(chunks):
        lengths = np.full(batch, new, np.int64)
        arrays = {"input_ids": ids_BT, "past_lengths": lengths * i, "new_lengths": lengths}
        for name, array in arrays.items():
            if name in given:
                feeds[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        found = session.run_with_ort_values([*values, *presents], feeds)
        feeds |= {spec.name: cache for spec, cache in zip(pasts, found[len(values) :], strict=True)}
        results.append({name: np.asarray(v.numpy(), np.float32) for name, v in zip(values, found, strict=False)})
    return results


def make_session(path: Path, threads: int, kind: str) -> Any:
    """An InferenceSession that computes what the file says.

    By default ONNX Runtime turns weight-only DequantizeLinear into products with int8 activations
    (errors of 0.1); accuracy level 1 keeps them in float.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # its errors are raised: logged too, each would be told twice
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if kind == "onnx":
        options.add_session_config_entry("session.disable_prepacking", "1")
    return open_session(str(path), options, path)


def open_session(graph: str | bytes, options: Any, path: Path) -> Any:
    """An InferenceSession on the CPU of a graph, given as a file's name or as the bytes made of `path`."""
    import onnxruntime

    with refusals_of(path):
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def refusals_of(path: Path) -> Iterator[None]:
    """Word what ONNX Runtime raises about the graph in `path`: in the block nothing else runs.

    Its errors have no class in common, and some are plain RuntimeErrors.
    """
    try:
        yield
    except Exception as error:
        if memory_error(error) is not None:  # no fault of the graph: the last guard words it
            raise
        raise DtoolError(
            f"ONNX Runtime cannot run {path}",
            expected="a graph of this version of dtool over the weights it was made with",
            found=" ".join(str(error).split())[:400],
            fix="make the artifact again with this version of dtool",
        ) from error

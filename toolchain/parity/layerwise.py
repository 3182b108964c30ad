"""Each layer on its own: the candidate's layers against torch, fed what the candidate fed them.

Where activations or the cache are rounded, two right implementations drift apart: a last-bit
difference turns a value near an edge into the next code, that code changes the inputs of the next
layer, and after some layers the difference is as large as the rounding itself. Comparing logits
then says little about the implementation. So the candidate's residual stream is read between the
layers, every torch layer is given the candidate's own input, and only what the layer adds to the
stream is compared, token by token:

    error[i, t] = ||ours - theirs|| / ||theirs||,   ours = h[i+1, t] - h[i, t],   theirs = layer_i(h[i])[t] - h[i, t]

A few codes may still flip inside one layer, which moves a few tokens by a part of the rounding
error; a fault in a scale, mask, rotation or layout moves most tokens by far more. The stream is
walked in two chunks, so that the second one has a past.

Legend: B batch, T new tokens, E hidden.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from toolchain.artifact import Artifact
from toolchain.graph_io import EMBEDDED, GRAPH_FILES, OUTPUT, layer_value, load_graph
from toolchain.model.decoder import Decoder
from toolchain.parity.metrics import Metric, Row, fact, gate_rows
from toolchain.parity.statistics import nan_as_infinite, quantile
from toolchain.recipe_sections import Gates
from toolchain.runners.onnx import open_session, run_chunks

Array = np.ndarray[Any, Any]
PHASE = "layers"
TOKENS = 64
"""Of each row: positions beyond 60 are among them."""
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def layer_errors(artifact: Artifact, decoder: Decoder, ids_BT: Array) -> Array:
    """Relative error [layers, B, T] of what each layer adds, per row and token."""
    half = ids_BT.shape[1] // 2
    chunks = [ids_BT[:, :half], ids_BT[:, half : 2 * half]]
    streams = _candidate_streams(artifact, decoder, chunks)
    caches = decoder.new_caches(len(ids_BT), 2 * half)
    dtype = decoder.compute_dtype
    errors = []
    with torch.inference_mode():
        for i, block in enumerate(decoder.model.layers):
            layer = []
            for chunk, stream in enumerate(streams):
                past = torch.full((len(ids_BT),), chunk * half)
                x_BTE, ours_BTE = (torch.from_numpy(stream[j]) for j in (i, i + 1))
                theirs_BTE, _ = block(x_BTE.to(dtype), decoder.layer_rope(i), past, caches[i])
                added_BTE = theirs_BTE.double() - x_BTE.double()
                difference_BTE = ours_BTE.double() - theirs_BTE.double()
                layer.append((difference_BTE.norm(dim=-1) / added_BTE.norm(dim=-1)).numpy())
            errors.append(np.concatenate(layer, axis=1))
    return np.stack(errors)


def layer_rows(errors_LRT: Array, gates: Gates, confidence: float) -> list[Row]:
    """The report's rows: the median token of the worst layer, and the worst token of all.

    `errors_LRT` is of all rows of text so far. Rows are the samples here too (`statistics`).
    """
    layers, rows, tokens = errors_LRT.shape
    rows_N = np.repeat(np.arange(rows), tokens)
    medians = [quantile(layer_RT.ravel(), rows_N, rows * tokens, 0.5, confidence) for layer_RT in errors_LRT]
    worst = max(range(layers), key=lambda i: nan_as_infinite(medians[i].value))
    peak = int(errors_LRT.reshape(layers, -1).max(1).argmax())  # NaN counts as the largest
    metrics = {
        "layer_error_median": Metric(medians[worst], "relative", sampled=True, where=f"layers.{worst}"),
        "layer_error_max": fact(float(errors_LRT[peak].max()), "relative", where=f"layers.{peak}"),
    }
    return gate_rows("fake_quant", PHASE, metrics, gates)


def _candidate_streams(artifact: Artifact, decoder: Decoder, chunks: list[Array]) -> list[list[Array]]:
    """The residual stream of each chunk, float32 [layers + 1][B, T, E], from the evaluation graph."""
    session, names = _session_with_stream(artifact, decoder.config.num_hidden_layers)
    found = run_chunks(session, decoder.config, decoder.cache_formats(), chunks, names)
    return [[values[name] for name in names] for values in found]


def _session_with_stream(artifact: Artifact, layers: int) -> tuple[Any, list[str]]:
    """The evaluation graph with the residual stream as extra outputs; the file itself is left alone."""
    names = [EMBEDDED, *(layer_value(i, OUTPUT) for i in range(layers))]
    data, options = expose_values(artifact, names)
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return open_session(data, options, artifact.path / GRAPH_FILES["evaluation"]), names


def expose_values(artifact: Artifact, names: Sequence[str]) -> tuple[bytes, Any]:
    """The evaluation graph's bytes with more values as outputs, and session options that find its data.

    The file itself is left alone.
    """
    import onnx
    import onnxruntime

    path = artifact.file(GRAPH_FILES["evaluation"])
    model = load_graph(path)
    declared = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in declared)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised: logged too, each would be told twice
    options.add_session_config_entry(EXTERNAL_FOLDER, str(path.parent.absolute()))
    return model.SerializeToString(), options

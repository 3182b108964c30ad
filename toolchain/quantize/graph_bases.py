"""The bases of `rotation`, the excess of `excess` and the means of centered inputs in a graph, as ordinary operators.

    stream         embedded -> MatMul(R) -> layers -> MatMul(R^T) -> last norm
    feed forward   x -> Min, Max (limits) -> Reshape, MatMul(K), Reshape -> product -> Add(excess)
                   excess = MatMul(Gather(x - limited x, channels), their weights)
    centered       x -> Sub(m) where x is rounded -> product -> Add(offset)

All of it is in the compute type. What a graph needs stands in its weights file.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from toolchain.graph_io import EMBEDDED, OUTPUT, layer_value
from toolchain.model.config import DecoderConfig
from toolchain.model.quantized import (
    CENTER,
    CHANNEL_WEIGHT,
    CHANNELS,
    FEED_FORWARD_ROTATION,
    LIMIT,
    OFFSET,
    ROTATION,
)
from toolchain.quantize.excess import PRODUCT
from toolchain.tensor_file import TensorEntry


def write_bases(quantizer: Any, config: DecoderConfig, entries: Mapping[str, TensorEntry]) -> None:
    """Write what `entries` hold of it into the quantizer's graph, before its weights are codes."""
    values = {str(v.name): v for node in quantizer.graph for v in node.outputs}
    if ROTATION in entries:
        _rotate_stream(quantizer, values, config)
    for i in range(config.num_hidden_layers):
        _shape_input(quantizer, f"model.layers.{i}.{PRODUCT}", entries)
    for name in entries:
        if name.endswith(f".{OFFSET}"):
            _center(quantizer, name.removesuffix(f".{OFFSET}"), entries)


def _rotate_stream(quantizer: Any, values: dict[str, ir.Value], config: DecoderConfig) -> None:
    rotation = quantizer.initializer(ROTATION)
    embedded = values[EMBEDDED]
    users = list(embedded.uses())
    embedded.name = f"{EMBEDDED}_plain"
    rotated = quantizer.insert(users[0].node, "MatMul", [embedded, rotation], f"{EMBEDDED}_rotated")
    _take_over(rotated, EMBEDDED, embedded, users)
    last = values[layer_value(config.num_hidden_layers - 1, OUTPUT)]
    users = list(last.uses())
    back = quantizer.insert(users[0].node, "Transpose", [rotation], f"{ROTATION}_transposed", perm=[1, 0])
    plain = quantizer.insert(users[0].node, "MatMul", [last, back], f"{last.name}_plain")
    _take_over(plain, str(plain.name), last, users)


def _shape_input(quantizer: Any, module: str, entries: Mapping[str, TensorEntry]) -> None:
    weight = quantizer.graph.initializers.get(f"{module}.weight")
    if weight is None or not {FEED_FORWARD_ROTATION, f"{module}.{LIMIT}"} & set(entries):
        return
    product = _product(weight)
    plain = product.inputs[0]
    assert plain is not None
    x = plain
    if f"{module}.{LIMIT}" in entries:
        x = _limit(quantizer, product, x, module)
        _add_excess(quantizer, product, plain, x, module)
    if FEED_FORWARD_ROTATION in entries:
        rotation = quantizer.initializer(FEED_FORWARD_ROTATION)
        width = entries[FEED_FORWARD_ROTATION].shape[0]
        inputs = entries[f"{module}.weight"].shape[1]
        inputs = inputs * 2 if entries[f"{module}.weight"].dtype == "uint8" else inputs
        blocks = quantizer.constant("rotation.blocks", np.array([0, 0, inputs // width, width], np.int64))
        whole = quantizer.constant("rotation.whole", np.array([0, 0, inputs], np.int64))
        x = quantizer.insert(product, "Reshape", [x, blocks], f"{module}.input_blocks")
        x = quantizer.insert(product, "MatMul", [x, rotation], f"{module}.input_turned")
        x = quantizer.insert(product, "Reshape", [x, whole], f"{module}.input_rotated")
    product.replace_input_with(0, x)


def _product(weight: ir.Value) -> ir.Node:
    """The only product with a matrix."""
    (product,) = (next(iter(usage.node.outputs[0].uses())).node for usage in weight.uses())
    return product


def _center(quantizer: Any, module: str, entries: Mapping[str, TensorEntry]) -> None:
    product = _product(quantizer.graph.initializers[f"{module}.weight"])
    if f"{module}.{CENTER}" in entries:
        center = quantizer.initializer(f"{module}.{CENTER}")
        about = quantizer.insert(product, "Sub", [product.inputs[0], center], f"{module}.input_about_center")
        product.replace_input_with(0, about)
    _add_to_output(quantizer, product, quantizer.initializer(f"{module}.{OFFSET}"), "centered")


def _limit(quantizer: Any, product: ir.Node, x: ir.Value, module: str) -> ir.Value:
    limit = quantizer.initializer(f"{module}.{LIMIT}")
    below = quantizer.insert(product, "Min", [x, limit], f"{module}.input_below")
    lowest = quantizer.insert(product, "Neg", [limit], f"{module}.input_lowest")
    return quantizer.insert(product, "Max", [below, lowest], f"{module}.input_limited")


def _add_excess(quantizer: Any, product: ir.Node, x: ir.Value, limited: ir.Value, module: str) -> None:
    channels, weight = (quantizer.initializer(f"{module}.{part}") for part in (CHANNELS, CHANNEL_WEIGHT))
    above = quantizer.insert(product, "Sub", [x, limited], f"{module}.input_above")
    few = quantizer.insert(product, "Gather", [above, channels], f"{module}.input_excess", axis=-1)
    added = quantizer.insert(product, "MatMul", [few, weight], f"{module}.excess")
    _add_to_output(quantizer, product, added, "limited")


def _add_to_output(quantizer: Any, product: ir.Node, added: ir.Value, before: str) -> None:
    """Add to what a product makes, which is called `before` from then on."""
    output = product.outputs[0]
    users, name = list(output.uses()), str(output.name)
    output.name = f"{name}_{before}"
    total = quantizer.insert(users[0].node, "Add", [output, added], f"{name}_with_{added.name}")
    _take_over(total, name, output, users)


def _take_over(value: ir.Value, name: str, other: ir.Value, users: list[Any]) -> None:
    """Stand in for another value: its type, the name it had, and those that read it until now."""
    value.name, value.type, value.shape = name, other.type, other.shape
    for usage in users:
        usage.node.replace_input_with(usage.idx, value)

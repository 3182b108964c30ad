"""What this machine computes with, found out by asking it. Light: no torch."""

import ctypes
from dataclasses import dataclass

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NAME_BYTES = 128


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its name and compute capability as 10 * major + minor."""

    name: str
    sm: int


def installed_gpus() -> tuple[Gpu, ...]:
    """The GPUs the CUDA driver lists, in its order; none where there is no driver or it does not start."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_describe_gpu(driver, i) for i in range(count.value))


def _describe_gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, _NAME_BYTES, device)
    parts = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(value.value)
    return Gpu(name.value.decode(), 10 * parts[0] + parts[1])


def probe_integer_products() -> bool:
    """Whether this CPU multiplies uint8 by int8 exactly (it has VNNI or the like)."""
    import numpy as np
    import onnx
    import onnxruntime

    node = onnx.helper.make_node("MatMulInteger", ["a", "b", "z"], ["y"])
    tensors = {"a": onnx.TensorProto.UINT8, "b": onnx.TensorProto.INT8}
    inputs = [onnx.helper.make_tensor_value_info(n, t, [None, None]) for n, t in tensors.items()]
    zero = onnx.helper.make_tensor("z", onnx.TensorProto.UINT8, [], [128])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [None, None])
    graph = onnx.helper.make_graph([node], "probe", inputs, [output], [zero])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    a, b = np.full((2, 64), 255, np.uint8), np.full((64, 32), 127, np.int8)
    (product,) = session.run(None, {"a": a, "b": b})
    return bool(np.all(product == 127 * 127 * 64))

"""What this processor computes, found out by computing it. Light: no torch."""


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

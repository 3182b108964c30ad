"""A child process: load the plugin into TensorRT-RTX and compile graphs one after the other. Prints JSON.

TensorRT keeps the first logger of a process, so all the graphs share one.
"""

import json
import sys


def main(library, jobs):
    import tensorrt_rtx as trt

    lines = []

    class Log(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)

        def log(self, severity, message):
            lines.append([severity.name, message])

    log = Log()
    builder = trt.Builder(log)
    assert trt.get_plugin_registry().load_library(library) is not None
    results = []
    for job in jobs:
        lines.clear()
        plan = compile_graph(trt, builder, log, **job)
        layers = next((message for _, message in lines if message.startswith("Layers:")), "")
        errors = [message for severity, message in lines if severity in {"ERROR", "INTERNAL_ERROR"}]
        results.append({"plan": plan, "layers": layers, "errors": errors})
    print(json.dumps(results))


def compile_graph(trt, builder, log, onnx, sm, aliasing, profile):
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(onnx):
        return 0
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if aliasing:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    shapes = builder.create_optimization_profile()
    for name, sizes in profile.items():
        shapes.set_shape(name, *sizes)
    config.add_optimization_profile(shapes)
    plan = builder.build_serialized_network(network, config)
    return plan.nbytes if plan is not None else 0


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

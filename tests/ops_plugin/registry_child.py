"""A child process: load the plugin into the registry of one TensorRT and create it from fields. Prints JSON."""

import importlib
import json
import sys

import numpy as np


def main(module, library, requests):
    trt = importlib.import_module(module)
    lines = []

    class Log(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)

        def log(self, severity, message):
            if severity <= trt.ILogger.Severity.ERROR:
                lines.append(message)

    log = Log()
    # A builder gives the process its logger. The lean runtime has none, and a Runtime without a GPU is half
    # made: it gives no logger and crashes when it is deleted, so there messages go to stderr.
    owner = trt.Builder(log) if hasattr(trt, "Builder") else None
    registry = trt.get_plugin_registry()
    lines.clear()
    assert registry.load_library(library) is not None
    creator = registry.get_creator("FusedAttention", "1", "dtool")
    declared = [field.name for field in creator.field_names]
    answers = [create(trt, creator, values) | {"log": take(lines)} for values in requests]
    print(json.dumps({"version": trt.__version__, "declared": declared, "answers": answers}))
    del owner


def create(trt, creator, values):
    kinds = {int: (np.int32, "INT32"), float: (np.float32, "FLOAT32")}
    fields = []
    for name, value in values.items():
        if isinstance(value, str):
            fields.append(trt.PluginField(name, value.encode(), trt.PluginFieldType.CHAR))
        else:
            dtype, kind = kinds[type(value)]
            fields.append(trt.PluginField(name, np.array([value], dtype), getattr(trt.PluginFieldType, kind)))
    collection = trt.PluginFieldCollection(fields)
    plugin = creator.create_plugin("node", collection, trt.TensorRTPhase.BUILD)
    if plugin is None:
        return {"plugin": None}
    core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    build = plugin.get_capability_interface(trt.PluginCapabilityType.BUILD)
    named = [core.plugin_name, core.plugin_version, core.plugin_namespace]
    return {"plugin": named, "outputs": build.num_outputs}


def take(lines):
    taken = list(lines)
    lines.clear()
    return taken


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

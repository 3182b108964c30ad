"""A stand-in for TensorRT 11's builder on a machine without a GPU: it records what it is asked.

The plan it returns is that record as JSON; its inspector tells one kernel per product and attention
node of the parsed graph, in the types the graph asks for.
"""

import json
from enum import Enum
from pathlib import Path

__version__ = "11.4.0.106"
CACHE = b"stub timing cache"


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class BuilderFlag(metaclass=_Names):
    pass


class PreviewFeature(metaclass=_Names):
    pass


class MemoryPoolType(metaclass=_Names):
    pass


class HardwareCompatibilityLevel(metaclass=_Names):
    pass


class ProfilingVerbosity(metaclass=_Names):
    pass


class LayerInformationFormat(metaclass=_Names):
    pass


class ILogger:
    class Severity(int, Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class IProgressMonitor:
    pass


class Tensor:
    def __init__(self, value):
        self.name = value.name
        self.shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim)


class Network:
    model = None

    @property
    def num_inputs(self):
        return len(self.model.graph.input)

    def get_input(self, i):
        return Tensor(self.model.graph.input[i])


class OnnxParser:
    num_errors = 0

    def __init__(self, network, logger):
        self.network = network

    def parse_from_file(self, path):
        import onnx

        self.network.model = onnx.load(path, load_external_data=False)
        return True


class Profile:
    def __init__(self):
        self.shapes = {}

    def set_shape(self, name, low, opt, high):
        self.shapes[name] = [list(low), list(opt), list(high)]


class TimingCache:
    def __init__(self, content):
        self.content = content

    def serialize(self):
        return self.content


class Config:
    def __init__(self):
        self.asked = {"flags": [], "previews": [], "profiles": [], "pools": {}}
        self.cache = None

    def __setattr__(self, name, value):
        if name not in ("asked", "cache", "progress_monitor"):
            self.asked[name] = value
        super().__setattr__(name, value)

    def set_flag(self, flag):
        self.asked["flags"].append(flag)

    def set_preview_feature(self, feature, on):
        self.asked["previews"].append(feature)

    def set_memory_pool_limit(self, pool, size):
        self.asked["pools"][pool] = size

    def add_optimization_profile(self, profile):
        self.asked["profiles"].append(profile.shapes)

    def create_timing_cache(self, content):
        if content not in (b"", CACHE):
            raise RuntimeError("not a timing cache")
        return TimingCache(bytes(content))

    def set_timing_cache(self, cache, *, ignore_mismatch):
        assert not ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self):
        return TimingCache(CACHE)


class Builder:
    def __init__(self, logger):
        self.logger = logger

    def create_network(self, flags):
        return Network()

    def create_builder_config(self):
        return Config()

    def create_optimization_profile(self):
        return Profile()

    def build_serialized_network(self, network, config):
        config.progress_monitor.phase_start("Building", None, 2)
        config.progress_monitor.phase_start("inner", "Building", 9)
        assert config.progress_monitor.step_complete("Building", 0)
        assert config.progress_monitor.step_complete("inner", 3)
        config.progress_monitor.phase_finish("Building")
        from toolchain.engine.report import read_graph

        facts = read_graph(network.model, "float16")
        layers = [_product(p) for p in facts.products] + [_attention(name) for name in facts.attention]
        profiles = config.asked["profiles"]
        return json.dumps({"asked": config.asked, "layers": layers, "profiles": len(profiles)}).encode()


def _tensor(dtype, *dims):
    return {"Name": "t", "Dimensions": list(dims), "Format/Datatype": dtype}


def _product(product):
    return {
        "Name": product.node,
        "LayerType": "gemm",
        "Inputs": [_tensor(product.activations, -1, 64)],
        "Constants": [_tensor(product.weights, 64, 64)],
        "Outputs": [_tensor("Half", -1, 64)],
        "TacticName": "stub",
        "Metadata": f"[ONNX Layer: {product.node}]",
    }


def _attention(name):
    return {"Name": name, "LayerType": "PluginV3", "Outputs": [], "Metadata": f"[ONNX Layer: {name}]"}


class Runtime:
    def __init__(self, logger):
        pass

    def deserialize_cuda_engine(self, plan):
        return Engine(json.loads(bytes(plan)))


class Engine:
    def __init__(self, document):
        self.document = document
        self.num_optimization_profiles = document["profiles"]

    def create_engine_inspector(self):
        return Inspector(self.document)

    def create_execution_context(self):
        return Context()


class Context:
    def set_optimization_profile_async(self, profile, stream):
        self.profile = profile


class Inspector:
    execution_context = None

    def __init__(self, document):
        self.document = document

    def get_engine_information(self, kind):
        assert self.execution_context is not None, "the profile must be told"
        return json.dumps({"Layers": self.document["layers"]})


class _Registry:
    def load_library(self, path):
        return 1 if Path(path).is_file() else None


def get_plugin_registry():
    return _Registry()

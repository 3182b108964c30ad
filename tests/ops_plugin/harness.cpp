// Drives one plugin as TensorRT would, from commands on stdin, and prints a line for each. There is no
// engine: shapes, types and addresses are what the commands say.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct Fields {
    std::deque<std::string> names, texts;
    std::deque<int32_t> integers;
    std::deque<float> numbers;
    std::vector<PluginField> fields;

    void add(std::string const& kind, std::string const& name, std::string const& value) {
        char const* label = names.emplace_back(name).c_str();
        if (kind == "int") {
            fields.emplace_back(label, &integers.emplace_back(std::stoi(value)), PluginFieldType::kINT32, 1);
        } else if (kind == "float") {
            fields.emplace_back(label, &numbers.emplace_back(std::stof(value)), PluginFieldType::kFLOAT32, 1);
        } else {
            std::string const& text = texts.emplace_back(value);
            fields.emplace_back(label, text.data(), PluginFieldType::kCHAR, static_cast<int32_t>(text.size()));
        }
    }
};

struct Tensor {
    PluginTensorDesc desc;
    DynamicPluginTensorDesc dynamic;
};

Tensor read_tensor(std::istringstream& words) {
    Tensor tensor{};
    int32_t type = 0;
    words >> type;
    tensor.desc.type = static_cast<DataType>(type);
    for (int64_t size; words >> size;) tensor.desc.dims.d[tensor.desc.dims.nbDims++] = size;
    tensor.dynamic = {tensor.desc, tensor.desc.dims, tensor.desc.dims, tensor.desc.dims};
    return tensor;
}

struct Session {
    IPluginCreatorV3One* creator;
    Fields fields;
    IPluginV3* plugin = nullptr;
    std::vector<Tensor> tensors; // inputs, then the outputs
    bool aliased = true;

    template <typename T> T* capability(PluginCapabilityType type) {
        return static_cast<T*>(plugin->getCapabilityInterface(type));
    }
    IPluginV3OneBuildV2* build() { return capability<IPluginV3OneBuildV2>(PluginCapabilityType::kBUILD); }
    IPluginV3OneRuntime* runtime() { return capability<IPluginV3OneRuntime>(PluginCapabilityType::kRUNTIME); }
    int32_t outputs() { return build()->getNbOutputs(); }
    int32_t inputs() { return static_cast<int32_t>(tensors.size()) - outputs(); }

    void create(std::string const& phase, PluginFieldCollection const& collection) {
        TensorRTPhase const when = phase == "build" ? TensorRTPhase::kBUILD : TensorRTPhase::kRUNTIME;
        plugin = creator->createPlugin("node", &collection, when);
        std::printf("%s\n", plugin ? build()->getMetadataString() : "refused");
    }

    void formats() {
        for (int32_t position = 0; position < inputs() + outputs(); ++position) {
            std::vector<DynamicPluginTensorDesc> descs;
            for (Tensor const& tensor : tensors) descs.push_back(tensor.dynamic);
            for (int32_t type = 0; type < 12; ++type) {
                for (TensorFormat format : {TensorFormat::kLINEAR, TensorFormat::kCHW32}) {
                    descs[position].desc.type = static_cast<DataType>(type);
                    descs[position].desc.format = format;
                    bool ok = build()->supportsFormatCombination(position, descs.data(), inputs(), outputs());
                    if (ok) std::printf("%d%s ", type, format == TensorFormat::kLINEAR ? "" : "!");
                }
            }
            std::printf(position < inputs() + outputs() - 1 ? "| " : "\n");
        }
    }

    void workspace(int64_t fewest_tokens) {
        std::vector<DynamicPluginTensorDesc> descs;
        for (Tensor const& tensor : tensors) descs.push_back(tensor.dynamic);
        descs[0].min.d[1] = fewest_tokens;
        std::printf("%zu\n", build()->getWorkspaceSize(descs.data(), inputs(), descs.data() + inputs(), outputs()));
    }

    int32_t configure() {
        std::vector<DynamicPluginTensorDesc> descs;
        for (Tensor const& tensor : tensors) descs.push_back(tensor.dynamic);
        return build()->configurePlugin(descs.data(), inputs(), descs.data() + inputs(), outputs());
    }

    int32_t run(bool launch) {
        std::vector<PluginTensorDesc> descs;
        for (Tensor const& tensor : tensors) descs.push_back(tensor.desc);
        if (!launch) return runtime()->onShapeChange(descs.data(), inputs(), descs.data() + inputs(), outputs());
        auto other = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
        std::vector<void const*> in;
        for (int32_t i = 0; i < inputs(); ++i) in.push_back(other((i + 1) * uintptr_t{0x10000}));
        std::vector<void*> out{other(0xf0000)};
        for (int32_t i = 1; i < outputs(); ++i) out.push_back(const_cast<void*>(in[build()->getAliasedInput(i)]));
        if (!aliased) out.back() = other(0xe0000);
        return runtime()->enqueue(descs.data(), descs.data() + inputs(), in.data(), out.data(), other(0xa00000),
                                  reinterpret_cast<cudaStream_t>(0x77));
    }

    void command(std::string const& line) {
        std::istringstream words(line);
        std::string verb, a, b, c;
        words >> verb;
        if (verb == "field") {
            words >> a >> b >> c;
            fields.add(a, b, c);
        } else if (verb == "create") {
            words >> a;
            create(a, {static_cast<int32_t>(fields.fields.size()), fields.fields.data()});
        } else if (verb == "restore") {
            create("run", *runtime()->getFieldsToSerialize());
        } else if (verb == "tensor") {
            tensors.push_back(read_tensor(words));
        } else if (verb == "clear") {
            tensors.clear();
        } else if (verb == "declared") {
            PluginFieldCollection const* names = creator->getFieldNames();
            for (int32_t i = 0; i < names->nbFields; ++i) {
                std::printf("%s:%d ", names->fields[i].name, static_cast<int>(names->fields[i].type));
            }
            std::printf("\n");
        } else if (verb == "aliases") {
            for (int32_t output = 0; output < outputs(); ++output) std::printf("%d ", build()->getAliasedInput(output));
            std::printf("\n");
        } else if (verb == "formats") {
            formats();
        } else if (verb == "workspace") {
            words >> a;
            workspace(std::stoll(a));
        } else if (verb == "unaliased") {
            aliased = false;
        } else if (verb == "attach") {
            plugin = runtime()->attachToContext(nullptr);
            std::printf("%s\n", plugin ? "attached" : "nothing");
        } else if (verb == "configure") {
            std::printf("%d\n", configure());
        } else {
            std::printf("%d\n", run(verb == "enqueue"));
        }
    }
};

} // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    auto get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
    int32_t count = 0;
    Session session{static_cast<IPluginCreatorV3One*>(get(count)[0])};
    for (std::string line; std::getline(std::cin, line);) session.command(line);
    return 0;
}

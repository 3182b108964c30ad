#include "attention_plugin.h"

#include <algorithm>
#include <vector>

#include "launcher.h"
#include "messages.h"
#include "node_rules.h"

namespace dtool {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kFailed = 1;

// The sizes known while the network is built; those only a profile or a run decides stay kUnknown.
Dims known(DimsExprs const& expressions) {
    Dims dims{expressions.nbDims, {}};
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        auto const* size = expressions.d[i];
        dims.d[i] = size->isConstant() ? size->getConstantValue() : kUnknown;
    }
    return dims;
}

template <typename Desc, typename Pick>
void check_tensors(Spec const& spec, Desc const* inputs, int32_t count, Pick pick) {
    std::vector<DataType> types;
    std::vector<Dims> dims;
    for (int32_t i = 0; i < count; ++i) {
        PluginTensorDesc const& desc = pick(inputs[i]);
        types.push_back(desc.type);
        dims.push_back(desc.dims);
    }
    check_types(spec, types.data());
    check_shapes(spec, dims.data());
}

} // namespace

nvinfer1::IPluginCapability* AttentionPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
    case PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* AttentionPlugin::clone() noexcept {
    return guarded<nvinfer1::IPluginV3*>(nullptr, [&] { return new AttentionPlugin(spec_, phase_); });
}

int32_t AttentionPlugin::getNbOutputs() const noexcept { return Outputs(spec_).count; }

int32_t AttentionPlugin::getOutputDataTypes(DataType* outputs, int32_t output_count, DataType const* inputs,
                                            int32_t input_count) const noexcept {
    return guarded(kFailed, [&] {
        check_count(spec_, input_count, output_count);
        check_types(spec_, inputs);
        for (int32_t i = 0; i < output_count; ++i) outputs[i] = type_of(spec_, input_count + i, inputs[Inputs::qkv]);
        return 0;
    });
}

int32_t AttentionPlugin::getOutputShapes(DimsExprs const* inputs, int32_t input_count, DimsExprs const*, int32_t,
                                         DimsExprs* outputs, int32_t output_count,
                                         nvinfer1::IExprBuilder& builder) noexcept {
    return guarded(kFailed, [&] {
        check_count(spec_, input_count, output_count);
        std::vector<Dims> dims;
        std::transform(inputs, inputs + input_count, std::back_inserter(dims), known);
        check_shapes(spec_, dims.data());
        outputs[Outputs::out] = inputs[Inputs::qkv];
        outputs[Outputs::out].d[2] = builder.constant(int64_t{spec_.num_heads} * spec_.head_dim);
        for (int32_t i = 1; i < output_count; ++i) outputs[i] = inputs[Outputs::aliased(spec_, i)];
        return 0;
    });
}

bool AttentionPlugin::supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t,
                                                int32_t) noexcept {
    // Asked for many combinations, so a refusal is no fault here and is not logged.
    PluginTensorDesc const& asked = tensors[position].desc;
    if (asked.format != nvinfer1::TensorFormat::kLINEAR) return false;
    DataType const compute = tensors[Inputs::qkv].desc.type;
    if (position == Inputs::qkv) return compute == DataType::kHALF || compute == DataType::kBF16;
    return asked.type == type_of(spec_, position, compute);
}

int32_t AttentionPlugin::configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t input_count,
                                         DynamicPluginTensorDesc const*, int32_t output_count) noexcept {
    return guarded(kFailed, [&] {
        check_count(spec_, input_count, output_count);
        check_tensors(spec_, inputs, input_count, [](auto const& tensor) -> auto& { return tensor.desc; });
        return 0;
    });
}

size_t AttentionPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t, DynamicPluginTensorDesc const*,
                                         int32_t) const noexcept {
    // One token at a time is the only kind of call that needs it, and the device is not known yet.
    DynamicPluginTensorDesc const& qkv = inputs[Inputs::qkv];
    return qkv.min.d[1] > 1 ? 0 : workspace_bytes(spec_, std::max<int64_t>(qkv.max.d[0], 0), kMaxSplits);
}

int32_t AttentionPlugin::getAliasedInput(int32_t output) noexcept {
    return Outputs::aliased(spec_, output);
}

int32_t AttentionPlugin::onShapeChange(PluginTensorDesc const* inputs, int32_t input_count, PluginTensorDesc const*,
                                       int32_t output_count) noexcept {
    return guarded(kFailed, [&] {
        check_count(spec_, input_count, output_count);
        check_tensors(spec_, inputs, input_count, [](auto const& tensor) -> auto& { return tensor; });
        if (runs_here()) prepare(spec_, compute_type(inputs[Inputs::qkv].type));
        return 0;
    });
}

int32_t AttentionPlugin::enqueue(PluginTensorDesc const* input_descs, PluginTensorDesc const*,
                                 void const* const* inputs, void* const* outputs, void* workspace,
                                 cudaStream_t stream) noexcept {
    return guarded(kFailed, [&] {
        Inputs const at(spec_);
        for (int32_t output = 1; output < Outputs(spec_).count; ++output) {
            int32_t const aliased = Outputs::aliased(spec_, output);
            if (outputs[output] == inputs[aliased]) continue;
            throw Error(kBadArgument, format("%s: expected the memory of %s (PreviewFeature ALIASED_PLUGIN_IO_10_03), "
                                             "found other memory", Outputs::name(output), at.name(aliased)));
        }
        auto input = [&](int32_t index) { return index == kUnknown ? nullptr : inputs[index]; };
        Call call{};
        call.batch = static_cast<int32_t>(input_descs[Inputs::qkv].dims.d[0]);
        call.new_tokens = static_cast<int32_t>(input_descs[Inputs::qkv].dims.d[1]);
        call.capacity = static_cast<int32_t>(input_descs[Inputs::past_key].dims.d[2]);
        call.qkv = inputs[Inputs::qkv];
        call.cos = inputs[Inputs::cos];
        call.sin = inputs[Inputs::sin];
        call.past_lengths = inputs[Inputs::past_lengths];
        call.key_cache = outputs[Outputs::present_key];
        call.value_cache = outputs[Outputs::present_value];
        call.key_scale = input(at.key_scale); // the very memory of present_key_scale where tokens have scales
        call.value_scale = input(at.value_scale);
        call.q_norm = input(at.q_norm);
        call.k_norm = input(at.k_norm);
        call.out = outputs[Outputs::out];
        call.workspace = workspace;
        call.workspace_bytes = workspace_bytes(spec_, call.batch, kMaxSplits); // what getWorkspaceSize asked for
        if (call.batch == 0 || call.new_tokens == 0) return 0; // an empty launch would be an error
        launch(spec_, compute_type(input_descs[Inputs::qkv].type), call, stream);
        return 0;
    });
}

nvinfer1::IPluginV3* AttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    // The first call may be captured into a CUDA graph, so the kernels are loaded now. A failure is said
    // here and makes onShapeChange fail: TensorRT-RTX 1.7 crashes when it gets no plugin from here.
    if (runs_here()) guarded(false, [&] { return prepare(spec_); });
    return clone();
}

} // namespace dtool

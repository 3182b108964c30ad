// One attention node in TensorRT.
#pragma once

#include <NvInferRuntime.h>

#include <string>

#include "fields.h"

namespace dtool {

constexpr char const* kPluginName = "FusedAttention";
constexpr char const* kPluginVersion = "1";
constexpr char const* kPluginNamespace = "dtool";

class AttentionPlugin final : public nvinfer1::IPluginV3,
                              public nvinfer1::IPluginV3OneCore,
                              public nvinfer1::IPluginV3OneBuildV2,
                              public nvinfer1::IPluginV3OneRuntime {
public:
    AttentionPlugin(Spec const& spec, nvinfer1::TensorRTPhase phase)
        : spec_(spec), phase_(phase), saved_(spec), metadata_(spec.text()) {}

    // IPluginV3
    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    // IPluginV3OneCore
    char const* getPluginName() const noexcept override { return kPluginName; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

    // IPluginV3OneBuildV2
    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t output_count, nvinfer1::DataType const* inputs,
                               int32_t input_count) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t input_count,
                            nvinfer1::DimsExprs const* shape_inputs, int32_t shape_input_count,
                            nvinfer1::DimsExprs* outputs, int32_t output_count,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
                                   int32_t input_count, int32_t output_count) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
                            nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t output_count) noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
                            nvinfer1::DynamicPluginTensorDesc const* outputs,
                            int32_t output_count) const noexcept override;
    int32_t getAliasedInput(int32_t output) noexcept override;
    char const* getMetadataString() noexcept override { return metadata_.c_str(); }

    // IPluginV3OneRuntime
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t input_count,
                          nvinfer1::PluginTensorDesc const* outputs, int32_t output_count) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const* output_descs,
                    void const* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override { return saved_.collection(); }

private:
    // A builder makes engines for devices other than its own, or has none; only a runtime needs kernels.
    bool runs_here() const { return phase_ == nvinfer1::TensorRTPhase::kRUNTIME; }

    Spec const spec_;
    nvinfer1::TensorRTPhase const phase_;
    SavedFields const saved_;
    std::string const metadata_;
};

} // namespace dtool

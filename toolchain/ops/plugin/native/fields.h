// The node's attributes as TensorRT carries them: read when a plugin is made, written when it is saved.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "common.h"

namespace dtool {

// Every attribute with its type and no value, for the parser to fill in.
nvinfer1::PluginFieldCollection const* declared_fields();

// The spec of a node. Throws when an attribute is missing, of another type, impossible, or of another abi.
Spec read_fields(nvinfer1::PluginFieldCollection const& fields);

// The fields `read_fields` needs to make the same spec again.
class SavedFields {
public:
    explicit SavedFields(Spec const& spec);
    SavedFields(SavedFields const&) = delete;
    SavedFields& operator=(SavedFields const&) = delete;
    nvinfer1::PluginFieldCollection const* collection() const { return &collection_; }

private:
    int32_t abi_ = kAbi, interleaved_, token_scales_;
    Spec spec_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

} // namespace dtool

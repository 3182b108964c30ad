// What a node's tensors must look like: names, types and shapes, checked wherever TensorRT shows them.
#pragma once

#include <NvInferRuntime.h>

#include "common.h"

namespace dtool {

constexpr int32_t kUnknown = -1;

// The inputs of a node in order; the optional ones are kUnknown where the spec has none.
struct Inputs {
    static constexpr int32_t qkv = 0, cos = 1, sin = 2, past_lengths = 3, past_key = 4, past_value = 5;
    int32_t key_scale = kUnknown, value_scale = kUnknown, q_norm = kUnknown, k_norm = kUnknown;
    int32_t count = 6;

    explicit Inputs(Spec const& spec);
    char const* name(int32_t input) const;
};

// The outputs of a node in order; those after the first are the caches, written in place.
struct Outputs {
    static constexpr int32_t out = 0, present_key = 1, present_value = 2, present_key_scale = 3,
                             present_value_scale = 4;
    int32_t count;

    explicit Outputs(Spec const& spec) : count(spec.token_scales ? 5 : 3) {}
    // The input that a cache is written to, kUnknown for `out`.
    static int32_t aliased(Spec const& spec, int32_t output);
    static char const* name(int32_t output);
};

// Each throws Error naming the tensor, what was expected and what was found. Sizes of kUnknown pass.
void check_values(Spec const& spec);
void check_count(Spec const& spec, int32_t inputs, int32_t outputs);
void check_types(Spec const& spec, nvinfer1::DataType const* types);
void check_shapes(Spec const& spec, nvinfer1::Dims const* dims);

// The type one input or output must have, given the type of qkv.
nvinfer1::DataType type_of(Spec const& spec, int32_t position, nvinfer1::DataType compute);

ComputeType compute_type(nvinfer1::DataType type);

} // namespace dtool

#include "node_rules.h"

#include <cmath>
#include <vector>

namespace dtool {

using nvinfer1::DataType;
using nvinfer1::Dims;

namespace {

char const* name_of(DataType type) {
    static char const* const names[] = {"FLOAT", "HALF", "INT8",  "INT32", "BOOL", "UINT8",
                                        "FP8",   "BF16", "INT64", "INT4",  "FP4",  "E8M0"};
    auto index = static_cast<uint32_t>(type);
    return index < sizeof names / sizeof *names ? names[index] : "an unknown type";
}

std::string text(Dims const& dims) {
    std::string said = "[";
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        said += format("%s%s", i ? ", " : "", dims.d[i] < 0 ? "?" : std::to_string(dims.d[i]).c_str());
    }
    return said + "]";
}

[[noreturn]] void refuse(std::string const& what, std::string const& expected, std::string const& found) {
    throw Error(kBadArgument, format("%s: expected %s, found %s", what.c_str(), expected.c_str(), found.c_str()));
}

void check_range(char const* name, bool good, char const* expected, double found) {
    if (!good) refuse(format("attribute %s", name), expected, format("%.9g", found));
}

// One dimension a tensor must have: a size, or kUnknown for any.
struct Want {
    std::string letter;
    int64_t size;
};

void check_dims(char const* name, Dims const& dims, std::vector<Want> const& wants) {
    std::string expected = "[";
    bool good = dims.nbDims == static_cast<int32_t>(wants.size());
    for (size_t i = 0; i < wants.size(); ++i) {
        Want const& want = wants[i];
        bool open = want.size == kUnknown;
        auto size = static_cast<long long>(want.size);
        expected += (i ? ", " : "") + (open ? want.letter : format("%s = %lld", want.letter.c_str(), size));
        good = good && (open || dims.d[i] == kUnknown || dims.d[i] == want.size);
    }
    if (!good) refuse(format("shape of %s", name), expected + "]", text(dims));
}

} // namespace

Inputs::Inputs(Spec const& spec) {
    if (spec.quantized()) key_scale = count++, value_scale = count++;
    if (spec.qk_norm()) q_norm = count++, k_norm = count++;
}

char const* Inputs::name(int32_t input) const {
    static char const* const first[] = {"qkv", "cos", "sin", "past_lengths", "past_key", "past_value"};
    if (input < 6) return first[input];
    if (input == key_scale) return "key_scale";
    if (input == value_scale) return "value_scale";
    return input == q_norm ? "q_norm" : "k_norm";
}

char const* Outputs::name(int32_t output) {
    static char const* const names[] = {"out", "present_key", "present_value", "present_key_scale",
                                        "present_value_scale"};
    return names[output];
}

int32_t Outputs::aliased(Spec const& spec, int32_t output) {
    Inputs const inputs(spec);
    if (output == present_key) return Inputs::past_key;
    if (output == present_value) return Inputs::past_value;
    if (!spec.token_scales) return kUnknown;
    return output == present_key_scale ? inputs.key_scale : output == present_value_scale ? inputs.value_scale : kUnknown;
}

void check_values(Spec const& spec) {
    check_range("num_heads", spec.num_heads > 0, "at least 1", spec.num_heads);
    check_range("num_kv_heads", spec.num_kv_heads > 0, "at least 1", spec.num_kv_heads);
    if (spec.num_heads % spec.num_kv_heads != 0) {
        refuse("attribute num_heads", format("a multiple of num_kv_heads = %d", spec.num_kv_heads),
               std::to_string(spec.num_heads));
    }
    check_range("head_dim", spec.head_dim > 0, "at least 1", spec.head_dim);
    check_range("scale", std::isfinite(spec.scale) && spec.scale > 0, "a positive number", spec.scale);
    if (spec.rotary_dim < 2 || spec.rotary_dim % 2 || spec.rotary_dim > spec.head_dim) {
        refuse("attribute rotary_dim", format("an even number from 2 to head_dim = %d", spec.head_dim),
               std::to_string(spec.rotary_dim));
    }
    char const* const off_or_positive = "0 (off) or a positive number";
    check_range("softcap", std::isfinite(spec.softcap) && spec.softcap >= 0, off_or_positive, spec.softcap);
    check_range("window", spec.window >= 0, off_or_positive, spec.window);
    check_range("qk_norm_eps", std::isfinite(spec.qk_norm_eps) && spec.qk_norm_eps >= 0, off_or_positive,
                spec.qk_norm_eps);
    if (spec.token_scales && !spec.quantized()) refuse("attribute token_scales", "0 with cache_format none", "1");
}

void check_count(Spec const& spec, int32_t inputs, int32_t outputs) {
    Inputs const expected(spec);
    if (inputs != expected.count) {
        std::string names;
        for (int32_t i = 0; i < expected.count; ++i) names += format("%s%s", i ? ", " : "", expected.name(i));
        refuse("number of inputs", format("%d (%s)", expected.count, names.c_str()), std::to_string(inputs));
    }
    Outputs const made(spec);
    if (outputs != made.count) {
        std::string names;
        for (int32_t i = 0; i < made.count; ++i) names += format("%s%s", i ? ", " : "", Outputs::name(i));
        refuse("number of outputs", format("%d (%s)", made.count, names.c_str()), std::to_string(outputs));
    }
}

DataType type_of(Spec const& spec, int32_t position, DataType compute) {
    Inputs const inputs(spec);
    DataType const cache = !spec.quantized() ? compute
        : spec.cache_format == CacheFormat::kInt8 ? DataType::kINT8
                                                  : DataType::kFP8;
    if (position >= inputs.count) {
        int32_t const input = Outputs::aliased(spec, position - inputs.count);
        return input == kUnknown ? compute : type_of(spec, input, compute);
    }
    if (position == Inputs::cos || position == Inputs::sin) return DataType::kFLOAT;
    if (position == Inputs::past_lengths) return DataType::kINT64;
    if (position == Inputs::past_key || position == Inputs::past_value) return cache;
    if (position == inputs.key_scale || position == inputs.value_scale) return DataType::kFLOAT;
    return compute; // qkv and the norms
}

void check_types(Spec const& spec, DataType const* types) {
    Inputs const inputs(spec);
    if (types[Inputs::qkv] != DataType::kHALF && types[Inputs::qkv] != DataType::kBF16) {
        refuse("type of qkv", "HALF or BF16", name_of(types[Inputs::qkv]));
    }
    for (int32_t i = 1; i < inputs.count; ++i) {
        DataType const expected = type_of(spec, i, types[Inputs::qkv]);
        if (types[i] == expected) continue;
        refuse(format("type of %s (qkv is %s, cache_format %s)", inputs.name(i), name_of(types[Inputs::qkv]),
                      dtool::name_of(spec.cache_format)),
               name_of(expected), name_of(types[i]));
    }
}

void check_shapes(Spec const& spec, Dims const* dims) {
    Inputs const inputs(spec);
    Want const any_b{"B", kUnknown}, any_t{"T", kUnknown};
    Want const heads{"kv_heads", spec.num_kv_heads}, dim{"head_dim", spec.head_dim};
    std::string const width = format("(%d + 2 * %d) * %d", spec.num_heads, spec.num_kv_heads, spec.head_dim);
    check_dims("qkv", dims[Inputs::qkv], {any_b, any_t, {width, spec.packed_width()}});
    Want const batch{"B", dims[Inputs::qkv].d[0]};
    Want const half{"rotary_dim / 2", spec.rotary_dim / 2};
    check_dims("cos", dims[Inputs::cos], {{"P", kUnknown}, half});
    check_dims("sin", dims[Inputs::sin], {{"P", dims[Inputs::cos].d[0]}, half});
    check_dims("past_lengths", dims[Inputs::past_lengths], {batch});
    check_dims("past_key", dims[Inputs::past_key], {batch, heads, {"C", kUnknown}, dim});
    check_dims("past_value", dims[Inputs::past_value], {batch, heads, {"C", dims[Inputs::past_key].d[2]}, dim});
    for (int32_t i : {inputs.key_scale, inputs.value_scale}) {
        if (i == kUnknown) continue;
        Want const capacity{"C", dims[Inputs::past_key].d[2]};
        std::vector<Want> const every_slot{batch, heads, capacity};
        check_dims(inputs.name(i), dims[i], spec.token_scales ? every_slot : std::vector<Want>{heads});
    }
    for (int32_t i : {inputs.q_norm, inputs.k_norm}) {
        if (i != kUnknown) check_dims(inputs.name(i), dims[i], {dim});
    }
    int64_t const tokens = dims[Inputs::qkv].d[1], capacity = dims[Inputs::past_key].d[2];
    int64_t const positions = dims[Inputs::cos].d[0];
    std::string const bound = format("the cache's capacity of %lld", static_cast<long long>(capacity));
    if (capacity == kUnknown) return;
    if (tokens > capacity) refuse("new tokens of qkv", "at most " + bound, std::to_string(tokens));
    // a token may sit in any slot, and its row of the tables is read unchecked
    if (positions != kUnknown && positions < capacity) {
        refuse("positions of cos and sin", "at least " + bound, std::to_string(positions));
    }
}

ComputeType compute_type(DataType type) {
    return type == DataType::kHALF ? ComputeType::kFloat16 : ComputeType::kBfloat16;
}

} // namespace dtool

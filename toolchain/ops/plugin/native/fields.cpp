#include "fields.h"

#include <cstring>

#include "node_rules.h"

namespace dtool {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

namespace {

char const* name_of(PluginFieldType type) {
    static char const* const names[] = {"FLOAT16", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "CHAR",
                                        "DIMS",    "UNKNOWN", "BF16",    "INT64", "FP8",  "INT4",  "FP4"};
    auto index = static_cast<uint32_t>(type);
    return index < sizeof names / sizeof *names ? names[index] : "an unknown type";
}

class Reader {
public:
    explicit Reader(PluginFieldCollection const& fields) : fields_(fields) {}

    int32_t integer(char const* name) const {
        PluginField const& field = find(name);
        if (field.length == 1 && field.type == PluginFieldType::kINT32) return value<int32_t>(field);
        if (field.length == 1 && field.type == PluginFieldType::kINT64) {
            auto wide = value<int64_t>(field);
            if (wide == static_cast<int32_t>(wide)) return static_cast<int32_t>(wide);
            auto found = static_cast<long long>(wide);
            throw Error(kBadArgument, format("attribute %s: expected an integer of 32 bits, found %lld", name, found));
        }
        wrong_type(field, "one integer");
    }

    float number(char const* name) const {
        PluginField const& field = find(name);
        bool const single = field.length == 1;
        if (single && field.type == PluginFieldType::kFLOAT32) return value<float>(field);
        if (single && field.type == PluginFieldType::kFLOAT64) return static_cast<float>(value<double>(field));
        wrong_type(field, "one float");
    }

    std::string word(char const* name) const {
        PluginField const& field = find(name);
        if (field.type != PluginFieldType::kCHAR) wrong_type(field, "a string");
        // some callers count a closing zero in the length, some do not
        auto text = static_cast<char const*>(field.data);
        return std::string(text, strnlen(text, field.length));
    }

private:
    PluginField const& find(char const* name) const {
        for (int32_t i = 0; i < fields_.nbFields; ++i) {
            PluginField const& field = fields_.fields[i];
            if (field.name && std::strcmp(field.name, name) == 0 && field.data && field.length > 0) return field;
        }
        throw Error(kBadArgument, format("attribute %s: expected on every node of abi %d, found none", name, kAbi));
    }

    template <typename T>
    static T value(PluginField const& field) {
        T copied; // the data need not be aligned
        std::memcpy(&copied, field.data, sizeof copied);
        return copied;
    }

    [[noreturn]] static void wrong_type(PluginField const& field, char const* expected) {
        throw Error(kBadArgument, format("attribute %s: expected %s, found %d of type %s", field.name, expected,
                                         field.length, name_of(field.type)));
    }

    PluginFieldCollection const& fields_;
};

CacheFormat read_cache_format(Reader const& reader) {
    std::string const word = reader.word("cache_format");
    for (CacheFormat format : {CacheFormat::kNone, CacheFormat::kInt8, CacheFormat::kFp8}) {
        if (word == dtool::name_of(format)) return format;
    }
    throw Error(kBadArgument,
                format("attribute cache_format: expected none, int8 or fp8_e4m3, found '%s'", word.c_str()));
}

bool read_flag(Reader const& reader, char const* name) {
    int32_t const value = reader.integer(name);
    if (value == 0 || value == 1) return value == 1;
    throw Error(kBadArgument, format("attribute %s: expected 0 or 1, found %d", name, value));
}

std::vector<PluginField> make_fields(int32_t const* abi, int32_t const* interleaved, int32_t const* token_scales,
                                     Spec const* spec) {
    auto integer = [](char const* name, int32_t const* value) {
        return PluginField(name, value, PluginFieldType::kINT32, 1);
    };
    auto number = [](char const* name, float const* value) {
        return PluginField(name, value, PluginFieldType::kFLOAT32, 1);
    };
    char const* cache = spec ? dtool::name_of(spec->cache_format) : nullptr;
    int32_t const letters = cache ? static_cast<int32_t>(std::strlen(cache)) : 1;
    return {
        integer("abi", abi),
        integer("num_heads", spec ? &spec->num_heads : nullptr),
        integer("num_kv_heads", spec ? &spec->num_kv_heads : nullptr),
        integer("head_dim", spec ? &spec->head_dim : nullptr),
        number("scale", spec ? &spec->scale : nullptr),
        integer("rotary_dim", spec ? &spec->rotary_dim : nullptr),
        integer("interleaved", interleaved),
        number("softcap", spec ? &spec->softcap : nullptr),
        integer("window", spec ? &spec->window : nullptr),
        number("qk_norm_eps", spec ? &spec->qk_norm_eps : nullptr),
        PluginField("cache_format", cache, PluginFieldType::kCHAR, letters),
        integer("token_scales", token_scales),
    };
}

} // namespace

PluginFieldCollection const* declared_fields() {
    static std::vector<PluginField> const fields = make_fields(nullptr, nullptr, nullptr, nullptr);
    static PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    return &collection;
}

Spec read_fields(PluginFieldCollection const& fields) {
    Reader const reader(fields);
    int32_t const abi = reader.integer("abi"); // first: the others may mean something else in another abi
    if (abi != kAbi) {
        throw Error(kBadArgument, format("attribute abi: expected %d, found %d; export the model again with the dtool "
                                         "that built this plugin, or build the plugin with the dtool that exported "
                                         "the model", kAbi, abi));
    }
    Spec spec{};
    spec.num_heads = reader.integer("num_heads");
    spec.num_kv_heads = reader.integer("num_kv_heads");
    spec.head_dim = reader.integer("head_dim");
    spec.scale = reader.number("scale");
    spec.rotary_dim = reader.integer("rotary_dim");
    spec.interleaved = read_flag(reader, "interleaved");
    spec.softcap = reader.number("softcap");
    spec.window = reader.integer("window");
    spec.qk_norm_eps = reader.number("qk_norm_eps");
    spec.cache_format = read_cache_format(reader);
    spec.token_scales = read_flag(reader, "token_scales");
    check_values(spec);
    return spec;
}

SavedFields::SavedFields(Spec const& spec)
    : interleaved_(spec.interleaved), token_scales_(spec.token_scales), spec_(spec),
      fields_(make_fields(&abi_, &interleaved_, &token_scales_, &spec_)) {
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

} // namespace dtool

// What every part of the plugin library shares: errors, message formatting, the attributes of a node.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace dtool {

constexpr int kAbi = 3;          // version of the node's inputs and attributes: toolchain.ops.attention.ABI
constexpr int kMaxSplits = 128;  // upper bound of the pieces a row's cache is cut into for decode: tiles.MOST_SPLITS

// Return codes of the C entry point; the plugin turns all of them into one error.
enum Code { kOk = 0, kBadArgument = 1, kNoKernels = 2, kDriver = 3, kInternal = 4 };

// Thrown inside the library only. Each function TensorRT or C calls catches it at its own border.
class Error : public std::runtime_error {
public:
    Error(Code code, std::string const& text) : std::runtime_error(text), code(code) {}
    Code const code;
};

__attribute__((format(printf, 1, 2))) inline std::string format(char const* pattern, ...) {
    char buffer[2048];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(buffer, sizeof buffer, pattern, arguments);
    va_end(arguments);
    return buffer;
}

enum class ComputeType : int32_t { kFloat16 = 0, kBfloat16 = 1 };
enum class CacheFormat : int32_t { kNone = 0, kInt8 = 1, kFp8 = 2 };

inline char const* name_of(ComputeType type) { return type == ComputeType::kFloat16 ? "float16" : "bfloat16"; }
inline char const* name_of(CacheFormat cache) {
    return cache == CacheFormat::kNone ? "none" : cache == CacheFormat::kInt8 ? "int8" : "fp8_e4m3";
}

// The attributes of one node; zero turns softcap, window and qk_norm_eps off.
struct Spec {
    int32_t num_heads, num_kv_heads, head_dim;
    float scale;
    int32_t rotary_dim;
    CacheFormat cache_format;
    bool interleaved;
    float softcap;
    int32_t window;
    float qk_norm_eps;
    bool token_scales; // every cached token has scales of its own, in caches beside the codes

    bool quantized() const { return cache_format != CacheFormat::kNone; }
    bool qk_norm() const { return qk_norm_eps > 0; }
    int64_t packed_width() const { return (int64_t{num_heads} + 2 * num_kv_heads) * head_dim; }
    int32_t group() const { return num_heads / num_kv_heads; }

    // Kernels have every attribute compiled in, so all of them must be equal, floats to the bit.
    bool operator==(Spec const& other) const {
        return num_heads == other.num_heads && num_kv_heads == other.num_kv_heads && head_dim == other.head_dim &&
            scale == other.scale && rotary_dim == other.rotary_dim && cache_format == other.cache_format &&
            interleaved == other.interleaved && softcap == other.softcap && window == other.window &&
            qk_norm_eps == other.qk_norm_eps && token_scales == other.token_scales;
    }

    std::string text() const {
        std::string said = format("%d query and %d KV heads of %d, scale %.9g, rotary_dim %d%s, cache %s", num_heads,
            num_kv_heads, head_dim, scale, rotary_dim, interleaved ? " interleaved" : "", name_of(cache_format));
        if (token_scales) said += " with a scale per token";
        if (softcap > 0) said += format(", softcap %.9g", softcap);
        if (window > 0) said += format(", window %d", window);
        if (qk_norm()) said += format(", qk_norm_eps %.9g", qk_norm_eps);
        return said;
    }
};

} // namespace dtool

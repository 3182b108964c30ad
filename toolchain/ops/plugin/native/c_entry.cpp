#include "c_entry.h"

#include <cstdio>

#include "launcher.h"

namespace dtool {
namespace {

thread_local char last_error[2048] = "";

template <typename Body>
int guarded(Body&& body) noexcept {
    Code code = kInternal;
    try {
        body();
        return kOk;
    } catch (Error const& error) {
        code = error.code;
        std::snprintf(last_error, sizeof last_error, "%s", error.what());
    } catch (std::exception const& error) {
        std::snprintf(last_error, sizeof last_error, "%s", error.what());
    } catch (...) {
        std::snprintf(last_error, sizeof last_error, "unknown failure");
    }
    return code;
}

Spec const& spec_at(int32_t index) {
    if (index >= 0 && index < kSpecCount) return kSpecs[index];
    throw Error(kBadArgument, format("spec: expected an index from 0 to %d, found %d", kSpecCount - 1, index));
}

ComputeType type_at(int32_t value) {
    if (value == 0 || value == 1) return static_cast<ComputeType>(value);
    throw Error(kBadArgument, format("compute_dtype: expected 0 (float16) or 1 (bfloat16), found %d", value));
}

void check_size(char const* name, int32_t found, int32_t most) {
    if (found >= 1 && found <= most) return;
    throw Error(kBadArgument, format("%s: expected 1 to %d, found %d", name, most, found));
}

void check_pointer(char const* name, void const* pointer, bool needed) {
    if (!needed) return;
    if (!pointer) throw Error(kBadArgument, format("%s: expected device memory, found a null pointer", name));
    // the kernels were compiled to load 16 bytes at a time
    if (reinterpret_cast<uintptr_t>(pointer) % 16) {
        throw Error(kBadArgument, format("%s: expected an address aligned to 16 bytes, found %p", name, pointer));
    }
}

constexpr int32_t kMaxBatch = 65535; // a launch's third dimension

Call checked(DtoolAttentionCall const* call, Spec const& spec) {
    check_size("batch", call->batch, kMaxBatch);
    check_size("capacity", call->capacity, INT32_MAX);
    check_size("new_tokens", call->new_tokens, call->capacity);
    check_pointer("qkv", call->qkv, true);
    check_pointer("cos", call->cos, true);
    check_pointer("sin", call->sin, true);
    check_pointer("past_lengths", call->past_lengths, true);
    check_pointer("key_cache", call->key_cache, true);
    check_pointer("value_cache", call->value_cache, true);
    check_pointer("key_scale", call->key_scale, spec.quantized());
    check_pointer("value_scale", call->value_scale, spec.quantized());
    check_pointer("q_norm", call->q_norm, spec.qk_norm());
    check_pointer("k_norm", call->k_norm, spec.qk_norm());
    check_pointer("out", call->out, true);
    return {call->batch, call->new_tokens, call->capacity, call->qkv, call->cos, call->sin, call->past_lengths,
            call->key_cache, call->value_cache, call->key_scale, call->value_scale, call->q_norm, call->k_norm,
            call->out, call->workspace, static_cast<size_t>(call->workspace_bytes)};
}

} // namespace
} // namespace dtool

#define DTOOL_EXPORT extern "C" __attribute__((visibility("default")))

DTOOL_EXPORT int dtool_attention(DtoolAttentionCall const* call, void* stream) {
    return dtool::guarded([&] {
        if (!call || call->struct_bytes != sizeof(DtoolAttentionCall)) {
            unsigned found = call ? call->struct_bytes : 0;
            size_t expected = sizeof(DtoolAttentionCall);
            throw dtool::Error(dtool::kBadArgument,
                               dtool::format("struct_bytes: expected %zu, found %u", expected, found));
        }
        dtool::Spec const& spec = dtool::spec_at(call->spec);
        dtool::launch(spec, dtool::type_at(call->compute_dtype), dtool::checked(call, spec), stream);
    });
}

DTOOL_EXPORT int64_t dtool_attention_workspace_bytes(int32_t spec, int32_t batch, int32_t new_tokens) {
    int64_t bytes = -1;
    dtool::guarded([&] {
        dtool::Spec const& found = dtool::spec_at(spec);
        dtool::check_size("batch", batch, dtool::kMaxBatch);
        bytes = new_tokens == 1 ? static_cast<int64_t>(dtool::workspace_bytes(found, batch, dtool::kMaxSplits)) : 0;
    });
    return bytes;
}

DTOOL_EXPORT int dtool_attention_prepare(int32_t spec, int32_t compute_dtype) {
    return dtool::guarded([&] { dtool::prepare(dtool::spec_at(spec), dtool::type_at(compute_dtype)); });
}

DTOOL_EXPORT char const* dtool_attention_describe(void) { return dtool::kDescription; }

DTOOL_EXPORT char const* dtool_attention_last_error(void) { return dtool::last_error; }

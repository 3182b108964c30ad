// Picks, loads and launches the kernels of one attention call.
#pragma once

#include <cstddef>
#include <vector>

#include "kernel_table.h"

namespace dtool {

// One call on raw device pointers. Pointers a spec has no use for may be null.
struct Call {
    int32_t batch, new_tokens, capacity;
    void const *qkv, *cos, *sin, *past_lengths;
    void *key_cache, *value_cache;
    void const *key_scale, *value_scale, *q_norm, *k_norm; // scales per token are written, through the kernels
    void *out, *workspace;
    size_t workspace_bytes;
};

// Whether a device of one compute capability (89 for 8.9) executes machine code made for another.
bool runs_on(int32_t cubin_sm, int32_t device_sm);

// The pieces a row's cache is cut into for decode; `slots` is the most a row may see. It depends on
// shapes and device alone, never on lengths, so a captured CUDA graph stays right while the rows grow.
// The same as choose_splits of toolchain.ops.kernels.tiles, and a test holds the two together.
int32_t split_count(int32_t multiprocessors, int32_t batch, int32_t kv_heads, int32_t slots, int32_t tile);

// Bytes of workspace for a call; `splits` is kMaxSplits where the device is not known yet.
size_t workspace_bytes(Spec const& spec, int64_t batch, int64_t splits);

// Load the kernels of a node on the current CUDA device, for every compute type the library carries.
// Returns false where no CUDA context is current; throws when the device is not served.
bool prepare(Spec const& spec);

// Load the kernels of one type, which must exist.
void prepare(Spec const& spec, ComputeType type);

// Launch one attention call on a stream of the current CUDA context.
void launch(Spec const& spec, ComputeType type, Call const& call, void* stream);

} // namespace dtool

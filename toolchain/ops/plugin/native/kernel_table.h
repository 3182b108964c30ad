// The kernels this library carries. `build.py` writes the file that defines the table and embeds the cubins.
#pragma once

#include "common.h"

namespace dtool {

struct Kernel {
    char const* function;          // the entry's name inside the cubin
    unsigned char const* cubin;    // a whole ELF file; it knows its own size
    int32_t warps;
    uint32_t shared_bytes;         // dynamic shared memory of a launch
    int32_t tile;                  // new tokens, query rows or cache slots one step takes: see launcher.cpp
};

// What one node needs on one kind of device.
struct KernelSet {
    Spec spec;
    ComputeType type;
    int32_t sm;
    Kernel cache_write, prefill, decode_split, decode_merge;
};

extern KernelSet const kKernelSets[];
extern int32_t const kKernelSetCount;
extern Spec const kSpecs[];
extern int32_t const kSpecCount;
extern char const* const kDescription; // JSON

} // namespace dtool

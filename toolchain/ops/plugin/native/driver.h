// The CUDA driver, found when it is first needed: the library loads on hosts that have none.
#pragma once

#include <cuda.h>

#include "common.h"

namespace dtool {

struct Driver {
    decltype(&::cuInit) init;
    decltype(&::cuCtxGetCurrent) ctx_get_current;
    CUresult (*ctx_get_device)(CUdevice*); // named by hand: CUDA 13 maps the name to another version
    decltype(&::cuDeviceGetAttribute) device_get_attribute;
    decltype(&::cuGetErrorString) get_error_string;
    decltype(&::cuModuleLoadData) module_load_data;
    decltype(&::cuModuleUnload) module_unload;
    decltype(&::cuModuleGetFunction) module_get_function;
    decltype(&::cuFuncSetAttribute) func_set_attribute;
    decltype(&::cuLaunchKernel) launch_kernel;
    decltype(&::cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
    CUresult (*ctx_get_id)(CUcontext, unsigned long long*); // CUDA 12; null on older drivers
    CUresult (*func_load)(CUfunction);                      // CUDA 12.4; null on older drivers

    // The driver of this process. Throws when it is absent or cannot start; the next call tries again.
    static Driver const& get();

    // Throws when a driver call failed, with the driver's words.
    void check(CUresult status, char const* doing) const;
};

} // namespace dtool

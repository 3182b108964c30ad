#include "driver.h"

#include "dynamic_loading.h"

namespace dtool {
namespace {

template <typename Function>
void resolve(void* library, char const* name, Function& function, bool required = true) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function || !required) return;
    throw Error(kDriver, format("libcuda.so.1 has no %s: the NVIDIA driver is too old", name));
}

Driver load() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); // stays for the life of the process
    if (!library) {
        char const* reason = dlerror();
        throw Error(kDriver, format("cannot load the NVIDIA driver (%s): attention kernels run on a GPU only",
                                    reason ? reason : "libcuda.so.1"));
    }
    Driver driver{};
    resolve(library, "cuInit", driver.init);
    resolve(library, "cuCtxGetCurrent", driver.ctx_get_current);
    resolve(library, "cuCtxGetDevice", driver.ctx_get_device);
    resolve(library, "cuDeviceGetAttribute", driver.device_get_attribute);
    resolve(library, "cuGetErrorString", driver.get_error_string);
    resolve(library, "cuModuleLoadData", driver.module_load_data);
    resolve(library, "cuModuleUnload", driver.module_unload);
    resolve(library, "cuModuleGetFunction", driver.module_get_function);
    resolve(library, "cuFuncSetAttribute", driver.func_set_attribute);
    resolve(library, "cuLaunchKernel", driver.launch_kernel);
    resolve(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
    resolve(library, "cuCtxGetId", driver.ctx_get_id, false);
    resolve(library, "cuFuncLoad", driver.func_load, false);
    driver.check(driver.init(0), "starting the driver");
    return driver;
}

} // namespace

Driver const& Driver::get() {
    static Driver const driver = load(); // an exception leaves it unset, so that a later call tries again
    return driver;
}

void Driver::check(CUresult status, char const* doing) const {
    if (status == CUDA_SUCCESS) return;
    char const* words = nullptr;
    if (get_error_string(status, &words) != CUDA_SUCCESS || !words) words = "unknown error";
    throw Error(kDriver, format("%s: CUDA error %d, %s", doing, static_cast<int>(status), words));
}

} // namespace dtool

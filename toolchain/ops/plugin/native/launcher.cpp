#include "launcher.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "driver.h"

namespace dtool {
namespace {

constexpr uint32_t kPlainSharedBytes = 48 * 1024; // more than this must be asked for, kernel by kernel
constexpr int32_t kResident = 3;                   // decode CTAs a multiprocessor holds at once: tiles.RESIDENT

struct Device {
    CUcontext context;
    unsigned long long key; // the context's id where the driver has one: addresses are used again
    int32_t sm, multiprocessors;
    uint32_t max_shared_bytes;
};

class Module {
public:
    Module(Driver const& driver, Kernel const& kernel) {
        driver.check(driver.module_load_data(&module_, kernel.cubin), kernel.function);
        CUfunction function = nullptr;
        CUresult status = driver.module_get_function(&function, module_, kernel.function);
        if (status == CUDA_SUCCESS && driver.func_load) status = driver.func_load(function); // not in the first launch
        if (status == CUDA_SUCCESS && kernel.shared_bytes > kPlainSharedBytes) {
            status = driver.func_set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                               static_cast<int>(kernel.shared_bytes));
        }
        if (status != CUDA_SUCCESS) driver.module_unload(module_);
        driver.check(status, kernel.function);
        function_ = function;
    }
    Module(Module const&) = delete;
    Module& operator=(Module const&) = delete;
    // Never unloaded once it works: contexts may be gone by the time static objects die, and then
    // unloading is an error. The driver frees modules together with their context.

    CUfunction function() const { return function_; }

private:
    CUmodule module_ = nullptr;
    CUfunction function_ = nullptr;
};

struct LoadedSet {
    LoadedSet(Driver const& driver, KernelSet const& set)
        : set(set), cache_write(driver, set.cache_write), prefill(driver, set.prefill),
          decode_split(driver, set.decode_split), decode_merge(driver, set.decode_merge) {}
    KernelSet const& set;
    Module cache_write, prefill, decode_split, decode_merge;
};

// Loading a module is refused while any stream is captured, unless this thread says it knows better.
class RelaxedCapture {
public:
    explicit RelaxedCapture(Driver const& driver) : driver_(driver) { driver_.exchange_capture_mode(&mode_); }
    ~RelaxedCapture() { driver_.exchange_capture_mode(&mode_); }
    RelaxedCapture(RelaxedCapture const&) = delete;
    RelaxedCapture& operator=(RelaxedCapture const&) = delete;

private:
    Driver const& driver_;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

struct Loaded {
    std::mutex mutex;
    std::map<unsigned long long, Device> devices;
    std::map<std::pair<unsigned long long, KernelSet const*>, std::unique_ptr<LoadedSet>> sets;
};

Loaded& loaded() {
    static Loaded* all = new Loaded; // left to the process: see Module
    return *all;
}

int attribute(Driver const& driver, CUdevice device, CUdevice_attribute which) {
    int value = 0;
    driver.check(driver.device_get_attribute(&value, which, device), "reading the device's properties");
    return value;
}

// The device of the current context, or null where there is none. The lock is held.
Device const* current_device(Driver const& driver) {
    CUcontext context = nullptr;
    driver.check(driver.ctx_get_current(&context), "asking for the current CUDA context");
    if (!context) return nullptr;
    unsigned long long key = reinterpret_cast<uintptr_t>(context);
    if (driver.ctx_get_id) driver.check(driver.ctx_get_id(context, &key), "asking for the CUDA context's id");
    auto found = loaded().devices.find(key);
    if (found != loaded().devices.end()) return &found->second;
    CUdevice device = 0;
    driver.check(driver.ctx_get_device(&device), "asking for the current CUDA device");
    Device made{context, key, 0, 0, 0};
    made.sm = 10 * attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
        attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    made.multiprocessors = attribute(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    made.max_shared_bytes =
        static_cast<uint32_t>(attribute(driver, device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
    return &loaded().devices.emplace(key, made).first->second;
}

bool fits(KernelSet const& set, Device const& device) {
    uint32_t needed = std::max({set.cache_write.shared_bytes, set.prefill.shared_bytes,
                                set.decode_split.shared_bytes, set.decode_merge.shared_bytes});
    return needed <= device.max_shared_bytes;
}

bool serves(KernelSet const& set, Device const& device) { return runs_on(set.sm, device.sm) && fits(set, device); }

std::string not_served(Spec const& spec, ComputeType type, Device const& device) {
    std::string mine, others;
    for (int32_t i = 0; i < kKernelSetCount; ++i) {
        KernelSet const& set = kKernelSets[i];
        if (set.spec == spec && set.type == type) {
            bool large = runs_on(set.sm, device.sm) && !fits(set, device);
            mine += format("%ssm%d%s", mine.empty() ? "" : ", ", set.sm, large ? " (needs more shared memory)" : "");
        } else {
            std::string const text = set.spec.text();
            others += format("%s[%s, %s, sm%d]", others.empty() ? "" : " ", text.c_str(), name_of(set.type), set.sm);
        }
    }
    std::string asked = format("this library has no kernels for sm%d, %s, %s; expected one of the embedded: ",
                               device.sm, name_of(type), spec.text().c_str());
    return asked + (!mine.empty() ? mine : others) + "; build the plugin again for this device and node";
}

KernelSet const& find_set(Spec const& spec, ComputeType type, Device const& device) {
    KernelSet const* best = nullptr;
    for (int32_t i = 0; i < kKernelSetCount; ++i) {
        KernelSet const& set = kKernelSets[i];
        bool candidate = set.spec == spec && set.type == type && serves(set, device);
        if (candidate && (!best || set.sm > best->sm)) best = &set;
    }
    if (!best) throw Error(kNoKernels, not_served(spec, type, device));
    return *best;
}

// The kernels on the current device, loaded if they are not. The lock is held.
LoadedSet const& load(Driver const& driver, Device const& device, KernelSet const& set) {
    std::unique_ptr<LoadedSet>& slot = loaded().sets[{device.key, &set}];
    if (!slot) {
        RelaxedCapture relaxed(driver);
        slot = std::make_unique<LoadedSet>(driver, set);
    }
    return *slot;
}

[[noreturn]] void no_context() {
    throw Error(kDriver, "no CUDA context is current on this thread: select a device first");
}

template <size_t N>
void run(Driver const& driver, Module const& module, Kernel const& kernel, int64_t x, int64_t y, int64_t z,
         void* (&arguments)[N], void* stream) {
    driver.check(driver.launch_kernel(module.function(), static_cast<unsigned>(x), static_cast<unsigned>(y),
                                      static_cast<unsigned>(z), static_cast<unsigned>(kernel.warps) * 32, 1, 1,
                                      kernel.shared_bytes, static_cast<CUstream>(stream), arguments, nullptr),
                 kernel.function);
}

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

size_t partial_out_bytes(Spec const& spec, int64_t batch, int64_t splits) {
    size_t bytes = static_cast<size_t>(batch * splits) * spec.num_heads * spec.head_dim * sizeof(float);
    return (bytes + 255) / 256 * 256; // so that what follows is aligned
}

void run_prefill(Driver const& driver, LoadedSet const& kernels, Call call, void* stream) {
    Spec const& spec = kernels.set.spec;
    void* hidden = nullptr; // Triton kernels end in two scratch pointers that these kernels do not use
    void* write[] = {&call.qkv, &call.cos, &call.sin, &call.past_lengths, &call.key_cache, &call.value_cache,
                     &call.key_scale, &call.value_scale, &call.k_norm, &call.new_tokens, &call.capacity, &hidden,
                     &hidden};
    Kernel const& writer = kernels.set.cache_write;
    int64_t blocks = ceil_div(call.new_tokens, writer.tile);
    run(driver, kernels.cache_write, writer, blocks, spec.num_kv_heads, call.batch, write, stream);
    void* attend[] = {&call.qkv, &call.cos, &call.sin, &call.past_lengths, &call.key_cache, &call.value_cache,
                      &call.key_scale, &call.value_scale, &call.q_norm, &call.out, &call.new_tokens, &call.capacity,
                      &hidden, &hidden};
    Kernel const& prefill = kernels.set.prefill;
    blocks = ceil_div(int64_t{call.new_tokens} * spec.group(), prefill.tile);
    run(driver, kernels.prefill, prefill, blocks, spec.num_kv_heads, call.batch, attend, stream);
}

void run_decode(Driver const& driver, LoadedSet const& kernels, Device const& device, Call call, void* stream) {
    Spec const& spec = kernels.set.spec;
    Kernel const& split = kernels.set.decode_split;
    int32_t slots = spec.window > 0 ? std::min(spec.window, call.capacity) : call.capacity;
    int32_t splits = split_count(device.multiprocessors, call.batch, spec.num_kv_heads, slots, split.tile);
    size_t needed = workspace_bytes(spec, call.batch, splits);
    size_t given = call.workspace ? call.workspace_bytes : 0;
    if (given < needed) {
        throw Error(kBadArgument, format("the workspace has %zu bytes, expected %zu for batch %d and %d splits", given,
                                         needed, call.batch, splits));
    }
    void* hidden = nullptr;
    void* partial_out = call.workspace;
    void* partial_lse = static_cast<char*>(call.workspace) + partial_out_bytes(spec, call.batch, splits);
    void* attend[] = {&call.qkv, &call.cos, &call.sin, &call.past_lengths, &call.key_cache, &call.value_cache,
                      &call.key_scale, &call.value_scale, &call.q_norm, &call.k_norm, &partial_out, &partial_lse,
                      &call.capacity, &splits, &hidden, &hidden};
    run(driver, kernels.decode_split, split, splits, spec.num_kv_heads, call.batch, attend, stream);
    void* merge[] = {&partial_out, &partial_lse, &call.out, &splits, &hidden, &hidden};
    run(driver, kernels.decode_merge, kernels.set.decode_merge, spec.num_heads, call.batch, 1, merge, stream);
}

} // namespace

bool runs_on(int32_t cubin_sm, int32_t device_sm) {
    if (cubin_sm == device_sm) return true;
    // From 9.0 on the compiler uses instructions of that very architecture (sm_90a, sm_100a, sm_120a);
    // 7.2 and 8.7 are embedded devices, outside the promise that minor versions go upwards.
    auto alone = [](int32_t sm) { return sm >= 90 || sm == 72 || sm == 87; };
    return !alone(cubin_sm) && !alone(device_sm) && cubin_sm / 10 == device_sm / 10 && cubin_sm < device_sm;
}

int32_t split_count(int32_t multiprocessors, int32_t batch, int32_t kv_heads, int32_t slots, int32_t tile) {
    int64_t wanted = int64_t{kResident} * multiprocessors / (int64_t{batch} * kv_heads);
    int64_t useful = ceil_div(slots, tile);
    return static_cast<int32_t>(std::max<int64_t>(1, std::min({wanted, useful, int64_t{kMaxSplits}})));
}

size_t workspace_bytes(Spec const& spec, int64_t batch, int64_t splits) {
    size_t sums = static_cast<size_t>(batch * splits) * spec.num_heads * sizeof(float);
    return partial_out_bytes(spec, batch, splits) + sums;
}

bool prepare(Spec const& spec) {
    Driver const& driver = Driver::get();
    std::lock_guard<std::mutex> lock(loaded().mutex);
    Device const* device = current_device(driver);
    if (!device) return false;
    bool any = false;
    for (ComputeType type : {ComputeType::kFloat16, ComputeType::kBfloat16}) {
        bool served = std::any_of(kKernelSets, kKernelSets + kKernelSetCount, [&](KernelSet const& set) {
            return set.spec == spec && set.type == type && serves(set, *device);
        });
        if (served) load(driver, *device, find_set(spec, type, *device));
        any = any || served;
    }
    if (!any) {
        ComputeType type = kKernelSetCount ? kKernelSets[0].type : ComputeType::kFloat16;
        throw Error(kNoKernels, not_served(spec, type, *device));
    }
    return true;
}

void prepare(Spec const& spec, ComputeType type) {
    Driver const& driver = Driver::get();
    std::lock_guard<std::mutex> lock(loaded().mutex);
    Device const* device = current_device(driver);
    if (!device) no_context();
    load(driver, *device, find_set(spec, type, *device));
}

void launch(Spec const& spec, ComputeType type, Call const& call, void* stream) {
    Driver const& driver = Driver::get();
    Device device;
    LoadedSet const* kernels;
    {
        std::lock_guard<std::mutex> lock(loaded().mutex);
        Device const* current = current_device(driver);
        if (!current) no_context();
        device = *current;
        kernels = &load(driver, device, find_set(spec, type, device)); // never removed, so it outlives the lock
    }
    if (call.new_tokens == 1) {
        run_decode(driver, *kernels, device, call, stream);
    } else {
        run_prefill(driver, *kernels, call, stream);
    }
}

} // namespace dtool

#include "messages.h"

#include <atomic>
#include <cstdio>

#include "dynamic_loading.h"

// The logger and its finder as TensorRT lays them out in memory. TensorRT 11 and TensorRT-RTX 1.7 gave
// both three virtual functions in front, so headers of one release call the wrong function in the other
// (a log call that does nothing). Plugins are the same in both; so the two are declared here, for either,
// and the release that loaded us decides. Nothing derives from them here: they only name slots.
namespace dtool::layout {

struct Plain {
    virtual void* first(int32_t severity, char const* text) noexcept = 0; // findLogger, log
    virtual ~Plain() = default;
};

struct Versioned {
    virtual int32_t language() const noexcept = 0;
    virtual nvinfer1::InterfaceInfo info() const noexcept = 0;
    virtual ~Versioned() = default;
    virtual void* first(int32_t severity, char const* text) noexcept = 0;
};

} // namespace dtool::layout

namespace dtool {
namespace {

constexpr int32_t kError = 1; // ILogger::Severity::kERROR in every release

enum class Layout : int32_t { kUnknown, kPlain, kVersioned };

std::atomic<void*> logger_finder{nullptr};
std::atomic<Layout> layout_found{Layout::kUnknown};

int32_t version_part(void* library, char const* name) noexcept {
    auto get = reinterpret_cast<int32_t (*)()>(dlsym(library, name));
    return get ? get() : 0;
}

// The layout of the TensorRT that made the finder: it is the library in which the finder's code lies,
// whose file name differs between TensorRT, TensorRT-RTX and the lean runtime.
Layout find_layout(void* finder) noexcept {
    Dl_info home{};
    if (!finder || !dladdr(*static_cast<void**>(finder), &home) || !home.dli_fname) return Layout::kUnknown;
    void* library = dlopen(home.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return Layout::kUnknown;
    int32_t const major = version_part(library, "getInferLibMajorVersion");
    int32_t const minor = version_part(library, "getInferLibMinorVersion");
    dlclose(library);
    if (major >= 11 || (major == 1 && minor >= 7)) return Layout::kVersioned; // RTX counts from 1
    return major == 10 ? Layout::kPlain : Layout::kUnknown;
}

// Call the first function of its own that an object of either layout has.
void* call_first(void* object, Layout layout, int32_t severity, char const* text) noexcept {
    if (!object || layout == Layout::kUnknown) return nullptr;
    if (layout == Layout::kPlain) return static_cast<layout::Plain*>(object)->first(severity, text);
    return static_cast<layout::Versioned*>(object)->first(severity, text);
}

} // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept {
    layout_found.store(find_layout(finder));
    logger_finder.store(finder);
}

void log_error(char const* text) noexcept {
    char line[2048];
    std::snprintf(line, sizeof line, "dtool::FusedAttention: %s", text);
    Layout const layout = layout_found.load();
    if (void* logger = call_first(logger_finder.load(), layout, 0, nullptr)) {
        call_first(logger, layout, kError, line);
    } else {
        std::fprintf(stderr, "%s\n", line);
    }
}

} // namespace dtool

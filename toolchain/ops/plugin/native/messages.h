// Where a failure goes: TensorRT's log where there is one, else stderr.
#pragma once

#include <NvInferRuntime.h>

#include <exception>

#include "common.h"

namespace dtool {

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// Log an error under the op's name.
void log_error(char const* text) noexcept;

// Run `body` and return its result; when it throws, log the failure and return `failed`. Nothing
// thrown here may reach TensorRT, whose functions promise not to throw.
template <typename Result, typename Body>
Result guarded(Result failed, Body&& body) noexcept {
    try {
        return body();
    } catch (std::exception const& error) {
        log_error(error.what());
    } catch (...) {
        log_error("unknown failure");
    }
    return failed;
}

} // namespace dtool

// Makes plugins from nodes and saved engines; the two C functions through which TensorRT finds it.
#include "attention_plugin.h"
#include "messages.h"

namespace dtool {
namespace {

class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    char const* getPluginName() const noexcept override { return kPluginName; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override {
        return guarded<nvinfer1::PluginFieldCollection const*>(nullptr, [] { return declared_fields(); });
    }

    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override {
        return guarded<nvinfer1::IPluginV3*>(nullptr, [&]() -> nvinfer1::IPluginV3* {
            std::string const node = name && *name ? format("node '%s': ", name) : "";
            if (!fields) throw Error(kBadArgument, node + "expected attributes, found none");
            try {
                return new AttentionPlugin(read_fields(*fields), phase);
            } catch (Error const& error) {
                throw Error(error.code, node + error.what());
            }
        });
    }
};

} // namespace
} // namespace dtool

#define DTOOL_EXPORT extern "C" __attribute__((visibility("default")))

DTOOL_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept {
    static dtool::Creator creator;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
    count = 1;
    return creators;
}

DTOOL_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept { dtool::set_logger_finder(finder); }

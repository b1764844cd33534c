// The parts of check_model (gguf_model.h): what its rules ask a model, and the rules that have a file of
// their own. Private to store/. Thread: any; in memory, nothing blocks. Errors: Status of the rule that was
// broken; may throw std::bad_alloc.
#pragma once

#include "store/gguf_model.h"
#include "store/status.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace spice {

/// What the rules ask a model.
class CheckedModel {
  public:
    explicit CheckedModel(const GgufModel &model) : model_(model), arch_(model.architecture()) {}

    [[nodiscard]] const GgufModel &model() const { return model_; }
    [[nodiscard]] const std::string &arch() const { return arch_; }
    // Without tensors it is a vocabulary file: llama.cpp reads no hyper-parameters of those (vocab_only).
    [[nodiscard]] bool has_tensors() const { return !model_.tensors().empty(); }
    [[nodiscard]] std::string key(std::string_view name) const { return arch_ + "." + std::string(name); }
    /// The value of a key of the architecture.
    [[nodiscard]] std::optional<int64_t> number(std::string_view name, int32_t layer = 0) const {
        return model_.get_int(key(name), layer);
    }
    [[nodiscard]] const GgufArray *array(std::string_view full_key) const {
        const auto at = model_.metadata().find(full_key);
        return at == model_.metadata().end() ? nullptr : std::get_if<GgufArray>(&at->second);
    }
    [[nodiscard]] Status refuse(const std::string &what, Code code = Code::malformed) const {
        return {code,
                model_.files().front().path.string() + ": " + what +
                    ". llama.cpp would crash on it, so it is not loaded; use another copy of the model"};
    }
    [[nodiscard]] Status refuse_key(std::string_view name, int64_t value, const std::string &possible) const {
        return refuse(key(name) + " is " + std::to_string(value) + "; possible is " + possible);
    }

  private:
    const GgufModel &model_;
    std::string arch_;
};

/// Tokens and special tokens (vocabulary_check.cpp).
[[nodiscard]] Status check_vocabulary(const CheckedModel &model);

} // namespace spice

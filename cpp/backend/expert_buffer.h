// The buffer type that owns expert weights: llama.cpp allocates them here and gets address space, no bytes.
//
// How loading is avoided: while llama.cpp allocates the tensors, init_tensor gives each a name that the file
// does not have; the loader then finds no data for it and goes on, as it does for split experts. finish_load
// gives the names back. llama.cpp has recorded its own name table before (adapters look there).
//
// Thread: llama.cpp's loading thread; finish_load from the same thread after the load.
#pragma once

#include "backend/ggml_abi.h"
#include "runtime/engine.h"

#include <memory>
#include <vector>

namespace spice {

/// Ties one Engine to one buffer type. Shared by the Python object and by the buffers made of the type, so
/// that either may go first.
class Attachment : public std::enable_shared_from_this<Attachment> {
  public:
    [[nodiscard]] static std::shared_ptr<Attachment> make(std::shared_ptr<Engine> engine);
    [[nodiscard]] Engine &engine() { return *engine_; }
    /// For llama_model_tensor_buft_override.buft. Valid while the Attachment or a buffer of it lives.
    [[nodiscard]] ggml_backend_buffer_type_t buffer_type() { return &type_; }
    /// Gives the expert tensors their names back; returns how many. Call after a load that succeeded.
    [[nodiscard]] size_t finish_load();
    /// False after finish_load: what llama.cpp allocates of this type then is no expert of the model, but a
    /// LoRA adapter's matrices for one, which belong in ordinary memory.
    [[nodiscard]] bool loading() const { return loading_; }
    void note_renamed(ggml_tensor *tensor) { renamed_.push_back(tensor); }
    void forget_renamed() { renamed_.clear(); }

  private:
    Attachment() = default;
    std::shared_ptr<Engine> engine_;
    ggml_backend_buffer_type type_{};
    std::vector<ggml_tensor *> renamed_;
    bool loading_ = true;
};

/// Which tensors go to the buffer type: ECMAScript regular expression for llama.cpp's override table.
inline constexpr const char *expert_tensor_pattern =
    "^blk\\.[0-9]+\\.ffn_(gate|up|down|gate_up)_(exps|chexps)\\.weight$";

/// True for a buffer type made by any Attachment.
[[nodiscard]] bool is_expert_buffer_type(ggml_backend_buffer_type_t type);

/// The record of a weight tensor in an expert buffer (or of a view of one), or nullptr.
[[nodiscard]] const ExpertTensor *expert_tensor(const ggml_tensor *tensor);

} // namespace spice

// Nodes of a split that are computed before their turn, while experts are being read.
//
// Memory of a graph is shared by tensors that live at different times, so a node that runs early must not
// write to its own place: it writes to a buffer, and its bytes are put in place at the turn that it had.
//
// Thread: the context's compute thread. Nothing blocks. May throw std::bad_alloc.
#pragma once

#include "ggml.h"

#include <span>
#include <unordered_map>
#include <vector>

namespace spice {

class EarlyNodes {
  public:
    /// The early twin of a node whose turn comes later, or nullptr.
    [[nodiscard]] ggml_tensor *find(const ggml_tensor *node) const;
    [[nodiscard]] bool empty() const { return twins_.empty(); }
    void clear() { twins_.clear(); }

    /// Of `nodes`, in the order of their turns, those of a shared expert that need nothing else of the
    /// `split`, which `nodes` are a part of: their twins, made in `context` without memory for results.
    [[nodiscard]] std::vector<ggml_tensor *> take(ggml_context *context, std::span<ggml_tensor *const> nodes,
                                                  std::span<ggml_tensor *const> split);

    struct Copy {
        const ggml_tensor *from = nullptr;
        const ggml_tensor *to = nullptr;
    };
    /// What must be copied at the turn of `nodes`, which are next to each other, in any order: a result that
    /// a later one of them overwrites is left out.
    [[nodiscard]] std::vector<Copy> copies(std::span<ggml_tensor *const> nodes) const;

  private:
    std::unordered_map<const ggml_tensor *, ggml_tensor *> twins_;
};

} // namespace spice

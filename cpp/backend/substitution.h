// Stand-ins for experts within one block: finds what they need in llama.cpp's graph, and makes the two jobs
// that compute them (compute/surrogate.h).
//
// What they need: the gate weights of the routed experts and the row that the router read, both there before
// the block begins, and the down product, whose rows the stand-ins write. Recognised by structure; a block
// without them is computed exactly, and counted.
//
// Thread: the context's compute thread; the jobs run on every thread of a graph. Nothing blocks. May throw
// std::bad_alloc.
#pragma once

#include "compute/surrogate.h"
#include "runtime/surrogates.h"

#include "ggml.h"

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace spice {

/// The nodes of one block that stand-ins touch.
struct SubstitutionSite {
    ggml_tensor *down = nullptr;        ///< whose rows are replaced, [n_out, routed, tokens]
    const ggml_tensor *x = nullptr;     ///< what gate and up multiply, [n_in, 1, tokens]
    const ggml_tensor *gates = nullptr; ///< [1, routed, tokens]

    /// Of the block whose first product is nodes[turn], `nodes` being those of the split; nothing when it has
    /// not that form, or other widths than `shape` (nullptr: any).
    [[nodiscard]] static std::optional<SubstitutionSite>
    find(std::span<ggml_tensor *const> nodes, size_t turn, int32_t group, const LoreShape *shape);

    [[nodiscard]] std::vector<float> gate_weights() const; ///< [tokens][routed]
};

/// Zeros for the rows of a product that nobody computes: what is made of them is not used, but must not be
/// what was in the memory before.
struct ZeroRows {
    std::vector<float *> rows;
    int64_t n = 0;

    ZeroRows(const ggml_tensor *product, std::span<const uint8_t> taken);
    static void run(ggml_tensor *, int thread, int n_threads, void *job); ///< `job`: the ZeroRows
};

/// The stand-ins of one layer call.
struct Substituted {
    std::vector<uint8_t> taken; ///< [tokens][routed]: the pairs that stand-ins compute
    const ggml_tensor *down = nullptr;
    compute::SurrogateJob job;
    std::vector<float> z; ///< the job's scratch
    std::deque<ZeroRows> zeros;

    /// Fills the job from `taken`. `layer`: nullptr for a kind that needs none.
    void set_up(const SubstitutionSite &site, compute::SurrogateKind kind, const SurrogateLayer *layer);
};

} // namespace spice

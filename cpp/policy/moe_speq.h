// MoE-SpeQ's lookahead buffer and governor as plain values, for its strategy and the tests.
//
// Source: MoE-SpeQ (arXiv 2511.14102), from notes on the paper; papers.md section 3.
#pragma once

#include "policy/eviction.h"

#include <cstdint>
#include <span>
#include <vector>

namespace spice::policy::speq {

/// The expert lookahead buffer: for each layer, how many of the drafted tokens name each expert.
class LookaheadBuffer {
  public:
    explicit LookaheadBuffer(const PoolShape &pool);

    /// ids [n_groups][k] of one drafted token.
    void add(std::span<const int32_t> ids, int32_t k);
    void clear();
    /// The layers below `group` have been verified: nothing of them counts any more.
    void passed(int32_t group) { first_ = group; }
    /// Drafted tokens that will use the slab in the rest of the verification.
    [[nodiscard]] int32_t remaining(SlabId id) const { return id.group < first_ ? 0 : count(id); }
    [[nodiscard]] int32_t tokens() const { return tokens_; }

    /// Slabs that at least `least` tokens name and `present` does not have: by layer, in each those named
    /// most first (phase III), or all layers together by how many name them (phase II).
    void missing(int32_t least, bool by_layer, Evictable present, std::vector<SlabId> &out) const;

  private:
    [[nodiscard]] int32_t count(SlabId id) const {
        return counts_[static_cast<size_t>(id.group) * n_experts_ + static_cast<size_t>(id.expert)];
    }
    size_t n_experts_;
    int32_t n_groups_;
    int32_t first_ = 0; ///< of the layers not verified yet
    int32_t tokens_ = 0;
    std::vector<int32_t> counts_;
};

/// Inputs of the governor; times in seconds.
struct Cycle {
    double draft_token = 0.0;  ///< T_draft(k) = k draft_token
    double transfer = 0.0;     ///< S_e / B
    double verify_fixed = 0.0; ///< T_verify(n) = verify_fixed + n verify_row
    double verify_row = 0.0;
    double acceptance = 0.0; ///< p_j, the same for every position
    int32_t n_groups = 0;
    int32_t n_experts = 0;
    int32_t top_k = 0;
    double miss_rate = 0.0; ///< share of the buffer's slabs that are not cached, lately
};

/// Slabs that k drafted tokens name and the cache lacks: independent draws from the layer's experts.
[[nodiscard]] double new_slabs(const Cycle &cycle, int32_t k);

/// Theta(k): accepted tokens and the one of the verification, per second of
/// T_cycle = max(T_draft(k), T_loads during it) + T_loads after it + T_verify(k + 1).
[[nodiscard]] double throughput(const Cycle &cycle, int32_t k);

/// The k in 1 .. most with the highest throughput; the smallest among equals.
[[nodiscard]] int32_t best_length(const Cycle &cycle, int32_t most);

} // namespace spice::policy::speq

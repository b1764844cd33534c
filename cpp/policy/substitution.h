// Which routed experts of a row are replaced by their low-rank stand-ins (LoRE, papers.md section 1).
//
// Two ways to choose. ForcedSubstitution takes a share of all pairs (row, expert) by lot, to measure what
// substituting costs, whatever is in memory. Substitution takes missed experts that matter little.
// Both are deterministic, and neither ever takes the expert of a row that has the largest gate weight.
//
// Who calls: runtime/surrogate_use.h, and tests. Thread: one at a time. Nothing blocks. Errors: none.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

namespace spice::policy {

/// One (row, expert) pair of a layer call.
struct RoutedPair {
    int32_t expert = 0;
    float gate = 0.0F;       ///< weight of the expert's output in the row's sum
    float confidence = 0.0F; ///< chance that was predicted for it; 0 without a prediction
    float cost = 0.0F;       ///< nats of KL that substituting it is expected to cost; 0 where not known
    bool candidate = true;   ///< may be taken; Substitution: it is missed
};

/// Sum of |gate| over the row.
[[nodiscard]] float gate_sum(std::span<const RoutedPair> row);
/// Index of the pair with the largest |gate|, the first of several.
[[nodiscard]] size_t top_pair(std::span<const RoutedPair> row);

class ForcedSubstitution {
  public:
    /// `share` of the pairs that are candidates and not their row's top, 0 .. 1. With the same seed and the
    /// same routing a larger share takes a superset.
    ForcedSubstitution(float share, uint64_t seed) : share_(share), seed_(seed) {}

    /// The n-th row of that layer; taken[i] says whether pair i is substituted.
    void choose(int32_t layer, uint64_t n, std::span<const RoutedPair> row, std::span<uint8_t> taken) const;

  private:
    float share_;
    uint64_t seed_;
};

} // namespace spice::policy

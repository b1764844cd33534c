// What prefetching strategies share: the likeliest experts of a predicted layer, and published recalls.
//
// Used inside the strategies of policy/; thread and errors as in strategy.h.
#pragma once

#include "policy/strategy.h"

#include <algorithm>
#include <array>
#include <vector>

namespace spice::policy {

/// Recall of the next layers' routers on the present hidden state, training-free, 1 to 5 layers ahead:
/// DeepSeek-V2-Lite, published evidence of cream-sketch/SPICE (papers.md section 6).
inline constexpr std::array<float, 5> next_gate_recall{0.873F, 0.816F, 0.770F, 0.733F, 0.697F};

/// Asks the predictor and ranks its answer.
class Guesser {
  public:
    explicit Guesser(const PoolShape &pool)
        : n_groups_(pool.n_groups), chances_(static_cast<size_t>(pool.n_experts)) {}

    /// The layer `horizon` calls from now, its likeliest experts first: at most `top` per token of the call,
    /// none with chance 0. Empty when nothing is predicted.
    std::span<const SlabId> best(const PlanContext &context, int32_t horizon, int32_t top) {
        ranked_.clear();
        if (context.predictor == nullptr || horizon > context.predictor->max_horizon()) return ranked_;
        if (!context.predictor->predict(context.group, horizon, {}, chances_)) return ranked_;
        const int32_t group = (context.group + horizon) % n_groups_;
        for (size_t e = 0; e < chances_.size(); ++e) {
            if (chances_[e] > 0.0F) ranked_.push_back({group, static_cast<int32_t>(e)});
        }
        const size_t most =
            std::min(ranked_.size(), static_cast<size_t>(top) * static_cast<size_t>(context.rows));
        std::partial_sort(ranked_.begin(), ranked_.begin() + static_cast<std::ptrdiff_t>(most), ranked_.end(),
                          [this](SlabId a, SlabId b) {
                              const float pa = chance(a.expert);
                              const float pb = chance(b.expert);
                              return pa != pb ? pa > pb : a.expert < b.expert;
                          });
        ranked_.resize(most);
        return ranked_;
    }
    [[nodiscard]] std::span<const float> chances() const { return chances_; }

  private:
    [[nodiscard]] float chance(int32_t expert) const { return chances_[static_cast<size_t>(expert)]; }

    int32_t n_groups_;
    std::vector<float> chances_; ///< of the last layer asked for
    std::vector<SlabId> ranked_;
};

} // namespace spice::policy

// Logistic mixing, learned online: from features of each expert to the calibrated chance that it is used.
//
//     p_e = sigmoid(shift + sum over f of (w[f] + v[group][f]) * feature_f[e])
//
// with weights w per context (horizon, scores given or not) and a correction v per group. A token uses
// exactly k experts, so `shift` is what makes the chances of a row sum to k (Newton's method, from where it
// ended last). When the routing is known, w and v take a step down the log loss, summed over the experts;
// each weight's step is scaled by its own curvature (diagonal Newton), so that one rate suits every feature.
//
// Who calls: the learned predictors. Thread: one at a time; no clock, no random numbers; memory in the
// constructor only. Errors: none. Features are for the caller to bound (a few units).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace spice::policy {

/// What is known of an expert, in the order of the weights.
enum class Feature : uint8_t {
    use,          ///< log-odds of its use by the last few dozen tokens
    long_use,     ///< log-odds of its use over a longer time
    recent,       ///< its use by the last one or two calls
    follow,       ///< log ratio: follows the last call of its group
    cross,        ///< log ratio: follows the present group's experts
    cross_before, ///< log ratio: follows the experts of the group before the present one
    cross_far,    ///< log ratio: follows those of the three groups before that, summed
    score,        ///< router score, standardised
};
inline constexpr size_t n_features = 8;

using Weights = std::array<float, n_features>;
/// One pointer to [n_experts] per feature; nullptr: absent, 0 for every expert.
using Features = std::array<const float *, n_features>;

class Mixer {
  public:
    Mixer(size_t n_contexts, size_t n_groups, size_t n_experts);

    void start(size_t context, const Weights &weights) { contexts_[context].weights = weights; }

    /// p[n_experts] for one row that uses k experts.
    void mix(size_t context, size_t group, const Features &features, size_t k, std::span<float> p);

    /// Adds one row to the next step: p as mix() gave it; used[e]: 1 for the experts that were used, else 0.
    void observe(const Features &features, std::span<const float> p, std::span<const float> used);
    /// Takes the step for the rows observed since the last one, if any.
    void step(size_t context, size_t group);

  private:
    struct Learned {
        Weights weights{};
        Weights curvature{}; ///< decayed average over steps of the sum of p (1 - p) feature^2
    };
    [[nodiscard]] size_t slot(size_t context, size_t group) const { return context * n_groups_ + group; }

    size_t n_groups_;
    std::vector<Learned> contexts_;
    std::vector<Weights> corrections_; ///< v, by context and group
    std::vector<float> shifts_;        ///< where the search for a shift starts, by context and group
    Weights gradient_{};               ///< of the rows observed
    Weights curvature_{};
    int32_t n_observed_ = 0;
    std::vector<float> sums_;   ///< scratch, by expert, padded
    std::vector<float> error_;  ///< scratch, by expert
    std::vector<float> weight_; ///< scratch, by expert
};

} // namespace spice::policy

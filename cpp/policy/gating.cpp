#include "policy/gating.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>

namespace spice::policy {

namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();
constexpr int32_t max_groups = 64; ///< deepseek3 has 8; the bound keeps the group scores off the heap

/// What the model compares: activation(raw) + selection_bias.
float selection_score(Activation activation, float biased, float largest, float sum, float selection_bias) {
    switch (activation) {
    case Activation::softmax:
        return std::exp(biased - largest) / sum + selection_bias;
    case Activation::sigmoid:
        return 1.0F / (1.0F + std::exp(-biased)) + selection_bias;
    case Activation::none:
        return biased + selection_bias;
    case Activation::sqrt_softplus: {
        // log(1 + e^x), without overflow
        const float softplus = std::max(biased, 0.0F) + std::log1p(std::exp(-std::abs(biased)));
        return std::sqrt(softplus) + selection_bias;
    }
    }
    return lowest;
}

/// Sets the scores of all groups but the best to -infinity. A group's score: the sum of the two best
/// select(e) of its experts, the earlier group first among equals.
template <class Select>
void exclude_groups(const Gating &gating, std::span<float> out, const Select &select) {
    const auto n_groups = static_cast<size_t>(gating.n_expert_groups);
    const size_t size = out.size() / n_groups;
    std::array<float, max_groups> group_scores{};
    for (size_t g = 0; g < n_groups; ++g) {
        float first = lowest;
        float second = lowest;
        for (size_t e = g * size; e < (g + 1) * size; ++e) {
            const float score = select(e);
            second = std::max(second, std::min(first, score));
            first = std::max(first, score);
        }
        group_scores[g] = first + second;
    }
    for (size_t g = 0; g < n_groups; ++g) {
        int32_t better = 0;
        for (size_t other = 0; other < n_groups; ++other) {
            const bool wins = group_scores[other] > group_scores[g] ||
                              (group_scores[other] == group_scores[g] && other < g);
            better += wins ? 1 : 0;
        }
        if (better >= gating.n_groups_used) std::fill_n(&out[g * size], size, lowest);
    }
}

} // namespace

bool possible(const Gating &gating, int32_t n_experts) {
    if (n_experts <= 0 || gating.n_expert_groups < 0) return false;
    if (gating.n_expert_groups <= 1) return true;
    return gating.n_expert_groups <= max_groups && n_experts % gating.n_expert_groups == 0 &&
           n_experts / gating.n_expert_groups >= 2 && gating.n_groups_used >= 1 &&
           gating.n_groups_used <= gating.n_expert_groups;
}

void ranking_scores(const Gating &gating, std::span<const float> raw, std::span<const float> router_bias,
                    std::span<const float> selection_bias, std::span<float> out) {
    const size_t n = raw.size();
    assert(out.size() == n && (router_bias.empty() || router_bias.size() == n));
    assert(selection_bias.empty() || selection_bias.size() == n);
    assert(possible(gating, static_cast<int32_t>(n)));
    float largest = lowest;
    for (size_t e = 0; e < n; ++e) {
        const float biased = raw[e] + (router_bias.empty() ? 0.0F : router_bias[e]);
        out[e] = std::isfinite(biased) ? biased : lowest;
        largest = std::max(largest, out[e]);
    }
    const bool grouped = gating.n_expert_groups > 1;
    if ((selection_bias.empty() && !grouped) || largest == lowest) return;

    float sum = 1.0F;
    if (gating.activation == Activation::softmax) {
        sum = 0.0F;
        for (const float biased : out) sum += std::exp(biased - largest);
    }
    const auto select = [&](size_t e) {
        if (out[e] == lowest) return lowest;
        return selection_score(gating.activation, out[e], largest, sum,
                               selection_bias.empty() ? 0.0F : selection_bias[e]);
    };
    if (!selection_bias.empty()) {
        for (size_t e = 0; e < n; ++e) out[e] = select(e);
        if (grouped) exclude_groups(gating, out, [out](size_t e) { return out[e]; });
    } else {
        // Groups are compared by sums of activations, for which the raw scores are no substitute.
        exclude_groups(gating, out, select);
    }
}

} // namespace spice::policy

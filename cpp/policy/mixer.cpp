#include "policy/mixer.h"

#include "policy/fast_math.h"

#include <algorithm>

namespace spice::policy {

namespace {

constexpr float rate = 0.01F;        ///< share of a Newton step that w takes
constexpr float group_rate = 0.02F;  ///< the same for v
constexpr float keep_group = 0.999F; ///< v decays towards none
constexpr float curvature_rate = 0.02F;
constexpr float curvature_start = 1.0F;
constexpr float curvature_floor = 0.05F;
constexpr float step_max = 0.1F; ///< a weight moves no further at once
constexpr int32_t shift_steps = 2;
constexpr float shift_max = 1.0F; ///< the shift moves no further in a step
constexpr float shift_rate = 0.1F;
constexpr float slope_floor = 0.1F;
constexpr float shift_limit = 20.0F;
constexpr float impossible = -80.0F;

/// Sums are made in lanes side by side: the compiler has instructions for that, and one order for all
/// machines.
constexpr size_t lanes = 4;

float total(const std::array<float, lanes> &sum) {
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

} // namespace

Mixer::Mixer(size_t n_contexts, size_t n_groups, size_t n_experts)
    : n_groups_(n_groups), contexts_(n_contexts), corrections_(n_contexts * n_groups),
      shifts_(n_contexts * n_groups), sums_((n_experts + lanes - 1) / lanes * lanes, impossible),
      error_(n_experts), weight_(n_experts) {
    for (Learned &learned : contexts_) learned.curvature.fill(curvature_start);
}

void Mixer::mix(size_t context, size_t group, const Features &features, size_t k, std::span<float> p) {
    const Weights &shared = contexts_[context].weights;
    const Weights &own = corrections_[slot(context, group)];
    float &start = shifts_[slot(context, group)];
    std::fill_n(sums_.begin(), p.size(), 0.0F); // the padding stays impossible
    for (size_t f = 0; f < n_features; ++f) {
        if (features[f] == nullptr) continue;
        const float w = shared[f] + own[f];
        const float *feature = features[f];
        for (size_t e = 0; e < p.size(); ++e) sums_[e] += w * feature[e];
    }
    float shift = start;
    for (int32_t i = 0; i < shift_steps; ++i) {
        std::array<float, lanes> sum{};
        std::array<float, lanes> slope{};
        for (size_t e = 0; e < sums_.size(); e += lanes) {
            for (size_t lane = 0; lane < lanes; ++lane) {
                const float chance = sigmoid(sums_[e + lane] + shift);
                sum[lane] += chance;
                slope[lane] += chance * (1.0F - chance);
            }
        }
        const float over = total(sum) - static_cast<float>(k);
        shift -= std::clamp(over / std::max(total(slope), slope_floor), -shift_max, shift_max);
    }
    for (size_t e = 0; e < p.size(); ++e) p[e] = sigmoid(sums_[e] + shift);
    start = std::clamp(start + shift_rate * (shift - start), -shift_limit, shift_limit);
}

void Mixer::observe(const Features &features, std::span<const float> p, std::span<const float> used) {
    const size_t n = p.size();
    float *error = error_.data();
    float *weight = weight_.data();
    for (size_t e = 0; e < n; ++e) {
        error[e] = p[e] - used[e];
        weight[e] = p[e] * (1.0F - p[e]);
    }
    for (size_t f = 0; f < n_features; ++f) {
        if (features[f] == nullptr) continue;
        const float *feature = features[f];
        std::array<float, lanes> slope{};
        std::array<float, lanes> curve{};
        size_t e = 0;
        for (; e + lanes <= n; e += lanes) {
            for (size_t lane = 0; lane < lanes; ++lane) {
                slope[lane] += error[e + lane] * feature[e + lane];
                curve[lane] += weight[e + lane] * feature[e + lane] * feature[e + lane];
            }
        }
        for (; e < n; ++e) {
            slope[0] += error[e] * feature[e];
            curve[0] += weight[e] * feature[e] * feature[e];
        }
        gradient_[f] += total(slope);
        curvature_[f] += total(curve);
    }
    ++n_observed_;
}

void Mixer::step(size_t context, size_t group) {
    if (n_observed_ == 0) return;
    Learned &learned = contexts_[context];
    Weights &own = corrections_[slot(context, group)];
    const float share = 1.0F / static_cast<float>(n_observed_); // a call is one step, whatever its rows
    for (size_t f = 0; f < n_features; ++f) {
        learned.curvature[f] += curvature_rate * (share * curvature_[f] - learned.curvature[f]);
        const float newton = -share * gradient_[f] / std::max(learned.curvature[f], curvature_floor);
        learned.weights[f] += std::clamp(rate * newton, -step_max, step_max);
        own[f] = keep_group * own[f] + std::clamp(group_rate * newton, -step_max, step_max);
    }
    gradient_ = {};
    curvature_ = {};
    n_observed_ = 0;
}

} // namespace spice::policy

#include "policy/mixer.h"

#include "policy/fast_math.h"

#include <algorithm>

namespace spice::policy {

namespace {

constexpr float rate = 0.01F;        ///< share of a Newton step that w takes
constexpr float group_rate = 0.01F;  ///< the same for v
constexpr float keep_group = 0.999F; ///< v decays towards none
constexpr float curvature_rate = 0.02F;
constexpr float curvature_start = 1.0F;
constexpr float curvature_floor = 0.05F;
constexpr float step_max = 0.1F; ///< a weight moves no further at once
constexpr int32_t shift_steps = 2;
constexpr float shift_max = 1.0F; ///< the shift moves no further in a step
constexpr float shift_rate = 0.1F;
constexpr float slope_floor = 0.1F;

} // namespace

Mixer::Mixer(size_t n_contexts, size_t n_groups, size_t n_experts)
    : n_groups_(n_groups), contexts_(n_contexts), corrections_(n_contexts * n_groups),
      shifts_(n_contexts * n_groups), sums_(n_experts), error_(n_experts), weight_(n_experts) {
    for (Learned &learned : contexts_) learned.curvature.fill(curvature_start);
}

void Mixer::mix(size_t context, size_t group, const Features &features, size_t k, std::span<float> p) {
    const Weights &shared = contexts_[context].weights;
    const Weights &own = corrections_[slot(context, group)];
    float &start = shifts_[slot(context, group)];
    std::fill(sums_.begin(), sums_.end(), 0.0F);
    for (size_t f = 0; f < n_features; ++f) {
        if (features[f] == nullptr) continue;
        const float w = shared[f] + own[f];
        const float *feature = features[f];
        for (size_t e = 0; e < p.size(); ++e) sums_[e] += w * feature[e];
    }
    float shift = start;
    for (int32_t i = 0;; ++i) {
        for (size_t e = 0; e < p.size(); ++e) p[e] = sigmoid(sums_[e] + shift);
        if (i == shift_steps) break;
        std::array<float, 4> sum{};
        std::array<float, 4> slope{};
        for (size_t e = 0; e < p.size(); ++e) {
            sum[e % 4] += p[e];
            slope[e % 4] += p[e] * (1.0F - p[e]);
        }
        const float over = (sum[0] + sum[1]) + (sum[2] + sum[3]) - static_cast<float>(k);
        const float rise = std::max((slope[0] + slope[1]) + (slope[2] + slope[3]), slope_floor);
        shift -= std::clamp(over / rise, -shift_max, shift_max);
    }
    start = std::clamp(start + shift_rate * (shift - start), -20.0F, 20.0F);
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
        // Four sums side by side, for which the compiler has an instruction and one order.
        std::array<float, 4> slope{};
        std::array<float, 4> curve{};
        size_t e = 0;
        for (; e + 4 <= n; e += 4) {
            for (size_t i = 0; i < 4; ++i) {
                slope[i] += error[e + i] * feature[e + i];
                curve[i] += weight[e + i] * feature[e + i] * feature[e + i];
            }
        }
        for (; e < n; ++e) {
            slope[0] += error[e] * feature[e];
            curve[0] += weight[e] * feature[e] * feature[e];
        }
        gradient_[f] += (slope[0] + slope[1]) + (slope[2] + slope[3]);
        curvature_[f] += (curve[0] + curve[1]) + (curve[2] + curve[3]);
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

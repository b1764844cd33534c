#include "sim/recorded_predictor.h"

#include <algorithm>

namespace spice::sim {

bool RecordedPredictor::predict(int32_t group, int32_t horizon, std::span<const float> /*scores*/,
                                std::span<float> out) {
    std::fill(out.begin(), out.end(), 0.0F);
    if (horizon > max_horizon_) return false;
    const auto named = static_cast<size_t>(r_.n_named);
    bool any = false;
    for (int32_t token = from_; token < to_; ++token) {
        const size_t call =
            static_cast<size_t>(group) * static_cast<size_t>(r_.n_tokens) + static_cast<size_t>(token);
        const size_t at =
            (call * static_cast<size_t>(r_.n_horizons) + static_cast<size_t>(horizon - 1)) * named;
        for (size_t i = at; i < at + named; ++i) {
            if (r_.predicted[i] < 0) continue;
            float &chance = out[static_cast<size_t>(r_.predicted[i])];
            chance = 1.0F - (1.0F - chance) * (1.0F - std::clamp(r_.chances[i], 0.0F, 1.0F));
            any = true;
        }
    }
    return any;
}

} // namespace spice::sim

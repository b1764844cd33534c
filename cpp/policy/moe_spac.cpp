#include "policy/moe_spac.h"

#include <algorithm>
#include <cmath>

namespace spice::policy::spac {

namespace {

constexpr float rate = 0.1F; ///< of the decayed mean and deviation
constexpr float c_up = 1.0F; ///< boundaries in deviations
constexpr float c_down = 1.0F;

} // namespace

int32_t next_level(int32_t level, int32_t uses, float up, float down) {
    const float difference = static_cast<float>(uses - level);
    if (difference >= up) return std::min(levels, level + 1);
    if (-difference >= down) return std::max(0, level - 1);
    return level;
}

float Boundaries::up(int32_t most) const {
    return std::clamp(c_up * deviation + nudge, 1.0F, static_cast<float>(std::max(most, 1)));
}

float Boundaries::down(int32_t most) const {
    return std::clamp(c_down * deviation, 1.0F, static_cast<float>(std::max(most, 1)));
}

void Boundaries::observe(int32_t uses) {
    const float difference = static_cast<float>(uses) - mean;
    mean += rate * difference;
    deviation += rate * (std::fabs(difference) - deviation);
}

int32_t balanced_hot(const Balance &b) {
    const double most = std::max(0, std::min({b.active, b.resident + b.loads, b.slots}));
    const double each = b.device_each + b.host_each;
    const double root = each > 0.0 ? (b.host_each * b.active - b.device_fixed) / each : most;
    const auto takes = [&](double x) {
        return std::max(x > 0.0 ? b.device_fixed + b.device_each * x : 0.0, b.host_each * (b.active - x));
    };
    const double low = std::clamp(std::floor(root), 0.0, most);
    const double high = std::clamp(std::ceil(root), 0.0, most);
    return static_cast<int32_t>(takes(high) < takes(low) ? high : low);
}

int32_t threshold(std::span<const int32_t> histogram, int32_t hot) {
    int32_t above = 0;
    for (int32_t u = levels; u >= 1; --u) {
        above += histogram[static_cast<size_t>(u)];
        if (above > hot) return u + 1;
    }
    return 1;
}

} // namespace spice::policy::spac

#include "policy/lookahead.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace spice::policy {

int32_t least_depth(double loads, double slab_bytes, double bytes_per_second, double layer_seconds,
                    int32_t l_max) {
    if (!(loads > 0.0 && slab_bytes > 0.0 && bytes_per_second > 0.0 && layer_seconds > 0.0)) return 1;
    const double layers = std::ceil(loads * slab_bytes / (bytes_per_second * layer_seconds));
    if (!(layers < l_max)) return std::max(l_max, 1); // also where it is not finite
    return std::max(static_cast<int32_t>(layers), 1);
}

float confidence(std::span<const float> chances, std::vector<float> &scratch) {
    if (chances.empty()) return 0.0F;
    float sum = 0.0F;
    for (const float p : chances) sum += p;
    const auto n = static_cast<size_t>(std::clamp(std::round(sum), 1.0F, static_cast<float>(chances.size())));
    scratch.assign(chances.begin(), chances.end());
    std::nth_element(scratch.begin(), scratch.begin() + static_cast<ptrdiff_t>(n) - 1, scratch.end(),
                     std::greater<>());
    float mass = 0.0F;
    for (size_t i = 0; i < n; ++i) mass += scratch[i];
    return std::min(mass / static_cast<float>(n), 1.0F);
}

bool look_further(const LookaheadOptions &options, int32_t depth, int32_t l_min, float confidence) {
    return depth < options.l_max && (depth < l_min || confidence >= options.tau);
}

} // namespace spice::policy

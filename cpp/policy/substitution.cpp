#include "policy/substitution.h"

#include <algorithm>
#include <cmath>

namespace spice::policy {

namespace {

/// The finaliser of SplitMix64.
uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

} // namespace

float gate_sum(std::span<const RoutedPair> row) {
    float sum = 0.0F;
    for (const RoutedPair &pair : row) sum += std::fabs(pair.gate);
    return sum;
}

size_t top_pair(std::span<const RoutedPair> row) {
    const auto best =
        std::ranges::max_element(row, {}, [](const RoutedPair &pair) { return std::fabs(pair.gate); });
    return static_cast<size_t>(best - row.begin());
}

void ForcedSubstitution::choose(int32_t layer, uint64_t n, std::span<const RoutedPair> row,
                                std::span<uint8_t> taken) const {
    const size_t top = top_pair(row);
    for (size_t i = 0; i < row.size(); ++i) {
        uint64_t lot = mix(seed_ + 0x9e3779b97f4a7c15U);
        for (const uint64_t part : {static_cast<uint64_t>(layer), n, static_cast<uint64_t>(row[i].expert)}) {
            lot = mix(lot ^ (part + 0x9e3779b97f4a7c15U));
        }
        const double drawn = static_cast<double>(lot >> 11) * 0x1p-53;
        taken[i] = i != top && row[i].candidate && drawn < static_cast<double>(share_) ? 1 : 0;
    }
}

} // namespace spice::policy

// SplitMix64 (Steele, Lea and Flood 2014), so that no library's generator matters: the same numbers
// everywhere.
#pragma once

#include <cstdint>

namespace spice::policy {

inline constexpr uint64_t split_mix_step = 0x9e3779b97f4a7c15U;

/// The generator's last stage: every bit of x decides about every bit of the result.
[[nodiscard]] constexpr uint64_t split_mix_finish(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

/// Of x, x + split_mix_step, ... the generator's sequence from the seed x.
[[nodiscard]] constexpr uint64_t split_mix(uint64_t x) {
    return split_mix_finish(x + split_mix_step);
}

} // namespace spice::policy

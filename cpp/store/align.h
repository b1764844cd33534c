// Sizes and offsets in whole units.
#pragma once

#include <cstdint>

namespace spice {

/// The smallest multiple of `unit` that is not below n; n + unit must not overflow.
[[nodiscard]] constexpr uint64_t align_up(uint64_t n, uint64_t unit) {
    return (n + unit - 1) / unit * unit;
}

} // namespace spice

// Logarithm, exponential and sigmoid of floats as plain arithmetic: the compiler can vectorise a loop of
// them, and every machine gives the same bits for them (no library call). Relative error below 1e-6.
#pragma once

#include <bit>
#include <cstdint>

namespace spice::policy {

/// Natural logarithm of a normal number above zero.
[[nodiscard]] inline float fast_log(float x) {
    constexpr int32_t sqrt_half =
        0x3f3504f3; // the bits of sqrt(1/2): the mantissa comes from [that, sqrt(2))
    const auto bits = std::bit_cast<int32_t>(x);
    const int32_t exponent = (bits - sqrt_half) >> 23;
    const float m = std::bit_cast<float>(bits - exponent * (1 << 23));
    const float s = (m - 1.0F) / (m + 1.0F); // ln(m) = 2 atanh(s), |s| < 0.172
    const float s2 = s * s;
    const float atanh = s * (1.0F + s2 * (1.0F / 3.0F + s2 * (1.0F / 5.0F + s2 * (1.0F / 7.0F))));
    return 2.0F * atanh + static_cast<float>(exponent) * 0.69314718F;
}

/// x within -bound .. bound (NaN: at a bound). A comparison of integers: compilers vectorise that, where one
/// of floats has to keep its branch for the sake of floating-point traps.
[[nodiscard]] inline float limit(float x, float bound) {
    constexpr int32_t sign = INT32_MIN;
    const auto bits = std::bit_cast<int32_t>(x);
    const int32_t size = bits & ~sign;
    const auto most = std::bit_cast<int32_t>(bound);
    return std::bit_cast<float>((size < most ? size : most) | (bits & sign));
}

/// e to the power of x, which is limited to -80 .. 80.
[[nodiscard]] inline float fast_exp(float x) {
    constexpr float to_int = 12582912.0F; // 1.5 * 2^23: adding it rounds to an integer
    x = limit(x, 80.0F);
    const float n = (x * 1.44269504F + to_int) - to_int;
    const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F; // ln 2 in two parts
    const float p =
        1.0F +
        r * (1.0F + r * (0.5F + r * (1.0F / 6.0F + r * (1.0F / 24.0F + r * (1.0F / 120.0F + r / 720.0F)))));
    return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) * (1 << 23));
}

[[nodiscard]] inline float sigmoid(float x) {
    return 1.0F / (1.0F + fast_exp(-x));
}

} // namespace spice::policy

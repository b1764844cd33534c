// MoE-SpAc's three algorithms as plain functions and values, for its strategy and the tests.
//
// Source: MoE-SpAc (arXiv 2603.09983) and its code; papers.md section 2 says what of them could be read. The
// released code has the utility levels with fixed boundaries and threshold 1; the calibration and the balance
// are written from the paper's description.
#pragma once

#include <cstdint>
#include <span>

namespace spice::policy::spac {

inline constexpr int32_t levels = 5; ///< utilities are 0 .. levels

/// The level after a verification that used the expert `uses` times: one up when uses - level reaches `up`,
/// one down when level - uses reaches `down`. The released code has up 5 and down 1 for every expert.
[[nodiscard]] int32_t next_level(int32_t level, int32_t uses, float up, float down);

/// Adaptive boundaries of one expert: a decayed mean and deviation of its uses set them, and mistakes move
/// the upper one.
struct Boundaries {
    float mean = 0.0F;
    float deviation = 0.0F;
    float nudge =
        0.0F; ///< added to `up`: more after a promotion that did not last, less after a miss just below
    [[nodiscard]] float up(int32_t most) const;   ///< 1 .. most
    [[nodiscard]] float down(int32_t most) const; ///< 1 .. most
    void observe(int32_t uses);
};

/// What the balance needs; times in seconds.
struct Balance {
    double device_fixed = 0.0; ///< a: of the device, whatever it computes
    double device_each = 0.0;  ///< b_g: of one expert on the device
    double host_each = 0.0;    ///< b_c: of one expert on the host
    int32_t active = 0;        ///< N: experts of the call
    int32_t resident = 0;      ///< r: hot ones that are on the device already
    int32_t loads = 0;         ///< what the link can bring during a draft: floor(B T_draft / S_e)
    int32_t slots = 0;         ///< that the layer may take
};

/// How many of the active experts the device should have: the integer beside the root of T_device = T_host,
/// within what link and memory allow, that has the smaller max(T_device, T_host). Constant time.
[[nodiscard]] int32_t balanced_hot(const Balance &balance);

/// The smallest level u, at least 1, with no more than `hot` experts at u or above. histogram[levels + 1]:
/// experts at each level. levels + 1 when even the highest has more.
[[nodiscard]] int32_t threshold(std::span<const int32_t> histogram, int32_t hot);

} // namespace spice::policy::spac

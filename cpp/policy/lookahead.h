// How far to look ahead: SPICE's Algorithm 1 (papers.md section 1).
//
//     for d = 1 .. l_max: predict layer l + d, queue its experts; stop once d >= l_min and C(d) < tau
//     l_min = max(1, ceil(K S_e / (B T_layer)))
//
// A load takes K S_e / B; so many layers of T_layer must pass before it is in time, whatever the confidence.
//
// Confidence. SPICE takes C = the mass of the top-k of a softmax. Our chances are calibrated and sum to about
// k, not to 1; C is the sum of the n largest of them over n, where n is the number of experts expected (their
// sum, rounded; at least 1). That is the expected share of a prefetched top-k that will be used, the same for
// softmax and sigmoid routers and for calls of several rows. Not divided by the sum of the chances: that
// would call "all equally unlikely" a confidence, too.
//
// Who calls: the runtime's Prefetcher and the simulator. Thread: any; no state. Errors: none: measurements
// that are not above zero (nothing measured yet) give the depth 1.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spice::policy {

struct LookaheadOptions {
    float tau = 0.7F;  ///< SPICE's code; as an expected share of useful loads it means much the same
    int32_t l_max = 6; ///< SPICE's code (6 to 8 in notes on the paper)
};

/// What a load costs in layers. K: loads per layer; S_e: bytes of one; B: bytes per second of the link;
/// T_layer: seconds of one layer. 1 .. l_max.
[[nodiscard]] int32_t least_depth(double loads, double slab_bytes, double bytes_per_second,
                                  double layer_seconds, int32_t l_max);

/// C of one layer's chances, 0 .. 1; `scratch` is resized to them once.
[[nodiscard]] float confidence(std::span<const float> chances, std::vector<float> &scratch);

/// Whether to go on to depth + 1 after the layer at `depth` was predicted with that confidence.
[[nodiscard]] bool look_further(const LookaheadOptions &options, int32_t depth, int32_t l_min,
                                float confidence);

} // namespace spice::policy

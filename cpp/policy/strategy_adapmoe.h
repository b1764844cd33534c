// AdapMoE's slots per layer, for its strategy and the tests.
#pragma once

#include "policy/eviction.h"

#include <vector>

namespace spice::policy {

/// Expected loads on demand of one token in a layer with `slots` of n experts cached, k used, and a prefetch
/// that is right with chance `accuracy`: the number of misses is hypergeometric, and a right prefetch saves
/// one of them.
[[nodiscard]] double adapmoe_loads(int32_t n, int32_t k, int32_t slots, double accuracy);

/// The slots of each layer that minimise the sum of adapmoe_loads(), at least 1 and at most n_experts each.
/// accuracy: by layer.
[[nodiscard]] std::vector<int32_t> adapmoe_quotas(const PoolShape &pool, const std::vector<double> &accuracy);

} // namespace spice::policy

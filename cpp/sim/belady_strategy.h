// Belady's optimum as a strategy of the simulator: the slab whose next use is farthest leaves. It knows the
// calls.
//
// Who calls: the Simulator, for the names of belady_names(). Misses are fetched, nothing is loaded ahead: a
// bound for the misses of caches that load what they miss, not for the time of strategies that let the host
// compute.
#pragma once

#include "policy/strategy.h"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace spice::sim {

/// The calls of one life, in order: groups, and the experts of each.
struct FutureUses {
    std::vector<int32_t> groups;
    std::vector<size_t> ends; ///< of the experts of each call in `experts`
    std::vector<int32_t> experts;
};

/// `per_layer`: the pool is shared out equally over the layers, else it is one.
[[nodiscard]] std::unique_ptr<policy::Strategy> make_belady(bool per_layer, const policy::PoolShape &pool,
                                                            const FutureUses &future);

[[nodiscard]] std::span<const std::string_view> belady_names();

} // namespace spice::sim

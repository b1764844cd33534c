// Which predicted experts go to a pool ahead of their layers, and what must not leave the pool for them: the
// part of the strategy `spice` that the simulator and the runtime's device tier share.
//
// Who calls: strategy_spice.cpp, and runtime/device_ahead.cpp for the pool of each device:
//     begin()                   a layer call begins: what was predicted before it no longer holds
//     add(group, horizon, ...)  for each predicted layer whose experts the pool is for, nearest first
//     plan(link, ...)           what to load, in order; it replaces what an earlier plan wanted
//     needed(id)                at any time after: must not leave for a load ahead
// Thread: one at a time. No clock, no I/O: times come from the caller, in seconds from now. Memory in the
// constructor only. Errors: none.
//
// Rule: prefetch_plan.h's, with the options given. What leaves a full pool for a load is taken to be missed
// again with the chance `victim_value`: the chance that the pool's eviction was wrong about it. An expert
// with a chance of at least p_min in any layer that was added does not leave for a load ahead, however the
// eviction rates it: layers that come no later than the load's own are among these.
#pragma once

#include "policy/eviction.h"
#include "policy/prefetch_plan.h"

#include <cstdint>
#include <span>
#include <vector>

namespace spice::policy {

/// For a pool on a device. The host can compute what is missing there, so that a late load costs more than
/// none: only what arrives in time is sent, with some room for surprises; and a load that is not used only
/// costs idle time of the link.
inline constexpr PlanOptions to_device{.p_min = 0.2F, .max_queue = 8, .share = 0.8F};
inline constexpr float device_victim_value = 0.1F;

class LoadAhead {
  public:
    LoadAhead(const PoolShape &pool, int32_t max_horizon, const PlanOptions &options, float victim_value)
        : n_experts_(static_cast<size_t>(pool.n_experts)), options_(options), victim_value_(victim_value),
          needed_(static_cast<size_t>(pool.n_groups) * n_experts_, 0),
          planner_(pool.n_experts, max_horizon, options) {}

    void begin() {
        ++call_;
        planner_.begin();
    }
    /// chances[n_experts] of the call of `group`, `horizon` calls from now, which starts in `seconds`.
    void add(int32_t group, int32_t horizon, double seconds, std::span<const float> chances,
             PrefetchPlanner::Present present);
    /// `n_free`: loads that push nothing out. Valid until the next begin().
    [[nodiscard]] std::span<const PrefetchLoad> plan(const LinkState &link,
                                                     PrefetchPlanner::SlabBytes slab_bytes, int32_t n_free);
    [[nodiscard]] bool needed(SlabId id) const { return needed_[flat(id)] == call_; }

  private:
    [[nodiscard]] size_t flat(SlabId id) const {
        return static_cast<size_t>(id.group) * n_experts_ + static_cast<size_t>(id.expert);
    }

    size_t n_experts_;
    PlanOptions options_;
    float victim_value_;
    uint64_t call_ = 1;
    std::vector<uint64_t> needed_; ///< by flat number: the last call whose predictions expect a use
    PrefetchPlanner planner_;
};

} // namespace spice::policy

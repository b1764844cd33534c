// Which predicted experts to load ahead: those that can arrive before their layer starts and are worth more
// than what they push out (SpecPrefetch's window-aware scheduler, papers.md section 4, for any horizon).
//
// Who calls: the runtime's Prefetcher after each prediction, and the simulator:
//     begin()                          the present call's predictions follow
//     add(group, horizon, chances...)  for each predicted layer, nearest first
//     plan(link, ...)                  what to load, in the order in which to issue it
// Thread: one at a time. No clock, no I/O: times come from the caller, in seconds from now. Nothing blocks;
// memory in the constructor only (n_horizons * n_experts candidates). Errors: none.
//
// Rule. A candidate is a slab that is neither resident nor on its way, with a chance of at least p_min. Its
// priority is (chance - value of what it pushes out) * seconds of its load: the stall that it is expected to
// save. In the order of priority, a candidate is taken when, with all those taken so far and what is queued
// already, every load ends before its layer starts when the link serves them by deadline; at most max_queue
// are taken. The plan is sorted by deadline, and by priority within a layer: the order in which they all
// arrive in time. With `share` above 1 a plan may hold more than can arrive: a load that is late is still
// waited for a shorter time than one that was not begun.
//
// Why these constants: measured end to end on a planted DeepSeek-V2-Lite of which 42 % fits
// (docs/prefetch.md). On a saturated link a load that is not used costs as much as one that is used saves:
// p_min 0.5. What waits is planned anew at every layer call, so a short queue loses nothing, and deep queues
// of uncertain loads do.
#pragma once

#include "policy/eviction.h"
#include "policy/function_ref.h"

#include <cstdint>
#include <span>
#include <vector>

namespace spice::policy {

struct PlanOptions {
    float p_min = 0.5F;
    int32_t max_queue = 4; ///< loads queued at a time, those queued before included
    float share = 4.0F;    ///< of the window that the plan may fill; above 1: some loads will be late
};

/// The link that the loads go over, as measured.
struct LinkState {
    double bytes_per_second = 0.0; ///< 0: not known; then nothing is planned
    double queued_bytes = 0.0;     ///< of loads that go first: demand reads and prefetches on their way
    int32_t n_queued = 0;          ///< prefetches queued or on their way
};

struct PrefetchLoad {
    SlabId id;
    int32_t horizon = 0; ///< layer calls until it is needed
    float chance = 0.0F;
    float priority = 0.0F; ///< seconds of stall that it is expected to save
};

class PrefetchPlanner {
  public:
    /// Slabs that need no load, because they are in the pool or on their way there.
    using Present = FunctionRef<bool(SlabId)>;
    /// Bytes of a slab of that group.
    using SlabBytes = FunctionRef<double(int32_t group)>;
    /// The chance that what the n-th load of this plan pushes out (n = 0, 1, ..) will be missed before it
    /// could come back for free; 0 for a free slot, 1 when nothing may leave. Must not fall with n.
    using VictimValue = FunctionRef<float(int32_t n)>;

    PrefetchPlanner(int32_t n_experts, int32_t max_horizon, const PlanOptions &options);

    void begin() { candidates_.clear(); }
    /// chances[n_experts] of the call of `group`, `horizon` calls from now, which starts in `seconds`.
    void add(int32_t group, int32_t horizon, double seconds, std::span<const float> chances, Present present);
    /// Valid until the next begin().
    [[nodiscard]] std::span<const PrefetchLoad> plan(const LinkState &link, SlabBytes slab_bytes,
                                                     VictimValue victim_value);

  private:
    [[nodiscard]] bool fits(double bytes, size_t horizon, double bytes_per_second) const;

    PlanOptions options_;
    std::vector<PrefetchLoad> candidates_;
    std::vector<PrefetchLoad> plan_;
    std::vector<double> seconds_; ///< by horizon: until its call starts
    std::vector<double> bytes_;   ///< by horizon: of what is taken for it
    double queued_ = 0.0;
};

} // namespace spice::policy

// The tiers of a simulated machine: pools, the links between them, and who gets a slot when.
//
// Fast is the device's pool, fed by `link` from memory; memory is fed by `disk` from the file, or holds
// everything. Without a device, fast is memory, and `link` is the disk's.
//
// Who calls: the Simulator, with times that never decrease. Errors: none but bugs.
#pragma once

#include "policy/strategy.h"
#include "sim/link.h"
#include "sim/simulator.h"
#include "sim/tier.h"

#include <memory>
#include <span>
#include <vector>

namespace spice::sim {

class Tiers {
  public:
    /// memory_slots 0: memory holds every expert.
    Tiers(const Machine &machine, const Model &model, const policy::PoolShape &fast, int32_t memory_slots,
          const std::string &memory_eviction);

    /// Empties the pools for another life; time and what is counted go on.
    void begin_life(std::unique_ptr<policy::Strategy> strategy);
    [[nodiscard]] policy::Strategy &strategy() { return *strategy_; }
    /// Fills the fast pool without taking time.
    void start_with(std::span<const policy::SlabId> slabs);

    /// Loads ahead go on until then.
    void advance(double until);
    /// Replaces what waits to be loaded ahead.
    void plan(std::span<const policy::SlabId> wanted, double now);
    /// Sends a slab to the fast pool when the links have nothing else to do.
    void fill(policy::SlabId id, double ready);

    // One layer call: demands of its experts, each once. Returned times are when the slab is there.
    [[nodiscard]] double memory_estimate(policy::SlabId id, double now, int32_t &reads_before) const;
    /// When the link could begin a demand.
    [[nodiscard]] double link_free(double now) const;
    [[nodiscard]] double to_memory(policy::SlabId id, double now);
    [[nodiscard]] double to_fast(policy::SlabId id, double now, double in_memory);
    /// The call begins: who is on the way is hurried, and nobody of it may leave.
    void begin_call(const policy::StrategyCall &call, double now);
    /// The slab is computed, or sent on, then; its slot may be used again within the call if need be.
    void done_in_fast(policy::SlabId id, double when) { fast_done_.push_back({when, id}); }
    void done_in_memory(policy::SlabId id, double when) { memory_done_.push_back({when, id}); }
    void end_call(const policy::StrategyCall &call);

    [[nodiscard]] Tier &fast() { return fast_; }
    [[nodiscard]] const Link &link() const { return link_; }
    [[nodiscard]] const Link &disk() const { return disk_; }
    [[nodiscard]] bool bounded_memory() const { return memory_slots_ > 0; }
    [[nodiscard]] double busy_until() const { return std::max(link_.free_at(), disk_.free_at()); }
    void count_into(SimResult &result) const;

  private:
    struct Done {
        double when = 0.0;
        policy::SlabId id;
    };
    [[nodiscard]] double bytes(policy::SlabId id) const {
        return model_.slab_bytes[static_cast<size_t>(id.group)];
    }
    void evict_fast(policy::SlabId id);
    void evict_memory(policy::SlabId id);
    [[nodiscard]] bool start_fast(const Link::Load &load, double at);
    [[nodiscard]] bool start_memory(const Link::Load &load, double at);
    [[nodiscard]] double slot_in_fast(policy::SlabId id, double now);
    [[nodiscard]] double slot_in_memory(double now);

    const Model &model_;
    int32_t memory_slots_;
    policy::PoolShape memory_shape_;
    std::string memory_eviction_name_;
    std::unique_ptr<policy::Strategy> strategy_;
    std::unique_ptr<policy::Eviction> memory_eviction_;
    Link link_;
    Link disk_;
    Tier fast_;
    Tier memory_;
    std::vector<Done> fast_done_; ///< of the present call: computed, but pinned
    std::vector<Done> memory_done_;
    std::vector<int32_t> used_in_memory_; ///< scratch
    std::vector<float> weights_in_memory_;
    size_t most_fills_;
    int64_t ahead_ = 0;
    int64_t ahead_used_ = 0;
    int64_t ahead_wasted_ = 0;
    int64_t planned_ = 0; // of these, on predictions
    int64_t planned_used_ = 0;
    int64_t planned_wasted_ = 0;
    int64_t disk_demands_ = 0;
    double link_bytes_ = 0.0;
    double disk_bytes_ = 0.0;
};

} // namespace spice::sim

#include "sim/tiers.h"

#include <algorithm>
#include <cassert>

namespace spice::sim {

using policy::SlabId;

Tiers::Tiers(const Machine &machine, const Model &model, const policy::PoolShape &fast, int32_t memory_slots,
             const std::string &memory_eviction)
    : model_(model), memory_slots_(machine.has_device ? memory_slots : 0),
      memory_shape_{fast.n_groups, fast.n_experts, memory_slots, fast.top_k},
      memory_eviction_name_(memory_eviction), link_(machine.has_device ? machine.link : machine.disk),
      disk_(machine.disk), fast_(fast.n_groups, fast.n_experts), memory_(fast.n_groups, fast.n_experts),
      most_fills_(static_cast<size_t>(2 * std::max(fast.top_k, 1))) {}

namespace {

/// A load ahead that the present call waits for is not interrupted for its other demands.
bool may_interrupt(const Link &link, const Tier &tier, double now) {
    const auto id = link.under_way(now);
    return id && !tier.pinned(*id);
}

} // namespace

void Tiers::begin_life(std::unique_ptr<policy::Strategy> strategy) {
    strategy_ = std::move(strategy);
    fast_ = Tier(memory_shape_.n_groups, memory_shape_.n_experts);
    memory_ = Tier(memory_shape_.n_groups, memory_shape_.n_experts);
    memory_eviction_ =
        memory_slots_ > 0 ? policy::make_eviction(memory_eviction_name_, memory_shape_) : nullptr;
    link_.forget();
    disk_.forget();
}

void Tiers::start_with(std::span<const SlabId> slabs) {
    for (const SlabId id : slabs) {
        if (strategy_->full(id) || fast_.present(id)) continue;
        fast_.load(id, 0.0, Ahead::no);
        strategy_->on_load(id);
    }
}

void Tiers::evict_fast(SlabId id) {
    const Ahead wasted = fast_.evict(id);
    ahead_wasted_ += wasted != Ahead::no ? 1 : 0;
    planned_wasted_ += wasted == Ahead::planned ? 1 : 0;
    strategy_->on_evict(id);
}

void Tiers::evict_memory(SlabId id) {
    memory_.evict(id);
    memory_eviction_->on_evict(id);
}

bool Tiers::start_fast(const Link::Load &load, double at) {
    if (fast_.present(load.id) || (bounded_memory() && !memory_.ready(load.id, at))) return false;
    if (strategy_->full(load.id)) {
        const auto victim =
            strategy_->victim(load.id, false, [&](SlabId id) { return fast_.evictable(id, at); });
        if (!victim || !fast_.evictable(*victim, at)) return false;
        evict_fast(*victim);
    }
    strategy_->on_load(load.id);
    fast_.load(load.id, at, load.fill ? Ahead::fill : Ahead::planned);
    ++ahead_;
    planned_ += load.fill ? 0 : 1;
    link_bytes_ += load.bytes;
    return true;
}

bool Tiers::start_memory(const Link::Load &load, double at) {
    if (memory_.present(load.id)) return false;
    if (memory_.n_present() >= memory_slots_) {
        const auto victim = memory_eviction_->victim([&](SlabId id) { return memory_.evictable(id, at); });
        if (!victim) return false;
        evict_memory(*victim);
    }
    memory_eviction_->on_load(load.id);
    memory_.load(load.id, at, Ahead::planned);
    disk_bytes_ += load.bytes;
    return true;
}

void Tiers::advance(double until) {
    if (bounded_memory()) {
        disk_.advance(
            until, [&](const Link::Load &load, double at) { return start_memory(load, at); },
            [&](SlabId id, double end) { memory_.arrives_at(id, end); });
    }
    link_.advance(
        until, [&](const Link::Load &load, double at) { return start_fast(load, at); },
        [&](SlabId id, double end) { fast_.arrives_at(id, end); });
}

void Tiers::plan(std::span<const SlabId> wanted, double now) {
    link_.clear_planned();
    disk_.clear_planned();
    for (const SlabId id : wanted) {
        if (fast_.present(id)) continue;
        if (!bounded_memory()) {
            link_.plan({id, now, bytes(id)});
        } else if (!memory_.present(id)) {
            disk_.plan({id, now, bytes(id)}); // a later plan finds it in memory and sends it on
        } else if (memory_.arrives(id) < Tier::interrupted) {
            link_.plan({id, std::max(now, memory_.arrives(id)), bytes(id)});
        }
    }
}

void Tiers::fill(SlabId id, double ready) {
    if (!fast_.present(id)) link_.fill({id, ready, bytes(id)}, most_fills_);
}

double Tiers::memory_estimate(SlabId id, double now, int32_t &reads_before) const {
    if (!bounded_memory() || memory_.ready(id, now)) return now;
    if (memory_.present(id) && memory_.arrives(id) < Tier::interrupted) return memory_.arrives(id);
    const double free =
        may_interrupt(disk_, memory_, now) ? disk_.free_for_demand(now) : std::max(now, disk_.free_at());
    return free + disk_.seconds(bytes(id)) * static_cast<double>(++reads_before);
}

double Tiers::link_free(double now) const {
    return may_interrupt(link_, fast_, now) ? link_.free_for_demand(now) : std::max(now, link_.free_at());
}

double Tiers::to_memory(SlabId id, double now) {
    if (!bounded_memory() || memory_.ready(id, now)) return now;
    if (memory_.present(id)) {
        if (disk_.is_interrupted(id)) memory_.arrives_at(id, disk_.resume(now));
        return memory_.arrives(id);
    }
    if (may_interrupt(disk_, memory_, now)) {
        if (const auto stopped = disk_.interrupt(now)) memory_.arrives_at(*stopped, Tier::interrupted);
    }
    const double slot = slot_in_memory(now);
    const double end = disk_.demand(slot, bytes(id));
    memory_eviction_->on_load(id);
    memory_.load(id, end, Ahead::no);
    memory_.pin(id, true);
    ++disk_demands_;
    disk_bytes_ += bytes(id);
    return end;
}

double Tiers::to_fast(SlabId id, double now, double in_memory) {
    if (may_interrupt(link_, fast_, now)) {
        if (const auto stopped = link_.interrupt(now)) fast_.arrives_at(*stopped, Tier::interrupted);
    }
    const double slot = slot_in_fast(id, now);
    const double end = link_.demand(std::max(in_memory, slot), bytes(id));
    strategy_->on_load(id);
    fast_.load(id, end, Ahead::no);
    fast_.pin(id, true);
    link_bytes_ += bytes(id);
    return end;
}

double Tiers::slot_in_fast(SlabId incoming, double now) {
    if (!strategy_->full(incoming)) return now;
    const auto victim =
        strategy_->victim(incoming, true, [&](SlabId id) { return fast_.evictable(id, now); });
    if (victim && fast_.evictable(*victim, now)) {
        evict_fast(*victim);
        return now;
    }
    // Every slot is taken by this call or by what is on the way: the first that is computed gives its own.
    const auto first = std::min_element(fast_done_.begin(), fast_done_.end(),
                                        [](const Done &a, const Done &b) { return a.when < b.when; });
    if (first != fast_done_.end()) {
        const Done done = *first;
        fast_done_.erase(first);
        evict_fast(done.id);
        return std::max(now, done.when);
    }
    if (const auto landing = fast_.first_loading(strategy_->split() ? incoming.group : -1)) {
        const double at = std::max(now, fast_.arrives(*landing));
        evict_fast(*landing);
        return at;
    }
    const auto abandoned = link_.abandon();
    assert(abandoned);
    evict_fast(*abandoned);
    return now;
}

double Tiers::slot_in_memory(double now) {
    if (memory_.n_present() < memory_slots_) return now;
    if (const auto victim = memory_eviction_->victim([&](SlabId id) { return memory_.evictable(id, now); })) {
        evict_memory(*victim);
        return now;
    }
    const auto first = std::min_element(memory_done_.begin(), memory_done_.end(),
                                        [](const Done &a, const Done &b) { return a.when < b.when; });
    if (first != memory_done_.end()) {
        const Done done = *first;
        memory_done_.erase(first);
        evict_memory(done.id);
        return std::max(now, done.when);
    }
    if (const auto landing = memory_.first_loading(-1)) {
        const double at = std::max(now, memory_.arrives(*landing));
        evict_memory(*landing);
        return at;
    }
    const auto abandoned = disk_.abandon();
    assert(abandoned);
    evict_memory(*abandoned);
    return now;
}

void Tiers::begin_call(const policy::StrategyCall &call, double now) {
    fast_done_.clear();
    memory_done_.clear();
    used_in_memory_.clear();
    weights_in_memory_.clear();
    for (size_t i = 0; i < call.experts.size(); ++i) {
        const SlabId id{call.group, call.experts[i]};
        if (fast_.present(id)) {
            if (link_.is_interrupted(id)) fast_.arrives_at(id, link_.resume(now));
            const Ahead used = fast_.use(id);
            ahead_used_ += used != Ahead::no ? 1 : 0;
            planned_used_ += used == Ahead::planned ? 1 : 0;
            fast_.pin(id, true);
            continue;
        }
        used_in_memory_.push_back(call.experts[i]);
        weights_in_memory_.push_back(call.weights[i]);
        if (bounded_memory() && memory_.present(id)) memory_.pin(id, true);
    }
    if (bounded_memory()) memory_eviction_->begin_call(call.group, used_in_memory_, weights_in_memory_);
}

void Tiers::end_call(const policy::StrategyCall &call) {
    for (const int32_t expert : call.experts) {
        fast_.pin({call.group, expert}, false);
        memory_.pin({call.group, expert}, false);
    }
}

void Tiers::count_into(SimResult &result) const {
    result.ahead = ahead_;
    result.ahead_used = ahead_used_;
    result.ahead_wasted = ahead_wasted_;
    result.planned = planned_;
    result.planned_used = planned_used_;
    result.planned_wasted = planned_wasted_;
    result.disk_demands = disk_demands_;
    result.link_bytes = link_bytes_;
    result.disk_bytes = disk_bytes_;
    result.link_busy = link_.busy();
    result.disk_busy = disk_.busy();
}

} // namespace spice::sim

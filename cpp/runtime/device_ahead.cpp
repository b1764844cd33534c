// Sending experts from host memory to a device ahead of their layers: what DeviceTier knows, put to the
// policy (policy/load_ahead.h), and what has come of it.
#include "runtime/device_tier.h"

#include "policy/lookahead.h"

#include <algorithm>

namespace spice {

void DeviceTier::set_up_ahead() {
    int32_t most = 0;
    for (const Engine::Group &group : engine_.groups_) most = std::max(most, group.n_expert);
    const policy::PoolShape shape{static_cast<int32_t>(groups_.size()), most,
                                  static_cast<int32_t>(plan_.n_slots), 0};
    load_ahead_.emplace(shape, policy::LookaheadOptions{}.l_max, policy::to_device,
                        policy::device_victim_value);
}

bool DeviceTier::sends_ahead() const {
    if (!plan_.asynchronous || !placement_->loads_ahead()) return false;
    int32_t resident = 0;
    for (const SizeClass &cls : classes_) resident += cls.pool.n_slots() - cls.pool.n_free();
    return resident < n_experts_;
}

int32_t DeviceTier::ahead_depth(double layer_seconds, int32_t l_max) const {
    int32_t depth = 1;
    for (size_t c = 0; c < classes_.size(); ++c) {
        const Engine::SizeClass &cls = engine_.classes_[c];
        const auto group = std::ranges::find_if(cls.groups, [&](int32_t g) { return owns(g); });
        if (group == cls.groups.end()) continue;
        const uint64_t bytes = slab_bytes(*group);
        depth = std::max(depth,
                         policy::least_depth(cls.top_k, static_cast<double>(bytes),
                                             costs_.get(bytes, false).link_bandwidth, layer_seconds, l_max));
    }
    return depth;
}

void DeviceTier::plan_ahead(std::span<const ComingCall> coming, double layer_seconds) {
    ahead_.clear();
    load_ahead_->begin();
    for (const ComingCall &call : coming) {
        if (!owns(call.group)) continue;
        const int32_t n = engine_.groups_[static_cast<size_t>(call.group)].n_expert;
        load_ahead_->add(call.group, call.horizon, call.horizon * layer_seconds,
                         call.chances.first(static_cast<size_t>(n)), [&](policy::SlabId id) {
                             return has(id.group, id.expert) || !in_host_memory(id.group, id.expert);
                         });
    }
    int32_t n_free = 0;
    for (const SizeClass &cls : classes_) n_free += cls.pool.n_free();
    const double bandwidth = costs_.get(1, false).link_bandwidth;
    const policy::LinkState link = {.bytes_per_second = bandwidth,
                                    .queued_bytes =
                                        std::max(link_free_at() - Timeline::now(), 0.0) * bandwidth,
                                    .n_queued = 0};
    const auto bytes = [this](int32_t group) { return static_cast<double>(slab_bytes(group)); };
    for (const policy::PrefetchLoad &load : load_ahead_->plan(link, bytes, n_free)) ahead_.push_back(load.id);
}

void DeviceTier::note_need(int32_t group, DeviceSlab &it) {
    const uint64_t bytes = slab_bytes(group);
    report_.needed_bytes += bytes;
    report_.absent_bytes += it.state == State::absent ? bytes : 0;
    if (!std::exchange(it.ahead, false)) return;
    const bool there = it.state == State::ready;
    (there ? counters_.prefetch_used : counters_.prefetch_late) += 1;
    (there ? report_.used_bytes : report_.late_bytes) += bytes;
}

} // namespace spice

#include "runtime/layer_call.h"

#include <algorithm>
#include <optional>
#include <string>

namespace spice {

namespace {

/// For each expert, how many rows of the batch go to it: what stands for its weight in the call.
std::vector<float> rows_of(std::span<const int32_t> ids, std::span<const int32_t> experts, int32_t n_expert) {
    std::vector<float> by_expert(static_cast<size_t>(n_expert), 0.0f);
    for (const int32_t id : ids) by_expert[static_cast<size_t>(id)] += 1.0f;
    std::vector<float> rows;
    rows.reserve(experts.size());
    for (const int32_t expert : experts) rows.push_back(by_expert[static_cast<size_t>(expert)]);
    return rows;
}

} // namespace

Status LayerCall::begin(Engine &engine, int32_t group_id, std::span<const int32_t> ids) {
    const std::lock_guard lock(engine.mutex_);
    Engine::Group &group = engine.groups_[static_cast<size_t>(group_id)];
    if (engine.plan_.n_slots == 0) return {Code::internal, "computing before the expert pool was made"};
    std::vector<int32_t> routed(ids.begin(), ids.end());
    std::ranges::sort(routed);
    routed.erase(std::unique(routed.begin(), routed.end()), routed.end());
    if (!routed.empty() && (routed.front() < 0 || routed.back() >= group.n_expert)) {
        const int32_t bad = routed.front() < 0 ? routed.front() : routed.back();
        return {Code::malformed, "layer " + std::to_string(group.layer) + ": the router chose expert " +
                                     std::to_string(bad) + " of " + std::to_string(group.n_expert) +
                                     "; the model file is damaged"};
    }

    engine_ = &engine;
    group_ = &group;
    const size_t n_parts = group.parts.size();
    const auto complete = [&](int32_t e) { return group.slabs[static_cast<size_t>(e)].complete(n_parts); };
    // Each is asked once: a read may end at any moment, and whoever was not complete must be looked after.
    const auto rest = std::ranges::stable_partition(routed, complete);
    const auto n_complete = routed.size() - rest.size();
    experts_ = std::move(routed);
    pinned_.assign(experts_.size(), false);

    engine.classes_[static_cast<size_t>(group.size_class)].eviction->begin_call(
        group.number, experts_, rows_of(ids, experts_, group.n_expert));
    engine.in_use_ = true;
    for (const int32_t id : ids) ++group.slabs[static_cast<size_t>(id)].uses;
    engine.counters_.layer_calls += 1;
    engine.counters_.expert_rows += ids.size();
    engine.counters_.experts_requested += experts_.size();
    engine.counters_.experts_missed += experts_.size() - n_complete;

    // What is there is pinned first, so that making room for the rest does not evict it.
    uint64_t moved = 0; // or would have been, without prefetching
    uint64_t missing = 0;
    for (size_t i = 0; i < experts_.size(); ++i) {
        missing += slab(i).slot < 0 ? 1 : 0;
        moved += slab(i).slot < 0 || slab(i).ahead ? 1 : 0;
        if (slab(i).slot < 0) continue;
        pin(i);
        engine.used(group, slab(i));
    }
    engine.counters_.missed_bytes += missing * engine.slab_bytes(group_id);
    constexpr double weight = 0.02; // a token or two of layers
    engine.loads_per_call_ += weight * (static_cast<double>(moved) - engine.loads_per_call_);
    for (size_t i = n_complete; i < experts_.size() && !streaming_; ++i) {
        if (slab(i).slot >= 0) continue;
        streaming_ = !engine.give_slot(group, experts_[i]);
        if (!streaming_) {
            pin(i);
            engine.counters_.slabs_read += 1;
        }
    }
    if (streaming_) return {}; // parts are asked for by next_wave
    for (size_t part = 0; part < n_parts; ++part) {
        for (size_t i = n_complete; i < experts_.size(); ++i) {
            const PartState state = slab(i).parts[part].state();
            if (state == PartState::absent || state == PartState::failed) {
                engine.request(group, experts_[i], part, Priority::demand);
            }
        }
    }
    return {};
}

LayerCall::~LayerCall() {
    if (engine_ == nullptr) return;
    const size_t n_parts = group_->parts.size();
    for (size_t i = 0; i < experts_.size(); ++i) { // nobody may take a slot that is still being written
        if (!pinned_[i]) continue;
        for (size_t part = 0; part < n_parts; ++part) (void)slab(i).parts[part].wait();
    }
    {
        const std::lock_guard lock(engine_->mutex_);
        Engine::SizeClass &cls = engine_->classes_[static_cast<size_t>(group_->size_class)];
        for (size_t i = 0; i < experts_.size(); ++i) {
            if (!pinned_[i]) continue;
            unpin(i);
            const bool failed = std::ranges::any_of(
                slab(i).parts, [](const Part &part) { return part.state() == PartState::failed; });
            if (failed && slab(i).pins == 0) engine_->evict(cls, {group_->number, experts_[i]});
        }
    }
    engine_->arrivals_.note(); // another call may wait for a slot
}

void LayerCall::pin(size_t index) {
    slab(index).pins += 1;
    pinned_[index] = true;
}

void LayerCall::unpin(size_t index) {
    slab(index).pins -= 1;
    pinned_[index] = false;
}

bool LayerCall::all_ready(size_t part) const {
    for (size_t i = 0; i < experts_.size(); ++i) {
        if (!pinned_[i] || slab(i).parts[part].state() != PartState::ready) return false;
    }
    return true;
}

bool LayerCall::wait(size_t index, size_t part) {
    const Part &wanted = slab(index).parts[part];
    if (wanted.state() == PartState::ready) return true;
    const StallClock::Wait stall(engine_->stalls_);
    const bool came = wanted.wait();
    if (!came) skipped_ = true;
    return came;
}

const std::byte *LayerCall::weights(size_t index, size_t part) const {
    return engine_->part_data(*group_, part, slab(index).slot);
}

Result<std::vector<size_t>> LayerCall::next_wave(size_t part) {
    if (part != wave_part_) {
        wave_part_ = part;
        handed_out_.assign(experts_.size(), false);
    }
    std::vector<size_t> wave;
    for (;;) {
        const uint32_t seen = engine_->arrivals_.count();
        bool open = false;
        {
            const std::lock_guard lock(engine_->mutex_);
            bool room = true;
            for (size_t i = 0; i < experts_.size(); ++i) {
                if (handed_out_[i]) continue;
                open = true;
                if (!pinned_[i]) {
                    const bool fresh = slab(i).slot < 0;
                    if (fresh && room) room = engine_->give_slot(*group_, experts_[i]);
                    if (slab(i).slot < 0) continue;
                    engine_->counters_.slabs_read += fresh ? 1 : 0;
                    pin(i);
                }
                Part &wanted = slab(i).parts[part];
                if (wanted.state() == PartState::absent) {
                    engine_->request(*group_, experts_[i], part, Priority::demand);
                }
                if (wanted.state() == PartState::failed) skipped_ = true;
                if (wanted.state() == PartState::ready) wave.push_back(i);
            }
        }
        if (skipped_) return failure();
        if (!wave.empty() || !open) break;
        const StallClock::Wait stall(engine_->stalls_);
        engine_->arrivals_.wait_past(seen);
    }
    for (const size_t i : wave) handed_out_[i] = true;
    return wave;
}

void LayerCall::wave_done(std::span<const size_t> wave) {
    if (!streaming_) return;
    const std::lock_guard lock(engine_->mutex_);
    for (const size_t i : wave) unpin(i);
}

Status LayerCall::failure() {
    if (engine_ == nullptr) return {};
    const size_t n_parts = group_->parts.size();
    bool failed = false;
    std::optional<int32_t> absent;
    for (size_t i = 0; i < experts_.size(); ++i) {
        if (!pinned_[i]) absent = experts_[i];
        for (size_t part = 0; part < n_parts && pinned_[i]; ++part) {
            const PartState state = slab(i).parts[part].state();
            if (state == PartState::absent) absent = experts_[i];
            failed = failed || state == PartState::failed;
        }
    }
    const bool lost = absent && !streaming_;
    if (failed || (skipped_ && !lost)) {
        Status error = engine_->arrivals_.take_error();
        return !error.ok() ? error
                           : Status(Code::io, "layer " + std::to_string(group_->layer) +
                                                  ": an expert could not be read; try again");
    }
    if (lost) {
        return {Code::internal, "layer " + std::to_string(group_->layer) + ": expert " +
                                    std::to_string(*absent) +
                                    " was needed and not asked for; try again, and report this"};
    }
    return {};
}

} // namespace spice

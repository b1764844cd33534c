#include "runtime/device_call.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

namespace spice {

void DeviceCall::begin(DeviceTier &tier, int32_t group_id, std::span<const int32_t> ids) {
    {
        Engine &engine = tier.engine_;
        const std::lock_guard lock(engine.mutex_);
        const Engine::Group &of = engine.groups_[static_cast<size_t>(group_id)];
        std::vector<int32_t> experts(ids.begin(), ids.end());
        std::ranges::sort(experts);
        if (experts.empty() || experts.front() < 0 || experts.back() >= of.n_expert) return;
        tier.rows_.clear();
        size_t n = 0;
        for (size_t i = 0; i < experts.size(); ++i) {
            if (n == 0 || experts[i] != experts[n - 1]) {
                experts[n++] = experts[i];
                tier.rows_.push_back(0);
            }
            tier.rows_.back() += 1;
        }
        experts.resize(n);
        // Room first: an exception later would leave pins behind.
        resident_.reserve(n);
        chunks_.reserve(n + 1);
        device_rows_.reserve(n);
        host_rows_.reserve(n);
        taken_.assign(static_cast<size_t>(of.n_expert), false);
        tier_ = &tier;
        group_ = group_id;
        DeviceTier::SizeClass &cls = tier.classes_[static_cast<size_t>(of.size_class)];
        const std::vector<float> weights(tier.rows_.begin(), tier.rows_.end());
        cls.eviction->begin_call(of.number, experts, weights);

        // What was to be sent ahead for this call and was not begun comes too late.
        std::erase_if(tier.ahead_, [&](policy::SlabId id) { return id.group == group_id; });

        const double time = Timeline::now();
        const uint64_t bytes = tier.groups_[static_cast<size_t>(group_id)].slab_bytes;
        const bool many = std::ranges::max(tier.rows_) >= DeviceCosts::many_rows;
        const policy::PlacementCosts costs = tier.costs_.get(bytes, many);
        tier.on_device_.resize(n);
        tier.in_memory_.resize(n);
        double reads = 0.0;
        const ReaderCounters disk = engine.reader_->counters();
        const double disk_rate =
            disk.busy_seconds > 0.0 ? static_cast<double>(disk.bytes) / disk.busy_seconds : 1e9;
        for (size_t i = 0; i < n; ++i) {
            DeviceTier::DeviceSlab &it = tier.slab(group_id, experts[i]);
            tier.note_need(group_id, it);
            using State = DeviceTier::State;
            tier.on_device_[i] = it.doomed                    ? policy::PlacementCall::absent
                                 : it.state == State::ready   ? 0.0
                                 : it.state == State::loading ? std::max(it.ends - time, 1e-9)
                                                              : policy::PlacementCall::absent;
            tier.in_memory_[i] = tier.in_host_memory(group_id, experts[i])
                                     ? 0.0
                                     : (reads += static_cast<double>(bytes) / disk_rate);
        }
        tier.places_.assign(n, policy::Place::host);
        const policy::PlacementCall call = {.rows = tier.rows_,
                                            .on_device = tier.on_device_,
                                            .in_memory = tier.in_memory_,
                                            .slab_bytes = bytes,
                                            .link_queued = std::max(tier.link_free_at() - time, 0.0),
                                            .prefetch_queued =
                                                static_cast<double>(tier.fills_.size() + tier.ahead_.size()) *
                                                costs.transfer(bytes)};
        tier.placement_->place(call, costs, tier.places_);

        const Asked asked = {.experts = experts,
                             .places = tier.places_,
                             .n_rows = ids.size(),
                             .costs = costs,
                             .slab_bytes = bytes};
        // What is there, or about to be, is pinned first, so that a fetch does not evict it.
        Chunk loading;
        for (size_t i = 0; i < n; ++i) {
            if (tier.places_[i] != policy::Place::device) continue;
            DeviceTier::DeviceSlab &it = tier.slab(group_id, experts[i]);
            const bool ready = it.state == DeviceTier::State::ready;
            take(i, asked, it.slot, ready ? resident_ : loading.experts);
            it.pins += 1;
            if (!ready) loading.ticket = std::max(loading.ticket, it.ticket);
            tier.counters_.hits += 1;
        }
        if (!loading.experts.empty()) chunks_.push_back(std::move(loading));
        policy::fetch_order(call, tier.places_, tier.order_);
        fetch(asked, tier.order_);
        pure_ = chunks_.empty();
        for (size_t i = 0; i < n; ++i) {
            if (taken_[static_cast<size_t>(experts[i])]) continue;
            tier.counters_.host += 1;
            host_rows_.push_back(tier.rows_[i]);
            if (tier.in_memory_[i] > 0.0) {
                host_complete_ = false;
            } else if (tier.places_[i] == policy::Place::host_fill || cls.pool.n_free() > 0) {
                // Whatever the strategy: an empty slot is of no use to anyone.
                const bool may_evict = tier.places_[i] == policy::Place::host_fill;
                if (!tier.has(group_id, experts[i])) tier.queue_fill(group_id, experts[i], may_evict);
            }
        }
        tier.counters_.calls += empty() ? 0 : 1;
    }
    for (size_t c = 0; c < chunks_.size(); ++c) {
        if (!chunks_[c].after) (void)send(c, nullptr);
    }
    if (tier.plan_.asynchronous) tier.pump();
}

void DeviceCall::take(size_t i, const Asked &asked, int32_t slot, std::vector<DeviceExpert> &to) {
    const int32_t expert = asked.experts[i];
    const int32_t rows = tier_->rows_[i];
    to.push_back({expert, slot, rows});
    taken_[static_cast<size_t>(expert)] = true;
    device_rows_.push_back(rows);
    tier_->counters_.rows += static_cast<uint64_t>(rows);
    tier_->engine_.counters_.expert_rows += static_cast<uint64_t>(rows);
    tier_->engine_.counters_.experts_requested += 1;
    tier_->engine_.groups_[static_cast<size_t>(group_)].slabs[static_cast<size_t>(expert)].uses +=
        static_cast<uint64_t>(rows);
}

void DeviceCall::fetch(const Asked &asked, std::span<const int32_t> order) {
    DeviceTier &tier = *tier_;
    const Engine::Group &of = tier.engine_.groups_[static_cast<size_t>(group_)];
    const Engine::SizeClass &numbers = tier.engine_.classes_[static_cast<size_t>(of.size_class)];
    const DevicePool &pool = tier.classes_[static_cast<size_t>(of.size_class)].pool;
    std::vector<size_t> wanted;
    for (const int32_t job : order) {
        const auto i = static_cast<size_t>(job);
        // What the host must read from disk it computes as well.
        const bool there = tier.slab(group_, asked.experts[i]).state == DeviceTier::State::absent &&
                           tier.in_memory_[i] <= 0.0;
        if (there) wanted.push_back(i);
    }
    if (wanted.empty()) return;
    const auto per_chunk = static_cast<size_t>(
        policy::fetches_per_launch(asked.costs, asked.slab_bytes, static_cast<int32_t>(wanted.size())));
    // A scan of the layer, as the eviction strategies know it, leaves the pool as it is.
    const bool scan = asked.n_rows > static_cast<size_t>(numbers.top_k) &&
                      (2 * asked.experts.size() >= static_cast<size_t>(of.n_expert) ||
                       2 * wanted.size() > static_cast<size_t>(pool.n_slots()));
    // Two chunks, but not so much of a small pool.
    const size_t ring = std::max<size_t>(std::min(2 * per_chunk, static_cast<size_t>(pool.n_slots()) / 4), 2);
    const size_t spared = scan && wanted.size() > static_cast<size_t>(pool.n_free()) ? ring : 0;
    size_t at = 0;
    for (; at < wanted.size(); ++at) {
        const int32_t expert = asked.experts[wanted[at]];
        if (spared > 0 && static_cast<size_t>(pool.n_free()) <= spared) break;
        if (!tier.give_slot(group_, expert, true)) break; // full of pinned slabs
        if (chunks_.empty() || chunks_.back().uploads.empty() || chunks_.back().experts.size() >= per_chunk) {
            chunks_.emplace_back();
        }
        DeviceTier::DeviceSlab &it = tier.slab(group_, expert);
        chunks_.back().uploads.push_back(tier.prepare(group_, expert, it.slot));
        take(wanted[at], asked, it.slot, chunks_.back().experts);
        it.pins += 1;
        tier.counters_.fetched += 1;
    }
    if (scan) fetch_through(asked, std::span(wanted).subspan(at), ring);
}

void DeviceCall::fetch_through(const Asked &asked, std::span<const size_t> wanted, size_t most) {
    DeviceTier &tier = *tier_;
    const int32_t size_class = tier.engine_.groups_[static_cast<size_t>(group_)].size_class;
    most = std::min(most, wanted.size());
    borrowed_.reserve(most);
    while (borrowed_.size() < most) {
        const std::optional<int32_t> slot = tier.take_slot(size_class, true);
        if (!slot) break;
        borrowed_.push_back(*slot);
    }
    if (borrowed_.empty()) return;
    const size_t half = std::max<size_t>(borrowed_.size() / 2, 1);
    const size_t n_halves = std::min<size_t>(borrowed_.size(), 2);
    const size_t base = chunks_.size();
    for (size_t k = 0; k < wanted.size(); ++k) {
        const size_t c = k / half;
        if (k % half == 0) {
            Chunk &chunk = chunks_.emplace_back();
            chunk.passing = true;
            if (c >= n_halves) chunk.after = base + c - n_halves;
        }
        const int32_t slot = borrowed_[c % n_halves * half + k % half];
        DeviceTier::Upload upload = tier.prepare(group_, asked.experts[wanted[k]], slot);
        upload.passing = true;
        chunks_.back().uploads.push_back(std::move(upload));
        take(wanted[k], asked, slot, chunks_.back().experts);
        tier.counters_.fetched += 1;
        tier.counters_.passed += 1;
    }
}

bool DeviceCall::is_waited_for(size_t c) const {
    return std::ranges::any_of(chunks_, [&](const Chunk &chunk) { return chunk.after == c; });
}

DeviceLink::Ticket DeviceCall::send(size_t c, ggml_backend_event_t after) {
    Chunk &chunk = chunks_[c];
    for (DeviceTier::Upload &upload : std::exchange(chunk.uploads, {})) {
        chunk.ticket = tier_->submit(std::move(upload), std::exchange(after, nullptr));
    }
    return chunk.ticket;
}

void DeviceCall::ended(const Times &times) {
    if (tier_ == nullptr) return;
    const std::lock_guard lock(tier_->engine_.mutex_);
    const uint64_t bytes = tier_->groups_[static_cast<size_t>(group_)].slab_bytes;
    tier_->counters_.wait_seconds += times.waited;
    tier_->report_.call_seconds += std::max(times.device, times.host + times.waited);
    if (Timeline &timeline = tier_->engine_.timeline_; timeline.on()) {
        const double end = Timeline::now();
        const double begin = end - std::max(times.device, times.host + times.waited);
        const auto share = [&](size_t n) {
            return "layer " + std::to_string(tier_->engine_.layer_of(group_)) + ": " + std::to_string(n) +
                   (n == 1 ? " expert" : " experts");
        };
        if (times.host > 0.0) {
            timeline.add(
                Timeline::Track::host, [&] { return share(host_rows_.size()); }, begin, begin + times.host);
        }
        if (times.device > 0.0) {
            timeline.add(
                Timeline::Track::device, [&] { return share(device_rows_.size()); }, end - times.device, end);
        }
    }
    if (host_complete_ && times.host > 0.0) tier_->costs_.host(bytes, host_rows_, times.host);
    // The end was seen when it came only if the host had to wait for it.
    const bool exact = times.waited > 0.1 * times.device;
    if (pure_ && times.device > 0.0) tier_->costs_.device(bytes, device_rows_, times.device, exact);
}

void DeviceCall::give_up() {
    if (tier_ == nullptr) return;
    {
        const std::lock_guard lock(tier_->engine_.mutex_);
        const auto rows = std::accumulate(device_rows_.begin(), device_rows_.end(), uint64_t{0});
        tier_->counters_.calls -= 1;
        tier_->counters_.rows -= rows;
        tier_->counters_.host += device_rows_.size();
        tier_->counters_.refused += 1;
        tier_->engine_.counters_.expert_rows -= rows; // the host's LayerCall counts them again
        tier_->engine_.counters_.experts_requested -= device_rows_.size();
        const auto unused = [&](const DeviceExpert &it) {
            Slab &slab =
                tier_->engine_.groups_[static_cast<size_t>(group_)].slabs[static_cast<size_t>(it.expert)];
            slab.uses -= static_cast<uint64_t>(it.rows);
        };
        std::ranges::for_each(resident_, unused);
        for (const Chunk &chunk : chunks_) std::ranges::for_each(chunk.experts, unused);
    }
    release();
}

void DeviceCall::release() {
    {
        const std::lock_guard lock(tier_->engine_.mutex_);
        const auto unpin = [&](const DeviceExpert &expert) {
            DeviceTier::DeviceSlab &it = tier_->slab(group_, expert.expert);
            it.pins -= 1;
            if (it.doomed && it.pins == 0 && it.state == DeviceTier::State::ready) {
                tier_->evict(group_, expert.expert);
            }
        };
        std::ranges::for_each(resident_, unpin);
        for (const Chunk &chunk : chunks_) {
            if (!chunk.passing) std::ranges::for_each(chunk.experts, unpin);
            for (const DeviceTier::Upload &upload : chunk.uploads) { // never sent
                tier_->unpin_host(upload.group, upload.expert);
                tier_->submitting_ -= 1;
            }
        }
        const int32_t size_class = tier_->engine_.groups_[static_cast<size_t>(group_)].size_class;
        for (const int32_t slot : borrowed_) {
            tier_->classes_[static_cast<size_t>(size_class)].pool.release(slot);
        }
    }
    DeviceTier *tier = std::exchange(tier_, nullptr);
    resident_.clear();
    chunks_.clear();
    borrowed_.clear();
    taken_.clear();
    if (!tier->plan_.asynchronous) tier->pump();
}

DeviceCall::~DeviceCall() {
    if (tier_ != nullptr) release();
}

} // namespace spice

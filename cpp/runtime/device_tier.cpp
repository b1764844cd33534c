#include "runtime/device_tier.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace spice {

namespace {

constexpr size_t max_fills = 4; // queued; more would be stale before the link gets to them

} // namespace

DeviceCounters &DeviceCounters::operator+=(const DeviceCounters &other) {
    for (const auto member :
         {&DeviceCounters::calls, &DeviceCounters::hits, &DeviceCounters::fetched, &DeviceCounters::passed,
          &DeviceCounters::host, &DeviceCounters::filled, &DeviceCounters::prefetched,
          &DeviceCounters::prefetch_used, &DeviceCounters::prefetch_late, &DeviceCounters::prefetch_wasted,
          &DeviceCounters::rows, &DeviceCounters::in_place, &DeviceCounters::evictions,
          &DeviceCounters::unfit, &DeviceCounters::refused, &DeviceCounters::resident_experts,
          &DeviceCounters::resident_bytes}) {
        this->*member += other.*member;
    }
    wait_seconds += other.wait_seconds;
    link.uploads += other.link.uploads;
    link.bytes += other.link.bytes;
    link.busy_seconds += other.link.busy_seconds;
    return *this;
}

DeviceTier::~DeviceTier() {
    {
        const std::lock_guard lock(engine_.mutex_);
        stopping_ = true;
        ahead_.clear();
        fills_.clear();
        wanted_.clear();
    }
    if (link_ != nullptr) link_->finish(); // its thread may be on the way to submit one more
}

ggml_tensor *DeviceTier::slot_tensor(const ExpertTensor &tensor) const {
    return groups_[static_cast<size_t>(tensor.group)].parts[tensor.part];
}

bool DeviceTier::has(int32_t group, int32_t expert) const {
    return groups_[static_cast<size_t>(group)].slabs[static_cast<size_t>(expert)].state != State::absent;
}

bool DeviceTier::in_host_memory(int32_t group, int32_t expert) const {
    const Engine::Group &of = engine_.groups_[static_cast<size_t>(group)];
    const Slab &host = of.slabs[static_cast<size_t>(expert)];
    return host.slot >= 0 && host.complete(of.parts.size());
}

std::optional<int32_t> DeviceTier::take_slot(int32_t size_class, bool demand) {
    SizeClass &cls = classes_[static_cast<size_t>(size_class)];
    if (const std::optional<int32_t> slot = cls.pool.take()) return slot;
    const Engine::SizeClass &numbers = engine_.classes_[static_cast<size_t>(size_class)];
    const auto group_of = [&](policy::SlabId id) { return numbers.groups[static_cast<size_t>(id.group)]; };
    const auto evictable = [&](policy::SlabId id) {
        const DeviceSlab &it = slab(group_of(id), id.expert);
        return it.pins == 0 && it.state == State::ready;
    };
    std::optional<policy::SlabId> victim = cls.eviction->victim(
        [&](policy::SlabId id) { return evictable(id) && !load_ahead_->needed({group_of(id), id.expert}); });
    if (!victim && demand) victim = cls.eviction->victim(evictable);
    if (!victim) return std::nullopt;
    evict(group_of(*victim), victim->expert);
    counters_.evictions += 1;
    return cls.pool.take();
}

bool DeviceTier::give_slot(int32_t group, int32_t expert, bool demand) {
    const Engine::Group &of = engine_.groups_[static_cast<size_t>(group)];
    const std::optional<int32_t> slot = take_slot(of.size_class, demand);
    if (!slot) return false;
    DeviceSlab &it = slab(group, expert);
    it.slot = *slot;
    it.state = State::queued;
    classes_[static_cast<size_t>(of.size_class)].eviction->on_load({of.number, expert});
    return true;
}

void DeviceTier::evict(int32_t group, int32_t expert) {
    const Engine::Group &of = engine_.groups_[static_cast<size_t>(group)];
    SizeClass &cls = classes_[static_cast<size_t>(of.size_class)];
    DeviceSlab &it = slab(group, expert);
    cls.pool.release(std::exchange(it.slot, -1));
    it.state = State::absent;
    it.doomed = false;
    if (std::exchange(it.ahead, false)) {
        counters_.prefetch_wasted += 1;
        report_.wasted_bytes += slab_bytes(group);
    }
    cls.eviction->on_evict({of.number, expert});
}

DeviceTier::Upload DeviceTier::prepare(int32_t group, int32_t expert, int32_t slot) {
    const Engine::Group &of = engine_.groups_[static_cast<size_t>(group)];
    Slab &host = of.slabs[static_cast<size_t>(expert)];
    Upload upload;
    upload.group = group;
    upload.expert = expert;
    upload.parts.reserve(of.parts.size());
    for (size_t p = 0; p < of.parts.size(); ++p) {
        const uint64_t bytes = of.parts[p]->info->stride;
        upload.parts.push_back({groups_[static_cast<size_t>(group)].parts[p],
                                static_cast<uint64_t>(slot) * bytes, engine_.part_data(of, p, host.slot),
                                bytes});
    }
    host.pins += 1;
    submitting_ += 1;
    return upload;
}

void DeviceTier::unpin_host(int32_t group, int32_t expert) {
    engine_.groups_[static_cast<size_t>(group)].slabs[static_cast<size_t>(expert)].pins -= 1;
}

double DeviceTier::link_free_at() const {
    return flights_.empty() ? 0.0 : flights_.back().ends;
}

DeviceLink::Ticket DeviceTier::submit(Upload upload, ggml_backend_event_t after) {
    const std::vector<UploadPart> parts = upload.parts;
    return link_->submit(parts, after, [&](DeviceLink::Ticket ticket) {
        const std::lock_guard lock(engine_.mutex_);
        const uint64_t bytes = groups_[static_cast<size_t>(upload.group)].slab_bytes;
        upload.ticket = ticket;
        upload.ends = std::max(Timeline::now(), link_free_at()) + costs_.get(bytes, false).transfer(bytes);
        if (!upload.passing) {
            DeviceSlab &it = slab(upload.group, upload.expert);
            it.ends = upload.ends;
            it.state = State::loading;
            it.ticket = ticket;
        }
        submitting_ -= 1;
        flights_.push_back(std::move(upload));
    });
}

void DeviceTier::uploaded(DeviceLink::Ticket ticket, double begun, double ended) {
    {
        const std::lock_guard lock(engine_.mutex_);
        const auto it = std::ranges::find(flights_, ticket, &Upload::ticket);
        if (it == flights_.end()) return;
        const Upload upload = std::move(*it);
        flights_.erase(it);
        if (!upload.passing) {
            DeviceSlab &there = slab(upload.group, upload.expert);
            there.state = State::ready;
            if (there.doomed && there.pins == 0) evict(upload.group, upload.expert);
        }
        unpin_host(upload.group, upload.expert);
        if (engine_.timeline_.on()) {
            constexpr std::array<const char *, 3> why = {"fetch", "fill", "ahead"};
            const auto name = [&] {
                return std::string(why[static_cast<size_t>(upload.why)]) + " layer " +
                       std::to_string(engine_.layer_of(upload.group)) + " expert " +
                       std::to_string(upload.expert);
            };
            engine_.timeline_.add(Timeline::Track::upload, name, begun, ended);
        }
        costs_.link(groups_[static_cast<size_t>(upload.group)].slab_bytes, ended - begun);
    }
    engine_.arrivals_.note(); // a layer call may wait for the host slot
    if (plan_.asynchronous) pump();
}

void DeviceTier::queue_fill(int32_t group, int32_t expert, bool may_evict) {
    if (fills_.size() < max_fills) fills_.push_back({group, expert, may_evict});
}

void DeviceTier::want(int32_t group, int32_t expert) {
    const SizeClass &cls =
        classes_[static_cast<size_t>(engine_.groups_[static_cast<size_t>(group)].size_class)];
    if (wanted_.size() < static_cast<size_t>(cls.pool.n_free())) wanted_.push_back({group, expert, false});
}

bool DeviceTier::begin_fill(const Fill &fill, Upload &upload) {
    const auto [group, expert, may_evict] = fill;
    const SizeClass &cls =
        classes_[static_cast<size_t>(engine_.groups_[static_cast<size_t>(group)].size_class)];
    if (!may_evict && cls.pool.n_free() == 0) return false; // others were quicker
    if (!begin_unasked({group, expert}, Why::fill, upload)) return false;
    counters_.filled += 1;
    return true;
}

bool DeviceTier::begin_unasked(policy::SlabId id, Why why, Upload &upload) {
    if (slab(id.group, id.expert).state != State::absent || !in_host_memory(id.group, id.expert) ||
        !give_slot(id.group, id.expert, false)) {
        return false; // or everything is in use
    }
    upload = prepare(id.group, id.expert, slab(id.group, id.expert).slot);
    upload.why = why;
    return true;
}

void DeviceTier::pump() {
    Upload upload;
    {
        const std::lock_guard lock(engine_.mutex_);
        if (stopping_ || !flights_.empty() || submitting_ > 0) return;
        bool found = false;
        while (!found && !ahead_.empty()) {
            const policy::SlabId id = ahead_.front();
            ahead_.pop_front();
            found = begin_unasked(id, Why::ahead, upload);
            if (!found) continue;
            slab(id.group, id.expert).ahead = true;
            counters_.prefetched += 1;
        }
        for (std::deque<Fill> *queue : {&fills_, &wanted_}) {
            while (!found && !queue->empty()) {
                found = begin_fill(queue->front(), upload);
                queue->pop_front();
            }
        }
        if (!found) return;
    }
    (void)submit(std::move(upload), nullptr);
}

void DeviceTier::forget() {
    const std::lock_guard lock(engine_.mutex_);
    for (size_t g = 0; g < groups_.size(); ++g) {
        for (size_t e = 0; e < groups_[g].slabs.size(); ++e) {
            DeviceSlab &it = groups_[g].slabs[e];
            it.doomed = it.state != State::absent;
            if (it.state == State::ready && it.pins == 0) {
                evict(static_cast<int32_t>(g), static_cast<int32_t>(e));
            }
        }
    }
}

Result<ggml_tensor *> DeviceTier::on_device(const ggml_tensor &weight, int64_t n) {
    const std::lock_guard lock(beside_mutex_);
    Beside &it = beside_[weight.data];
    if (it.tensor != nullptr) return it.tensor;
    it.context.reset(
        ggml_init({.mem_size = ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true}));
    if (it.context == nullptr) return Status(Code::out_of_memory, "no memory for a tensor");
    ggml_tensor *tensor = ggml_new_tensor_2d(it.context.get(), GGML_TYPE_F32, n, ggml_nelements(&weight) / n);
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device_);
    it.buffer.reset(ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, tensor)));
    if (it.buffer == nullptr ||
        ggml_backend_tensor_alloc(it.buffer.get(), tensor, ggml_backend_buffer_get_base(it.buffer.get())) !=
            GGML_STATUS_SUCCESS) {
        return Status(Code::out_of_memory, plan_.device + " has no room for an expert's bias");
    }
    ggml_backend_buffer_set_usage(it.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(tensor, weight.data, 0, ggml_nbytes(tensor));
    it.tensor = tensor;
    return tensor;
}

void DeviceTier::count_unfit() {
    const std::lock_guard lock(engine_.mutex_);
    counters_.unfit += 1;
}

void DeviceTier::count_in_place() {
    const std::lock_guard lock(engine_.mutex_);
    counters_.in_place += 1;
}

void DeviceTier::count_refused() {
    const std::lock_guard lock(engine_.mutex_);
    counters_.refused += 1;
}

DeviceCounters DeviceTier::counters() const {
    const std::lock_guard lock(engine_.mutex_);
    DeviceCounters counters = counters_;
    counters.link = link_->counters();
    for (const SizeClass &cls : classes_) {
        if (cls.pool.n_slots() == 0) continue;
        const auto n = static_cast<uint64_t>(cls.pool.n_slots() - cls.pool.n_free());
        counters.resident_experts += n;
        counters.resident_bytes += n * cls.pool.device_bytes() / static_cast<uint64_t>(cls.pool.n_slots());
    }
    return counters;
}

void DeviceTier::reset_counters() {
    const std::lock_guard lock(engine_.mutex_);
    counters_ = {};
    link_->reset_counters();
}

} // namespace spice

#include "runtime/device_tier.h"

#include "runtime/device_probe.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>

namespace spice {

namespace {

constexpr int32_t min_slots = 2; // one that is computed and one that is sent
constexpr size_t max_fills = 4;  // queued; more would be stale before the link gets to them

DevicePartShape shape_of(const ExpertPart &part) {
    return {static_cast<ggml_type>(part.ggml_type), part.n_in, part.n_out};
}

/// Does the device that was given these layers own this one?
bool is_owned(int32_t layer, std::span<const int32_t> layers) {
    return layers.empty() || std::ranges::find(layers, layer) != layers.end();
}

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

ggml_backend_dev_t DeviceTier::find_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
}

Status Engine::build_device_pool(ggml_backend_dev_t device, std::span<const int32_t> layers, uint64_t budget,
                                 const std::string &placement, int32_t n_threads) {
    if (plan_.n_slots == 0) return {Code::internal, "a device pool before the expert pool"};
    auto made = DeviceTier::make(*this, device, layers, budget, placement);
    if (!made.ok()) return made.status();
    std::unique_ptr<DeviceTier> tier = made.take();
    std::vector<DeviceTier *> owners = owners_;
    owners.resize(groups_.size(), nullptr);
    for (size_t g = 0; g < groups_.size(); ++g) {
        if (!tier->owns(static_cast<int32_t>(g))) continue;
        if (owners[g] != nullptr) return {Code::internal, "the device pool is there already"};
        owners[g] = tier.get();
    }
    if (n_threads > 0) tier->probe(n_threads);
    owners_ = std::move(owners);
    devices_.push_back(std::move(tier));
    return {};
}

std::vector<DeviceTier::ClassNeeds> DeviceTier::class_needs(const Engine &engine,
                                                            ggml_backend_buffer_type_t type,
                                                            std::span<const int32_t> layers) {
    std::vector<ClassNeeds> needs(engine.classes_.size());
    for (const Engine::Group &group : engine.groups_) {
        if (!is_owned(group.layer, layers)) continue;
        ClassNeeds &cls = needs[static_cast<size_t>(group.size_class)];
        cls.n_experts += group.n_expert;
        cls.shapes.resize(group.parts.size());
        for (size_t p = 0; p < group.parts.size(); ++p) {
            const DevicePartShape shape = shape_of(*group.parts[p]->info);
            const bool known = std::ranges::any_of(cls.shapes[p], [&](const DevicePartShape &other) {
                return other.type == shape.type && other.n_in == shape.n_in && other.n_out == shape.n_out;
            });
            if (!known) cls.shapes[p].push_back(shape);
        }
    }
    for (ClassNeeds &cls : needs) {
        if (cls.n_experts == 0) continue;
        cls.most = std::min(cls.n_experts, DevicePool::most_slots(type, cls.shapes));
        cls.least = std::min(min_slots, cls.most);
    }
    return needs;
}

DevicePlan DeviceTier::needs(const Engine &engine, ggml_backend_dev_t device,
                             std::span<const int32_t> layers) {
    DevicePlan plan;
    if (device == nullptr) return plan;
    plan.device = ggml_backend_dev_name(device);
    plan.description = ggml_backend_dev_description(device);
    ggml_backend_dev_props properties = {};
    ggml_backend_dev_get_props(device, &properties);
    plan.asynchronous = properties.caps.async && properties.caps.events;
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    for (const ClassNeeds &cls : class_needs(engine, type, layers)) {
        plan.smallest += DevicePool::bytes(type, cls.shapes, cls.least);
        plan.everything += DevicePool::bytes(type, cls.shapes, cls.most);
    }
    return plan;
}

Result<std::unique_ptr<DeviceTier>> DeviceTier::make(Engine &engine, ggml_backend_dev_t device,
                                                     std::span<const int32_t> layers, uint64_t budget,
                                                     const std::string &placement) {
    std::unique_ptr<DeviceTier> tier(new DeviceTier(engine));
    tier->device_ = device;
    tier->plan_ = needs(engine, device, layers);
    const auto names = policy::placement_names();
    tier->plan_.placement = placement.empty() ? std::string(names.front()) : placement;
    tier->placement_ = policy::make_placement(tier->plan_.placement);
    if (tier->placement_ == nullptr) {
        std::string known;
        for (const std::string_view name : names) known += " " + std::string(name);
        return Status(Code::unsupported, "no placement strategy is called '" + tier->plan_.placement +
                                             "'; choose one of:" + known);
    }
    DevicePlan &plan = tier->plan_;
    if (budget < plan.smallest) {
        return Status(Code::budget, "a vram_budget of " + std::to_string(budget) +
                                        " bytes is too small for experts on " + plan.device +
                                        "; give at least " + std::to_string(plan.smallest) +
                                        ", or 0 for none");
    }
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    const std::vector<ClassNeeds> all = class_needs(engine, type, layers);
    for (size_t c = 0; c < all.size(); ++c) {
        const ClassNeeds &cls = all[c];
        SizeClass &made = tier->classes_.emplace_back();
        if (cls.n_experts == 0) continue;
        // Its least and, of the rest, its share of what all could use; never more than the budget.
        const uint64_t floor = DevicePool::bytes(type, cls.shapes, cls.least);
        const uint64_t wish = DevicePool::bytes(type, cls.shapes, cls.most) - floor;
        const double share = static_cast<double>(wish) /
                             static_cast<double>(std::max<uint64_t>(plan.everything - plan.smallest, 1));
        const uint64_t room =
            floor + (budget >= plan.everything
                         ? wish
                         : static_cast<uint64_t>(static_cast<double>(budget - plan.smallest) * share));
        int32_t low = cls.least;
        for (int32_t high = cls.most; low < high;) { // the most slots that fit
            const int32_t middle = low + (high - low + 1) / 2;
            if (DevicePool::bytes(type, cls.shapes, middle) <= room)
                low = middle;
            else
                high = middle - 1;
        }
        Result<DevicePool> pool = DevicePool::make(type, cls.shapes, low);
        if (!pool.ok()) return pool.status();
        made.pool = pool.take();
        const Engine::SizeClass &of = engine.classes_[c];
        made.eviction = policy::make_eviction(
            engine.plan_.eviction, {static_cast<int32_t>(of.groups.size()), of.max_experts, low, of.top_k});
        plan.n_slots += low;
        plan.budget += made.pool.device_bytes();
        tier->n_experts_ += cls.n_experts;
    }
    for (const Engine::Group &of : engine.groups_) {
        Group &group = tier->groups_.emplace_back();
        if (!is_owned(of.layer, layers)) continue;
        group.slabs.resize(static_cast<size_t>(of.n_expert));
        for (size_t p = 0; p < of.parts.size(); ++p) {
            auto tensor = tier->classes_[static_cast<size_t>(of.size_class)].pool.part_tensor(
                p, shape_of(*of.parts[p]->info));
            if (!tensor.ok()) return tensor.status();
            group.parts.push_back(tensor.value());
            group.slab_bytes += of.parts[p]->info->stride;
        }
    }
    tier->set_up_ahead();
    tier->link_ =
        DeviceLink::make(device, [it = tier.get()](DeviceLink::Ticket ticket, double begun, double ended) {
            it->uploaded(ticket, begun, ended);
        });
    if (tier->link_ == nullptr) {
        return Status(Code::out_of_memory, plan.device + " gave no stream for copies; give vram_budget=0");
    }
    return tier;
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

void DeviceTier::probe(int32_t n_threads) {
    size_t largest = 0;
    for (size_t c = 1; c < classes_.size(); ++c) {
        if (classes_[c].pool.device_bytes() > classes_[largest].pool.device_bytes()) largest = c;
    }
    const Engine::SizeClass &of = engine_.classes_[largest];
    const auto group = std::ranges::find_if(of.groups, [&](int32_t g) { return owns(g); });
    if (group == of.groups.end() || of.pool.n_free() < of.pool.n_slots()) return;
    const Engine::Group &layer = engine_.groups_[static_cast<size_t>(*group)];
    const Group &there = groups_[static_cast<size_t>(*group)];
    ProbePlace place = {.device = there.parts,
                        .host = {},
                        .host_stride = of.pool.stride(),
                        .n_device = classes_[largest].pool.n_slots(),
                        .n_host = of.pool.n_slots(),
                        .top_k = of.top_k,
                        .slab_bytes = there.slab_bytes};
    for (size_t p = 0; p < there.parts.size(); ++p) place.host.push_back(engine_.part_data(layer, p, 0));
    probe_costs(device_, place, n_threads, costs_);
    const policy::PlacementCosts costs = costs_.get(there.slab_bytes, false);
    const auto bytes = static_cast<double>(there.slab_bytes);
    plan_.link_speed = costs.link_bandwidth;
    plan_.device_speed = bytes / costs.device.at(1);
    plan_.host_speed = bytes / costs.host.at(1);
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
            engine_.timeline_.add(Timeline::Track::upload,
                                  std::string(why[static_cast<size_t>(upload.why)]) + " layer " +
                                      std::to_string(engine_.layer_of(upload.group)) + " expert " +
                                      std::to_string(upload.expert),
                                  begun, ended);
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

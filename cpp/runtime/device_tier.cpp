#include "runtime/device_tier.h"

#include <algorithm>
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

} // namespace

ggml_backend_dev_t DeviceTier::find_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
}

std::vector<std::vector<std::vector<DevicePartShape>>> Engine::device_shapes() const {
    std::vector<std::vector<std::vector<DevicePartShape>>> shapes(classes_.size());
    for (size_t c = 0; c < classes_.size(); ++c) {
        shapes[c].resize(classes_[c].part_bytes.size());
        for (const int32_t group : classes_[c].groups) {
            const Group &of = groups_[static_cast<size_t>(group)];
            for (size_t p = 0; p < of.parts.size(); ++p) {
                const DevicePartShape shape = shape_of(*of.parts[p]->info);
                const bool known = std::ranges::any_of(shapes[c][p], [&](const DevicePartShape &other) {
                    return other.type == shape.type && other.n_in == shape.n_in && other.n_out == shape.n_out;
                });
                if (!known) shapes[c][p].push_back(shape);
            }
        }
    }
    return shapes;
}

Status Engine::build_device_pool(ggml_backend_dev_t device, uint64_t budget, const std::string &placement) {
    if (plan_.n_slots == 0) return {Code::internal, "a device pool before the expert pool"};
    if (device_ != nullptr) return {Code::internal, "the device pool is there already"};
    auto tier = DeviceTier::make(*this, device, budget, placement);
    if (!tier.ok()) return tier.status();
    device_ = tier.take();
    return {};
}

DevicePlan DeviceTier::needs(const Engine &engine, ggml_backend_dev_t device) {
    DevicePlan plan;
    if (device == nullptr) return plan;
    plan.device = ggml_backend_dev_name(device);
    plan.description = ggml_backend_dev_description(device);
    ggml_backend_dev_props properties = {};
    ggml_backend_dev_get_props(device, &properties);
    plan.asynchronous = properties.caps.async && properties.caps.events;
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    const auto shapes = engine.device_shapes();
    for (size_t c = 0; c < shapes.size(); ++c) {
        const auto all = static_cast<int32_t>(engine.classes_[c].n_experts);
        const int32_t most = std::min(all, DevicePool::most_slots(type, shapes[c]));
        plan.smallest += DevicePool::bytes(type, shapes[c], std::min(min_slots, all));
        plan.everything += DevicePool::bytes(type, shapes[c], most);
    }
    return plan;
}

Result<std::unique_ptr<DeviceTier>> DeviceTier::make(Engine &engine, ggml_backend_dev_t device,
                                                     uint64_t budget, const std::string &placement) {
    std::unique_ptr<DeviceTier> tier(new DeviceTier(engine));
    tier->device_ = device;
    tier->plan_ = needs(engine, device);
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
    const auto shapes = engine.device_shapes();
    for (size_t c = 0; c < shapes.size(); ++c) {
        const Engine::SizeClass &of = engine.classes_[c];
        const int32_t most =
            std::min(static_cast<int32_t>(of.n_experts), DevicePool::most_slots(type, shapes[c]));
        const int32_t least = std::min(min_slots, most);
        // Its least and, of the rest, its share of what all could use; never more than the budget.
        const uint64_t floor = DevicePool::bytes(type, shapes[c], least);
        const uint64_t wish = DevicePool::bytes(type, shapes[c], most) - floor;
        const double share = static_cast<double>(wish) /
                             static_cast<double>(std::max<uint64_t>(plan.everything - plan.smallest, 1));
        const uint64_t room =
            floor + (budget >= plan.everything
                         ? wish
                         : static_cast<uint64_t>(static_cast<double>(budget - plan.smallest) * share));
        int32_t low = least;
        for (int32_t high = most; low < high;) { // the most slots that fit
            const int32_t middle = low + (high - low + 1) / 2;
            if (DevicePool::bytes(type, shapes[c], middle) <= room)
                low = middle;
            else
                high = middle - 1;
        }
        Result<DevicePool> pool = DevicePool::make(type, shapes[c], low);
        if (!pool.ok()) return pool.status();
        SizeClass &cls = tier->classes_.emplace_back();
        cls.pool = pool.take();
        cls.eviction = policy::make_eviction(
            engine.plan_.eviction, {static_cast<int32_t>(of.groups.size()), of.max_experts, low, of.top_k});
        plan.n_slots += low;
        plan.budget += cls.pool.device_bytes();
    }
    for (const Engine::Group &of : engine.groups_) {
        Group &group = tier->groups_.emplace_back();
        group.slabs.resize(static_cast<size_t>(of.n_expert));
        for (size_t p = 0; p < of.parts.size(); ++p) {
            auto tensor = tier->classes_[static_cast<size_t>(of.size_class)].pool.part_tensor(
                p, shape_of(*of.parts[p]->info));
            if (!tensor.ok()) return tensor.status();
            group.parts.push_back(tensor.value());
            group.slab_bytes += of.parts[p]->info->stride;
        }
    }
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
        fills_.clear();
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

bool DeviceTier::give_slot(int32_t group, int32_t expert) {
    const Engine::Group &of = engine_.groups_[static_cast<size_t>(group)];
    SizeClass &cls = classes_[static_cast<size_t>(of.size_class)];
    std::optional<int32_t> slot = cls.pool.take();
    if (!slot) {
        const Engine::SizeClass &numbers = engine_.classes_[static_cast<size_t>(of.size_class)];
        const auto evictable = [&](policy::SlabId id) {
            const DeviceSlab &it = slab(numbers.groups[static_cast<size_t>(id.group)], id.expert);
            return it.pins == 0 && it.state == State::ready;
        };
        const std::optional<policy::SlabId> victim = cls.eviction->victim(evictable);
        if (!victim) return false;
        evict(numbers.groups[static_cast<size_t>(victim->group)], victim->expert);
        counters_.evictions += 1;
        slot = cls.pool.take();
    }
    DeviceSlab &it = slab(group, expert);
    it.slot = *slot;
    it.state = State::queued;
    it.doomed = false;
    cls.eviction->on_load({of.number, expert});
    return true;
}

void DeviceTier::evict(int32_t group, int32_t expert) {
    const Engine::Group &of = engine_.groups_[static_cast<size_t>(group)];
    SizeClass &cls = classes_[static_cast<size_t>(of.size_class)];
    DeviceSlab &it = slab(group, expert);
    cls.pool.release(std::exchange(it.slot, -1));
    it.state = State::absent;
    it.doomed = false;
    cls.eviction->on_evict({of.number, expert});
}

DeviceTier::Upload DeviceTier::prepare(int32_t group, int32_t expert) {
    const Engine::Group &of = engine_.groups_[static_cast<size_t>(group)];
    Slab &host = of.slabs[static_cast<size_t>(expert)];
    host.pins += 1;
    Upload upload{.group = group, .expert = expert, .fill = false, .ticket = 0, .parts = {}};
    for (size_t p = 0; p < of.parts.size(); ++p) {
        const uint64_t bytes = of.parts[p]->info->stride;
        upload.parts.push_back({groups_[static_cast<size_t>(group)].parts[p],
                                static_cast<uint64_t>(slab(group, expert).slot) * bytes,
                                engine_.part_data(of, p, host.slot), bytes});
    }
    submitting_ += 1;
    return upload;
}

void DeviceTier::unpin_host(int32_t group, int32_t expert) {
    engine_.groups_[static_cast<size_t>(group)].slabs[static_cast<size_t>(expert)].pins -= 1;
}

double DeviceTier::link_free_at() const {
    return flights_.empty() ? 0.0
                            : groups_[static_cast<size_t>(flights_.back().group)]
                                  .slabs[static_cast<size_t>(flights_.back().expert)]
                                  .ends;
}

void DeviceTier::submit(Upload upload) {
    const std::vector<UploadPart> parts = upload.parts;
    link_->submit(parts, [&](DeviceLink::Ticket ticket) {
        const std::lock_guard lock(engine_.mutex_);
        DeviceSlab &it = slab(upload.group, upload.expert);
        const uint64_t bytes = groups_[static_cast<size_t>(upload.group)].slab_bytes;
        it.ends = std::max(Timeline::now(), link_free_at()) + costs_.get(bytes, false).transfer(bytes);
        it.state = State::loading;
        upload.ticket = ticket;
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
        DeviceSlab &there = slab(upload.group, upload.expert);
        there.state = State::ready;
        if (there.doomed && there.pins == 0) evict(upload.group, upload.expert);
        unpin_host(upload.group, upload.expert);
        if (engine_.timeline_.on()) {
            engine_.timeline_.add(Timeline::Track::upload,
                                  std::string(upload.fill ? "fill" : "fetch") + " layer " +
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

void DeviceTier::pump() {
    Upload upload;
    {
        const std::lock_guard lock(engine_.mutex_);
        if (stopping_ || !flights_.empty() || submitting_ > 0) return;
        bool found = false;
        while (!found && !fills_.empty()) {
            const auto [group, expert, may_evict] = fills_.front();
            fills_.pop_front();
            const SizeClass &cls =
                classes_[static_cast<size_t>(engine_.groups_[static_cast<size_t>(group)].size_class)];
            if (!may_evict && cls.pool.n_free() == 0) continue; // others were quicker
            // Else it may be stale, or everything is in use.
            found = slab(group, expert).state == State::absent && in_host_memory(group, expert) &&
                    give_slot(group, expert);
            if (found) upload = prepare(group, expert);
        }
        if (!found) return;
        upload.fill = true;
        counters_.filled += 1;
    }
    submit(std::move(upload));
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

void DeviceTier::count_unfit() {
    const std::lock_guard lock(engine_.mutex_);
    counters_.unfit += 1;
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

void DeviceCall::begin(DeviceTier &tier, int32_t group_id, std::span<const int32_t> ids) {
    std::vector<DeviceTier::Upload> uploads;
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
        for (auto *list : {&resident_, &late_}) list->reserve(n);
        for (auto *list : {&device_rows_, &host_rows_}) list->reserve(n);
        uploads.reserve(n);
        tier_ = &tier;
        group_ = group_id;
        DeviceTier::SizeClass &cls = tier.classes_[static_cast<size_t>(of.size_class)];
        const std::vector<float> weights(tier.rows_.begin(), tier.rows_.end());
        cls.eviction->begin_call(of.number, experts, weights);

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
            const DeviceTier::DeviceSlab &it = tier.slab(group_id, experts[i]);
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
                                            .prefetch_queued = static_cast<double>(tier.fills_.size()) *
                                                               costs.transfer(bytes)};
        tier.placement_->place(call, costs, tier.places_);

        const auto take = [&](size_t i, std::vector<DeviceExpert> &to) {
            DeviceTier::DeviceSlab &it = tier.slab(group_id, experts[i]);
            it.pins += 1;
            to.push_back({experts[i], it.slot});
            device_rows_.push_back(tier.rows_[i]);
            tier.counters_.rows += static_cast<uint64_t>(tier.rows_[i]);
            engine.counters_.expert_rows += static_cast<uint64_t>(tier.rows_[i]);
            engine.counters_.experts_requested += 1;
        };
        // What is there is pinned first, so that a fetch does not evict it.
        for (size_t i = 0; i < n; ++i) {
            if (tier.places_[i] != policy::Place::device) continue;
            const bool ready = tier.on_device_[i] <= 0.0;
            take(i, ready ? resident_ : late_);
            pure_ = pure_ && ready;
            tier.counters_.hits += 1;
        }
        policy::fetch_order(call, tier.places_, tier.order_);
        for (const int32_t job : tier.order_) {
            const auto i = static_cast<size_t>(job);
            // What the host must read from disk it computes as well, and a pool may be full of pinned slabs.
            if (tier.in_memory_[i] > 0.0 ||
                tier.slab(group_id, experts[i]).state != DeviceTier::State::absent ||
                !tier.give_slot(group_id, experts[i])) {
                tier.places_[i] = policy::Place::host;
                continue;
            }
            uploads.push_back(tier.prepare(group_id, experts[i]));
            take(i, late_);
            pure_ = false;
            tier.counters_.fetched += 1;
        }
        for (size_t i = 0; i < n; ++i) {
            if (tier.places_[i] != policy::Place::host && tier.places_[i] != policy::Place::host_fill)
                continue;
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
    for (DeviceTier::Upload &upload : uploads) tier.submit(std::move(upload));
    if (tier.plan_.asynchronous) tier.pump();
}

bool DeviceCall::takes(int32_t expert) const {
    const auto is = [&](const DeviceExpert &it) { return it.expert == expert; };
    return std::ranges::any_of(resident_, is) || std::ranges::any_of(late_, is);
}

void DeviceCall::ended(const Times &times) {
    if (tier_ == nullptr) return;
    const std::lock_guard lock(tier_->engine_.mutex_);
    const uint64_t bytes = tier_->groups_[static_cast<size_t>(group_)].slab_bytes;
    tier_->counters_.wait_seconds += times.waited;
    if (Timeline &timeline = tier_->engine_.timeline_; timeline.on()) {
        const double end = Timeline::now();
        const double begin = end - std::max(times.device, times.host + times.waited);
        const std::string layer = "layer " + std::to_string(tier_->engine_.layer_of(group_)) + ": ";
        const auto experts = [](size_t n) { return std::to_string(n) + (n == 1 ? " expert" : " experts"); };
        if (times.host > 0.0) {
            timeline.add(Timeline::Track::host, layer + experts(host_rows_.size()), begin,
                         begin + times.host);
        }
        if (times.device > 0.0) {
            timeline.add(Timeline::Track::device, layer + experts(device_rows_.size()), end - times.device,
                         end);
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
    }
    release();
}

void DeviceCall::release() {
    {
        const std::lock_guard lock(tier_->engine_.mutex_);
        for (const auto *experts : {&resident_, &late_}) {
            for (const DeviceExpert &expert : *experts) {
                DeviceTier::DeviceSlab &it = tier_->slab(group_, expert.expert);
                it.pins -= 1;
                if (it.doomed && it.pins == 0 && it.state == DeviceTier::State::ready) {
                    tier_->evict(group_, expert.expert);
                }
            }
        }
    }
    DeviceTier *tier = std::exchange(tier_, nullptr);
    resident_.clear();
    late_.clear();
    if (!tier->plan_.asynchronous) tier->pump();
}

DeviceCall::~DeviceCall() {
    if (tier_ != nullptr) release();
}

} // namespace spice

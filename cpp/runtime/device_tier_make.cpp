// Making a DeviceTier: what its pool would need, how a budget is shared out, and the probe.
#include "runtime/device_probe.h"
#include "runtime/device_tier.h"

#include <algorithm>
#include <string>
#include <utility>

namespace spice {

namespace {

constexpr int32_t min_slots = 2; // one that is computed and one that is sent

DevicePartShape shape_of(const ExpertPart &part) {
    return {static_cast<ggml_type>(part.ggml_type), part.n_in, part.n_out};
}

/// Does the device that was given these layers own this one?
bool is_owned(int32_t layer, std::span<const int32_t> layers) {
    return layers.empty() || std::ranges::find(layers, layer) != layers.end();
}

} // namespace

ggml_backend_dev_t DeviceTier::find_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
}

Status Engine::build_device_pool(ggml_backend_dev_t device, std::span<const int32_t> layers, uint64_t budget,
                                 const std::string &placement, int32_t n_threads) {
    if (plan_.n_slots == 0) return {Code::internal, "a device pool before the expert pool"};
    if (preloader_ != nullptr) return {Code::internal, "a device pool after preloading has begun"};
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

int32_t DeviceTier::slots_within(ggml_backend_buffer_type_t type, const ClassNeeds &cls, uint64_t room) {
    int32_t low = cls.least;
    for (int32_t high = cls.most; low < high;) {
        const int32_t middle = low + (high - low + 1) / 2;
        if (DevicePool::bytes(type, cls.shapes, middle) <= room)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
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
        const int32_t n_slots = slots_within(type, cls, room);
        Result<DevicePool> pool = DevicePool::make(type, cls.shapes, n_slots);
        if (!pool.ok()) return pool.status();
        made.pool = pool.take();
        const Engine::SizeClass &of = engine.classes_[c];
        made.eviction = policy::make_eviction(engine.plan_.eviction, {static_cast<int32_t>(of.groups.size()),
                                                                      of.max_experts, n_slots, of.top_k});
        plan.n_slots += n_slots;
        plan.budget += made.pool.device_bytes();
        tier->n_experts_ += cls.n_experts;
    }
    for (const Engine::Group &of : engine.groups_) {
        Group &group = tier->groups_.emplace_back();
        if (!is_owned(of.layer, layers)) continue;
        group.slabs.resize(static_cast<size_t>(of.n_expert));
        for (size_t p = 0; p < of.parts.size(); ++p) {
            const DevicePool &pool = tier->classes_[static_cast<size_t>(of.size_class)].pool;
            group.parts.push_back(pool.part_tensor(p, shape_of(*of.parts[p]->info)));
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

} // namespace spice

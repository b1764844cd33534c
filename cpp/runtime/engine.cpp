#include "runtime/engine.h"

#include "runtime/device_tier.h"
#include "runtime/surrogate_use.h"
#include "store/align.h"

#include <algorithm>
#include <system_error>

namespace spice {

namespace {

// A slot for the expert that is computed and one for the expert that is read.
constexpr int64_t min_slots = 2;

/// The order in which a block multiplies: what is needed first is read first.
int use_order(Projection projection) {
    switch (projection) {
    case Projection::gate:
    case Projection::gate_up:
        return 0;
    case Projection::up:
        return 1;
    case Projection::down:
        break;
    }
    return 2;
}

} // namespace

void Arrivals::keep(const Status &error) noexcept {
    const std::lock_guard lock(mutex_);
    error_ = error;
}

void Arrivals::note() noexcept {
    count_.fetch_add(1, std::memory_order_release);
    count_.notify_all();
}

Status Arrivals::take_error() {
    const std::lock_guard lock(mutex_);
    return std::exchange(error_, {});
}

Result<std::shared_ptr<Engine>> Engine::open(const std::filesystem::path &path,
                                             const EngineOptions &options) {
    Result<GgufModel> model = GgufModel::open(path);
    if (!model.ok()) return model.status();
    if (Status status = check_model(model.value(), options.expert_used); !status.ok()) return status;
    Result<ExpertIndex> index = ExpertIndex::build(model.value());
    if (!index.ok()) return index.status();

    std::shared_ptr<Engine> engine(new Engine);
    engine->model_ = model.take();
    engine->index_ = index.take();
    if (engine->index_.dense()) return engine;

    std::vector<std::filesystem::path> files;
    for (const GgufFile &file : engine->model_.files()) files.push_back(file.path);
    auto reader = SlabReader::open(std::move(files), {.n_threads = options.io_threads,
                                                      .direct = options.direct_io,
                                                      .ops = options.ops,
                                                      .watcher = &engine->read_timeline_});
    if (!reader.ok()) return reader.status();
    engine->reader_ = reader.take();
    engine->build_groups();
    engine->plan_pool(options.expert_used);
    if (Status status = engine->set_up_prefetch(options); !status.ok()) return status;
    const auto names = policy::eviction_names();
    engine->plan_.eviction = options.eviction.empty() ? std::string(names.front()) : options.eviction;
    if (std::ranges::find(names, engine->plan_.eviction) == names.end()) {
        std::string known;
        for (const std::string_view name : names) known += " " + std::string(name);
        return Status(Code::unsupported, "no eviction strategy is called '" + engine->plan_.eviction +
                                             "'; choose one of:" + known);
    }
    return engine;
}

Status Engine::set_up_prefetch(const EngineOptions &options) {
    if (!options.prefetch.enabled) return {};
    Result<HeadSet> heads = make_heads(model_, index_,
                                       {.expert_used = options.expert_used,
                                        .sidecar = options.sidecar,
                                        .sidecar_required = options.sidecar_required});
    if (!heads.ok()) return heads.status();
    const std::string note = heads.value().sidecar_problem;
    plan_.sidecar = note.empty() ? options.sidecar.string() : std::string();
    Result<std::unique_ptr<Prefetcher>> prefetcher = Prefetcher::make(*this, heads.take(), options.prefetch);
    if (!prefetcher.ok()) return prefetcher.status();
    prefetcher_ = prefetcher.take();
    plan_.predictor = prefetcher_->predictor();
    plan_.head_bytes = prefetcher_->bytes();
    plan_.head_reason = note.empty() ? std::string(prefetcher_->reason()) : note;
    return {};
}

Engine::~Engine() {
    preloader_.reset();
    devices_.clear(); // waits for uploads from the slots
    reader_.reset();
} // no thread writes to slots after this

void Engine::build_groups() {
    const uint64_t alignment = reader_->alignment();
    for (const LayerExperts &layer : index_.layers()) {
        for (const Bank bank : {Bank::routed, Bank::adjugate}) {
            std::vector<const ExpertPart *> parts;
            for (const ExpertPart &part : layer.parts) {
                if (part.bank == bank && part.kind == PartKind::weight) parts.push_back(&part);
            }
            if (parts.empty()) continue;
            std::ranges::stable_sort(parts, {},
                                     [](const ExpertPart *part) { return use_order(part->projection); });

            Group group;
            group.layer = layer.layer;
            group.bank = bank;
            group.n_expert = parts.front()->n_expert;
            group.slabs = std::make_unique<Slab[]>(static_cast<size_t>(group.n_expert));
            std::vector<uint64_t> part_bytes;
            for (size_t p = 0; p < parts.size(); ++p) {
                const ExpertPart &part = *parts[p];
                auto tensor = std::make_unique<ExpertTensor>();
                *tensor = {this, static_cast<int32_t>(groups_.size()), p, &part};
                group.parts.push_back(tensor.get());
                tensors_.emplace(part.name, std::move(tensor));
                part_bytes.push_back(part.stride);
                // Read in place when every expert of the tensor lies alike within the disk's units; otherwise
                // the reader copies, so that all experts of the tensor have one place in their slots.
                group.phase[p] = part.stride % alignment == 0 ? part.offset % alignment : 0;
            }

            auto cls = std::ranges::find(classes_, part_bytes, &SizeClass::part_bytes);
            if (cls == classes_.end()) {
                SizeClass fresh;
                for (const uint64_t bytes : part_bytes) {
                    // Room for whole units around the part wherever it begins; 64 is what ggml asks of data.
                    fresh.part_room.push_back(fresh.slot_bytes);
                    const uint64_t unit = std::max<uint64_t>(alignment, 64);
                    fresh.slot_bytes += align_up(bytes + (alignment > 1 ? alignment - 1 : 0), unit);
                }
                fresh.part_bytes = part_bytes;
                classes_.push_back(std::move(fresh));
                cls = std::prev(classes_.end());
            }
            group.size_class = static_cast<int32_t>(cls - classes_.begin());
            group.number = static_cast<int32_t>(cls->groups.size());
            cls->groups.push_back(static_cast<int32_t>(groups_.size()));
            cls->n_experts += group.n_expert;
            cls->max_experts = std::max(cls->max_experts, group.n_expert);
            groups_.push_back(std::move(group));
        }
    }
}

void Engine::plan_pool(int64_t expert_used) {
    const std::string arch = model_.architecture();
    const auto used = [&](const Group &group) {
        const int64_t k = expert_used > 0
                              ? expert_used
                              : model_.get_int(arch + ".expert_used_count", group.layer).value_or(1);
        return std::clamp<int64_t>(k, 1, group.n_expert);
    };
    plan_.n_classes = static_cast<int32_t>(classes_.size());
    plan_.direct_io = reader_->direct();
    for (SizeClass &cls : classes_) {
        plan_.everything += cls.slot_bytes * static_cast<uint64_t>(cls.n_experts);
        plan_.smallest += cls.slot_bytes * static_cast<uint64_t>(std::min(min_slots, cls.n_experts));
        plan_.n_experts += cls.n_experts;
        for (const int32_t group : cls.groups) {
            const int64_t k = used(groups_[static_cast<size_t>(group)]);
            cls.top_k = std::max(cls.top_k, static_cast<int32_t>(k));
            plan_.working_set += cls.slot_bytes * static_cast<uint64_t>(k);
        }
    }
}

Status Engine::build_pool(uint64_t budget, ggml_backend_buffer_type_t pinned, uint64_t pinned_limit) {
    const std::lock_guard lock(mutex_);
    if (classes_.empty()) return {};
    if (plan_.n_slots > 0) return {Code::internal, "the expert pool is there already"};
    if (budget < plan_.smallest) {
        return {Code::budget,
                model_.files().front().path.string() + ": a budget of " + std::to_string(budget) +
                    " bytes is too small for its experts; give at least " + std::to_string(plan_.smallest)};
    }
    for (SizeClass &cls : classes_) {
        // What the class cannot do without, and of the rest the share that its experts have of the model.
        const uint64_t spare = std::min(budget, plan_.everything) - plan_.smallest;
        const auto extra =
            static_cast<int64_t>(spare * static_cast<uint64_t>(cls.n_experts) / plan_.everything);
        const int64_t n = budget >= plan_.everything
                              ? cls.n_experts
                              : std::min(std::min(min_slots, cls.n_experts) + extra, cls.n_experts);
        const auto n_slots = static_cast<int32_t>(n);
        const bool pin = plan_.pinned + cls.slot_bytes * static_cast<uint64_t>(n_slots) <= pinned_limit;
        auto pool = SlotPool::make(cls.slot_bytes, n_slots, std::max<uint64_t>(reader_->alignment(), 64),
                                   pin ? pinned : nullptr);
        if (!pool.ok()) return pool.status();
        cls.pool = pool.take();
        cls.eviction = policy::make_eviction(
            plan_.eviction, {static_cast<int32_t>(cls.groups.size()), cls.max_experts, n_slots, cls.top_k});
        plan_.n_slots += n_slots;
        plan_.budget += cls.pool.stride() * static_cast<uint64_t>(n_slots);
        plan_.pinned += cls.pool.pinned() ? cls.pool.stride() * static_cast<uint64_t>(n_slots) : 0;
    }
    return {};
}

Status Engine::preload(std::span<const std::pair<int32_t, int32_t>> experts) {
    if (plan_.n_slots == 0 || preloader_ != nullptr) {
        return {Code::internal, "preloading needs a pool, and happens once"};
    }
    std::vector<policy::SlabId> wanted;
    wanted.reserve(experts.size());
    for (const auto &[layer, expert] : experts) {
        const int32_t group = group_of(layer);
        if (group < 0 || expert < 0 || expert >= groups_[static_cast<size_t>(group)].n_expert) {
            return {Code::internal, "layer " + std::to_string(layer) + " has no expert " +
                                        std::to_string(expert) + " to preload"};
        }
        wanted.push_back({group, expert});
    }
    try {
        preloader_ = std::make_unique<Preloader>(*this, std::move(wanted));
    } catch (const std::system_error &error) {
        return {Code::out_of_memory, std::string("cannot start a thread to preload: ") + error.what()};
    }
    return {};
}

std::map<int32_t, std::vector<uint64_t>> Engine::uses() const {
    const std::lock_guard lock(mutex_);
    std::map<int32_t, std::vector<uint64_t>> uses;
    for (const Group &group : groups_) {
        if (group.bank != Bank::routed) continue;
        std::vector<uint64_t> &of_layer = uses[group.layer];
        for (int32_t e = 0; e < group.n_expert; ++e) {
            of_layer.push_back(group.slabs[static_cast<size_t>(e)].uses);
        }
    }
    return uses;
}

const ExpertTensor *Engine::find(std::string_view name) const {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? nullptr : it->second.get();
}

std::byte *Engine::part_data(const Group &group, size_t part, int32_t slot) const {
    const SizeClass &cls = classes_[static_cast<size_t>(group.size_class)];
    return cls.pool.data(slot) + cls.part_room[part] + group.phase[part];
}

SlotTensor Engine::slot_tensor(const ExpertTensor &tensor) const {
    const Group &group =
        groups_[static_cast<size_t>(tensor.group)]; // fixed after open, like the pool's place
    const SlotPool &pool = classes_[static_cast<size_t>(group.size_class)].pool;
    return {part_data(group, tensor.part, 0), pool.stride(), pool.n_slots()};
}

uint64_t Engine::slab_bytes(int32_t group) const {
    uint64_t bytes = 0;
    for (const ExpertTensor *part : groups_[static_cast<size_t>(group)].parts) bytes += part->info->stride;
    return bytes;
}

Engine::LinkSize Engine::link_size(int32_t group) const {
    const std::lock_guard lock(mutex_);
    return {loads_per_call_, static_cast<double>(slab_bytes(group))};
}

Counters Engine::prefetch_bytes() const {
    const std::lock_guard lock(mutex_);
    return counters_;
}

int32_t Engine::layer_of(int32_t group) const {
    return groups_[static_cast<size_t>(group)].layer;
}

int32_t Engine::group_of(int32_t layer) const {
    const auto it = std::ranges::find_if(
        groups_, [&](const Group &group) { return group.layer == layer && group.bank == Bank::routed; });
    return it == groups_.end() ? -1 : static_cast<int32_t>(it - groups_.begin());
}

int32_t Engine::n_free_slots() const {
    int32_t n = 0;
    for (const SizeClass &cls : classes_) n += cls.pool.n_free();
    return n;
}

int32_t Engine::n_absent(int32_t group_id, std::span<const float> chances, float least) const {
    const std::lock_guard lock(mutex_);
    const Group &group = groups_[static_cast<size_t>(group_id)];
    int32_t n = 0;
    for (size_t e = 0; e < static_cast<size_t>(group.n_expert); ++e) {
        n += chances[e] >= least && !is_placed(group_id, static_cast<int32_t>(e)) ? 1 : 0;
    }
    return n;
}

bool Engine::some_missing() const {
    const std::lock_guard lock(mutex_);
    return plan_.n_slots < plan_.n_experts || n_free_slots() > 0;
}

bool Engine::give_slot(Group &group, int32_t expert, policy::Evictable may_leave) {
    SizeClass &cls = classes_[static_cast<size_t>(group.size_class)];
    std::optional<int32_t> slot = cls.pool.take();
    if (!slot) {
        const auto evictable = [&](policy::SlabId id) {
            const Group &owner = groups_[static_cast<size_t>(cls.groups[static_cast<size_t>(id.group)])];
            const Slab &slab = owner.slabs[static_cast<size_t>(id.expert)];
            return slab.pins == 0 && !slab.busy(owner.parts.size()) && may_leave(id);
        };
        const std::optional<policy::SlabId> victim = cls.eviction->victim(evictable);
        if (!victim) return false;
        evict(cls, *victim);
        counters_.evictions += 1;
        slot = cls.pool.take();
    }
    group.slabs[static_cast<size_t>(expert)].slot = *slot;
    cls.eviction->on_load({group.number, expert});
    return true;
}

void Engine::evict(SizeClass &cls, policy::SlabId id) {
    Group &group = groups_[static_cast<size_t>(cls.groups[static_cast<size_t>(id.group)])];
    Slab &slab = group.slabs[static_cast<size_t>(id.expert)];
    for (Part &part : slab.parts) part.set(PartState::absent);
    if (std::exchange(slab.ahead, false)) {
        counters_.prefetch_wasted += 1;
        counters_.wasted_bytes += slab_bytes(cls.groups[static_cast<size_t>(id.group)]);
    }
    cls.pool.release(std::exchange(slab.slot, -1));
    cls.eviction->on_evict(id);
}

bool Engine::is_placed(int32_t group, int32_t expert) const {
    if (groups_[static_cast<size_t>(group)].slabs[static_cast<size_t>(expert)].slot >= 0) return true;
    const DeviceTier *owner = device(group);
    return owner != nullptr && owner->has(group, expert);
}

bool Engine::prefetch(Group &group, int32_t expert, policy::Evictable may_leave) {
    Slab &slab = group.slabs[static_cast<size_t>(expert)];
    const auto index = static_cast<int32_t>(&group - groups_.data());
    if (is_placed(index, expert) || !give_slot(group, expert, may_leave)) return false;
    slab.ahead = true;
    for (size_t part = 0; part < group.parts.size(); ++part) {
        request(group, expert, part, Priority::prefetch);
    }
    return true;
}

bool Engine::withdraw(Group &group, int32_t expert) {
    Slab &slab = group.slabs[static_cast<size_t>(expert)];
    if (!slab.ahead || slab.pins > 0) return false;
    std::array<const Completion *, max_parts> parts = {};
    const size_t n_parts = group.parts.size();
    for (size_t part = 0; part < n_parts; ++part) parts[part] = &slab.parts[part];
    if (!reader_->withdraw(std::span(parts).first(n_parts))) return false;
    slab.ahead = false; // nothing was read for it
    evict(classes_[static_cast<size_t>(group.size_class)], {group.number, expert});
    return true;
}

void Engine::used(const Group &group, Slab &slab) {
    if (!std::exchange(slab.ahead, false)) return;
    const uint64_t bytes = slab_bytes(static_cast<int32_t>(&group - groups_.data()));
    if (slab.complete(group.parts.size())) {
        counters_.prefetch_ready += 1;
        counters_.ready_bytes += bytes;
        return;
    }
    counters_.prefetch_late += 1;
    counters_.late_bytes += bytes;
    for (size_t part = 0; part < group.parts.size(); ++part) reader_->promote(slab.parts[part]);
}

void Engine::request(Group &group, int32_t expert, size_t part, Priority priority) {
    Slab &slab = group.slabs[static_cast<size_t>(expert)];
    const ExpertPart &info = *group.parts[part]->info;
    slab.parts[part].start(arrivals_);
    reader_->submit({info.file,
                     info.offset + static_cast<uint64_t>(expert) * info.stride,
                     {part_data(group, part, slab.slot), info.stride},
                     &slab.parts[part]},
                    priority);
}

Status Engine::read_back(const ExpertTensor &tensor, uint64_t offset, std::span<std::byte> to) {
    const ExpertPart &info = *tensor.info;
    const uint64_t end = info.stride * static_cast<uint64_t>(info.n_expert);
    if (offset > end || to.size() > end - offset) {
        return {Code::internal, info.name + ": read past the end of the tensor"};
    }
    return reader_->read(info.file, info.offset + offset, to);
}

void Engine::routed(int32_t group_id, const RouterInput &input, std::span<const int32_t> ids) {
    const Group &group = groups_[static_cast<size_t>(group_id)];
    if (group.bank == Bank::routed) capture_.add(group.layer, input, ids);
}

void Engine::predict(int32_t group_id, const RouterInput &input, std::span<const int32_t> ids) {
    if (prefetcher_ != nullptr) prefetcher_->on_call(group_id, input, ids);
}

void Engine::count_graph(const GraphCount &graph) {
    const std::lock_guard lock(mutex_);
    counters_.graph_calls += 1;
    counters_.matmul_nodes += graph.matmul_nodes;
    counters_.delegated_nodes += graph.delegated_nodes;
    counters_.waves += graph.waves;
    counters_.early_nodes += graph.early_nodes;
    counters_.rows_direct += graph.rows_direct;
    counters_.rows_batched += graph.rows_batched;
}

void Engine::fail(Status status) {
    const std::lock_guard lock(mutex_);
    counters_.failures += 1;
    error_ = std::move(status);
}

std::optional<Status> Engine::take_error() {
    const std::lock_guard lock(mutex_);
    return std::exchange(error_, std::nullopt);
}

Counters Engine::counters() const {
    PrefetchCounters prefetch; // before our lock: its lock comes first
    if (prefetcher_ != nullptr) prefetch = prefetcher_->counters();
    const std::lock_guard lock(mutex_);
    Counters counters = counters_;
    counters.prefetch = prefetch;
    counters.stall_seconds = stalls_.seconds();
    if (reader_ != nullptr) {
        counters.reader = reader_->counters();
        counters.read_depth = reader_->depth();
    }
    for (const SizeClass &cls : classes_) {
        const auto n = static_cast<uint64_t>(cls.pool.n_slots() - cls.pool.n_free());
        counters.resident_experts += n;
        counters.resident_bytes += n * cls.pool.stride();
    }
    return counters;
}

void Engine::reset_counters() {
    if (prefetcher_ != nullptr) prefetcher_->reset_counters();
    const std::lock_guard lock(mutex_);
    counters_ = {};
    stalls_.reset();
    if (reader_ != nullptr) reader_->reset_counters();
}

} // namespace spice

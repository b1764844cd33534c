#include "runtime/engine.h"

#include <algorithm>
#include <chrono>

namespace spice {

namespace {
constexpr uint64_t part_alignment = 64;
constexpr uint64_t align_up(uint64_t n) {
    return (n + part_alignment - 1) / part_alignment * part_alignment;
}
} // namespace

Result<std::shared_ptr<Engine>> Engine::open(const std::filesystem::path &path, int64_t expert_used,
                                             int32_t io_threads) {
    Result<GgufModel> model = GgufModel::open(path);
    if (!model.ok()) return model.status();
    if (Status status = check_model(model.value(), expert_used); !status.ok()) return status;
    Result<ExpertIndex> index = ExpertIndex::build(model.value());
    if (!index.ok()) return index.status();

    std::shared_ptr<Engine> engine(new Engine);
    engine->model_ = model.take();
    engine->index_ = index.take();
    if (engine->index_.dense()) return engine;

    std::vector<std::filesystem::path> files;
    for (const GgufFile &file : engine->model_.files()) files.push_back(file.path);
    auto reader = SlabReader::open(std::move(files), io_threads);
    if (!reader.ok()) return reader.status();
    engine->reader_ = reader.take();
    if (Status status = engine->build_groups(); !status.ok()) return status;
    return engine;
}

Status Engine::build_groups() {
    for (const LayerExperts &layer : index_.layers()) {
        for (const Bank bank : {Bank::routed, Bank::adjugate}) {
            Group group;
            group.layer = layer.layer;
            group.bank = bank;
            int32_t n_expert = 0;
            uint64_t offset = 0;
            for (const ExpertPart &part : layer.parts) {
                if (part.bank != bank || part.kind != PartKind::weight) continue;
                auto tensor = std::make_unique<ExpertTensor>();
                *tensor = {this, static_cast<int32_t>(groups_.size()), &part, offset};
                group.parts.push_back(tensor.get());
                tensors_.emplace(part.name, std::move(tensor));
                n_expert = part.n_expert;
                offset = align_up(offset + part.stride);
                group.slab_bytes += part.stride;
            }
            if (group.parts.empty()) continue;
            auto pool = SlotPool::make(offset, n_expert);
            if (!pool.ok()) return pool.status();
            group.pool = pool.take();
            group.slot_of.assign(static_cast<size_t>(n_expert), -1);
            groups_.push_back(std::move(group));
        }
    }
    return {};
}

const ExpertTensor *Engine::find(std::string_view name) const {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? nullptr : it->second.get();
}

Status Engine::run(int32_t group_id, std::span<const int32_t> ids, std::span<int32_t> slots) {
    const std::lock_guard lock(mutex_);
    Group &group = groups_[static_cast<size_t>(group_id)];
    const auto n_expert = static_cast<int32_t>(group.slot_of.size());

    std::vector<int32_t> routed(ids.begin(), ids.end());
    std::ranges::sort(routed);
    routed.erase(std::unique(routed.begin(), routed.end()), routed.end());
    if (!routed.empty() && (routed.front() < 0 || routed.back() >= n_expert)) {
        const int32_t bad = routed.front() < 0 ? routed.front() : routed.back();
        return {Code::malformed, "layer " + std::to_string(group.layer) + ": the router chose expert " +
                                     std::to_string(bad) + " of " + std::to_string(n_expert) +
                                     "; the model file is damaged"};
    }

    std::vector<int32_t> missing;
    std::ranges::copy_if(routed, std::back_inserter(missing),
                         [&](int32_t e) { return group.slot_of[static_cast<size_t>(e)] < 0; });
    counters_.experts_requested += routed.size();
    counters_.experts_missed += missing.size();
    if (!missing.empty()) {
        if (Status status = load(group, missing); !status.ok()) return status;
    }

    for (const int32_t expert : routed) group.pool.pin(group.slot_of[static_cast<size_t>(expert)]);
    std::ranges::transform(ids, slots.begin(),
                           [&](int32_t e) { return group.slot_of[static_cast<size_t>(e)]; });
    counters_.layer_calls += 1;
    counters_.expert_rows += ids.size();
    return {};
}

Status Engine::load(Group &group, std::span<const int32_t> missing) {
    std::vector<int32_t> taken;
    std::vector<ReadPiece> pieces;
    for (const int32_t expert : missing) {
        const std::optional<int32_t> slot = group.pool.take();
        if (!slot) { // cannot happen while every expert has a slot of its own
            for (const int32_t s : taken) group.pool.release(s);
            return {Code::internal, "layer " + std::to_string(group.layer) + ": no free slot"};
        }
        taken.push_back(*slot);
        for (const ExpertTensor *tensor : group.parts) {
            const ExpertPart &part = *tensor->part;
            pieces.push_back({part.file,
                              part.offset + static_cast<uint64_t>(expert) * part.stride,
                              {group.pool.data(*slot) + tensor->slot_offset, part.stride}});
        }
    }

    const auto start = std::chrono::steady_clock::now();
    Status status = reader_->read(pieces);
    counters_.read_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!status.ok()) {
        for (const int32_t slot : taken) group.pool.release(slot);
        return status;
    }
    for (size_t i = 0; i < missing.size(); ++i) {
        group.pool.mark_ready(taken[i]);
        group.slot_of[static_cast<size_t>(missing[i])] = taken[i];
    }
    counters_.slabs_read += missing.size();
    counters_.bytes_read += missing.size() * group.slab_bytes;
    return {};
}

void Engine::done(int32_t group_id, std::span<const int32_t> slots) {
    const std::lock_guard lock(mutex_);
    Group &group = groups_[static_cast<size_t>(group_id)];
    std::vector<int32_t> pinned(slots.begin(), slots.end());
    std::ranges::sort(pinned);
    pinned.erase(std::unique(pinned.begin(), pinned.end()), pinned.end());
    for (const int32_t slot : pinned) group.pool.unpin(slot);
}

SlotTensor Engine::slot_tensor(int32_t group) const {
    const SlotPool &pool = groups_[static_cast<size_t>(group)].pool; // fixed after open
    return {pool.base(), pool.stride(), pool.n_slots()};
}

Status Engine::read_back(const ExpertTensor &tensor, uint64_t offset, std::span<std::byte> to) {
    const ExpertPart &part = *tensor.part;
    const uint64_t end = part.stride * static_cast<uint64_t>(part.n_expert);
    if (offset > end || to.size() > end - offset) {
        return {Code::internal, part.name + ": read past the end of the tensor"};
    }
    const ReadPiece piece{part.file, part.offset + offset, to};
    return reader_->read({&piece, 1});
}

void Engine::count_graph(uint64_t matmul_nodes, uint64_t delegated_nodes) {
    const std::lock_guard lock(mutex_);
    counters_.graph_calls += 1;
    counters_.matmul_nodes += matmul_nodes;
    counters_.delegated_nodes += delegated_nodes;
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
    const std::lock_guard lock(mutex_);
    Counters counters = counters_;
    for (const Group &group : groups_) {
        const auto n = static_cast<uint64_t>(group.pool.n_resident());
        counters.resident_experts += n;
        counters.resident_bytes += n * group.slab_bytes;
    }
    return counters;
}

void Engine::reset_counters() {
    const std::lock_guard lock(mutex_);
    counters_ = {};
}

} // namespace spice

// The part of the Engine that knows of stand-ins for experts.
#include "runtime/engine.h"
#include "runtime/surrogate_use.h"

#include <algorithm>

namespace spice {

SurrogateUse &Engine::make_surrogate_use() {
    if (surrogate_use_ == nullptr) {
        surrogate_use_ = std::make_unique<SurrogateUse>(static_cast<int32_t>(groups_.size()));
    }
    return *surrogate_use_;
}

int32_t Engine::top_k() const {
    int32_t most = 0;
    for (const SizeClass &cls : classes_) most = std::max(most, cls.top_k);
    return most;
}

std::vector<uint8_t> Engine::absent(int32_t group_id, std::span<const int32_t> ids) const {
    const Group &group = groups_[static_cast<size_t>(group_id)];
    std::vector<uint8_t> out;
    out.reserve(ids.size());
    const std::lock_guard lock(mutex_);
    for (const int32_t id : ids) {
        const bool exists = id >= 0 && id < group.n_expert;
        out.push_back(exists && group.slabs[static_cast<size_t>(id)].slot < 0 ? 1 : 0);
    }
    return out;
}

Status Engine::load_surrogates(const std::filesystem::path &sidecar) {
    std::vector<LoreShape> shapes;
    for (const Group &group : groups_) {
        LoreShape shape = {.layer = -1};
        const auto down = std::ranges::find_if(
            group.parts, [](const ExpertTensor *part) { return part->info->projection == Projection::down; });
        if (group.bank == Bank::routed && down != group.parts.end()) {
            shape = {group.layer, group.parts.front()->info->n_in, (*down)->info->n_out, group.n_expert};
        }
        shapes.push_back(shape);
    }
    Result<std::shared_ptr<const SurrogateSet>> set =
        SurrogateSet::load(sidecar, model_, index_, std::move(shapes));
    if (!set.ok()) return set.status();
    return make_surrogate_use().set_surrogates(set.take());
}

} // namespace spice

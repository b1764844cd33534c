#include "store/slot_pool.h"

#include <numeric>
#include <string>

namespace spice {

Result<SlotPool> SlotPool::make(uint64_t slot_bytes, int32_t n_slots, uint64_t alignment) {
    SlotPool pool;
    pool.stride_ = (slot_bytes + alignment - 1) / alignment * alignment;
    pool.n_slots_ = n_slots;
    const uint64_t bytes = pool.stride_ * static_cast<uint64_t>(n_slots);
    pool.memory_ = Mapping(Mapping::Kind::lazy, bytes);
    if (!pool.memory_) {
        return Status(Code::out_of_memory, "cannot reserve " + std::to_string(bytes) +
                                               " bytes of address space for experts; raise the limit "
                                               "`ulimit -v`, or load a smaller model");
    }
    pool.free_.resize(static_cast<size_t>(n_slots));
    std::iota(pool.free_.rbegin(), pool.free_.rend(), 0);
    return pool;
}

std::optional<int32_t> SlotPool::take() {
    if (free_.empty()) return std::nullopt;
    const int32_t slot = free_.back();
    free_.pop_back();
    return slot;
}

void SlotPool::release(int32_t slot) {
    free_.push_back(slot);
}

} // namespace spice

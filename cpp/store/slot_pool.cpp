#include "store/slot_pool.h"

#include <cassert>
#include <numeric>
#include <sys/mman.h>

namespace spice {

namespace {
constexpr uint64_t slot_alignment = 64; // what ggml asks of tensor data, and a cache line
}

SlotPool::SlotPool(SlotPool &&other) noexcept {
    *this = std::move(other);
}

SlotPool &SlotPool::operator=(SlotPool &&other) noexcept {
    std::swap(base_, other.base_);
    std::swap(stride_, other.stride_);
    std::swap(mapped_, other.mapped_);
    std::swap(n_resident_, other.n_resident_);
    std::swap(slots_, other.slots_);
    std::swap(free_, other.free_);
    return *this;
}

SlotPool::~SlotPool() {
    if (base_ != nullptr) munmap(base_, mapped_);
}

Result<SlotPool> SlotPool::make(uint64_t slot_bytes, int32_t n_slots) {
    SlotPool pool;
    pool.stride_ = (slot_bytes + slot_alignment - 1) / slot_alignment * slot_alignment;
    pool.mapped_ = pool.stride_ * static_cast<uint64_t>(n_slots);
    // Address space only: the model may be far larger than memory, and most slots may never be used.
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void *base = mmap(nullptr, pool.mapped_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (base == MAP_FAILED) {
        return Status(Code::out_of_memory, "cannot reserve " + std::to_string(pool.mapped_) +
                                               " bytes of address space for experts; raise the limit "
                                               "`ulimit -v`, or load a smaller model");
    }
    pool.base_ = static_cast<std::byte *>(base);
#ifdef MADV_HUGEPAGE
    // Experts are read from end to end: huge pages save most of the TLB misses. Only advice, may fail.
    (void)madvise(base, pool.mapped_, MADV_HUGEPAGE);
#endif
    pool.slots_.resize(static_cast<size_t>(n_slots));
    pool.free_.resize(static_cast<size_t>(n_slots));
    std::iota(pool.free_.rbegin(), pool.free_.rend(), 0);
    return pool;
}

std::optional<int32_t> SlotPool::take() {
    if (free_.empty()) return std::nullopt;
    const int32_t slot = free_.back();
    free_.pop_back();
    slots_[static_cast<size_t>(slot)].state = SlotState::loading;
    return slot;
}

void SlotPool::mark_ready(int32_t slot) {
    Slot &s = slots_[static_cast<size_t>(slot)];
    assert(s.state == SlotState::loading);
    s.state = SlotState::ready;
    ++n_resident_;
}

void SlotPool::release(int32_t slot) {
    Slot &s = slots_[static_cast<size_t>(slot)];
    assert(s.state == SlotState::loading || s.state == SlotState::ready);
    if (s.state == SlotState::ready) --n_resident_;
    s.state = SlotState::free;
    free_.push_back(slot);
}

void SlotPool::pin(int32_t slot) {
    Slot &s = slots_[static_cast<size_t>(slot)];
    assert(s.state == SlotState::ready || s.state == SlotState::pinned);
    s.state = SlotState::pinned;
    ++s.pins;
}

void SlotPool::unpin(int32_t slot) {
    Slot &s = slots_[static_cast<size_t>(slot)];
    assert(s.state == SlotState::pinned && s.pins > 0);
    if (--s.pins == 0) s.state = SlotState::ready;
}

SlotState SlotPool::state(int32_t slot) const {
    return slots_[static_cast<size_t>(slot)].state;
}

} // namespace spice

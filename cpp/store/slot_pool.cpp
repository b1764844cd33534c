#include "store/slot_pool.h"

#include <numeric>
#include <string>
#include <sys/mman.h>
#include <utility>

namespace spice {

SlotPool::SlotPool(SlotPool &&other) noexcept {
    *this = std::move(other);
}

SlotPool &SlotPool::operator=(SlotPool &&other) noexcept {
    std::swap(base_, other.base_);
    std::swap(stride_, other.stride_);
    std::swap(mapped_, other.mapped_);
    std::swap(n_slots_, other.n_slots_);
    std::swap(free_, other.free_);
    return *this;
}

SlotPool::~SlotPool() {
    if (base_ != nullptr) munmap(base_, mapped_);
}

Result<SlotPool> SlotPool::make(uint64_t slot_bytes, int32_t n_slots, uint64_t alignment) {
    SlotPool pool;
    pool.stride_ = (slot_bytes + alignment - 1) / alignment * alignment;
    pool.mapped_ = pool.stride_ * static_cast<uint64_t>(n_slots);
    // Address space only: memory comes with the first write to each page.
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
    pool.n_slots_ = n_slots;
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

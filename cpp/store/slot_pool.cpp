#include "store/slot_pool.h"

#include "store/align.h"

#include <numeric>
#include <string>

namespace spice {

namespace {
constexpr uint64_t page = 4096; // what direct reads may ask of an address
}

Result<SlotPool> SlotPool::make(uint64_t slot_bytes, int32_t n_slots, uint64_t alignment,
                                ggml_backend_buffer_type_t pinned) {
    SlotPool pool;
    pool.stride_ = align_up(slot_bytes, alignment);
    pool.n_slots_ = n_slots;
    const uint64_t bytes = pool.stride_ * static_cast<uint64_t>(n_slots);
    if (pinned != nullptr) {
        // A device that cannot pin gives ordinary memory, of another type: ours is better then, it is lazy.
        ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(pinned, bytes + page));
        if (buffer != nullptr && ggml_backend_buffer_get_type(buffer.get()) == pinned) {
            const auto address = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(buffer.get()));
            pool.base_ = reinterpret_cast<std::byte *>(align_up(address, page));
            pool.buffer_ = std::move(buffer);
        }
    }
    if (pool.buffer_ == nullptr) {
        pool.memory_ = Mapping(Mapping::Kind::lazy, bytes);
        pool.base_ = pool.memory_.base();
    }
    if (pool.base_ == nullptr) {
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

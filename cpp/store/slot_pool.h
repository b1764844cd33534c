// Room for slabs of one size: a slot tensor [slot_bytes, n_slots] in host memory.
//
// With a device, the memory can be pinned: then copies to it run at the link's full speed, and in the
// background. Slots have one stride, so that ggml's own MUL_MAT_ID can run on the pool with expert ids
// replaced by slot numbers. Address space for all slots is reserved at once; a slot takes memory when it is
// first written. Who uses a slot, and whether its bytes have arrived, is the Engine's business
// (runtime/slab.h).
//
// Thread: take and release from the thread that holds the Engine's lock; the rest anywhere. Nothing blocks.
// Errors: out_of_memory.
#pragma once

#include "store/mapping.h"
#include "store/status.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace spice {

class SlotPool {
  public:
    /// Reserves address space for `n_slots` slots of `slot_bytes` bytes, a multiple of `alignment` apart
    /// (a power of two from 64 to the page size).
    /// `pinned`: a device's host buffer type, to be used if it gives memory of its kind (then all of it is
    /// taken at once); nullptr for ordinary memory.
    [[nodiscard]] static Result<SlotPool> make(uint64_t slot_bytes, int32_t n_slots, uint64_t alignment,
                                               ggml_backend_buffer_type_t pinned = nullptr);
    [[nodiscard]] bool pinned() const { return buffer_ != nullptr; }

    [[nodiscard]] std::optional<int32_t> take(); ///< a free slot, the lowest at first; nothing when full
    void release(int32_t slot);

    [[nodiscard]] std::byte *base() const { return base_; }
    [[nodiscard]] std::byte *data(int32_t slot) const {
        return base() + static_cast<uint64_t>(slot) * stride_;
    }
    [[nodiscard]] uint64_t stride() const { return stride_; } ///< bytes from one slot to the next
    [[nodiscard]] int32_t n_slots() const { return n_slots_; }
    [[nodiscard]] int32_t n_free() const { return static_cast<int32_t>(free_.size()); }

  private:
    Mapping memory_;                 ///< or
    ggml_backend_buffer_ptr buffer_; ///< pinned
    std::byte *base_ = nullptr;
    uint64_t stride_ = 0;
    int32_t n_slots_ = 0;
    std::vector<int32_t> free_; ///< a stack
};

} // namespace spice

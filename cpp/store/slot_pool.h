// Room for slabs of one size: a slot tensor [slot_bytes, n_slots] in host memory.
//
// Slots have one stride, so that ggml's own MUL_MAT_ID can run on the pool with expert ids replaced by slot
// numbers. Address space for all slots is reserved at once; a slot takes memory when it is first written.
// States: free -> loading -> ready <-> pinned. A loading or pinned slot is never handed out again.
//
// Thread: all calls but data() from the one thread that holds the Engine's lock. Nothing blocks.
// Errors: out_of_memory.
#pragma once

#include "store/status.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace spice {

enum class SlotState : uint8_t { free, loading, ready, pinned };

class SlotPool {
  public:
    SlotPool() = default;
    SlotPool(SlotPool &&other) noexcept;
    SlotPool &operator=(SlotPool &&other) noexcept;
    ~SlotPool();

    /// Reserves address space for `n_slots` slots of `slot_bytes` bytes (rounded up to 64).
    [[nodiscard]] static Result<SlotPool> make(uint64_t slot_bytes, int32_t n_slots);

    [[nodiscard]] std::optional<int32_t> take(); ///< free -> loading; nothing when no slot is free
    void mark_ready(int32_t slot);               ///< loading -> ready
    void release(int32_t slot);                  ///< loading or ready -> free
    void pin(int32_t slot);                      ///< ready -> pinned (counted)
    void unpin(int32_t slot);                    ///< the last unpin: pinned -> ready

    [[nodiscard]] SlotState state(int32_t slot) const;
    [[nodiscard]] std::byte *base() const { return base_; }
    [[nodiscard]] std::byte *data(int32_t slot) const {
        return base_ + static_cast<uint64_t>(slot) * stride_;
    }
    [[nodiscard]] uint64_t stride() const { return stride_; } ///< bytes from one slot to the next
    [[nodiscard]] int32_t n_slots() const { return static_cast<int32_t>(slots_.size()); }
    [[nodiscard]] int32_t n_resident() const { return n_resident_; } ///< ready or pinned

  private:
    struct Slot {
        SlotState state = SlotState::free;
        int32_t pins = 0;
    };
    std::byte *base_ = nullptr;
    uint64_t stride_ = 0;
    uint64_t mapped_ = 0;
    int32_t n_resident_ = 0;
    std::vector<Slot> slots_;
    std::vector<int32_t> free_; ///< stack of free slots, lowest number on top at first
};

} // namespace spice

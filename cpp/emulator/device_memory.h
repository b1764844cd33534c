// The emulated device's memory: addresses that fault on the host, and the bytes that stand behind them.
//
// Thread: any. allocate and free take a lock; real() takes it shared. Errors: allocate returns nullptr when
// the limit is reached, an allocation is to fail, or the system has no memory.
#pragma once

#include "store/mapping.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>

namespace spice::emulator {

/// What uninitialised and unfinished memory holds: NaN as F16, BF16 and F32, -1 as an index.
inline constexpr int poison = 0xFF;

class DeviceMemory {
  public:
    [[nodiscard]] void *allocate(uint64_t bytes, uint64_t limit);
    void free(void *address);
    /// The bytes behind [address, address + bytes), or nullptr when they are not all of one allocation.
    [[nodiscard]] std::byte *real(const void *address, size_t bytes) const;
    [[nodiscard]] uint64_t used() const;
    [[nodiscard]] uint64_t peak() const;

  private:
    struct Block {
        Mapping addresses;
        Mapping bytes;
    };
    mutable std::shared_mutex mutex_;
    std::map<uintptr_t, Block> blocks_; ///< by their first address
    uint64_t used_ = 0;
    uint64_t peak_ = 0;
};

} // namespace spice::emulator

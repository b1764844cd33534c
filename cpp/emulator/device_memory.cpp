#include "emulator/device_memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace spice::emulator {

void *DeviceMemory::allocate(uint64_t bytes, uint64_t limit) {
    const uint64_t size = std::max<uint64_t>(bytes, 1);
    const std::unique_lock lock(mutex_);
    if (size > limit || used_ > limit - size) return nullptr;
    Block block{Mapping(Mapping::Kind::addresses, size), Mapping(Mapping::Kind::memory, size)};
    if (!block.addresses || !block.bytes) return nullptr;
    std::memset(block.bytes.base(), poison, size);
    void *address = block.addresses.base();
    blocks_.emplace(reinterpret_cast<uintptr_t>(address), std::move(block));
    used_ += size;
    peak_ = std::max(peak_, used_);
    return address;
}

void DeviceMemory::free(void *address) {
    const std::unique_lock lock(mutex_);
    const auto it = blocks_.find(reinterpret_cast<uintptr_t>(address));
    if (it == blocks_.end()) return;
    used_ -= it->second.bytes.bytes();
    blocks_.erase(it);
}

std::byte *DeviceMemory::real(const void *address, size_t bytes) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    const std::shared_lock lock(mutex_);
    auto it = blocks_.upper_bound(at);
    if (it == blocks_.begin()) return nullptr;
    --it;
    const uint64_t offset = at - it->first;
    const uint64_t size = it->second.bytes.bytes();
    if (offset > size || bytes > size - offset) return nullptr;
    return it->second.bytes.base() + offset;
}

uint64_t DeviceMemory::used() const {
    const std::shared_lock lock(mutex_);
    return used_;
}

uint64_t DeviceMemory::peak() const {
    const std::shared_lock lock(mutex_);
    return peak_;
}

} // namespace spice::emulator

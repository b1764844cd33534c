#include "emulator/device.h"

#include <algorithm>
#include <cstring>

namespace spice::emulator {

namespace {

// Indices that do not arrive would make ggml-cpu end the process; they are in smaller copies.
constexpr size_t smallest_failure = 4096;

} // namespace

spice_emulator_settings Device::settings() const {
    const std::lock_guard lock(mutex_);
    return settings_;
}

void Device::configure(const spice_emulator_settings &settings) {
    const std::lock_guard lock(mutex_);
    settings_ = settings;
}

void Device::fail(Failure what, uint64_t nth) {
    const std::lock_guard lock(mutex_);
    countdown_[static_cast<size_t>(what)] = nth;
}

bool Device::fails(Failure what) {
    const std::lock_guard lock(mutex_);
    uint64_t &left = countdown_[static_cast<size_t>(what)];
    return left > 0 && --left == 0;
}

void *Device::allocate(uint64_t bytes) {
    return fails(Failure::allocation) ? nullptr : memory_.allocate(bytes, settings().memory_bytes);
}

void Device::free(void *address) {
    std::vector<std::shared_ptr<Stream>> streams;
    {
        const std::lock_guard lock(mutex_);
        streams = streams_;
    }
    for (const auto &stream : streams) stream->synchronize();
    memory_.free(address);
}

void Device::upload(std::byte *to, const void *from, size_t bytes, bool queued) {
    const spice_emulator_settings now = settings();
    const bool is_pinned = pinned(from);
    if (to != nullptr) std::memset(to, poison, bytes);
    up_.transfer(bytes, now.upload_per_second * (is_pinned ? 1.0 : now.pageable_speed),
                 now.copy_latency_seconds);
    if (queued && bytes >= smallest_failure && fails(Failure::copy)) {
        failed_copy_ = true;
    } else if (to != nullptr) {
        std::memcpy(to, from, bytes);
    }
    const std::lock_guard lock(mutex_);
    counters_.uploads += 1;
    counters_.upload_bytes += bytes;
    counters_.pinned_upload_bytes += is_pinned ? bytes : 0;
}

void Device::download(const std::byte *from, void *to, size_t bytes) {
    const spice_emulator_settings now = settings();
    down_.transfer(bytes, now.download_per_second * (pinned(to) ? 1.0 : now.pageable_speed),
                   now.copy_latency_seconds);
    std::memcpy(to, from, bytes);
    const std::lock_guard lock(mutex_);
    counters_.downloads += 1;
    counters_.download_bytes += bytes;
}

void *Device::allocate_pinned(uint64_t bytes) {
    Mapping memory(Mapping::Kind::memory, bytes);
    const std::lock_guard lock(mutex_);
    if (!memory || memory.bytes() > settings_.pinned_bytes ||
        pinned_used_ > settings_.pinned_bytes - memory.bytes()) {
        return nullptr;
    }
    void *address = memory.base();
    pinned_used_ += memory.bytes();
    pinned_.emplace(reinterpret_cast<uintptr_t>(address), std::move(memory));
    return address;
}

void Device::free_pinned(void *address) {
    const std::lock_guard lock(mutex_);
    const auto it = pinned_.find(reinterpret_cast<uintptr_t>(address));
    if (it == pinned_.end()) return;
    pinned_used_ -= it->second.bytes();
    pinned_.erase(it);
}

bool Device::pinned(const void *address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    const std::lock_guard lock(mutex_);
    auto it = pinned_.upper_bound(at);
    if (it == pinned_.begin()) return false;
    --it;
    return at - it->first < it->second.bytes();
}

void Device::count_graph(uint64_t nodes, uint64_t matmul_ids, double seconds, double late_seconds) {
    const std::lock_guard lock(mutex_);
    counters_.graphs += 1;
    counters_.nodes += nodes;
    counters_.matmul_id_nodes += matmul_ids;
    counters_.compute_busy_seconds += seconds;
    counters_.late_seconds += late_seconds;
}

spice_emulator_counters Device::counters() const {
    const std::lock_guard lock(mutex_);
    spice_emulator_counters counters = counters_;
    counters.upload_busy_seconds = up_.busy_seconds();
    counters.download_busy_seconds = down_.busy_seconds();
    counters.memory_used = memory_.used();
    counters.memory_peak = memory_.peak();
    counters.pinned_used = pinned_used_;
    return counters;
}

void Device::reset_counters() {
    const std::lock_guard lock(mutex_);
    counters_ = {};
    misuse_.clear();
    up_.reset();
    down_.reset();
}

void Device::note_misuse(std::string what) {
    const std::lock_guard lock(mutex_);
    misuse_ = std::move(what);
}

std::string Device::misuse() const {
    const std::lock_guard lock(mutex_);
    return misuse_;
}

void Device::add(std::shared_ptr<Stream> stream) {
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::move(stream));
}

void Device::remove(const std::shared_ptr<Stream> &stream) {
    const std::lock_guard lock(mutex_);
    std::erase(streams_, stream);
}

} // namespace spice::emulator

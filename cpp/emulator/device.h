// One emulated device: its memory, its link, its settings, what it counts and what it is told to get wrong.
//
// Streams (ggml backends) of the device register themselves, because freeing memory waits for all of them, as
// a driver does. Thread: any.
#pragma once

#include "emulator/device_memory.h"
#include "emulator/emulator.h"
#include "emulator/link.h"
#include "emulator/stream.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace spice::emulator {

enum class Failure : uint8_t { allocation, copy, compute, event };

class Device {
  public:
    [[nodiscard]] spice_emulator_settings settings() const;
    void configure(const spice_emulator_settings &settings);

    /// The nth check from now on is true, once.
    void fail(Failure what, uint64_t nth);
    [[nodiscard]] bool fails(Failure what);
    /// A copy failed and no graph has said so yet; says it once.
    [[nodiscard]] bool take_failed_copy() { return failed_copy_.exchange(false); }

    [[nodiscard]] void *allocate(uint64_t bytes);
    void free(void *address); ///< waits for all streams
    [[nodiscard]] DeviceMemory &memory() { return memory_; }

    // Copies of `bytes` between real device bytes and host memory, at the link's speed; the caller sleeps.
    // `to` may be nullptr: an upload that takes its time and leaves nothing.
    void upload(std::byte *to, const void *from, size_t bytes, bool queued);
    void download(const std::byte *from, void *to, size_t bytes);

    /// A host buffer's memory: pinned while the limit allows it, else nullptr.
    [[nodiscard]] void *allocate_pinned(uint64_t bytes);
    void free_pinned(void *address);
    [[nodiscard]] bool pinned(const void *address) const;

    void count_graph(uint64_t nodes, uint64_t matmul_ids, double seconds, double late_seconds);
    [[nodiscard]] spice_emulator_counters counters() const;
    void reset_counters();
    void note_misuse(std::string what);
    [[nodiscard]] std::string misuse() const;

    void add(std::shared_ptr<Stream> stream);
    void remove(const std::shared_ptr<Stream> &stream);

  private:
    mutable std::mutex mutex_; ///< guards what is not atomic, a lock, or locked in itself
    spice_emulator_settings settings_ = {.memory_bytes = uint64_t{1} << 40,
                                         .pinned_bytes = uint64_t{1} << 40,
                                         .upload_per_second = 0.0,
                                         .download_per_second = 0.0,
                                         .copy_latency_seconds = 0.0,
                                         .pageable_speed = 1.0,
                                         .compute_slowdown = 1.0,
                                         .launch_seconds = 0.0,
                                         .expert_bytes_per_second = 0.0,
                                         .threads = 1};
    std::array<uint64_t, 4> countdown_ = {}; ///< 0: not to fail
    std::atomic<bool> failed_copy_{false};
    DeviceMemory memory_;
    std::map<uintptr_t, Mapping> pinned_;
    uint64_t pinned_used_ = 0;
    Link up_;
    Link down_;
    spice_emulator_counters counters_ = {};
    std::string misuse_;
    std::vector<std::shared_ptr<Stream>> streams_; ///< shared: free() may still wait for one that goes
};

} // namespace spice::emulator

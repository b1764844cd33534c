// One direction of the link between host and device: copies take turns, each for the time its bytes need.
//
// Thread: any; transfer() sleeps until the copy would have ended.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

namespace spice::emulator {

class Link {
  public:
    /// `per_second`: bytes; 0 is no limit.
    void transfer(uint64_t bytes, double per_second, double latency_seconds);
    [[nodiscard]] double busy_seconds() const;
    void reset();

  private:
    using Clock = std::chrono::steady_clock;
    mutable std::mutex mutex_;
    Clock::time_point free_at_;
    double busy_ = 0.0;
};

} // namespace spice::emulator

#include "emulator/link.h"

#include <algorithm>
#include <thread>

namespace spice::emulator {

void Link::transfer(uint64_t bytes, double per_second, double latency_seconds) {
    const double seconds = per_second > 0.0 ? static_cast<double>(bytes) / per_second : 0.0;
    const auto length = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    const auto latency =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(latency_seconds));
    Clock::time_point end;
    {
        const std::lock_guard lock(mutex_);
        const Clock::time_point start = std::max(Clock::now(), free_at_);
        free_at_ = start + length; // the latency of one copy hides behind the bytes of another
        end = free_at_ + latency;
        busy_ += seconds;
    }
    if (end > Clock::now()) std::this_thread::sleep_until(end);
}

double Link::busy_seconds() const {
    const std::lock_guard lock(mutex_);
    return busy_;
}

void Link::reset() {
    const std::lock_guard lock(mutex_);
    busy_ = 0.0;
}

} // namespace spice::emulator

// What the Prefetcher tells a device tier of the calls to come, and what the tier reports of those that were.
//
// Plain values; thread: as whoever passes them says.
#pragma once

#include <cstdint>
#include <span>

namespace spice {

/// What a layer call to come is predicted to use.
struct ComingCall {
    int32_t group = 0;
    int32_t horizon = 0;            ///< layer calls from now
    std::span<const float> chances; ///< of each expert
};

/// What sending ahead is measured by: totals since the tier was made.
struct AheadReport {
    double call_seconds = 0.0; ///< of layer calls, from the launch until host and device are done
    uint64_t needed_bytes = 0; ///< of the experts of these calls
    uint64_t absent_bytes = 0; ///< of these, the ones that were not on the device
    uint64_t used_bytes = 0;   ///< as the counters of the same names
    uint64_t late_bytes = 0;
    uint64_t wasted_bytes = 0;

    AheadReport &operator+=(const AheadReport &other) {
        call_seconds += other.call_seconds;
        needed_bytes += other.needed_bytes;
        absent_bytes += other.absent_bytes;
        used_bytes += other.used_bytes;
        late_bytes += other.late_bytes;
        wasted_bytes += other.wasted_bytes;
        return *this;
    }
};

} // namespace spice

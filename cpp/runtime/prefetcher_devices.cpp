// The Prefetcher's business with devices: what it has them send ahead, and whether that pays.
#include "runtime/device_tier.h"
#include "runtime/engine.h"
#include "runtime/prefetcher.h"

#include <utility>

namespace spice {

/// What sending ahead changes is the time of the layer calls themselves: more is computed on the device, and
/// predicting delays the host's share. Without the waits for the disk, for each byte of experts.
void Prefetcher::report_devices(double stalled) {
    if (engine_.devices_.empty()) return;
    AheadReport now;
    {
        const std::lock_guard lock(engine_.mutex_);
        for (const auto &tier : engine_.devices_) now += tier->ahead_report();
    }
    const AheadReport before = std::exchange(seen_ahead_, now);
    const auto bytes = [&](uint64_t AheadReport::*member) {
        return static_cast<int64_t>(now.*member - before.*member);
    };
    policy::PassReport report = {.missed_bytes = bytes(&AheadReport::absent_bytes),
                                 .useful_bytes = bytes(&AheadReport::used_bytes),
                                 .late_bytes = bytes(&AheadReport::late_bytes),
                                 .wasted_bytes = bytes(&AheadReport::wasted_bytes)};
    const int64_t needed = bytes(&AheadReport::needed_bytes);
    const double seconds = now.call_seconds - before.call_seconds - stalled;
    if (needed > 0 && clock_.pass_seconds() > 0.0) report.seconds = seconds / static_cast<double>(needed);
    device_meter_.end_pass(report); // what is not above zero teaches nothing
}

/// Has the devices send up what is worth it, and nothing else that was planned before. Returns the seconds
/// that handing over copies took: most of it happens on another thread.
double Prefetcher::act_on_devices(int32_t group, int32_t depth) {
    coming_.clear();
    for (int32_t horizon = 1; horizon <= depth; ++horizon) {
        const int32_t to = target(group, horizon);
        coming_.push_back({to, horizon, forecasts_[static_cast<size_t>(to)].chances});
    }
    devices_planned_ = depth > 0;
    {
        const std::lock_guard lock(engine_.mutex_);
        for (const auto &tier : engine_.devices_) {
            const bool sends = tier->sends_ahead();
            tier->plan_ahead(sends ? std::span<const ComingCall>(coming_) : std::span<const ComingCall>(),
                             clock_.layer_seconds());
        }
    }
    const double begun = Timeline::now();
    for (const auto &tier : engine_.devices_) {
        if (depth > 0 && tier->plan().asynchronous) tier->pump();
    }
    return Timeline::now() - begun;
}

} // namespace spice

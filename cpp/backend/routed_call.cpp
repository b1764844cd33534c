#include "backend/routed_call.h"

#include "backend/device_lane.h"

#include <algorithm>
#include <new>

namespace spice {

void RoutedCall::predict() noexcept {
    try {
        forecast->engine->predict(group, forecast->input, forecast->ids);
    } catch (const std::bad_alloc &) { // nothing is read ahead; the layers read what they need
    }
}

void RoutedCall::join() {
    const double begun = Timeline::now();
    if (lane != nullptr) lane->wait();
    const double done = Timeline::now();
    device.ended({.host = rows.empty() ? 0.0 : begun - launched,
                  .device = lane == nullptr ? 0.0 : done - launched,
                  .waited = done - begun});
}

void RoutedCall::sort_rows(std::span<const int32_t> routed, int64_t n_routed, int32_t n_expert) {
    std::vector<int32_t> place(static_cast<size_t>(n_expert), -1);
    const std::span<const int32_t> experts = layer.experts();
    for (size_t e = 0; e < experts.size(); ++e)
        place[static_cast<size_t>(experts[e])] = static_cast<int32_t>(e);
    first.assign(experts.size() + 1, 0);
    const auto place_of = [&](size_t r) {
        const bool taken = stand_ins != nullptr && stand_ins->taken[r] != 0;
        return taken ? -1 : place[static_cast<size_t>(routed[r])]; // -1 for the device's, too
    };
    size_t n_rows = 0;
    for (size_t r = 0; r < routed.size(); ++r) {
        if (place_of(r) < 0) continue;
        ++first[static_cast<size_t>(place_of(r)) + 1];
        ++n_rows;
    }
    for (size_t e = 0; e < experts.size(); ++e) {
        most_rows = std::max<int64_t>(most_rows, first[e + 1]);
        first[e + 1] += first[e];
    }
    rows.resize(n_rows);
    std::vector<uint32_t> next(first.begin(), first.end() - 1);
    for (size_t r = 0; r < routed.size(); ++r) {
        if (place_of(r) < 0) continue;
        const auto e = static_cast<size_t>(place_of(r));
        rows[next[e]++] = {static_cast<int32_t>(static_cast<int64_t>(r) % n_routed),
                           static_cast<int32_t>(static_cast<int64_t>(r) / n_routed)};
    }
}

} // namespace spice

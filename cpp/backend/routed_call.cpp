#include "backend/routed_call.h"

#include "backend/device_lane.h"

#include <algorithm>
#include <new>
#include <numeric>

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

void sort_rows(size_t n, int64_t n_routed, size_t n_places, policy::FunctionRef<int32_t(size_t)> place_of,
               std::vector<RoutedCall::Row> &rows, std::vector<uint32_t> &first) {
    first.assign(n_places + 1, 0);
    for (size_t r = 0; r < n; ++r) {
        if (const int32_t place = place_of(r); place >= 0) ++first[static_cast<size_t>(place) + 1];
    }
    std::partial_sum(first.begin(), first.end(), first.begin());
    rows.resize(first.back());
    std::vector<uint32_t> next(first.begin(), first.end() - 1);
    for (size_t r = 0; r < n; ++r) {
        const int32_t place = place_of(r);
        if (place < 0) continue;
        rows[next[static_cast<size_t>(place)]++] = {static_cast<int32_t>(static_cast<int64_t>(r) % n_routed),
                                                    static_cast<int32_t>(static_cast<int64_t>(r) / n_routed)};
    }
}

void RoutedCall::sort_rows(std::span<const int32_t> routed, int64_t n_routed, int32_t n_expert) {
    std::vector<int32_t> place(static_cast<size_t>(n_expert), -1); // stays -1 for the device's, too
    const std::span<const int32_t> experts = layer.experts();
    for (size_t e = 0; e < experts.size(); ++e)
        place[static_cast<size_t>(experts[e])] = static_cast<int32_t>(e);
    const auto place_of = [&](size_t r) {
        const bool taken = stand_ins != nullptr && stand_ins->taken[r] != 0;
        return taken ? -1 : place[static_cast<size_t>(routed[r])];
    };
    spice::sort_rows(routed.size(), n_routed, experts.size(), place_of, rows, first);
    for (size_t e = 0; e < experts.size(); ++e)
        most_rows = std::max<int64_t>(most_rows, first[e + 1] - first[e]);
}

} // namespace spice

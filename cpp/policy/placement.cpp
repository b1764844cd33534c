#include "policy/placement.h"

#include "policy/placement_strategies.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>

namespace spice::policy {

namespace {

using Factory = std::unique_ptr<Placement> (*)();

constexpr std::array<std::string_view, 8> names{"spice",  "all-host", "all-fetch", "static",
                                                "cg-moe", "fiddler",  "hybrimoe",  "adapmoe"};
constexpr std::array<Factory, 8> factories{make_place_spice,    make_place_all_host, make_place_all_fetch,
                                           make_place_static,   make_place_cg_moe,   make_place_fiddler,
                                           make_place_hybrimoe, make_place_adapmoe};

/// By the time the copy is in memory, then most rows first, then the place in the call.
void sort_jobs(const PlacementCall &call, std::vector<int32_t> &jobs) {
    std::sort(jobs.begin(), jobs.end(), [&](int32_t a, int32_t b) {
        const size_t i = static_cast<size_t>(a);
        const size_t j = static_cast<size_t>(b);
        if (call.memory_at(i) != call.memory_at(j)) return call.memory_at(i) < call.memory_at(j);
        return call.rows[i] != call.rows[j] ? call.rows[i] > call.rows[j] : a < b;
    });
}

} // namespace

void fetch_order(const PlacementCall &call, std::span<const Place> places, std::vector<int32_t> &order) {
    order.clear();
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] == Place::fetch) order.push_back(static_cast<int32_t>(i));
    }
    sort_jobs(call, order);
}

void host_order(const PlacementCall &call, std::span<const Place> places, std::vector<int32_t> &order) {
    order.clear();
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] == Place::host || places[i] == Place::host_fill)
            order.push_back(static_cast<int32_t>(i));
    }
    sort_jobs(call, order);
}

int32_t fetches_per_launch(const PlacementCosts &costs, uint64_t slab_bytes, int32_t n) {
    constexpr double launches_per_transfer = 4.0;
    const double worth = std::ceil(launches_per_transfer * costs.device_call / costs.transfer(slab_bytes));
    return static_cast<int32_t>(std::clamp(worth, 1.0, std::max(1.0, static_cast<double>(n))));
}

double finish_time(const PlacementCall &call, const PlacementCosts &costs, std::span<const Place> places,
                   std::vector<int32_t> &order) {
    assert(call.rows.size() == places.size() && call.on_device.size() == places.size());
    double device = 0.0;
    double resident = 0.0; // compute time of what is there
    double late = 0.0;     // and of experts whose transfer is under way
    double landing = 0.0;
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] != Place::device) continue;
        if (call.on_device[i] <= 0.0) {
            resident += costs.device.at(call.rows[i]);
        } else {
            landing = std::max(landing, call.on_device[i]);
            late += costs.device.at(call.rows[i]);
        }
    }
    if (resident > 0.0) device += costs.device_call + resident;
    if (late > 0.0) device = std::max(device, landing) + costs.device_call + late;
    fetch_order(call, places, order);
    const bool on_device = resident > 0.0 || late > 0.0 || !order.empty();
    const auto per_launch =
        static_cast<size_t>(fetches_per_launch(costs, call.slab_bytes, static_cast<int32_t>(order.size())));
    double link = call.link_queued;
    for (size_t first = 0; first < order.size(); first += per_launch) {
        double takes = costs.device_call;
        for (const int32_t job :
             std::span(order).subspan(first, std::min(per_launch, order.size() - first))) {
            const auto i = static_cast<size_t>(job);
            link = std::max(link, call.memory_at(i)) + costs.transfer(call.slab_bytes);
            takes += costs.device.at(call.rows[i]);
        }
        device = std::max(device, link) + takes;
    }
    host_order(call, places, order);
    double host = costs.host_call;
    for (const int32_t job : order) {
        const size_t i = static_cast<size_t>(job);
        host = std::max(host, call.memory_at(i)) + costs.host.at(call.rows[i]);
    }
    return std::max(on_device ? device : 0.0, order.empty() ? 0.0 : host);
}

std::unique_ptr<Placement> make_placement(std::string_view name) {
    for (size_t i = 0; i < names.size(); ++i) {
        if (names[i] == name) return factories[i]();
    }
    return nullptr;
}

std::span<const std::string_view> placement_names() {
    return names;
}

} // namespace spice::policy

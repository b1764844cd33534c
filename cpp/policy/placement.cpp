#include "policy/placement.h"

#include "policy/placement_strategies.h"

#include <algorithm>
#include <array>
#include <cassert>

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

double finish_time(const PlacementCall &call, const PlacementCosts &costs, std::span<const Place> places,
                   std::vector<int32_t> &order) {
    assert(call.rows.size() == places.size() && call.on_device.size() == places.size());
    // Two passes for the device: what it has already, then what still comes on the link.
    double device = 0.0;
    double landing = 0.0;
    double late = 0.0; // compute time of experts whose transfer is under way
    bool on_device = false;
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] == Place::fetch) on_device = true;
        if (places[i] != Place::device) continue;
        on_device = true;
        if (call.on_device[i] <= 0.0) {
            device += costs.device.at(call.rows[i]);
        } else {
            landing = std::max(landing, call.on_device[i]);
            late += costs.device.at(call.rows[i]);
        }
    }
    if (on_device) device += costs.device_call;
    if (late > 0.0) device = std::max(device, landing) + late;
    fetch_order(call, places, order);
    double link = call.link_queued;
    for (const int32_t job : order) {
        const size_t i = static_cast<size_t>(job);
        link = std::max(link, call.memory_at(i)) + costs.transfer(call.slab_bytes);
        device = std::max(device, link) + costs.device.at(call.rows[i]);
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

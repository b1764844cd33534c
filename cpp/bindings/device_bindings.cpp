// The device tier in spice_moe._core: what it needs, what it got, what it counted. Declarations, no logic.
#include "bindings/device_bindings.h"

#include "bindings/arrays.h"
#include "policy/placement.h"
#include "runtime/device_tier.h"

#include <pybind11/stl.h>

namespace py = pybind11;
using namespace spice;

namespace {

ggml_backend_dev_t find(const std::string &name) {
    return name.empty() ? DeviceTier::find_device() : ggml_backend_dev_by_name(name.c_str());
}

} // namespace

void bind_device(py::module_ &m) {
    m.def("placement_names", [] { return to_list(policy::placement_names()); });
}

py::dict device_needs(const Engine &engine, const std::string &name, const std::vector<int32_t> &layers) {
    const ggml_backend_dev_t device = find(name);
    const DevicePlan plan = DeviceTier::needs(engine, device, layers);
    size_t free = 0;
    size_t total = 0;
    if (device != nullptr) ggml_backend_dev_memory(device, &free, &total);
    py::dict out;
    out["device"] = plan.device;
    out["description"] = plan.description;
    out["smallest"] = plan.smallest;
    out["everything"] = plan.everything;
    out["pins"] = device != nullptr && ggml_backend_dev_host_buffer_type(device) != nullptr;
    out["free"] = free;
    out["total"] = total;
    return out;
}

Status build_pool(Engine &engine, uint64_t budget, const std::string &name, uint64_t pinned_limit) {
    const ggml_backend_dev_t device = pinned_limit > 0 ? find(name) : nullptr;
    return engine.build_pool(budget, device == nullptr ? nullptr : ggml_backend_dev_host_buffer_type(device),
                             pinned_limit);
}

Status build_device_pool(Engine &engine, const std::string &name, const std::vector<int32_t> &layers,
                         uint64_t budget, const std::string &placement, int32_t n_threads) {
    const ggml_backend_dev_t device = find(name);
    if (device == nullptr) return {Code::unsupported, "llama.cpp has no GPU device; give vram_budget=0"};
    return engine.build_device_pool(device, layers, budget, placement, n_threads);
}

py::list device_pools(const Engine &engine) {
    py::list pools;
    for (const auto &tier : engine.devices()) {
        py::dict out;
        out["device"] = tier->plan().device;
        out["budget"] = tier->plan().budget;
        out["n_slots"] = tier->plan().n_slots;
        out["placement"] = tier->plan().placement;
        out["link_speed"] = tier->plan().link_speed;
        out["device_speed"] = tier->plan().device_speed;
        out["host_speed"] = tier->plan().host_speed;
        pools.append(out);
    }
    return pools;
}

void forget_devices(Engine &engine) {
    for (const auto &tier : engine.devices()) tier->forget();
}

void add_device_stats(const Engine &engine, py::dict &out) {
    DeviceCounters c;
    for (const auto &tier : engine.devices()) c += tier->counters();
    out["device_calls"] = c.calls;
    out["device_hits"] = c.hits;
    out["device_fetched"] = c.fetched;
    out["device_passed"] = c.passed;
    out["device_filled"] = c.filled;
    out["device_prefetched"] = c.prefetched;
    out["device_prefetch_used"] = c.prefetch_used;
    out["device_prefetch_late"] = c.prefetch_late;
    out["device_prefetch_wasted"] = c.prefetch_wasted;
    out["device_left"] = c.host;
    out["device_rows"] = c.rows;
    out["device_evictions"] = c.evictions;
    out["device_in_place"] = c.in_place;
    out["device_unfit"] = c.unfit;
    out["device_refused"] = c.refused;
    out["device_wait_seconds"] = c.wait_seconds;
    out["upload_bytes"] = c.link.bytes;
    out["uploads"] = c.link.uploads;
    out["upload_seconds"] = c.link.busy_seconds;
    out["device_resident_experts"] = c.resident_experts;
    out["device_resident_bytes"] = c.resident_bytes;
}

void reset_device_stats(Engine &engine) {
    for (const auto &tier : engine.devices()) tier->reset_counters();
}

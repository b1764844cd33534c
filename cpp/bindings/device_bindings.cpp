// The device tier in spice_moe._core: what it needs, what it got, what it counted. Declarations, no logic.
#include "bindings/device_bindings.h"

#include "bindings/arrays.h"
#include "policy/placement.h"
#include "runtime/device_tier.h"

#include <pybind11/stl.h>

namespace py = pybind11;
using namespace spice;

void bind_device(py::module_ &m) {
    m.def("placement_names", [] { return to_list(policy::placement_names()); });
}

py::dict device_needs(const Engine &engine) {
    const ggml_backend_dev_t device = DeviceTier::find_device();
    const DevicePlan plan = DeviceTier::needs(engine, device);
    size_t free = 0;
    size_t total = 0;
    if (device != nullptr) ggml_backend_dev_memory(device, &free, &total);
    py::dict out;
    out["device"] = plan.device;
    out["description"] = plan.description;
    out["smallest"] = plan.smallest;
    out["everything"] = plan.everything;
    out["asynchronous"] = plan.asynchronous;
    out["pins"] = device != nullptr && ggml_backend_dev_host_buffer_type(device) != nullptr;
    out["free"] = free;
    out["total"] = total;
    return out;
}

Status build_pool(Engine &engine, uint64_t budget, uint64_t pinned_limit) {
    const ggml_backend_dev_t device = pinned_limit > 0 ? DeviceTier::find_device() : nullptr;
    return engine.build_pool(budget, device == nullptr ? nullptr : ggml_backend_dev_host_buffer_type(device),
                             pinned_limit);
}

Status build_device_pool(Engine &engine, uint64_t budget, const std::string &placement) {
    const ggml_backend_dev_t device = DeviceTier::find_device();
    if (device == nullptr) return {Code::unsupported, "llama.cpp has no GPU device; give vram_budget=0"};
    return engine.build_device_pool(device, budget, placement);
}

py::dict device_pool(const Engine &engine) {
    py::dict out;
    const DevicePlan plan = engine.device() == nullptr ? DevicePlan{} : engine.device()->plan();
    out["budget"] = plan.budget;
    out["n_slots"] = plan.n_slots;
    out["placement"] = plan.placement;
    return out;
}

void forget_device(Engine &engine) {
    if (engine.device() != nullptr) engine.device()->forget();
}

void add_device_stats(const Engine &engine, py::dict &out) {
    const DeviceCounters c = engine.device() == nullptr ? DeviceCounters{} : engine.device()->counters();
    out["device_calls"] = c.calls;
    out["device_hits"] = c.hits;
    out["device_fetched"] = c.fetched;
    out["device_filled"] = c.filled;
    out["device_left"] = c.host;
    out["device_rows"] = c.rows;
    out["device_evictions"] = c.evictions;
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
    if (engine.device() != nullptr) engine.device()->reset_counters();
}

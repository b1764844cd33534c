// spice_moe._core.sim: the simulator, and the decisions that it makes. Declarations, no logic; wrong
// arguments raise ValueError.
#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "compute/dot_speed.h"
#include "policy/placement.h"
#include "policy/strategy.h"
#include "sim/belady_strategy.h"
#include "sim/simulator.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;
using namespace spice;

namespace {

py::dict to_dict(const sim::SimResult &r) {
    py::dict out;
    out["tokens"] = r.tokens;
    out["steps"] = r.steps;
    out["prefill_tokens"] = r.prefill_tokens;
    out["seconds"] = r.seconds;
    out["prefill_seconds"] = r.prefill_seconds;
    out["draft_seconds"] = r.draft_seconds;
    out["other_seconds"] = r.other_seconds;
    out["hits"] = r.hits;
    out["late"] = r.late;
    out["misses"] = r.misses;
    out["fetched"] = r.fetched;
    out["hosted"] = r.hosted;
    out["ahead"] = r.ahead;
    out["ahead_used"] = r.ahead_used;
    out["ahead_wasted"] = r.ahead_wasted;
    out["planned"] = r.planned;
    out["planned_used"] = r.planned_used;
    out["planned_wasted"] = r.planned_wasted;
    out["disk_demands"] = r.disk_demands;
    out["link_bytes"] = r.link_bytes;
    out["disk_bytes"] = r.disk_bytes;
    out["link_busy"] = r.link_busy;
    out["disk_busy"] = r.disk_busy;
    out["device_busy"] = r.device_busy;
    out["host_busy"] = r.host_busy;
    out["total_seconds"] = r.total_seconds;
    out["joules"] = r.joules;
    out["prefill_joules"] = r.prefill_joules;
    return out;
}

py::dict simulate(const Array<int32_t> &ids, const Array<int32_t> &lens, int32_t n_experts,
                  const sim::Machine &machine, const sim::Model &model, const sim::SimOptions &options,
                  const std::optional<Array<float>> &weights,
                  const std::optional<Array<int32_t>> &predictions,
                  const std::optional<Array<float>> &chances) {
    if (ids.ndim() != 3) throw py::value_error("ids must have the shape [layers, tokens, top_k]");
    sim::Routing routing;
    routing.ids = view(ids);
    routing.lens = view(lens);
    if (weights) routing.weights = view(*weights);
    if (predictions && chances) {
        if (predictions->ndim() != 4) {
            throw py::value_error("predictions must have the shape [layers, tokens, horizons, experts]");
        }
        routing.predicted = view(*predictions);
        routing.chances = view(*chances);
        routing.n_horizons = static_cast<int32_t>(predictions->shape(2));
        routing.n_named = static_cast<int32_t>(predictions->shape(3));
    }
    routing.n_layers = static_cast<int32_t>(ids.shape(0));
    routing.n_tokens = static_cast<int32_t>(ids.shape(1));
    routing.top_k = static_cast<int32_t>(ids.shape(2));
    routing.n_experts = n_experts;
    std::optional<Result<sim::SimResult>> result;
    {
        const py::gil_scoped_release unlocked;
        result.emplace(sim::simulate(routing, machine, model, options));
    }
    if (!result->ok()) throw py::value_error(result->status().message());
    return to_dict(result->value());
}

/// "Q4_K", as models' quantisations are written.
std::string type_name(int type) {
    const char *name = ggml_type_name(static_cast<ggml_type>(type));
    std::string upper = name == nullptr ? "" : name;
    std::ranges::transform(upper, upper.begin(), [](unsigned char c) { return std::toupper(c); });
    return upper;
}

constexpr std::string_view letters = "dfh+"; // device, fetch, host, host_fill

std::string place(const std::string &name, const std::vector<int32_t> &rows,
                  const std::vector<double> &on_device, const policy::PlacementCosts &costs,
                  uint64_t slab_bytes, const std::vector<double> &in_memory, double link_queued,
                  double prefetch_queued) {
    const auto strategy = policy::make_placement(name);
    if (strategy == nullptr) throw py::value_error("no placement is called '" + name + "'");
    if (on_device.size() != rows.size() || (!in_memory.empty() && in_memory.size() != rows.size())) {
        throw py::value_error("rows, on_device and in_memory must have equal lengths");
    }
    std::vector<policy::Place> places(rows.size());
    strategy->place({.rows = rows,
                     .on_device = on_device,
                     .in_memory = in_memory,
                     .slab_bytes = slab_bytes,
                     .link_queued = link_queued,
                     .prefetch_queued = prefetch_queued},
                    costs, places);
    std::string out;
    for (const policy::Place p : places) out += letters[static_cast<size_t>(p)];
    return out;
}

double finish_time(const std::string &places, const std::vector<int32_t> &rows,
                   const std::vector<double> &on_device, const policy::PlacementCosts &costs,
                   uint64_t slab_bytes, const std::vector<double> &in_memory, double link_queued) {
    if (on_device.size() != rows.size() || places.size() != rows.size() ||
        (!in_memory.empty() && in_memory.size() != rows.size())) {
        throw py::value_error("places, rows, on_device and in_memory must have equal lengths");
    }
    std::vector<policy::Place> which;
    for (const char letter : places) {
        const size_t at = letters.find(letter);
        if (at == std::string_view::npos) throw py::value_error("places are letters of 'dfh+'");
        which.push_back(static_cast<policy::Place>(at));
    }
    std::vector<int32_t> order;
    return policy::finish_time({.rows = rows,
                                .on_device = on_device,
                                .in_memory = in_memory,
                                .slab_bytes = slab_bytes,
                                .link_queued = link_queued},
                               costs, which, order);
}

} // namespace

void bind_sim(py::module_ &m) {
    py::module_ sim = m.def_submodule("sim", "Simulation of a model on a machine; see cpp/sim/simulator.h.");
    sim.def("strategy_names", [] { return to_list(policy::strategy_names()); });
    sim.def("belady_names", [] { return to_list(spice::sim::belady_names()); });
    py::class_<policy::ExpertCost>(sim, "ExpertCost")
        .def(py::init<double, double>(), py::arg("fixed"), py::arg("per_row"));
    py::class_<policy::PlacementCosts>(sim, "PlacementCosts", "See cpp/policy/placement.h.")
        .def(py::init<>())
        .def_readwrite("device", &policy::PlacementCosts::device)
        .def_readwrite("host", &policy::PlacementCosts::host)
        .def_readwrite("device_call", &policy::PlacementCosts::device_call)
        .def_readwrite("host_call", &policy::PlacementCosts::host_call)
        .def_readwrite("link_latency", &policy::PlacementCosts::link_latency)
        .def_readwrite("link_bandwidth", &policy::PlacementCosts::link_bandwidth);
    sim.def("place", &place, py::arg("name"), py::arg("rows"), py::arg("on_device"), py::arg("costs"),
            py::kw_only(), py::arg("slab_bytes"), py::arg("in_memory") = std::vector<double>{},
            py::arg("link_queued") = 0.0, py::arg("prefetch_queued") = 0.0,
            "One letter per expert: d(evice), f(etch), h(ost), + (host, and fill).");
    sim.def("finish_time", &finish_time, py::arg("places"), py::arg("rows"), py::arg("on_device"),
            py::arg("costs"), py::kw_only(), py::arg("slab_bytes"),
            py::arg("in_memory") = std::vector<double>{}, py::arg("link_queued") = 0.0);

    sim.def(
        "dot_speed",
        [](const std::string &type, int32_t n_threads, double seconds, uint64_t bytes, double pause) {
            std::optional<Result<double>> speed;
            {
                const py::gil_scoped_release unlocked;
                int which = 0;
                while (which < GGML_TYPE_COUNT && type_name(which) != type) ++which;
                speed.emplace(
                    compute::dot_speed(static_cast<ggml_type>(which), n_threads, seconds, bytes, pause));
            }
            raise_if(speed->status());
            return speed->value();
        },
        py::arg("type"), py::kw_only(), py::arg("n_threads"), py::arg("seconds"), py::arg("bytes"),
        py::arg("pause") = 0.0,
        "Bytes of weights of a type, \"Q4_K\", that ggml's dot products go through in a second.");
    py::class_<sim::LinkSpec>(sim, "LinkSpec", "Bytes per second, seconds, bytes; see cpp/sim/machine.h.")
        .def(py::init<double, double, double, int32_t>(), py::arg("bandwidth"), py::arg("latency") = 0.0,
             py::arg("chunk") = 0.0, py::arg("in_flight") = 1);
    py::class_<sim::EngineSpec>(sim, "EngineSpec")
        .def(py::init<double, double, double>(), py::arg("stream"), py::arg("row"), py::arg("call") = 0.0)
        .def_readonly("stream", &sim::EngineSpec::stream)
        .def_readonly("row", &sim::EngineSpec::row)
        .def_readonly("call", &sim::EngineSpec::call);
    py::class_<sim::PowerSpec>(sim, "PowerSpec", "Watts; see cpp/sim/machine.h.")
        .def(py::init<double, double, double, double, double>(), py::kw_only(), py::arg("idle") = 0.0,
             py::arg("host") = 0.0, py::arg("device") = 0.0, py::arg("link") = 0.0, py::arg("disk") = 0.0);
    py::class_<sim::Machine>(sim, "Machine")
        .def(py::init<>())
        .def_readwrite("has_device", &sim::Machine::has_device)
        .def_readwrite("host", &sim::Machine::host)
        .def_readwrite("device", &sim::Machine::device)
        .def_readwrite("link", &sim::Machine::link)
        .def_readwrite("disk", &sim::Machine::disk)
        .def_readwrite("layer_call", &sim::Machine::layer_call)
        .def_readwrite("contention", &sim::Machine::contention)
        .def_readwrite("drowsiness", &sim::Machine::drowsiness)
        .def_readwrite("power", &sim::Machine::power);
    py::class_<sim::Model>(sim, "Model")
        .def(py::init<std::vector<double>, double, double>(), py::arg("slab_bytes"), py::arg("other_bytes"),
             py::arg("shared_bytes") = 0.0);
    py::class_<sim::SimOptions>(sim, "SimOptions")
        .def(py::init<>())
        .def_readwrite("strategy", &sim::SimOptions::strategy)
        .def_readwrite("slots", &sim::SimOptions::slots)
        .def_readwrite("memory_slots", &sim::SimOptions::memory_slots)
        .def_readwrite("batch", &sim::SimOptions::batch)
        .def_readwrite("prefill", &sim::SimOptions::prefill)
        .def_readwrite("keep", &sim::SimOptions::keep)
        .def_readwrite("predictor", &sim::SimOptions::predictor)
        .def_readwrite("recall", &sim::SimOptions::recall)
        .def_readwrite("draft", &sim::SimOptions::draft)
        .def_readwrite("draft_seconds", &sim::SimOptions::draft_seconds)
        .def_readwrite("acceptance", &sim::SimOptions::acceptance)
        .def_readwrite("fidelity", &sim::SimOptions::fidelity)
        .def_readwrite("profile", &sim::SimOptions::profile)
        .def_readwrite("seed", &sim::SimOptions::seed);
    sim.def("simulate", &simulate, py::arg("ids"), py::arg("lens"), py::kw_only(), py::arg("n_experts"),
            py::arg("machine"), py::arg("model"), py::arg("options"), py::arg("weights") = py::none(),
            py::arg("predictions") = py::none(), py::arg("chances") = py::none(),
            "Routing ids [layers, tokens, top_k] on a machine: counts and seconds as a dict.");
}

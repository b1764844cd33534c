// spice_moe._core.policy: the eviction strategies on recorded routing. Declarations, no logic; wrong
// arguments raise ValueError.
#include "policy/eviction.h"
#include "sim/replay.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

namespace py = pybind11;
using namespace spice;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::span<const T> view(const Array<T> &array) {
    return {array.data(), static_cast<size_t>(array.size())};
}

py::dict to_dict(const sim::ReplayResult &result) {
    const auto column = [&](uint64_t sim::LayerHits::*member) {
        py::array_t<uint64_t> out(static_cast<py::ssize_t>(result.layers.size()));
        for (size_t i = 0; i < result.layers.size(); ++i) out.mutable_at(i) = result.layers[i].*member;
        return out;
    };
    sim::LayerHits sum;
    for (const sim::LayerHits &layer : result.layers) {
        sum.hits += layer.hits;
        sum.misses += layer.misses;
        sum.prefill_hits += layer.prefill_hits;
        sum.prefill_misses += layer.prefill_misses;
    }
    py::dict out;
    out["hits"] = sum.hits;
    out["misses"] = sum.misses;
    out["prefill_hits"] = sum.prefill_hits;
    out["prefill_misses"] = sum.prefill_misses;
    out["layer_hits"] = column(&sim::LayerHits::hits);
    out["layer_misses"] = column(&sim::LayerHits::misses);
    out["layer_prefill_hits"] = column(&sim::LayerHits::prefill_hits);
    out["layer_prefill_misses"] = column(&sim::LayerHits::prefill_misses);
    out["calls"] = result.n_calls;
    return out;
}

/// The arguments that replay() and belady() share, and the call.
template <class Run>
py::dict on_routing(const Array<int32_t> &ids, const Array<int32_t> &lens, int32_t n_slots, int32_t n_experts,
                    int32_t batch, int32_t prefill, int32_t wave, bool keep,
                    const std::optional<Array<float>> &weights, const Run &run) {
    if (ids.ndim() != 3) throw py::value_error("ids must have the shape [layers, tokens, top_k]");
    sim::Routing routing;
    routing.ids = view(ids);
    routing.lens = view(lens);
    if (weights) routing.weights = view(*weights);
    routing.n_layers = static_cast<int32_t>(ids.shape(0));
    routing.n_tokens = static_cast<int32_t>(ids.shape(1));
    routing.top_k = static_cast<int32_t>(ids.shape(2));
    routing.n_experts = n_experts;
    const sim::ReplayOptions options{n_slots, batch, prefill, wave, keep};
    std::optional<Result<sim::ReplayResult>> result;
    {
        const py::gil_scoped_release unlocked;
        result.emplace(run(routing, options));
    }
    if (!result->ok()) throw py::value_error(result->status().message());
    return to_dict(result->value());
}

} // namespace

void bind_policy(py::module_ &m) {
    py::module_ policy =
        m.def_submodule("policy", "Eviction strategies, and their replay on recorded routing.");
    policy.def("eviction_names", [] {
        std::vector<std::string> names;
        for (const std::string_view name : policy::eviction_names()) names.emplace_back(name);
        return names;
    });
    policy.def(
        "replay",
        [](const Array<int32_t> &ids, const Array<int32_t> &lens, int32_t n_slots,
           const std::string &strategy, int32_t n_experts, int32_t batch, int32_t prefill, int32_t wave,
           bool keep, const std::optional<Array<float>> &weights) {
            return on_routing(ids, lens, n_slots, n_experts, batch, prefill, wave, keep, weights,
                              [&](const sim::Routing &routing, const sim::ReplayOptions &options) {
                                  return sim::replay(routing, options, strategy);
                              });
        },
        py::arg("ids"), py::arg("lens"), py::arg("n_slots"), py::arg("strategy"), py::kw_only(),
        py::arg("n_experts"), py::arg("batch") = 1, py::arg("prefill") = 0, py::arg("wave") = 0,
        py::arg("keep") = false, py::arg("weights") = py::none(),
        "Hits and misses of a strategy on routing ids [layers, tokens, top_k]; see cpp/sim/replay.h.");
    policy.def(
        "belady",
        [](const Array<int32_t> &ids, const Array<int32_t> &lens, int32_t n_slots, int32_t n_experts,
           int32_t batch, int32_t prefill, int32_t wave, bool keep, bool per_layer) {
            return on_routing(ids, lens, n_slots, n_experts, batch, prefill, wave, keep, std::nullopt,
                              [&](const sim::Routing &routing, const sim::ReplayOptions &options) {
                                  return sim::belady(routing, options, per_layer);
                              });
        },
        py::arg("ids"), py::arg("lens"), py::arg("n_slots"), py::kw_only(), py::arg("n_experts"),
        py::arg("batch") = 1, py::arg("prefill") = 0, py::arg("wave") = 0, py::arg("keep") = false,
        py::arg("per_layer") = false,
        "The optimum for the same calls, knowing the future: one pool, or split equally over the layers.");
}

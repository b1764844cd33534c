// spice_moe._core.policy: the eviction strategies on recorded routing. Declarations, no logic; wrong
// arguments raise ValueError.
#include "bindings/arrays.h"
#include "policy/eviction.h"
#include "sim/replay.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;
using namespace spice;

namespace {

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

/// A strategy for tests: refuses what the contract leaves undefined.
class CheckedEviction {
  public:
    CheckedEviction(const std::string &name, int32_t n_groups, int32_t n_experts, int32_t n_slots,
                    int32_t top_k)
        : n_groups_(n_groups), n_experts_(n_experts),
          eviction_(policy::make_eviction(name, {n_groups, n_experts, n_slots, top_k})) {
        if (eviction_ == nullptr) throw py::value_error("unknown strategy, or an impossible shape");
    }
    void begin_call(int32_t group, const std::vector<int32_t> &experts, const std::vector<float> &weights) {
        for (const int32_t expert : experts) check({group, expert});
        eviction_->begin_call(group, experts, weights);
    }
    void on_load(int32_t group, int32_t expert) {
        check({group, expert});
        if (!resident_.insert({group, expert}).second) throw py::value_error("is resident already");
        eviction_->on_load({group, expert});
    }
    void on_evict(int32_t group, int32_t expert) {
        if (resident_.erase({group, expert}) == 0) throw py::value_error("is not resident");
        eviction_->on_evict({group, expert});
    }
    std::optional<std::pair<int32_t, int32_t>> victim(const py::function &evictable) {
        const auto id = eviction_->victim(
            [&](policy::SlabId slab) { return evictable(slab.group, slab.expert).cast<bool>(); });
        if (!id) return std::nullopt;
        return std::pair(id->group, id->expert);
    }

  private:
    void check(policy::SlabId id) const {
        if (id.group < 0 || id.group >= n_groups_ || id.expert < 0 || id.expert >= n_experts_) {
            throw py::value_error("no such slab");
        }
    }
    int32_t n_groups_;
    int32_t n_experts_;
    std::set<std::pair<int32_t, int32_t>> resident_;
    std::unique_ptr<policy::Eviction> eviction_;
};

} // namespace

void bind_policy(py::module_ &m) {
    py::module_ policy =
        m.def_submodule("policy", "Eviction strategies, and their replay on recorded routing.");
    policy.def("eviction_names", [] { return to_list(policy::eviction_names()); });
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
    py::class_<CheckedEviction>(policy, "Eviction",
                                "One strategy object, for tests; see cpp/policy/eviction.h.")
        .def(py::init<const std::string &, int32_t, int32_t, int32_t, int32_t>(), py::arg("name"),
             py::kw_only(), py::arg("n_groups"), py::arg("n_experts"), py::arg("n_slots"),
             py::arg("top_k") = 0)
        .def("begin_call", &CheckedEviction::begin_call, py::arg("group"), py::arg("experts"),
             py::arg("weights") = std::vector<float>{})
        .def("on_load", &CheckedEviction::on_load, py::arg("group"), py::arg("expert"))
        .def("on_evict", &CheckedEviction::on_evict, py::arg("group"), py::arg("expert"))
        .def("victim", &CheckedEviction::victim, py::arg("evictable"));
}

#include "bindings/lore_bindings.h"

#include "bindings/errors.h"
#include "runtime/surrogate_use.h"

#include <limits>
#include <string>

namespace py = pybind11;
using namespace spice;

void set_substitution(Engine &engine, const std::string &kind, double share, uint64_t seed, int32_t layer,
                      double max_share) {
    if (kind == "off") {
        if (engine.surrogate_use() != nullptr) engine.surrogate_use()->turn_off();
        return;
    }
    if (!(share >= 0.0 && share <= 1.0)) throw py::value_error("share must be 0 to 1");
    compute::SurrogateKind what = compute::SurrogateKind::full;
    if (kind == "drop") {
        what = compute::SurrogateKind::drop;
    } else if (kind == "base") {
        what = compute::SurrogateKind::base;
    } else if (kind != "lore") {
        throw py::value_error("no kind of substitution is called " + kind);
    }
    const int32_t group = layer < 0 ? -1 : engine.group_of(layer);
    if (layer >= 0 && group < 0) {
        throw py::value_error("layer " + std::to_string(layer) + " has no routed experts");
    }
    const policy::ForcedSubstitution lot(static_cast<float>(share), seed, group,
                                         static_cast<float>(max_share));
    raise_if(engine.make_surrogate_use().force(what, lot));
}

void use_lore(Engine &engine, float max_share, float max_mass, float max_confidence, double budget,
              bool prompts) {
    policy::SubstitutionRules rules = {
        .max_share = max_share, .max_mass = max_mass, .max_confidence = max_confidence, .budget = budget};
    if (prompts) rules.max_rows = std::numeric_limits<int32_t>::max();
    raise_if(engine.make_surrogate_use().follow(rules, engine.top_k()));
}

py::object lore_plan(const Engine &engine) {
    const SurrogateUse *use = engine.surrogate_use();
    if (use == nullptr || use->surrogates() == nullptr) return py::none();
    const SurrogateSet &set = *use->surrogates();
    return py::dict(py::arg("path") = set.path(), py::arg("bytes") = set.bytes(),
                    py::arg("rank") = set.rank(), py::arg("layers") = set.n_layers(),
                    py::arg("calibrated") = set.calibrated());
}

void add_lore_stats(const Engine &engine, py::dict &out) {
    const SurrogateUse *use = engine.surrogate_use();
    const SurrogateCounters c = use == nullptr ? SurrogateCounters() : use->counters();
    out["lore_rows"] = c.rows;
    out["lore_pairs"] = c.pairs;
    out["lore_substituted"] = c.taken;
    out["lore_unfit"] = c.unfit;
    out["lore_gate_mass"] = c.mass;
    out["lore_error"] = c.error;
    out["lore_kl"] = c.nats;
}

void reset_lore_stats(const Engine &engine) {
    if (engine.surrogate_use() != nullptr) engine.surrogate_use()->reset_counters();
}

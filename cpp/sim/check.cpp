#include "sim/check.h"

#include "policy/strategy.h"
#include "sim/belady_strategy.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace spice::sim {

Status check_routing(const Routing &r) {
    const auto bad = [](const std::string &what) { return Status(Code::unsupported, what); };
    if (r.n_layers <= 0 || r.n_tokens < 0 || r.top_k <= 0 || r.n_experts <= 0) {
        return bad("ids must have the shape [layers, tokens, top_k], and n_experts must be above 0");
    }
    if (r.n_layers > std::numeric_limits<int32_t>::max() / 2 / r.n_experts) return bad("too many experts");
    const size_t n =
        static_cast<size_t>(r.n_layers) * static_cast<size_t>(r.n_tokens) * static_cast<size_t>(r.top_k);
    if (r.ids.size() != n) return bad("ids do not have the size that their shape says");
    if (!r.weights.empty() && r.weights.size() != n) return bad("weights must have the shape of ids");
    if (r.n_horizons < 0 || r.n_named < 0) return bad("predictions must have a shape");
    const size_t n_predicted =
        n / static_cast<size_t>(r.top_k) * static_cast<size_t>(r.n_horizons) * static_cast<size_t>(r.n_named);
    if (r.predicted.size() != n_predicted || r.chances.size() != n_predicted) {
        return bad("predictions and their chances must have the shape [layers, tokens, horizons, experts]");
    }
    for (const int32_t id : r.predicted) {
        if (id < -1 || id >= r.n_experts) {
            return bad("a prediction of expert " + std::to_string(id) + ", outside -1 .. " +
                       std::to_string(r.n_experts - 1));
        }
    }
    for (const int32_t id : r.ids) {
        if (id < 0 || id >= r.n_experts) {
            return bad("expert id " + std::to_string(id) + " is outside 0 .. " +
                       std::to_string(r.n_experts - 1));
        }
    }
    int64_t sum = 0;
    for (const int32_t len : r.lens) {
        if (len < 0) return bad("a sequence has a negative length");
        sum += len;
    }
    if (sum != r.n_tokens) {
        return bad("the sequences have " + std::to_string(sum) + " tokens, ids have " +
                   std::to_string(r.n_tokens));
    }
    return {};
}

Status check_simulation(const Routing &r, const Machine &m, const Model &model, const SimOptions &o) {
    const auto bad = [](const std::string &what) { return Status(Code::unsupported, what); };
    const Status routing = check_routing(r);
    if (!routing.ok()) return routing;
    const auto positive = [](double x) { return std::isfinite(x) && x > 0.0; };
    const auto not_negative = [](double x) { return std::isfinite(x) && x >= 0.0; };
    if (model.slab_bytes.size() != static_cast<size_t>(r.n_layers)) {
        return bad("slab_bytes has " + std::to_string(model.slab_bytes.size()) + " layers, the routing " +
                   std::to_string(r.n_layers));
    }
    for (const double bytes : model.slab_bytes) {
        if (!positive(bytes)) return bad("slab_bytes must be above 0");
    }
    const auto engine_ok = [&](const EngineSpec &e) {
        return positive(e.stream) && positive(e.row) && e.row >= e.stream && not_negative(e.call);
    };
    const auto link_ok = [&](const LinkSpec &l) {
        return positive(l.bandwidth) && not_negative(l.latency) && not_negative(l.chunk) && l.in_flight >= 1;
    };
    if (!engine_ok(m.host)) return bad("host: stream must be above 0, row at least stream, call 0 or more");
    if (m.has_device && !engine_ok(m.device)) {
        return bad("device: stream must be above 0, row at least stream, call 0 or more");
    }
    if (m.has_device && !link_ok(m.link)) return bad("link: bandwidth must be above 0, the others 0 or more");
    if ((!m.has_device || o.memory_slots > 0) && !link_ok(m.disk)) {
        return bad("disk: bandwidth must be above 0, the others 0 or more");
    }
    if (!not_negative(model.shared_bytes) || model.shared_bytes > model.other_bytes) {
        return bad("shared_bytes must be 0 to other_bytes");
    }
    if (!not_negative(model.other_bytes) || !not_negative(m.layer_call) || !not_negative(m.contention) ||
        !not_negative(m.drowsiness)) {
        return bad("other_bytes, layer_call, contention and drowsiness must be 0 or more");
    }
    const PowerSpec &p = m.power;
    for (const double watts : {p.idle, p.host, p.device, p.link, p.disk}) {
        if (!not_negative(watts)) return bad("power must be 0 watts or more");
    }
    if (o.slots < 1) return bad("slots must be at least 1");
    if (o.memory_slots < 0) return bad("memory_slots must be 0 or more");
    if (o.batch < 1 || o.batch > 64) return bad("batch must be 1 to 64");
    if (o.prefill < -1 || o.prefill_batch < 1)
        return bad("prefill must be -1 or more, prefill_batch 1 or more");
    if (o.draft < 0 || o.draft > 63) return bad("draft must be 0 to 63");
    if (o.draft > 0 && o.batch > 1) return bad("a draft makes the batch: give draft or batch, not both");
    if (!not_negative(o.draft_seconds)) return bad("draft_seconds must be 0 or more");
    if (!(o.acceptance >= 0.0 && o.acceptance <= 1.0 && o.fidelity >= 0.0 && o.fidelity <= 1.0)) {
        return bad("acceptance and fidelity must be 0 to 1");
    }
    const size_t n = static_cast<size_t>(r.n_layers) * static_cast<size_t>(r.n_experts);
    if (!o.profile.empty() && o.profile.size() != n)
        return bad("profile must have the shape [layers, experts]");
    const policy::PoolShape pool{r.n_layers, r.n_experts, o.slots, r.top_k};
    const auto names = policy::strategy_names();
    const auto bounds = belady_names();
    const bool bound = std::find(bounds.begin(), bounds.end(), o.strategy) != bounds.end();
    if (!bound && std::find(names.begin(), names.end(), o.strategy) == names.end()) {
        std::string message = "no strategy is called '" + o.strategy + "'; there are";
        for (const std::string_view name : names) message.append(" ").append(name);
        for (const std::string_view name : bounds) message.append(" ").append(name);
        return bad(message);
    }
    if ((bound ? make_belady(o.strategy == bounds[1], pool, {}) : policy::make_strategy(o.strategy, pool)) ==
        nullptr) {
        return bad("strategy " + o.strategy + " needs at least one slot per layer: " +
                   std::to_string(r.n_layers) + ", not " + std::to_string(o.slots));
    }
    const bool recorded = o.predictor == "recorded";
    if (recorded && r.predicted.empty()) {
        return bad("the trace has no predictions; record them with spice-trace --predictions NAME");
    }
    if (!o.predictor.empty() && !recorded && o.predictor != "none" &&
        policy::make_predictor(o.predictor, {1, 2, 1, 1}) == nullptr) {
        std::string message = "no predictor is called '" + o.predictor + "'; there are none,";
        for (const std::string_view name : policy::predictor_names()) message.append(" ").append(name);
        return bad(message + " recorded");
    }
    if (policy::make_eviction(o.memory_eviction, {1, 1, 1, 1}) == nullptr) {
        return bad("no eviction strategy is called '" + o.memory_eviction + "'");
    }
    return {};
}

} // namespace spice::sim

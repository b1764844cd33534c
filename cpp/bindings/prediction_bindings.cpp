// spice_moe._core.policy: prediction and prefetch, for tests and benches. Arguments are checked here, because
// the contracts of policy/ leave wrong ones undefined.
#include "bindings/arrays.h"
#include "policy/benefit_meter.h"
#include "policy/gating.h"
#include "policy/load_ahead.h"
#include "policy/lookahead.h"
#include "policy/predictor.h"
#include "policy/prefetch_plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace py = pybind11;
using namespace spice;

void bind_prediction(py::module_ &policy);

namespace {

template <class T>
std::span<T> out_view(py::array_t<T> &array) {
    return {array.mutable_data(), static_cast<size_t>(array.size())};
}

void need(bool condition, const char *message) {
    if (!condition) throw py::value_error(message);
}

constexpr std::array<std::pair<const char *, policy::Activation>, 4> activations = {{
    {"softmax", policy::Activation::softmax},
    {"sigmoid", policy::Activation::sigmoid},
    {"none", policy::Activation::none},
    {"sqrt_softplus", policy::Activation::sqrt_softplus},
}};

policy::Activation activation_of(const std::string &name) {
    for (const auto &[known, activation] : activations) {
        if (name == known) return activation;
    }
    throw py::value_error("activation: softmax, sigmoid, none or sqrt_softplus");
}

py::array_t<float> ranking_scores(const Array<float> &raw, const std::string &activation,
                                  const Array<float> &router_bias, const Array<float> &selection_bias,
                                  int32_t n_expert_groups, int32_t n_groups_used) {
    need(raw.ndim() == 1 || raw.ndim() == 2, "raw: [n_experts] or [rows, n_experts]");
    const auto n = static_cast<size_t>(raw.shape(raw.ndim() - 1));
    const policy::Gating gating{activation_of(activation), n_expert_groups, n_groups_used};
    need(policy::possible(gating, static_cast<int32_t>(n)), "these expert groups do not divide the experts");
    for (const Array<float> *bias : {&router_bias, &selection_bias}) {
        need(bias->size() == 0 || static_cast<size_t>(bias->size()) == n, "a bias has one value per expert");
    }
    py::array_t<float> out(std::vector<py::ssize_t>(raw.shape(), raw.shape() + raw.ndim()));
    for (size_t at = 0; at < static_cast<size_t>(raw.size()); at += n) {
        policy::ranking_scores(gating, view(raw).subspan(at, n), view(router_bias), view(selection_bias),
                               out_view(out).subspan(at, n));
    }
    return out;
}

/// A predictor whose arguments are checked.
class CheckedPredictor {
  public:
    CheckedPredictor(const std::string &name, const policy::RoutingShape &shape)
        : shape_(shape), predictor_(policy::make_predictor(name, shape)),
          seen_(size_t(std::max(shape.n_experts, 1))) {
        need(predictor_ != nullptr, "unknown predictor, or an impossible shape");
    }

    [[nodiscard]] std::string name() const { return std::string(predictor_->name()); }
    [[nodiscard]] int32_t max_horizon() const { return predictor_->max_horizon(); }
    [[nodiscard]] std::string scores() const {
        switch (predictor_->scores()) {
        case policy::ScoreSource::none:
            return "none";
        case policy::ScoreSource::frozen:
            return "frozen";
        case policy::ScoreSource::fitted:
            return "fitted";
        case policy::ScoreSource::best:
            return "best";
        }
        return "";
    }

    void begin_call(int32_t group, const Array<int32_t> &ids) {
        check_call(group, ids);
        rows_ = static_cast<int32_t>(ids.shape(0));
        group_ = group;
        predicted_.clear();
        predictor_->begin_call(group, view(ids), rows_);
    }

    std::optional<py::array_t<float>> predict(int32_t group, int32_t horizon, const Array<float> &scores) {
        need(group == group_, "group: predictions start from the present call");
        need(horizon >= 1 && horizon <= max_horizon(), "horizon: 1 .. max_horizon");
        need(scores.size() == 0 || scores.size() == py::ssize_t{rows_} * shape_.n_experts,
             "scores: [rows, n_experts] for the rows of the present call");
        need(predicted_.insert(horizon).second, "a horizon is predicted once per call");
        py::array_t<float> out(shape_.n_experts);
        if (!predictor_->predict(group, horizon, view(scores), out_view(out))) return std::nullopt;
        return out;
    }

    void set_future(const std::vector<std::pair<int32_t, Array<int32_t>>> &calls,
                    const std::vector<float> &recall, uint64_t seed) {
        std::vector<policy::FutureCall> future;
        for (const auto &[group, ids] : calls) {
            check_call(group, ids);
            future.push_back(
                {group, static_cast<int32_t>(ids.shape(0)), {view(ids).begin(), view(ids).end()}});
        }
        predictor_->set_future(std::move(future), recall, seed);
    }

    /// Recall of the top-k and the calibration of all chances on recorded routing, one token per call.
    /// ids [layers, tokens, top_k]; a sequence's end is not told, as in a server.
    py::dict replay(const Array<int32_t> &ids, int32_t skip) {
        need(ids.ndim() == 3 && ids.shape(0) == shape_.n_groups && ids.shape(2) <= shape_.top_k,
             "ids: [n_groups, tokens, top_k]");
        const auto n_tokens = static_cast<int32_t>(ids.shape(1));
        const auto k = static_cast<size_t>(ids.shape(2));
        const auto n = static_cast<size_t>(shape_.n_experts);
        const auto n_horizons = static_cast<size_t>(max_horizon());
        for (const int32_t id : view(ids)) need(id >= 0 && id < shape_.n_experts, "ids: no such expert");
        constexpr size_t bins = 20;
        std::vector<std::vector<float>> chances(n_horizons * n_horizons, std::vector<float>(n));
        std::vector<uint8_t> valid(n_horizons * n_horizons);
        py::array_t<double> hits({n_horizons + 1, size_t(shape_.n_groups)});
        py::array_t<double> asked({n_horizons + 1, size_t(shape_.n_groups)});
        py::array_t<double> loss(n_horizons + 1);
        py::array_t<double> told({n_horizons + 1, bins});
        py::array_t<double> happened({n_horizons + 1, bins});
        py::array_t<double> number({n_horizons + 1, bins});
        for (auto *array : {&hits, &asked, &loss, &told, &happened, &number}) {
            std::fill_n(array->mutable_data(), array->size(), 0.0);
        }
        std::vector<std::pair<float, int32_t>> best(n);
        std::vector<uint8_t> used(n);
        {
            const py::gil_scoped_release unlocked;
            for (int32_t t = 0; t < n_tokens; ++t) {
                for (int32_t g = 0; g < shape_.n_groups; ++g) {
                    const size_t call = size_t(t) * size_t(shape_.n_groups) + size_t(g);
                    const auto row = std::span(ids.data(g, t, 0), k);
                    std::fill(used.begin(), used.end(), uint8_t{0});
                    for (const int32_t id : row) used[size_t(id)] = 1;
                    for (size_t h = 1; h <= n_horizons && h <= call; ++h) {
                        const size_t place = (call % n_horizons) * n_horizons + h - 1;
                        if (t < skip || valid[place] == 0) continue;
                        const std::vector<float> &p = chances[place];
                        for (size_t e = 0; e < n; ++e) best[e] = {-p[e], int32_t(e)};
                        std::partial_sort(best.begin(), best.begin() + ptrdiff_t(k), best.end());
                        double hit = 0.0;
                        for (size_t i = 0; i < k; ++i) hit += used[size_t(best[i].second)];
                        *hits.mutable_data(h, size_t(g)) += hit;
                        *asked.mutable_data(h, size_t(g)) += double(k);
                        for (size_t e = 0; e < n; ++e) {
                            const double q = std::clamp(double(p[e]), 1e-6, 1.0 - 1e-6);
                            *loss.mutable_data(h) -= std::log(used[e] != 0 ? q : 1.0 - q);
                            const size_t bin = std::min(size_t(q * double(bins)), bins - 1);
                            *told.mutable_data(h, bin) += q;
                            *happened.mutable_data(h, bin) += used[e];
                            *number.mutable_data(h, bin) += 1.0;
                        }
                    }
                    predictor_->begin_call(g, row, 1);
                    for (size_t h = 1; h <= n_horizons; ++h) {
                        const size_t place = ((call + h) % n_horizons) * n_horizons + h - 1;
                        valid[place] = predictor_->predict(g, int32_t(h), {}, chances[place]) ? 1 : 0;
                    }
                }
            }
        }
        py::dict out;
        out["hits"] = hits;
        out["asked"] = asked;
        out["loss"] = loss;
        out["told"] = told;
        out["happened"] = happened;
        out["number"] = number;
        return out;
    }

  private:
    void check_call(int32_t group, const Array<int32_t> &ids) {
        need(group >= 0 && group < shape_.n_groups, "group: no such group");
        need(ids.ndim() == 2 && ids.shape(0) >= 1 && ids.shape(1) >= 1 && ids.shape(1) <= shape_.top_k,
             "ids: [rows, k] with k of 1 .. top_k");
        for (py::ssize_t row = 0; row < ids.shape(0); ++row) {
            std::fill(seen_.begin(), seen_.end(), uint8_t{0});
            for (py::ssize_t i = 0; i < ids.shape(1); ++i) {
                const int32_t id = *ids.data(row, i);
                need(id >= 0 && id < shape_.n_experts, "ids: no such expert");
                need(seen_[size_t(id)]++ == 0, "ids: an expert twice in a row");
            }
        }
    }

    policy::RoutingShape shape_;
    std::unique_ptr<policy::Predictor> predictor_;
    std::vector<uint8_t> seen_;
    std::set<int32_t> predicted_;
    int32_t group_ = -1;
    int32_t rows_ = 0;
};

py::dict to_dict(const policy::PrefetchLoad &load) {
    py::dict one;
    one["group"] = load.id.group;
    one["expert"] = load.id.expert;
    one["horizon"] = load.horizon;
    one["chance"] = load.chance;
    one["priority"] = load.priority;
    return one;
}

/// A LoadAhead for a device, whose arguments are checked.
class CheckedLoadAhead {
  public:
    CheckedLoadAhead(int32_t n_groups, int32_t n_experts, int32_t max_horizon)
        : n_groups_(n_groups), n_experts_(n_experts), max_horizon_(max_horizon) {
        need(n_groups > 0 && n_experts > 0 && max_horizon > 0, "shape: not above 0");
        it_.emplace(policy::PoolShape{n_groups, n_experts, 0, 0}, max_horizon, policy::to_device,
                    policy::device_victim_value);
    }
    void begin() { it_->begin(); }
    void add(int32_t group, int32_t horizon, double seconds, const std::vector<float> &chances,
             const std::set<int32_t> &present) {
        check(group, 0);
        need(horizon >= 1 && horizon <= max_horizon_, "horizon: 1 .. max_horizon");
        need(chances.size() == size_t(n_experts_), "chances: one per expert");
        it_->add(group, horizon, seconds, chances,
                 [&](policy::SlabId id) { return present.contains(id.expert); });
    }
    std::vector<py::dict> plan(double bytes_per_second, double queued_bytes, double slab_bytes,
                               int32_t n_free) {
        std::vector<py::dict> out;
        for (const policy::PrefetchLoad &load :
             it_->plan({bytes_per_second, queued_bytes, 0}, [&](int32_t) { return slab_bytes; }, n_free)) {
            out.push_back(to_dict(load));
        }
        return out;
    }
    bool needed(int32_t group, int32_t expert) const {
        check(group, expert);
        return it_->needed({group, expert});
    }

  private:
    void check(int32_t group, int32_t expert) const {
        need(group >= 0 && group < n_groups_, "group: no such group");
        need(expert >= 0 && expert < n_experts_, "expert: no such expert");
    }

    int32_t n_groups_;
    int32_t n_experts_;
    int32_t max_horizon_;
    std::optional<policy::LoadAhead> it_;
};

/// One plan: layers are (group, seconds, chances), the first one call ahead.
std::vector<py::dict> plan(const std::vector<std::tuple<int32_t, double, std::vector<float>>> &layers,
                           const std::set<std::pair<int32_t, int32_t>> &present, double bytes_per_second,
                           double queued_bytes, int32_t n_queued, const std::vector<double> &slab_bytes,
                           const std::vector<float> &victim_values, float p_min, int32_t max_queue,
                           float share) {
    size_t n_experts = 1;
    for (const auto &[group, seconds, chances] : layers) {
        need(group >= 0 && size_t(group) < slab_bytes.size(), "slab_bytes: one value per group");
        n_experts = std::max(n_experts, chances.size());
    }
    policy::PrefetchPlanner planner(int32_t(n_experts), std::max(int32_t(layers.size()), 1),
                                    {p_min, max_queue, share});
    planner.begin();
    int32_t horizon = 0;
    for (const auto &[group, seconds, chances] : layers) {
        planner.add(group, ++horizon, seconds, chances,
                    [&](policy::SlabId id) { return present.contains({id.group, id.expert}); });
    }
    std::vector<py::dict> out;
    const auto value = [&](int32_t n) {
        if (victim_values.empty()) return 0.0F;
        return victim_values[std::min(size_t(n), victim_values.size() - 1)];
    };
    for (const policy::PrefetchLoad &load : planner.plan(
             {bytes_per_second, queued_bytes, n_queued},
             [&](int32_t group) { return slab_bytes[size_t(group)]; }, value)) {
        out.push_back(to_dict(load));
    }
    return out;
}

} // namespace

void bind_prediction(py::module_ &m) {
    py::module_ policy = m.attr("policy");
    policy.def("ranking_scores", &ranking_scores, py::arg("raw"), py::kw_only(),
               py::arg("activation") = "softmax", py::arg("router_bias") = Array<float>(0),
               py::arg("selection_bias") = Array<float>(0), py::arg("n_expert_groups") = 1,
               py::arg("n_groups_used") = 1,
               "Scores in the order of the model's choice; see cpp/policy/gating.h.");
    policy.def("predictor_names", [] { return to_list(policy::predictor_names()); });
    py::class_<CheckedPredictor>(policy, "Predictor", "See cpp/policy/predictor.h.")
        .def(py::init([](const std::string &name, int32_t n_groups, int32_t n_experts, int32_t top_k,
                         int32_t max_horizon) {
                 return std::make_unique<CheckedPredictor>(
                     name, policy::RoutingShape{n_groups, n_experts, top_k, max_horizon});
             }),
             py::arg("name"), py::kw_only(), py::arg("n_groups"), py::arg("n_experts"), py::arg("top_k"),
             py::arg("max_horizon") = 6)
        .def_property_readonly("name", &CheckedPredictor::name)
        .def_property_readonly("scores", &CheckedPredictor::scores)
        .def_property_readonly("max_horizon", &CheckedPredictor::max_horizon)
        .def("begin_call", &CheckedPredictor::begin_call, py::arg("group"), py::arg("ids"))
        .def("predict", &CheckedPredictor::predict, py::arg("group"), py::arg("horizon"),
             py::arg("scores") = Array<float>(0))
        .def("set_future", &CheckedPredictor::set_future, py::arg("calls"),
             py::arg("recall") = std::vector<float>{}, py::arg("seed") = 0)
        .def("replay", &CheckedPredictor::replay, py::arg("ids"), py::arg("skip") = 0,
             "Sums over recorded routing, by horizon (index 0 unused): hits and asked [.., n_groups], loss, "
             "and "
             "told, happened and number in 20 bins of the chance.");
    policy.def(
        "confidence",
        [](const Array<float> &chances) {
            std::vector<float> scratch;
            return policy::confidence(view(chances), scratch);
        },
        py::arg("chances"));
    policy.def(
        "look_further",
        [](int32_t depth, int32_t l_min, float confidence, float tau, int32_t l_max) {
            return policy::look_further({tau, l_max}, depth, l_min, confidence);
        },
        py::arg("depth"), py::arg("l_min"), py::arg("confidence"), py::kw_only(),
        py::arg("tau") = policy::LookaheadOptions{}.tau, py::arg("l_max") = policy::LookaheadOptions{}.l_max);
    policy.def("plan_prefetch", &plan, py::arg("layers"), py::kw_only(),
               py::arg("present") = std::set<std::pair<int32_t, int32_t>>{}, py::arg("bytes_per_second"),
               py::arg("queued_bytes") = 0.0, py::arg("n_queued") = 0, py::arg("slab_bytes"),
               py::arg("victim_values") = std::vector<float>{},
               py::arg("p_min") = policy::PlanOptions{}.p_min,
               py::arg("max_queue") = policy::PlanOptions{}.max_queue,
               py::arg("share") = policy::PlanOptions{}.share, "See cpp/policy/prefetch_plan.h.");
    py::class_<CheckedLoadAhead>(policy, "LoadAhead", "For a device's pool; see cpp/policy/load_ahead.h.")
        .def(py::init<int32_t, int32_t, int32_t>(), py::kw_only(), py::arg("n_groups"), py::arg("n_experts"),
             py::arg("max_horizon"))
        .def("begin", &CheckedLoadAhead::begin)
        .def("add", &CheckedLoadAhead::add, py::arg("group"), py::arg("horizon"), py::arg("seconds"),
             py::arg("chances"), py::arg("present") = std::set<int32_t>{})
        .def("plan", &CheckedLoadAhead::plan, py::kw_only(), py::arg("bytes_per_second"),
             py::arg("queued_bytes") = 0.0, py::arg("slab_bytes"), py::arg("n_free") = 0)
        .def("needed", &CheckedLoadAhead::needed, py::arg("group"), py::arg("expert"));
    policy.attr("to_device") = py::dict(
        py::arg("p_min") = policy::to_device.p_min, py::arg("max_queue") = policy::to_device.max_queue,
        py::arg("share") = policy::to_device.share, py::arg("victim_value") = policy::device_victim_value);
    py::class_<policy::BenefitMeter>(policy, "BenefitMeter", "See cpp/policy/benefit_meter.h.")
        .def(py::init<>())
        .def_property_readonly("on", &policy::BenefitMeter::on)
        .def(
            "end_pass",
            [](policy::BenefitMeter &meter, double seconds, int64_t missed, int64_t useful, int64_t late,
               int64_t wasted) { meter.end_pass({seconds, missed, useful, late, wasted}); },
            py::arg("seconds"), py::kw_only(), py::arg("missed_bytes") = 0, py::arg("useful_bytes") = 0,
            py::arg("late_bytes") = 0, py::arg("wasted_bytes") = 0);
}

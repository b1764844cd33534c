// spice_moe._core.heads: a model's prediction heads on recorded router inputs, its routers as arrays, and its
// fingerprint. Declarations, no logic.
#include "runtime/head_setup.h"
#include "store/fingerprint.h"

#include "bindings/arrays.h"
#include "bindings/errors.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <optional>
#include <string>

namespace py = pybind11;
using namespace spice;

namespace {

/// The heads of a model file, with what is needed to read its routers again for a fit.
class Heads {
  public:
    Heads(const std::filesystem::path &path, const std::filesystem::path &sidecar, int64_t expert_used,
          int32_t max_horizon) {
        Result<GgufModel> model = GgufModel::open(path);
        raise_if(model.status());
        model_ = model.take();
        Result<ExpertIndex> index = ExpertIndex::build(*model_);
        raise_if(index.status());
        Result<HeadSet> set =
            make_heads(*model_, index.value(),
                       {.expert_used = expert_used, .max_horizon = max_horizon, .sidecar = sidecar});
        raise_if(set.status());
        set_ = set.take();
        routers_ = find_routers(*model_, index.value(), expert_used);
    }

    [[nodiscard]] const HeadSet &set() const { return set_; }
    [[nodiscard]] const RouterSet &routers() const { return routers_; }

    [[nodiscard]] const compute::RouterHeads *kind(const std::string &name) const {
        if (name == "training-free") return set_.frozen.get();
        if (name == "adapter") return set_.adapter.get();
        if (name == "draft") return set_.draft.get();
        throw py::value_error("no kind of head is called " + name);
    }

    [[nodiscard]] py::dict router(int32_t group) const {
        const RouterInfo &info = routers_.groups.at(static_cast<size_t>(group));
        if (info.weight == nullptr) throw py::value_error("the group has no router");
        Result<RouterData> read = read_router(*model_, info);
        raise_if(read.status());
        const RouterData &data = read.value();
        const auto array = [](const std::vector<float> &v) {
            return py::array_t<float>(static_cast<py::ssize_t>(v.size()), v.data());
        };
        py::dict out;
        out["weight"] = array(data.weight).reshape({info.n_expert, static_cast<int32_t>(info.n_embd)});
        out["bias"] = array(data.bias);
        out["selection_bias"] = array(data.selection_bias);
        out["input_scale"] = array(data.input_scale);
        out["input_shift"] = array(data.input_shift);
        out["router_scale"] = array(data.router_scale);
        out["router_shift"] = array(data.router_shift);
        return out;
    }

    /// Scores [rows, experts of group + horizon], or None without such a head.
    [[nodiscard]] std::optional<py::array_t<float>>
    scores(const std::string &name, int32_t group, int32_t horizon, const Array<float> &hidden,
           const std::optional<Array<int32_t>> &present,
           const std::optional<Array<int32_t>> &previous) const {
        const compute::RouterHeads *heads = kind(name);
        if (heads == nullptr || !heads->has(group, horizon)) return std::nullopt;
        if (hidden.ndim() != 2 || hidden.shape(1) != heads->n_embd(group)) {
            throw py::value_error("hidden must be [rows, " + std::to_string(heads->n_embd(group)) + "]");
        }
        const py::ssize_t rows = hidden.shape(0);
        const auto row_of = [&](const std::optional<Array<int32_t>> &ids, py::ssize_t row) {
            if (!ids) return std::span<const int32_t>();
            return std::span<const int32_t>(ids->data(row, 0), static_cast<size_t>(ids->shape(1)));
        };
        for (const auto *ids : {&present, &previous}) {
            if (*ids && ((*ids)->ndim() != 2 || (*ids)->shape(0) != rows)) {
                throw py::value_error("ids must be [rows, k]");
            }
        }
        const int32_t n_out = heads->n_out(group, horizon);
        py::array_t<float> out({rows, static_cast<py::ssize_t>(n_out)});
        compute::HeadCall call(*heads);
        for (py::ssize_t row = 0; row < rows; ++row) {
            call.start({hidden.data(row, 0), static_cast<size_t>(hidden.shape(1))});
            if (!heads->scores(group, horizon, row_of(present, row), row_of(previous, row), call,
                               {out.mutable_data(row, 0), static_cast<size_t>(n_out)})) {
                throw py::value_error("the head refused the row");
            }
        }
        return out;
    }

  private:
    std::optional<GgufModel> model_;
    HeadSet set_;
    RouterSet routers_;
};

const char *name_of(GatingKind kind) {
    switch (kind) {
    case GatingKind::softmax:
        return "softmax";
    case GatingKind::sigmoid:
        return "sigmoid";
    case GatingKind::softmax_chosen:
        return "softmax_chosen";
    case GatingKind::sqrt_softplus:
        return "sqrt_softplus";
    }
    return "";
}

} // namespace

void bind_heads(py::module_ &m) {
    py::module_ heads = m.def_submodule("heads", "Prediction heads on recorded router inputs.");
    heads.def(
        "fingerprint",
        [](const std::filesystem::path &path) {
            Result<GgufModel> model = GgufModel::open(path);
            raise_if(model.status());
            Result<std::string> print = fingerprint(model.value());
            raise_if(print.status());
            return print.take();
        },
        py::arg("path"));
    py::class_<Heads>(heads, "Heads")
        .def(py::init<const std::filesystem::path &, const std::filesystem::path &, int64_t, int32_t>(),
             py::arg("path"), py::arg("sidecar") = "", py::arg("expert_used") = 0, py::arg("max_horizon") = 6)
        .def_property_readonly("reason", [](const Heads &h) { return h.set().reason; })
        .def_property_readonly("bytes", [](const Heads &h) { return h.set().bytes(); })
        .def_property_readonly("layers",
                               [](const Heads &h) {
                                   std::vector<int32_t> out;
                                   for (const RouterInfo &info : h.routers().groups)
                                       out.push_back(info.layer);
                                   return out;
                               })
        .def_property_readonly("n_expert",
                               [](const Heads &h) {
                                   std::vector<int32_t> out;
                                   for (const RouterInfo &info : h.routers().groups)
                                       out.push_back(info.n_expert);
                                   return out;
                               })
        .def_property_readonly(
            "gating",
            [](const Heads &h) {
                const RouterGating &g = h.set().gating;
                return py::dict(py::arg("kind") = name_of(g.kind), py::arg("top_k") = g.top_k,
                                py::arg("n_groups") = g.n_groups, py::arg("n_groups_used") = g.n_groups_used);
            })
        .def("has_router",
             [](const Heads &h, int32_t group) {
                 return h.set().routers != nullptr && h.set().routers->has(group);
             })
        .def("has",
             [](const Heads &h, const std::string &kind, int32_t group, int32_t horizon) {
                 const auto *found = h.kind(kind);
                 return found != nullptr && found->has(group, horizon);
             })
        .def("fitted",
             [](const Heads &h, const std::string &kind, int32_t group, int32_t horizon) {
                 const auto *found = h.kind(kind);
                 return found != nullptr && found->fitted(group, horizon);
             })
        .def("router", &Heads::router, py::arg("group"))
        .def("scores", &Heads::scores, py::arg("kind"), py::arg("group"), py::arg("horizon"),
             py::arg("hidden"), py::arg("present") = py::none(), py::arg("previous") = py::none());
}

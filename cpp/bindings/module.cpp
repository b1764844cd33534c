// The Python module spice_moe._core: declarations, no logic. Statuses become SpiceError subclasses.
#include "backend/abort_guard.h"
#include "backend/expert_buffer.h"
#include "backend/host_buffer.h"
#include "backend/plugin.h"
#include "bindings/arrays.h"
#include "bindings/device_bindings.h"
#include "bindings/errors.h"
#include "bindings/lore_bindings.h"
#include "policy/substitution.h"
#include "runtime/engine.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;
using namespace spice;

void bind_heads(py::module_ &m);      // heads_bindings.cpp
void bind_policy(py::module_ &m);     // policy_bindings.cpp
void bind_sim(py::module_ &m);        // sim_bindings.cpp
void bind_prediction(py::module_ &m); // prediction_bindings.cpp

namespace {

class Model {
  public:
    Model(const std::string &path, int64_t expert_used, int32_t io_threads, const std::string &eviction,
          bool direct_io, bool prefetch, const std::string &predictor, bool prefetch_always,
          const std::string &sidecar, bool sidecar_required) {
        const EngineOptions options = {.expert_used = expert_used,
                                       .io_threads = io_threads,
                                       .eviction = eviction,
                                       .direct_io = direct_io,
                                       .prefetch = {prefetch, predictor, prefetch_always},
                                       .sidecar_required = sidecar_required,
                                       .sidecar = sidecar,
                                       .ops = nullptr};
        std::optional<Result<std::shared_ptr<Engine>>> engine;
        {
            const py::gil_scoped_release unlocked; // headers can be large and the disk slow
            engine.emplace(Engine::open(path, options));
        }
        raise_if(engine->status());
        attachment_ = Attachment::make(engine->take());
    }

    [[nodiscard]] Attachment &attachment() const {
        if (attachment_ == nullptr) raise_if(Status(Code::internal, "the model is closed"));
        return *attachment_;
    }

    [[nodiscard]] Engine &engine() const { return attachment().engine(); }

    void close() { attachment_.reset(); }

    [[nodiscard]] size_t finish_load() const {
        const size_t n = attachment().finish_load();
        if (n == 0 && !engine().index().dense()) {
            raise_if(Status(Code::internal, "llama.cpp gave SPICE no expert tensor"));
        }
        return n;
    }

  private:
    std::shared_ptr<Attachment> attachment_;
};

/// Token embeddings, unless they are the output matrix, too.
bool is_table(const GgufModel &model, const GgufTensor &tensor) {
    return tensor.name == "per_layer_token_embd.weight" ||
           (tensor.name == "token_embd.weight" && model.find("output.weight") != nullptr);
}

py::dict summary(const Model &m) {
    const GgufModel &model = m.engine().model();
    const ExpertIndex &index = m.engine().index();
    const std::string arch = model.architecture();
    uint64_t all = 0;
    for (const GgufTensor &tensor : model.tensors()) all += tensor.bytes;
    py::list files;
    for (const GgufFile &file : model.files()) {
        files.append(py::dict(py::arg("path") = file.path.string(), py::arg("size") = file.size));
    }
    uint64_t smallest = 0;
    uint64_t largest = 0;
    py::set types;
    // Of weights that every token reads: not those of tables of which it reads a row.
    std::map<std::string, uint64_t> expert_bytes_by_type;
    std::map<std::string, uint64_t> other_bytes_by_type;
    uint64_t table_bytes = 0;
    uint64_t shared_bytes = 0;
    for (const GgufTensor &tensor : model.tensors()) {
        const std::string type = ggml_type_name(static_cast<ggml_type>(tensor.ggml_type));
        if (m.engine().find(tensor.name) != nullptr) {
            expert_bytes_by_type[type] += tensor.bytes;
        } else if (is_table(model, tensor)) {
            table_bytes += tensor.bytes;
        } else {
            other_bytes_by_type[type] += tensor.bytes;
            shared_bytes += tensor.name.find("_shexp.") != std::string::npos ? tensor.bytes : 0;
        }
    }
    for (const LayerExperts &layer : index.layers()) {
        const uint64_t bytes = layer.slab_bytes(Bank::routed);
        smallest = smallest == 0 ? bytes : std::min(smallest, bytes);
        largest = std::max(largest, bytes);
        for (const ExpertPart &part : layer.parts) {
            if (part.kind == PartKind::weight) {
                types.add(ggml_type_name(static_cast<ggml_type>(part.ggml_type)));
            }
        }
    }
    py::dict out;
    out["architecture"] = arch;
    out["dense"] = index.dense();
    out["n_layers"] = model.get_int(arch + ".block_count").value_or(0);
    out["n_layers_moe"] = index.layers().size();
    out["n_expert"] = model.get_int(arch + ".expert_count").value_or(0);
    out["n_expert_used"] = model.get_int(arch + ".expert_used_count").value_or(0);
    out["n_experts_total"] = index.n_experts();
    out["expert_bytes"] = index.total_weight_bytes();
    out["other_bytes"] = all - index.total_weight_bytes();
    out["table_bytes"] = table_bytes;
    out["shared_bytes"] = shared_bytes;
    out["expert_bytes_by_type"] = expert_bytes_by_type;
    out["other_bytes_by_type"] = other_bytes_by_type;
    out["slab_bytes_min"] = smallest;
    out["slab_bytes_max"] = largest;
    out["expert_types"] = py::list(types);
    out["files"] = files;
    return out;
}

py::dict pool(const Model &m) {
    const PoolPlan &plan = m.engine().plan();
    py::dict out;
    out["budget"] = plan.budget;
    out["smallest"] = plan.smallest;
    out["everything"] = plan.everything;
    out["working_set"] = plan.working_set;
    out["n_slots"] = plan.n_slots;
    out["n_experts"] = plan.n_experts;
    out["eviction"] = plan.eviction;
    out["direct_io"] = plan.direct_io;
    out["pinned"] = plan.pinned;
    out["predictor"] = plan.predictor;
    out["head_bytes"] = plan.head_bytes;
    out["sidecar"] = plan.sidecar;
    out["head_reason"] = plan.head_reason;
    return out;
}

py::dict stats(const Model &m) {
    const Counters c = m.engine().counters();
    py::dict out;
    out["graph_calls"] = c.graph_calls;
    out["layer_calls"] = c.layer_calls;
    out["matmul_nodes"] = c.matmul_nodes;
    out["delegated_nodes"] = c.delegated_nodes;
    out["expert_rows"] = c.expert_rows;
    out["experts_requested"] = c.experts_requested;
    out["experts_missed"] = c.experts_missed;
    out["waves"] = c.waves;
    out["early_nodes"] = c.early_nodes;
    out["preloaded"] = c.preloaded;
    out["rows_direct"] = c.rows_direct;
    out["rows_batched"] = c.rows_batched;
    out["evictions"] = c.evictions;
    out["slabs_read"] = c.slabs_read;
    out["bytes_read"] = c.reader.bytes;
    out["reads"] = c.reader.reads;
    out["read_depth"] = c.read_depth;
    out["read_seconds"] = c.reader.busy_seconds;
    out["stall_seconds"] = c.stall_seconds;
    out["resident_experts"] = c.resident_experts;
    out["resident_bytes"] = c.resident_bytes;
    out["failures"] = c.failures;
    add_device_stats(m.engine(), out);
    add_lore_stats(m.engine(), out);
    out["prefetched"] = c.prefetched;
    out["prefetch_ready"] = c.prefetch_ready;
    out["prefetch_late"] = c.prefetch_late;
    out["prefetch_dropped"] = c.prefetch_dropped;
    out["prefetch_wasted"] = c.prefetch_wasted;
    out["prefetch_bytes"] = c.reader.prefetched;
    out["wasted_bytes"] = c.wasted_bytes;
    out["predicted_calls"] = c.prefetch.calls;
    out["predicted_layers"] = c.prefetch.horizons;
    out["predicted_experts"] = c.prefetch.expected;
    out["predicted_right"] = c.prefetch.correct;
    out["predict_seconds"] = c.prefetch.seconds;
    out["prefetch_on"] = c.prefetch.on;
    out["prefetch_saving"] = c.prefetch.saving;
    out["prefetch_switches"] = c.prefetch.switches;
    out["device_prefetch_on"] = !m.engine().devices().empty() && c.prefetch.device_on;
    out["device_prefetch_saving"] = c.prefetch.device_saving;
    out["device_prefetch_switches"] = c.prefetch.device_switches;
    return out;
}

/// [(layer, hidden [tokens, n_embd] or None, ids [tokens, top_k], gates [tokens, top_k] or None, down
/// [tokens, top_k, n_out] or None)], in the order of the layer calls.
py::list take_capture(const Model &m) {
    Result<std::vector<CapturedCall>> calls = m.engine().capture().take();
    raise_if(calls.status());
    py::list out;
    for (const CapturedCall &call : calls.value()) {
        py::object hidden = py::none();
        if (call.n_embd > 0) {
            hidden = py::array_t<float>({call.n_tokens, call.n_embd}, call.hidden.data());
        }
        const auto top_k = static_cast<int64_t>(call.ids.size()) / std::max<int64_t>(call.n_tokens, 1);
        py::object gates = py::none();
        if (!call.gates.empty()) gates = py::array_t<float>({call.n_tokens, top_k}, call.gates.data());
        py::object down = py::none();
        if (call.n_out > 0) down = py::array_t<float>({call.n_tokens, top_k, call.n_out}, call.down.data());
        out.append(py::make_tuple(
            call.layer, hidden, py::array_t<int32_t>({call.n_tokens, top_k}, call.ids.data()), gates, down));
    }
    return out;
}

/// `with AbortGuard() as guard:` around a load; guard.message afterwards.
class ScopedAbortGuard {
  public:
    void enter() { guard_.emplace(); }
    void exit() { guard_.reset(); }
    [[nodiscard]] std::optional<std::string> message() const {
        const std::string &text = AbortGuard::message();
        return text.empty() ? std::nullopt : std::optional(text);
    }

  private:
    std::optional<AbortGuard> guard_;
};

} // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "The compiled part of spice_moe: the ggml plug-in and the expert store.";
    m.attr("GGML_VERSION") = SPICE_GGML_VERSION;
    m.attr("BACKEND_API_VERSION") = spice::abi::api_version;
    m.attr("LLAMA_CPP_PYTHON") = SPICE_LLAMA_CPP_PYTHON;
    m.def("runtime_ggml_version", [] { return std::string(ggml_version()); });
    m.def("register_backend", [] { raise_if(register_plugin()); });
    bind_policy(m);
    bind_device(m);
    bind_heads(m);
    bind_sim(m);
    bind_prediction(m);

    py::class_<Model>(m, "Model")
        .def(py::init<const std::string &, int64_t, int32_t, const std::string &, bool, bool,
                      const std::string &, bool, const std::string &, bool>(),
             py::arg("path"), py::arg("expert_used") = 0, py::arg("io_threads") = 0, py::arg("eviction") = "",
             py::arg("direct_io") = true, py::arg("prefetch") = false, py::arg("predictor") = "",
             py::arg("prefetch_always") = false, py::arg("sidecar") = "", py::arg("sidecar_required") = true)
        .def(
            "build_pool",
            [](const Model &model, uint64_t budget, uint64_t pinned_limit, const std::string &device) {
                raise_if(build_pool(model.engine(), budget, device, pinned_limit));
            },
            py::arg("budget"), py::arg("pinned_limit") = 0, py::arg("device") = "")
        .def(
            "preload",
            [](const Model &model, const std::vector<std::pair<int32_t, int32_t>> &experts) {
                raise_if(model.engine().preload(experts));
            },
            py::arg("experts"))
        .def("uses", [](const Model &model) { return model.engine().uses(); })
        .def("pool", &pool)
        .def(
            "device_needs",
            [](const Model &model, const std::string &device, const std::vector<int32_t> &layers) {
                return device_needs(model.engine(), device, layers);
            },
            py::arg("device") = "", py::arg("layers") = std::vector<int32_t>())
        .def("device_pools", [](const Model &model) { return device_pools(model.engine()); })
        .def(
            "build_device_pool",
            [](const Model &model, const std::string &device, const std::vector<int32_t> &layers,
               uint64_t budget, const std::string &placement, int32_t n_threads) {
                raise_if(build_device_pool(model.engine(), device, layers, budget, placement, n_threads));
            },
            py::arg("device"), py::arg("layers"), py::arg("budget"), py::arg("placement") = "",
            py::arg("n_threads") = 0)
        .def("start_timeline", [](const Model &model) { model.engine().timeline().start(); })
        .def("write_timeline",
             [](const Model &model, const std::string &path) {
                 raise_if(model.engine().timeline().write(path));
             })
        .def("forget_devices", [](const Model &model) { forget_devices(model.engine()); })
        .def(
            "load_lore",
            [](const Model &model, const std::string &sidecar) {
                const py::gil_scoped_release unlocked; // hundreds of megabytes
                Status status = model.engine().load_surrogates(sidecar);
                const py::gil_scoped_acquire locked;
                raise_if(status);
            },
            py::arg("sidecar"))
        .def("lore", [](const Model &model) { return lore_plan(model.engine()); })
        .def(
            "use_lore",
            [](const Model &model, float max_share, float max_mass, float max_confidence, double budget,
               bool prompts) {
                use_lore(model.engine(), max_share, max_mass, max_confidence, budget, prompts);
            },
            py::arg("max_share") = policy::SubstitutionRules().max_share,
            py::arg("max_mass") = policy::SubstitutionRules().max_mass,
            py::arg("max_confidence") = policy::SubstitutionRules().max_confidence,
            py::arg("budget") = policy::SubstitutionRules::no_budget, py::arg("prompts") = false)
        .def(
            "set_substitution",
            [](const Model &model, const std::string &kind, double share, uint64_t seed, int32_t layer,
               double max_share) { set_substitution(model.engine(), kind, share, seed, layer, max_share); },
            py::arg("kind"), py::arg("share") = 1.0, py::arg("seed") = 0, py::arg("layer") = -1,
            py::arg("max_share") = 1.0)
        .def("summary", &summary)
        .def("moe_layers",
             [](const Model &model) {
                 std::vector<int32_t> layers;
                 for (const LayerExperts &layer : model.engine().index().layers()) {
                     layers.push_back(layer.layer);
                 }
                 return layers;
             })
        .def("slab_bytes",
             [](const Model &model) { // of one routed expert, by MoE layer
                 std::vector<uint64_t> bytes;
                 for (const LayerExperts &layer : model.engine().index().layers()) {
                     bytes.push_back(layer.slab_bytes(Bank::routed));
                 }
                 return bytes;
             })
        .def("stats", &stats)
        .def("reset_stats",
             [](const Model &model) {
                 model.engine().reset_counters();
                 reset_device_stats(model.engine());
                 reset_lore_stats(model.engine());
             })
        .def(
            "start_capture",
            [](const Model &model, uint64_t limit, bool outputs) {
                model.engine().capture().start(limit, outputs);
            },
            py::arg("limit") = uint64_t{2} << 30, py::arg("outputs") = false)
        .def("stop_capture", [](const Model &model) { model.engine().capture().stop(); })
        .def("take_capture", &take_capture)
        .def(
            "set_future", // of the predictor `replay`: [(layer, ids [tokens, top_k])], as captured
            [](const Model &model, const std::vector<std::pair<int32_t, Array<int32_t>>> &calls,
               const std::vector<float> &recall, uint64_t seed) {
                if (model.engine().prefetcher() == nullptr) return;
                std::vector<policy::FutureCall> future;
                for (const auto &[layer, ids] : calls) {
                    const int32_t group = model.engine().group_of(layer);
                    if (group < 0 || ids.ndim() != 2)
                        throw py::value_error("no such layer, or ids that are no [tokens, top_k]");
                    future.push_back(
                        {group, static_cast<int32_t>(ids.shape(0)), {ids.data(), ids.data() + ids.size()}});
                }
                raise_if(model.engine().prefetcher()->set_future(std::move(future), recall, seed));
            },
            py::arg("calls"), py::arg("recall") = std::vector<float>(), py::arg("seed") = 0)
        .def("buffer_type",
             [](const Model &model) { return reinterpret_cast<uintptr_t>(model.attachment().buffer_type()); })
        .def_static("host_buffer_type", [] { return reinterpret_cast<uintptr_t>(host_buffer_type()); })
        .def_property_readonly_static("host_pattern", [](const py::object &) { return host_tensor_pattern; })
        .def_property_readonly("override_pattern", [](const Model &) { return expert_tensor_pattern; })
        .def("finish_load", &Model::finish_load)
        .def("take_error",
             [](const Model &model) -> std::optional<std::pair<int32_t, std::string>> {
                 const std::optional<Status> error = model.engine().take_error();
                 if (!error) return std::nullopt;
                 return std::pair(static_cast<int32_t>(error->code()), error->message());
             })
        .def("close", &Model::close);

    py::class_<ScopedAbortGuard>(m, "AbortGuard")
        .def(py::init<>())
        .def(
            "__enter__",
            [](ScopedAbortGuard &guard) -> ScopedAbortGuard & {
                guard.enter();
                return guard;
            },
            py::return_value_policy::reference_internal)
        .def("__exit__", [](ScopedAbortGuard &guard, const py::args &) { guard.exit(); })
        .def_property_readonly("message", &ScopedAbortGuard::message);
}

#include "runtime/device_probe.h"

#include "store/clock.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>

namespace spice {

namespace {

constexpr double most_seconds = 0.15; // of each of the five measurements
constexpr int most_times = 7;
constexpr int64_t many_rows = 32;
constexpr size_t max_tensors = 32;

/// The median time of `run`, after one run that does not count.
double median_seconds(const std::function<void()> &run) {
    run();
    std::vector<double> times;
    const double begun = steady_now();
    while (times.empty() || (times.size() < most_times && steady_now() - begun < most_seconds)) {
        const double start = steady_now();
        run();
        times.push_back(steady_now() - start);
    }
    std::ranges::nth_element(times, times.begin() + static_cast<ptrdiff_t>(times.size() / 2));
    return times[times.size() / 2];
}

/// A graph that multiplies by some slots' parts, each for itself: one token with all of them, or
/// `tokens_each` tokens with one each.
class Products {
  public:
    /// `weights`: [n_in, n_out, slots] of each part, with their data.
    Products(ggml_backend_t backend, const std::vector<ggml_tensor *> &weights, int32_t n_experts,
             int64_t tokens_each)
        : backend_(backend), n_(n_experts), each_(tokens_each),
          context_(ggml_init({.mem_size = max_tensors * ggml_tensor_overhead() +
                                          ggml_graph_overhead_custom(max_tensors, false),
                              .mem_buffer = nullptr,
                              .no_alloc = true})) {
        if (context_ == nullptr) return;
        ggml_context *context = context_.get();
        graph_ = ggml_new_graph_custom(context, max_tensors, false);
        const int64_t tokens = each_ == 1 ? 1 : n_ * each_;
        ids_ = ggml_new_tensor_2d(context, GGML_TYPE_I32, each_ == 1 ? n_ : 1, tokens);
        for (ggml_tensor *w : weights) {
            inputs_.push_back(ggml_new_tensor_3d(context, GGML_TYPE_F32, w->ne[0], 1, tokens));
            ggml_build_forward_expand(graph_, ggml_mul_mat_id(context, w, inputs_.back(), ids_));
        }
        buffer_.reset(ggml_backend_alloc_ctx_tensors(context, backend));
        if (buffer_ == nullptr) return;
        ggml_backend_buffer_clear(buffer_.get(), 0);
        std::vector<int32_t> ids;
        for (int64_t i = 0; i < n_ * each_; ++i) ids.push_back(static_cast<int32_t>(i / each_));
        ggml_backend_tensor_set(ids_, ids.data(), 0, ggml_nbytes(ids_));
        possible_ = true;
        for (int node = 0; node < ggml_graph_n_nodes(graph_); ++node) {
            possible_ = possible_ && ggml_backend_supports_op(backend, ggml_graph_node(graph_, node));
        }
    }

    [[nodiscard]] std::optional<double> seconds() {
        if (!possible_) return std::nullopt;
        bool ok = true;
        const double seconds = median_seconds(
            [&] { ok = ggml_backend_graph_compute(backend_, graph_) == GGML_STATUS_SUCCESS && ok; });
        return ok ? std::optional(seconds) : std::nullopt;
    }
    [[nodiscard]] std::vector<int32_t> rows() const {
        return std::vector<int32_t>(static_cast<size_t>(n_), static_cast<int32_t>(each_));
    }

  private:
    ggml_backend_t backend_;
    int64_t n_;
    int64_t each_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_cgraph *graph_ = nullptr;
    ggml_tensor *ids_ = nullptr;
    std::vector<ggml_tensor *> inputs_;
    bool possible_ = false;
};

void probe_link(ggml_backend_t stream, const ProbePlace &place, DeviceCosts &costs) {
    const double seconds = median_seconds([&] {
        for (size_t p = 0; p < place.device.size(); ++p) {
            ggml_backend_tensor_set_async(stream, place.device[p], place.host[p], 0, place.device[p]->nb[2]);
        }
        ggml_backend_synchronize(stream);
    });
    costs.link(place.slab_bytes, seconds);
}

} // namespace

void probe_costs(ggml_backend_dev_t device, const ProbePlace &place, int32_t n_threads, DeviceCosts &costs) {
    const ggml_backend_ptr stream(ggml_backend_dev_init(device, nullptr));
    const ggml_backend_ptr cpu(ggml_backend_cpu_init());
    const int32_t n_host = std::min(place.n_host, std::max(place.top_k, 1));
    const int32_t n_device = std::min(place.n_device, std::max(place.top_k, 1));
    if (stream == nullptr || cpu == nullptr || n_host < 1 || n_device < 1) return;
    ggml_backend_cpu_set_n_threads(cpu.get(), n_threads);

    // The host's slots as tensors; memory that was never written has no pages and would be too fast.
    const ggml_context_ptr context(ggml_init(
        {.mem_size = max_tensors * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true}));
    if (context == nullptr) return;
    std::vector<ggml_tensor *> host;
    for (size_t p = 0; p < place.device.size(); ++p) {
        const ggml_tensor *like = place.device[p];
        ggml_tensor *slots =
            ggml_new_tensor_3d(context.get(), like->type, like->ne[0], like->ne[1], place.n_host);
        slots->nb[2] = place.host_stride;
        slots->nb[3] = place.host_stride * static_cast<size_t>(place.n_host);
        slots->data = place.host[p];
        host.push_back(slots);
        for (int32_t slot = 0; slot < n_host; ++slot) {
            std::memset(place.host[p] + static_cast<uint64_t>(slot) * place.host_stride, 0, like->nb[2]);
        }
    }

    probe_link(stream.get(), place, costs);
    for (const int64_t each : {int64_t{1}, many_rows}) {
        Products there(stream.get(), place.device, n_device, each);
        if (const auto seconds = there.seconds()) {
            costs.device(place.slab_bytes, there.rows(), *seconds, true);
        }
        // Many rows take the host long: of one expert they say enough.
        Products here(cpu.get(), host, each == 1 ? n_host : 1, each);
        if (const auto seconds = here.seconds()) costs.host(place.slab_bytes, here.rows(), *seconds);
    }
}

} // namespace spice

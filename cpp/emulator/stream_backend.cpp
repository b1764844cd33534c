#include "emulator/stream_backend.h"

#include "backend/ggml_abi.h"
#include "emulator/graph_copy.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

namespace spice::emulator {

namespace {

struct StreamBackend {
    explicit StreamBackend(Device &of) : device(of), cpu(ggml_backend_cpu_init()) { device.add(stream); }
    ~StreamBackend() {
        stream->synchronize();
        device.remove(stream);
    }
    StreamBackend(const StreamBackend &) = delete;
    StreamBackend &operator=(const StreamBackend &) = delete;

    Device &device;
    ggml_backend_ptr cpu; ///< used by the stream's thread alone
    std::shared_ptr<Stream> stream = std::make_shared<Stream>();
};

StreamBackend &self(ggml_backend_t backend) {
    return *static_cast<StreamBackend *>(backend->context);
}

std::byte *real(StreamBackend &backend, const ggml_tensor *tensor, size_t offset, size_t bytes) {
    std::byte *data =
        backend.device.memory().real(static_cast<const std::byte *>(tensor->data) + offset, bytes);
    if (data == nullptr) {
        backend.device.note_misuse(std::string("copy of '") + tensor->name + "' beyond the device's memory");
    }
    return data;
}

const char *name(ggml_backend_t backend) {
    return ggml_backend_dev_name(backend->device);
}

void free_backend(ggml_backend_t backend) {
    const std::unique_ptr<ggml_backend> handle(backend);
    const std::unique_ptr<StreamBackend> context(&self(backend));
}

bool leaves_experts_out(const spice_emulator_settings &settings) {
    return settings.expert_bytes_per_second > 0.0;
}

/// Weights of experts that nothing will read: copying them would take the host's time from the host.
bool is_left_out(StreamBackend &me, const ggml_tensor *tensor) {
    return tensor->ne[2] > 1 && ggml_is_quantized(tensor->type) && leaves_experts_out(me.device.settings());
}

void write_async(ggml_backend_t backend, ggml_tensor *tensor, const void *from, size_t offset, size_t bytes) {
    StreamBackend &me = self(backend);
    std::byte *to = real(me, tensor, offset, bytes);
    if (to == nullptr) return;
    if (is_left_out(me, tensor)) to = nullptr;
    me.stream->push([&device = me.device, to, from, bytes] { device.upload(to, from, bytes, true); });
}

void read_async(ggml_backend_t backend, const ggml_tensor *tensor, void *to, size_t offset, size_t bytes) {
    StreamBackend &me = self(backend);
    const std::byte *from = real(me, tensor, offset, bytes);
    if (from == nullptr) return;
    std::memset(to, poison, bytes); // the caller may not use it before it has waited
    me.stream->push([&device = me.device, from, to, bytes] { device.download(from, to, bytes); });
}

bool copy_async(ggml_backend_t from_backend, ggml_backend_t to_backend, const ggml_tensor *from,
                ggml_tensor *to) {
    if (from_backend->table.copy_async != copy_async || to_backend->table.copy_async != copy_async ||
        &self(from_backend).device != &self(to_backend).device) {
        return false;
    }
    StreamBackend &source = self(from_backend);
    const size_t bytes = ggml_nbytes(from);
    const std::byte *data = real(source, from, 0, bytes);
    std::byte *target = real(self(to_backend), to, 0, bytes);
    if (data == nullptr || target == nullptr) return false;
    source.stream->push([data, target, bytes] { std::memcpy(target, data, bytes); });
    if (from_backend != to_backend) {
        const auto copied = std::make_shared<Event>();
        source.stream->record(copied);
        self(to_backend).stream->wait(copied);
    }
    return true;
}

void synchronize(ggml_backend_t backend) {
    StreamBackend &me = self(backend);
    leaves_experts_out(me.device.settings()) ? me.stream->spin() : me.stream->synchronize();
}

void run_graph(StreamBackend &me, GraphCopy &graph) {
    const spice_emulator_settings settings = me.device.settings();
    const auto start = std::chrono::steady_clock::now();
    ggml_backend_cpu_set_n_threads(me.cpu.get(), settings.threads);
    if (graph.run(me.cpu.get()) != GGML_STATUS_SUCCESS) me.device.note_misuse("ggml-cpu refused a graph");
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const bool modelled = leaves_experts_out(settings);
    double wanted = took.count() * settings.compute_slowdown + settings.launch_seconds;
    if (modelled) {
        wanted = settings.launch_seconds +
                 static_cast<double>(graph.expert_bytes()) / settings.expert_bytes_per_second;
    }
    if (wanted > took.count()) {
        std::this_thread::sleep_until(start + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                  std::chrono::duration<double>(wanted)));
    }
    me.device.count_graph(graph.n_nodes(), graph.n_matmul_ids(), wanted,
                          modelled ? std::max(0.0, took.count() - wanted) : 0.0);
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph *graph) {
    StreamBackend &me = self(backend);
    if (me.device.take_failed_copy() || me.device.fails(Failure::compute)) return GGML_STATUS_FAILED;
    std::string why;
    const bool without_experts = leaves_experts_out(me.device.settings());
    const std::shared_ptr<GraphCopy> copy = GraphCopy::make(graph, me.device.memory(), without_experts, why);
    if (copy == nullptr) {
        me.device.note_misuse(why);
        return GGML_STATUS_FAILED;
    }
    me.stream->push([&me, copy] { run_graph(me, *copy); });
    return GGML_STATUS_SUCCESS;
}

std::shared_ptr<Event> &event_of(ggml_backend_event_t event) {
    return *static_cast<std::shared_ptr<Event> *>(event->context);
}
void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    self(backend).stream->record(event_of(event));
}
void event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    self(backend).stream->wait(event_of(event));
}

ggml_guid_t guid() {
    static ggml_guid id = {'s', 'p', 'i', 'c', 'e', '-', 'e', 'm', 'u', 'l', 'a', 't', 'o', 'r', '.', '.'};
    return &id;
}

} // namespace

ggml_backend_t make_stream_backend(ggml_backend_dev_t handle, Device &device) {
    auto context = std::make_unique<StreamBackend>(device);
    if (context->cpu == nullptr) return nullptr;
    auto backend = std::make_unique<ggml_backend>();
    backend->guid = guid();
    backend->table = {};
    backend->table.name = name;
    backend->table.free = free_backend;
    backend->table.write_async = write_async;
    backend->table.read_async = read_async;
    backend->table.copy_async = copy_async;
    backend->table.synchronize = synchronize;
    backend->table.compute = compute;
    backend->table.event_record = event_record;
    backend->table.event_wait = event_wait;
    backend->device = handle;
    backend->context = context.release(); // owned by the handle, see free_backend
    return backend.release();
}

} // namespace spice::emulator

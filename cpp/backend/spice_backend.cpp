#include "backend/spice_backend.h"

#include "backend/block_graph.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <exception>
#include <memory>
#include <new>
#include <utility>

namespace spice {

namespace {

struct Backend {
    explicit Backend(ggml_backend_ptr cpu_backend) : cpu(std::move(cpu_backend)), blocks(cpu.get(), inputs) {}

    ggml_backend_ptr cpu;
    InputCopies inputs;
    BlockGraph blocks;
    int n_threads = GGML_DEFAULT_N_THREADS;

    /// Keeps an error where the binding finds it.
    void fail(Status status) const {
        if (blocks.engine() != nullptr) blocks.engine()->fail(std::move(status));
    }
};

Backend &backend_of(ggml_backend_t backend) {
    return *static_cast<Backend *>(backend->context);
}

const char *backend_name(ggml_backend_t) {
    return "SPICE";
}

void backend_free(ggml_backend_t backend) {
    const std::unique_ptr<ggml_backend> handle(backend);
    const std::unique_ptr<Backend> context(&backend_of(backend));
}

bool backend_copy_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor *source,
                        ggml_tensor *target) {
    if (to->table.copy_async != backend_copy_async) return false;
    try {
        return backend_of(to).inputs.take(from, source, target);
    } catch (const std::exception &) {
        return false; // no memory to remember it: the scheduler copies
    }
}

ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph *graph) {
    Backend &context = backend_of(backend);
    struct AtEnd {
        InputCopies &inputs;
        ~AtEnd() { inputs.clear(); }
    } const at_end{context.inputs};
    context.inputs.wait();
    try {
        return context.blocks.run(graph, context.n_threads);
    } catch (const std::bad_alloc &) {
        context.fail(Status(Code::out_of_memory, "no memory for a layer call; use a smaller batch"));
        return GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception &error) { // nothing may pass through ggml's C frames
        context.fail(Status(Code::internal, error.what()));
        return GGML_STATUS_FAILED;
    }
}

ggml_guid_t backend_guid() {
    static ggml_guid guid = {'s', 'p', 'i', 'c', 'e', '-', 'm', 'o', 'e', '-', 'e', 'x', 'p', 'e', 'r', 't'};
    return &guid;
}

} // namespace

ggml_backend_t make_backend(ggml_backend_dev_t device) {
    try {
        ggml_backend_ptr cpu(ggml_backend_cpu_init());
        if (cpu == nullptr) return nullptr;
        auto context = std::make_unique<Backend>(std::move(cpu));
        auto backend = std::make_unique<ggml_backend>();
        backend->guid = backend_guid();
        backend->table = {};
        backend->table.name = backend_name;
        backend->table.free = backend_free;
        backend->table.copy_async = backend_copy_async;
        backend->table.compute = backend_compute;
        backend->device = device;
        backend->context = context.release(); // owned by the handle, see backend_free
        return backend.release();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
    backend_of(backend).n_threads = n_threads;
    ggml_backend_cpu_set_n_threads(backend_of(backend).cpu.get(), n_threads);
}

void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void *data) {
    ggml_backend_cpu_set_abort_callback(backend_of(backend).cpu.get(), callback, data);
}

} // namespace spice

#include "backend/plugin.h"

#include "backend/expert_buffer.h"
#include "backend/moe_block.h"
#include "backend/shared_expert.h"
#include "backend/spice_backend.h"

#include "ggml-cpu.h"

#include <cstring>
#include <mutex>
#include <string>

namespace spice {

namespace {

const char *device_name(ggml_backend_dev_t) {
    return "SPICE";
}
const char *device_description(ggml_backend_dev_t) {
    return "SPICE expert scheduler";
}

// Experts live in ordinary host memory, which the CPU device reports.
void device_memory(ggml_backend_dev_t, size_t *free, size_t *total) {
    *free = *total = 0;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void device_properties(ggml_backend_dev_t device, ggml_backend_dev_props *properties) {
    *properties = {};
    properties->name = device_name(device);
    properties->description = device_description(device);
    properties->type = device_type(device);
}

// Intermediate results are ordinary host tensors: a split of ours needs no copies between CPU and us.
// llama.cpp also skips devices with this default when it chooses buffers for weights, so that only our
// override brings tensors to us.
ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
    return ggml_backend_cpu_buffer_type();
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor *op) {
    // A weight in our buffer is asked for as a node without an operation.
    if (op->op == GGML_OP_NONE) return expert_tensor(op) != nullptr;
    return is_block_node(op) || is_shared_expert_node(op);
}

bool device_supports_buffer_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return is_expert_buffer_type(type) || ggml_backend_buft_is_host(type);
}

ggml_backend_t device_make_backend(ggml_backend_dev_t device, const char *) {
    return make_backend(device);
}

const char *registration_name(ggml_backend_reg_t) {
    return "SPICE";
}
size_t registration_device_count(ggml_backend_reg_t) {
    return 1;
}
ggml_backend_dev_t registration_device(ggml_backend_reg_t, size_t) {
    return plugin_device();
}

void *registration_procedure(ggml_backend_reg_t, const char *name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(&set_n_threads);
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(&set_abort_callback);
    }
    return nullptr;
}

ggml_backend_reg &registration() {
    static ggml_backend_reg instance = {
        .api_version = abi::api_version,
        .table =
            {
                .name = registration_name,
                .device_count = registration_device_count,
                .device = registration_device,
                .procedure = registration_procedure,
            },
        .context = nullptr,
    };
    return instance;
}

} // namespace

ggml_backend_dev_t plugin_device() {
    static ggml_backend_device instance = {
        .table =
            {
                .name = device_name,
                .description = device_description,
                .memory = device_memory,
                .type = device_type,
                .properties = device_properties,
                .make_backend = device_make_backend,
                .buffer_type = device_buffer_type,
                .host_buffer_type = nullptr,
                .buffer_from_pointer = nullptr,
                .supports_op = device_supports_op,
                .supports_buffer_type = device_supports_buffer_type,
                .wants_offload = nullptr,
                .event_new = nullptr,
                .event_free = nullptr,
                .event_synchronize = nullptr,
            },
        .registration = &registration(),
        .context = nullptr,
    };
    return &instance;
}

Status register_plugin() {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const std::string loaded = ggml_version();
    if (loaded != SPICE_GGML_VERSION) {
        return {Code::version, "the loaded ggml is version " + loaded + ", but SPICE was built for " +
                                   SPICE_GGML_VERSION + "; reinstall spice-moe"};
    }
    const ggml_backend_reg_t cpu = ggml_backend_cpu_reg();
    if (cpu->api_version != abi::api_version) {
        return {Code::version, "the loaded ggml has backend API version " + std::to_string(cpu->api_version) +
                                   ", but SPICE was built for " + std::to_string(abi::api_version) +
                                   "; reinstall spice-moe"};
    }
    ggml_backend_register(&registration()); // a second registration of the same object is ignored
    return {};
}

} // namespace spice

#include "emulator/backend.h"

#include "backend/ggml_abi.h"
#include "emulator/stream_backend.h"

#include "ggml-cpu.h"

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

namespace spice::emulator {

namespace {

struct Entry {
    std::string name;
    Device device;
    ggml_backend_buffer_type memory_type;
    ggml_backend_buffer_type host_type;
    ggml_backend_device handle;
};

std::array<Entry, max_devices> entries;
size_t n_entries = 0;

Entry &entry_of(ggml_backend_dev_t device) {
    return *static_cast<Entry *>(device->context);
}
Device &device_of(ggml_backend_buffer_t buffer) {
    return static_cast<Entry *>(buffer->type->context)->device;
}

// Buffers in device memory. These calls are synchronous and ordered with no stream.

void memory_free(ggml_backend_buffer_t buffer) {
    device_of(buffer).free(buffer->context);
}
void *memory_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}
std::byte *real(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, size_t offset, size_t bytes) {
    return device_of(buffer).memory().real(static_cast<const std::byte *>(tensor->data) + offset, bytes);
}
void memory_fill(ggml_backend_buffer_t buffer, ggml_tensor *tensor, uint8_t value, size_t offset,
                 size_t bytes) {
    std::memset(real(buffer, tensor, offset, bytes), value, bytes);
}
void memory_write(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *from, size_t offset,
                  size_t bytes) {
    device_of(buffer).upload(real(buffer, tensor, offset, bytes), from, bytes, false);
}
void memory_read(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *to, size_t offset,
                 size_t bytes) {
    std::memset(to, poison, bytes);
    device_of(buffer).download(real(buffer, tensor, offset, bytes), to, bytes);
}
bool memory_copy_from(ggml_backend_buffer_t buffer, const ggml_tensor *from, ggml_tensor *to) {
    const ggml_backend_buffer_t source = from->view_src != nullptr ? from->view_src->buffer : from->buffer;
    if (source->type != buffer->type) return false;
    const size_t bytes = ggml_nbytes(from);
    std::memcpy(real(buffer, to, 0, bytes), real(source, from, 0, bytes), bytes);
    return true;
}
void memory_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(device_of(buffer).memory().real(buffer->context, buffer->bytes), value, buffer->bytes);
}

const char *memory_name(ggml_backend_buffer_type_t type) {
    return static_cast<Entry *>(type->context)->name.c_str();
}
size_t alignment(ggml_backend_buffer_type_t) {
    return 128;
}
ggml_backend_buffer_t memory_allocate(ggml_backend_buffer_type_t type, size_t bytes) {
    Device &device = static_cast<Entry *>(type->context)->device;
    void *address = device.allocate(bytes);
    if (address == nullptr) return nullptr;
    abi::BufferTable table = {};
    table.free = memory_free;
    table.base = memory_base;
    table.fill = memory_fill;
    table.write = memory_write;
    table.read = memory_read;
    table.copy_from = memory_copy_from;
    table.clear = memory_clear;
    return ggml_backend_buffer_init(type, table, address, bytes);
}
bool no(ggml_backend_buffer_type_t) {
    return false;
}
bool yes(ggml_backend_buffer_type_t) {
    return true;
}

// Host buffers: pinned memory.

void host_free(ggml_backend_buffer_t buffer) {
    device_of(buffer).free_pinned(buffer->context);
}
std::byte *host_bytes(const ggml_tensor *tensor, size_t offset) {
    return static_cast<std::byte *>(tensor->data) + offset;
}
void host_fill(ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t value, size_t offset, size_t bytes) {
    std::memset(host_bytes(tensor, offset), value, bytes);
}
void host_write(ggml_backend_buffer_t, ggml_tensor *tensor, const void *from, size_t offset, size_t bytes) {
    std::memcpy(host_bytes(tensor, offset), from, bytes);
}
void host_read(ggml_backend_buffer_t, const ggml_tensor *tensor, void *to, size_t offset, size_t bytes) {
    std::memcpy(to, host_bytes(tensor, offset), bytes);
}
void host_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(buffer->context, value, buffer->bytes);
}
const char *host_name(ggml_backend_buffer_type_t) {
    return "EMU_Host";
}
ggml_backend_buffer_t host_allocate(ggml_backend_buffer_type_t type, size_t bytes) {
    void *address = static_cast<Entry *>(type->context)->device.allocate_pinned(bytes);
    // As CUDA's: ordinary memory where none can be pinned, told by the buffer's type.
    if (address == nullptr) return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes);
    abi::BufferTable table = {};
    table.free = host_free;
    table.base = memory_base;
    table.fill = host_fill;
    table.write = host_write;
    table.read = host_read;
    table.clear = host_clear;
    return ggml_backend_buffer_init(type, table, address, bytes);
}

// The device.

const char *device_name(ggml_backend_dev_t device) {
    return entry_of(device).name.c_str();
}
const char *device_description(ggml_backend_dev_t) {
    return "emulated accelerator";
}
void device_memory(ggml_backend_dev_t device, size_t *free, size_t *total) {
    Device &emulated = entry_of(device).device;
    *total = emulated.settings().memory_bytes;
    const uint64_t used = emulated.memory().used();
    *free = used < *total ? *total - used : 0;
}
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}
void device_properties(ggml_backend_dev_t device, ggml_backend_dev_props *properties) {
    *properties = {};
    properties->name = device_name(device);
    properties->description = device_description(device);
    device_memory(device, &properties->memory_free, &properties->memory_total);
    properties->type = device_type(device);
    properties->caps = {.async = true,
                        .host_buffer = true,
                        .buffer_from_host_ptr = false,
                        .events = true,
                        .mmap_support = true};
}
ggml_backend_t device_make_backend(ggml_backend_dev_t device, const char *) {
    return make_stream_backend(device, entry_of(device).device);
}
ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) {
    return &entry_of(device).memory_type;
}
ggml_backend_buffer_type_t device_host_buffer_type(ggml_backend_dev_t device) {
    return &entry_of(device).host_type;
}
bool device_supports_op(ggml_backend_dev_t, const ggml_tensor *op) {
    static const ggml_backend_dev_t cpu = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    return op->op != GGML_OP_CUSTOM && ggml_backend_dev_supports_op(cpu, op);
}
bool device_supports_buffer_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return type == &entry_of(device).memory_type;
}
ggml_backend_event_t event_new(ggml_backend_dev_t device) {
    if (entry_of(device).device.fails(Failure::event)) return nullptr;
    auto context = std::make_unique<std::shared_ptr<Event>>(std::make_shared<Event>());
    return new ggml_backend_event{device, context.release()};
}
void event_free(ggml_backend_dev_t, ggml_backend_event_t event) {
    const std::unique_ptr<std::shared_ptr<Event>> context(
        static_cast<std::shared_ptr<Event> *>(event->context));
    const std::unique_ptr<ggml_backend_event> handle(event);
}
void event_synchronize(ggml_backend_dev_t, ggml_backend_event_t event) {
    Event &it = **static_cast<std::shared_ptr<Event> *>(event->context);
    it.wait_for(it.latest());
}

const char *registration_name(ggml_backend_reg_t) {
    return "EMU";
}
size_t registration_device_count(ggml_backend_reg_t) {
    return n_entries;
}
ggml_backend_dev_t registration_device(ggml_backend_reg_t, size_t index) {
    return &entries[index].handle;
}

ggml_backend_reg registration = {.api_version = abi::api_version,
                                 .table = {.name = registration_name,
                                           .device_count = registration_device_count,
                                           .device = registration_device,
                                           .procedure = nullptr},
                                 .context = nullptr};

void prepare(Entry &entry, size_t index) {
    entry.name = "EMU" + std::to_string(index);
    entry.memory_type = {.table = {.name = memory_name,
                                   .allocate = memory_allocate,
                                   .alignment = alignment,
                                   .max_bytes = nullptr,
                                   .tensor_bytes = nullptr,
                                   .is_host = no},
                         .device = &entry.handle,
                         .context = &entry};
    entry.host_type = entry.memory_type;
    entry.host_type.table.name = host_name;
    entry.host_type.table.allocate = host_allocate;
    entry.host_type.table.is_host = yes;
    entry.handle = {.table = {.name = device_name,
                              .description = device_description,
                              .memory = device_memory,
                              .type = device_type,
                              .properties = device_properties,
                              .make_backend = device_make_backend,
                              .buffer_type = device_buffer_type,
                              .host_buffer_type = device_host_buffer_type,
                              .buffer_from_pointer = nullptr,
                              .supports_op = device_supports_op,
                              .supports_buffer_type = device_supports_buffer_type,
                              .wants_offload = nullptr,
                              .event_new = event_new,
                              .event_free = event_free,
                              .event_synchronize = event_synchronize},
                    .registration = &registration,
                    .context = &entry};
}

} // namespace

bool register_devices(int n) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (n < 1 || static_cast<size_t>(n) > max_devices || n_entries > 0) return false;
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) prepare(entries[i], i);
    n_entries = static_cast<size_t>(n);
    ggml_backend_register(&registration);
    return true;
}

Device *device(int index) {
    return index >= 0 && static_cast<size_t>(index) < n_entries ? &entries[static_cast<size_t>(index)].device
                                                                : nullptr;
}

} // namespace spice::emulator

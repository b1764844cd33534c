#include "backend/host_buffer.h"

#include "backend/plugin.h"
#include "store/mapping.h"

#include <cstring>
#include <memory>

namespace spice {

namespace {

Mapping &mapping(ggml_backend_buffer_t buffer) {
    return *static_cast<Mapping *>(buffer->context);
}

void buffer_free(ggml_backend_buffer_t buffer) {
    const std::unique_ptr<Mapping> gone(&mapping(buffer));
}
void *buffer_base(ggml_backend_buffer_t buffer) {
    return mapping(buffer).base();
}

std::byte *bytes_of(const ggml_tensor *tensor, size_t offset) {
    return static_cast<std::byte *>(tensor->data) + offset;
}
void buffer_fill(ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t value, size_t offset, size_t bytes) {
    std::memset(bytes_of(tensor, offset), value, bytes);
}
void buffer_write(ggml_backend_buffer_t, ggml_tensor *tensor, const void *from, size_t offset, size_t bytes) {
    std::memcpy(bytes_of(tensor, offset), from, bytes);
}
void buffer_read(ggml_backend_buffer_t, const ggml_tensor *tensor, void *to, size_t offset, size_t bytes) {
    std::memcpy(to, bytes_of(tensor, offset), bytes);
}
void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(mapping(buffer).base(), value, buffer->bytes);
}

const char *type_name(ggml_backend_buffer_type_t) {
    return "SPICE_Host";
}
size_t type_alignment(ggml_backend_buffer_type_t) {
    return 64;
}
bool type_is_host(ggml_backend_buffer_type_t) {
    return true;
}

ggml_backend_buffer_t type_allocate(ggml_backend_buffer_type_t type, size_t bytes) {
    auto context = std::make_unique<Mapping>(Mapping::Kind::memory, bytes);
    if (!*context) return nullptr;
    const abi::BufferTable table = {
        .free = buffer_free,
        .base = buffer_base,
        .init_tensor = nullptr,
        .fill = buffer_fill,
        .write = buffer_write,
        .read = buffer_read,
        .write_2d = nullptr,
        .read_2d = nullptr,
        .copy_from = nullptr,
        .clear = buffer_clear,
        .reset = nullptr,
    };
    ggml_backend_buffer_t buffer = ggml_backend_buffer_init(type, table, context.get(), bytes);
    if (buffer != nullptr) (void)context.release(); // now owned by the buffer, see buffer_free
    return buffer;
}

} // namespace

ggml_backend_buffer_type_t host_buffer_type() {
    static ggml_backend_buffer_type type = {
        .table =
            {
                .name = type_name,
                .allocate = type_allocate,
                .alignment = type_alignment,
                .max_bytes = nullptr,
                .tensor_bytes = nullptr,
                .is_host = type_is_host,
            },
        .device = plugin_device(),
        .context = nullptr,
    };
    return &type;
}

} // namespace spice

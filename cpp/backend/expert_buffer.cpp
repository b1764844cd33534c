#include "backend/expert_buffer.h"

#include "backend/plugin.h"
#include "store/mapping.h"

#include <cstring>
#include <string>

namespace spice {

namespace {

constexpr char hidden_name[] = "~spice expert"; // no GGUF tensor has a space in its name

struct Reservation {
    std::shared_ptr<Attachment> attachment;
    Mapping addresses;
};

Reservation &reservation(ggml_backend_buffer_t buffer) {
    return *static_cast<Reservation *>(buffer->context);
}

void buffer_free(ggml_backend_buffer_t buffer) {
    std::unique_ptr<Reservation> gone(&reservation(buffer));
    gone->attachment->forget_renamed();
}

void *buffer_base(ggml_backend_buffer_t buffer) {
    return reservation(buffer).addresses.base();
}

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor) {
    if (tensor->view_src != nullptr) return GGML_STATUS_SUCCESS; // found through the tensor it views
    Attachment &attachment = *reservation(buffer).attachment;
    const ExpertTensor *record = attachment.engine().find(tensor->name);
    if (record == nullptr) {
        attachment.engine().fail(
            Status(Code::internal, std::string(tensor->name) + ": not an expert tensor"));
        return GGML_STATUS_FAILED;
    }
    tensor->extra = const_cast<ExpertTensor *>(record);
    attachment.note_renamed(tensor);
    ggml_set_name(tensor, hidden_name);
    return GGML_STATUS_SUCCESS;
}

// Weights come from the file alone: writing to them is a caller's mistake, and there is nothing to write to.
void buffer_fill(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void buffer_write(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *, size_t, size_t) {
    reservation(buffer).attachment->engine().fail(
        Status(Code::internal, std::string(tensor->name) + ": expert weights cannot be written"));
}

void buffer_read(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *to, size_t offset,
                 size_t bytes) {
    Engine &engine = reservation(buffer).attachment->engine();
    const ExpertTensor *record = expert_tensor(tensor);
    Status status =
        record == nullptr
            ? Status(Code::internal, std::string(tensor->name) + ": not an expert tensor")
            : engine.read_back(*record, tensor->view_offs + offset, {static_cast<std::byte *>(to), bytes});
    if (status.ok()) return;
    std::memset(to, 0, bytes); // this callback cannot fail; the error surfaces through take_error
    engine.fail(std::move(status));
}

void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

const char *type_name(ggml_backend_buffer_type_t) {
    return "SPICE";
}
size_t type_alignment(ggml_backend_buffer_type_t) {
    return 64;
}
bool type_is_host(ggml_backend_buffer_type_t) {
    return false;
} // its addresses must never be read

ggml_backend_buffer_t type_allocate(ggml_backend_buffer_type_t type, size_t bytes) {
    auto &attachment = *static_cast<Attachment *>(type->context);
    if (!attachment.loading()) return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes);
    auto context = std::make_unique<Reservation>(
        Reservation{attachment.shared_from_this(), Mapping(Mapping::Kind::addresses, bytes)});
    if (!context->addresses) {
        attachment.engine().fail(
            Status(Code::out_of_memory, "cannot reserve " + std::to_string(bytes) +
                                            " bytes of address space; raise the limit `ulimit -v`"));
        return nullptr;
    }
    const abi::BufferTable table = {
        .free = buffer_free,
        .base = buffer_base,
        .init_tensor = buffer_init_tensor,
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

std::shared_ptr<Attachment> Attachment::make(std::shared_ptr<Engine> engine) {
    std::shared_ptr<Attachment> attachment(new Attachment);
    attachment->engine_ = std::move(engine);
    attachment->type_ = {
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
        .context = attachment.get(),
    };
    return attachment;
}

size_t Attachment::finish_load() {
    for (ggml_tensor *tensor : renamed_) ggml_set_name(tensor, expert_tensor(tensor)->info->name.c_str());
    const size_t n = renamed_.size();
    renamed_.clear();
    loading_ = false;
    return n;
}

bool is_expert_buffer_type(ggml_backend_buffer_type_t type) {
    return type != nullptr && type->table.allocate == type_allocate;
}

const ExpertTensor *expert_tensor(const ggml_tensor *tensor) {
    if (tensor == nullptr) return nullptr;
    if (tensor->view_src != nullptr) tensor = tensor->view_src;
    if (tensor->buffer == nullptr || !is_expert_buffer_type(tensor->buffer->type)) return nullptr;
    return static_cast<const ExpertTensor *>(tensor->extra);
}

} // namespace spice

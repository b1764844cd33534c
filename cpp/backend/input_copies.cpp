#include "backend/input_copies.h"

namespace spice {

namespace {

ggml_backend_buffer_t buffer_of(const ggml_tensor *tensor) {
    return tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
}

} // namespace

bool InputCopies::take(ggml_backend_t device, const ggml_tensor *from, ggml_tensor *to) {
    const ggml_backend_buffer_t source = buffer_of(from);
    const ggml_backend_buffer_t target = buffer_of(to);
    if (source == nullptr || target == nullptr || !ggml_backend_buffer_is_host(target)) return false;
    // Backends end the process for buffers that are not of their own device's type.
    const ggml_backend_dev_t owner = ggml_backend_get_device(device);
    if (device->table.read_async == nullptr || device->table.synchronize == nullptr || owner == nullptr ||
        ggml_backend_buffer_is_host(source) ||
        ggml_backend_buffer_get_type(source) != ggml_backend_dev_buffer_type(owner)) {
        return false;
    }
    copies_.push_back({device, from, to});
    ggml_backend_tensor_get_async(device, from, to->data, 0, ggml_nbytes(from));
    return true;
}

void InputCopies::wait() {
    for (size_t i = 0; i < copies_.size(); ++i) {
        if (copies_[i].waited) continue;
        ggml_backend_synchronize(copies_[i].stream);
        for (size_t k = i; k < copies_.size(); ++k) {
            copies_[k].waited = copies_[k].waited || copies_[k].stream == copies_[i].stream;
        }
    }
}

void *InputCopies::on(ggml_backend_dev_t device, const ggml_tensor *tensor,
                      ggml_backend_buffer_t &buffer) const {
    if (!ggml_is_contiguous(tensor)) return nullptr;
    for (const Copy &copy : copies_) {
        const bool same = tensor == copy.to || tensor->view_src == copy.to;
        if (!same || tensor->data != copy.to->data || tensor->type != copy.from->type ||
            ggml_nbytes(tensor) != ggml_nbytes(copy.from) || !ggml_is_contiguous(copy.from) ||
            ggml_backend_get_device(copy.stream) != device) {
            continue;
        }
        buffer = buffer_of(copy.from);
        return copy.from->data;
    }
    return nullptr;
}

} // namespace spice

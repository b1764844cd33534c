#include "store/device_pool.h"

#include "store/align.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

namespace spice {

namespace {

/// A tensor without data, to ask for sizes and to place.
ggml_tensor *slot_tensor(ggml_context *context, const DevicePartShape &shape, int32_t n_slots) {
    return ggml_new_tensor_3d(context, shape.type, shape.n_in, shape.n_out, n_slots);
}

ggml_context_ptr tensor_context(size_t n) {
    return ggml_context_ptr(
        ggml_init({.mem_size = n * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true}));
}

/// The largest that any of the shapes asks for: devices pad some types.
uint64_t part_bytes(ggml_backend_buffer_type_t type, const std::vector<DevicePartShape> &shapes,
                    int32_t n_slots) {
    const ggml_context_ptr context = tensor_context(shapes.size());
    uint64_t most = 0;
    for (const DevicePartShape &shape : shapes) {
        const ggml_tensor *tensor = slot_tensor(context.get(), shape, n_slots);
        most = std::max<uint64_t>(most, ggml_backend_buft_get_alloc_size(type, tensor));
    }
    return align_up(most, ggml_backend_buft_get_alignment(type));
}

} // namespace

uint64_t DevicePool::bytes(ggml_backend_buffer_type_t type,
                           std::span<const std::vector<DevicePartShape>> shapes, int32_t n_slots) {
    uint64_t sum = 0;
    for (const auto &part : shapes) sum += part_bytes(type, part, n_slots);
    return sum;
}

int32_t DevicePool::most_slots(ggml_backend_buffer_type_t type,
                               std::span<const std::vector<DevicePartShape>> shapes) {
    const uint64_t limit = ggml_backend_buft_get_max_size(type);
    int32_t most = std::numeric_limits<int32_t>::max();
    for (const auto &part : shapes) {
        const uint64_t one = part_bytes(type, part, 2) - part_bytes(type, part, 1);
        const uint64_t padding = part_bytes(type, part, 1) - std::min(one, part_bytes(type, part, 1));
        const uint64_t room = limit > padding ? (limit - padding) / std::max<uint64_t>(one, 1) : 0;
        most = static_cast<int32_t>(std::min<uint64_t>(static_cast<uint64_t>(most), room));
    }
    return most;
}

Result<DevicePool> DevicePool::make(ggml_backend_buffer_type_t type,
                                    std::span<const std::vector<DevicePartShape>> shapes, int32_t n_slots) {
    DevicePool pool;
    size_t n_tensors = 0;
    for (const auto &part : shapes) n_tensors += part.size();
    pool.context_ = tensor_context(n_tensors);
    pool.n_slots_ = n_slots;
    for (const auto &part : shapes) {
        const uint64_t bytes = part_bytes(type, part, n_slots);
        ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(type, bytes));
        if (buffer == nullptr) {
            return Status(Code::out_of_memory, std::string(ggml_backend_buft_name(type)) + " refused " +
                                                   std::to_string(bytes) +
                                                   " bytes for experts; give a smaller vram_budget");
        }
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_buffer_clear(buffer.get(), 0);
        pool.device_bytes_ += bytes;
        std::vector<ggml_tensor *> &tensors = pool.tensors_.emplace_back();
        for (const DevicePartShape &shape : part) {
            tensors.push_back(slot_tensor(pool.context_.get(), shape, n_slots));
            if (ggml_backend_tensor_alloc(buffer.get(), tensors.back(),
                                          ggml_backend_buffer_get_base(buffer.get())) !=
                GGML_STATUS_SUCCESS) {
                return Status(Code::out_of_memory, "the device refused a tensor for experts");
            }
        }
        pool.buffers_.push_back(std::move(buffer));
    }
    pool.free_.resize(static_cast<size_t>(n_slots));
    std::iota(pool.free_.rbegin(), pool.free_.rend(), 0);
    return pool;
}

ggml_tensor *DevicePool::part_tensor(size_t part, const DevicePartShape &shape) const {
    for (ggml_tensor *tensor : tensors_[part]) {
        if (tensor->type == shape.type && tensor->ne[0] == shape.n_in && tensor->ne[1] == shape.n_out) {
            return tensor;
        }
    }
    return nullptr;
}

std::optional<int32_t> DevicePool::take() {
    if (free_.empty()) return std::nullopt;
    const int32_t slot = free_.back();
    free_.pop_back();
    return slot;
}

} // namespace spice

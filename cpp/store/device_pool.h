// Room for slabs of one size in a device's memory: for each part a slot tensor, [part bytes, n_slots].
//
// Parts have tensors of their own (in host memory they share a slot): devices multiply by contiguous tensors.
// Which type and shape a part has is the business of the caller, who looks at it through part_tensor():
// groups of one size class may differ in type, and agree in bytes. Fresh memory is zero, because device
// kernels read a little past the last row, and nothing that was never written may be NaN.
//
// Thread: take and release from the thread that holds the Engine's lock; the rest anywhere. make blocks while
// the device clears its memory. Errors: out_of_memory, when the device has no room.
#pragma once

#include "store/status.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace spice {

/// How a part of one group is seen: rows of a type, n_in x n_out for each expert.
struct DevicePartShape {
    ggml_type type = GGML_TYPE_F32;
    int64_t n_in = 0;
    int64_t n_out = 0;
};

class DevicePool {
  public:
    DevicePool() = default;

    /// `shapes[s]`: every way in which part s is seen; all of one part have the same bytes.
    [[nodiscard]] static Result<DevicePool> make(ggml_backend_buffer_type_t type,
                                                 std::span<const std::vector<DevicePartShape>> shapes,
                                                 int32_t n_slots);
    /// What `n_slots` slots take on the device, and how many fit under its limit for one allocation.
    [[nodiscard]] static uint64_t bytes(ggml_backend_buffer_type_t type,
                                        std::span<const std::vector<DevicePartShape>> shapes,
                                        int32_t n_slots);
    [[nodiscard]] static int32_t most_slots(ggml_backend_buffer_type_t type,
                                            std::span<const std::vector<DevicePartShape>> shapes);

    /// The slot tensor of a part, [n_in, n_out, n_slots]; nullptr: the pool was not made for the shape.
    [[nodiscard]] ggml_tensor *part_tensor(size_t part, const DevicePartShape &shape) const;

    [[nodiscard]] std::optional<int32_t> take();
    void release(int32_t slot) { free_.push_back(slot); }
    [[nodiscard]] int32_t n_slots() const { return n_slots_; }
    [[nodiscard]] int32_t n_free() const { return static_cast<int32_t>(free_.size()); }
    [[nodiscard]] uint64_t device_bytes() const { return device_bytes_; }

  private:
    ggml_context_ptr context_;                        ///< of the tensors
    std::vector<ggml_backend_buffer_ptr> buffers_;    ///< one for each part
    std::vector<std::vector<ggml_tensor *>> tensors_; ///< of each part, one for each shape
    int32_t n_slots_ = 0;
    uint64_t device_bytes_ = 0;
    std::vector<int32_t> free_; ///< a stack
};

} // namespace spice

// A MoE block as the device can compute it: which graphs of llama.cpp qualify, and one device graph for some
// of the block's experts.
//
// A block qualifies when everything between the expert products is elementwise on their results: gate, up (or
// both in one, seen through views), biases and scales of each expert, an activation, down. The device graph
// takes the rows of the chosen experts, multiplies by slot tensors with slot numbers for ids, and gives the
// down projection's row for each (token, expert): what follows (the down projection's bias, the weighted sum
// over experts) stays llama.cpp's own, on the host, so the order of summation does not change.
//
// Thread: the context's compute thread. launch() does not block on devices with streams.
#pragma once

#include "backend/routed_call.h"
#include "backend/row_copies.h"
#include "runtime/device_call.h"

#include "ggml-cpp.h"

#include <optional>
#include <span>
#include <vector>

namespace spice {

/// The nodes of one block in llama.cpp's graph.
struct BlockShape {
    const ggml_tensor *down = nullptr;         ///< whose rows are the block's result
    const ggml_tensor *x = nullptr;            ///< what gate and up multiply
    const ggml_tensor *ids = nullptr;          ///< of the chosen experts
    std::vector<const ggml_tensor *> products; ///< gate and up, or both in one
    bool by_expert = false;                    ///< biases or scales of each expert are between them

    /// The block of these ids and this group in the graph, or nothing when it has no such form.
    [[nodiscard]] static std::optional<BlockShape> recognise(ggml_cgraph *graph, const ggml_tensor *ids,
                                                             int32_t group);
    /// One token without a row of its own for each expert: the experts share the row.
    [[nodiscard]] bool one_row() const { return x->ne[1] == 1 && x->ne[2] == 1; }
};

/// The rows that one launch computes: each expert with its (i, t) rows.
struct DeviceRows {
    DeviceExpert expert;
    std::span<const RoutedCall::Row> rows;
};

/// Device memory for everything but slots and the call's activations. The launches of a stream use it in
/// turn: they run in order.
class DeviceWork {
  public:
    explicit DeviceWork(ggml_backend_t stream) : stream_(stream) {}
    /// Gives every tensor of the context that has no place one. Waits for the stream when it must grow.
    /// Errors: out_of_memory.
    [[nodiscard]] Status place(ggml_context *context);

  private:
    ggml_backend_t stream_;
    ggml_backend_buffer_ptr buffer_;
};

class DeviceLaunch {
  public:
    /// Rows of one launch at most, so that prompts take no more working space than that.
    static constexpr size_t max_rows = 1024;
    static constexpr size_t staging_unit = 64; ///< what is staged begins at whole units

    DeviceLaunch(ggml_backend_t stream, DeviceWork &work) : stream_(stream), work_(work) {}

    /// True when the device can compute every node of the block; nothing when it had no memory to tell.
    [[nodiscard]] std::optional<bool> supported(const BlockShape &block, DeviceTier &tier);
    /// Queues inputs, graph and results. `x`: the block's activations on the device, a row for each
    /// (i % x->ne[1], token). `staging`: host memory of staging_bytes() that stays until the stream was
    /// waited for. Errors: out_of_memory (nothing was queued), device (the graph was refused).
    [[nodiscard]] Status launch(const BlockShape &block, DeviceTier &tier, ggml_tensor *x,
                                std::span<const DeviceRows> experts, std::byte *staging);
    [[nodiscard]] static size_t staging_bytes(const BlockShape &block, size_t n_rows);
    /// The copies that bring the results, once the stream was waited for, to the down product's tensor.
    void results_to(const ggml_tensor *down, RowCopies &to) const;

  private:
    /// `x`: as in launch, or nullptr for any.
    [[nodiscard]] Result<ggml_cgraph *> build(const BlockShape &block, DeviceTier &tier, int64_t n_rows,
                                              ggml_tensor *x);

    ggml_backend_t stream_;
    DeviceWork &work_;
    std::vector<std::byte> arena_;
    ggml_context_ptr context_; ///< of the last launch
    ggml_tensor *slot_ids_ = nullptr;
    ggml_tensor *expert_ids_ = nullptr; ///< or nullptr: nothing goes by expert
    ggml_tensor *x_rows_ = nullptr;     ///< which row of x; nullptr: the only one
    ggml_tensor *result_ = nullptr;
    const std::byte *results_ = nullptr;
    std::vector<RoutedCall::Row> rows_; ///< in the order of results_
};

} // namespace spice

// A MoE block as the device can compute it: which graphs of llama.cpp qualify, and one device graph for some
// of the block's experts.
//
// A block qualifies when everything between the expert products is elementwise on their results: gate, up (or
// both in one, seen through views), an activation, down. What has other operands between (biases, scales of
// each expert) is computed by the host. The device graph takes the rows of the chosen experts, multiplies by
// slot tensors with slot numbers for ids, and gives the down projection's row for each (token, expert): the
// weighted sum over experts stays llama.cpp's own, on the host, so the order of summation does not change.
//
// Thread: the context's compute thread. launch() does not block on devices with streams; wait() does.
#pragma once

#include "backend/routed_call.h"
#include "runtime/device_tier.h"

#include "ggml-cpp.h"

#include <optional>
#include <span>
#include <vector>

namespace spice {

/// The nodes of one block in llama.cpp's graph.
struct BlockShape {
    const ggml_tensor *down = nullptr;         ///< whose rows are the block's result
    const ggml_tensor *x = nullptr;            ///< what gate and up multiply
    std::vector<const ggml_tensor *> products; ///< gate and up, or both in one

    /// The block of these ids and this group in the graph, or nothing when it has no such form.
    [[nodiscard]] static std::optional<BlockShape> recognise(ggml_cgraph *graph, const ggml_tensor *ids,
                                                             int32_t group);
};

/// The rows that one launch computes: each expert with its (i, t) rows.
struct DeviceRows {
    DeviceExpert expert;
    std::vector<RoutedCall::Row> rows;
};

class DeviceLaunch {
  public:
    explicit DeviceLaunch(ggml_backend_t stream) : stream_(stream) {}
    ~DeviceLaunch() { wait(); }
    DeviceLaunch(const DeviceLaunch &) = delete;
    DeviceLaunch &operator=(const DeviceLaunch &) = delete;

    /// True when the device can compute every node of the block; nothing when it had no memory to tell.
    [[nodiscard]] std::optional<bool> supported(const BlockShape &block, const DeviceTier &tier);
    /// Queues inputs, graph and results. Errors: out_of_memory (nothing was queued),
    /// device (the graph was refused).
    [[nodiscard]] Status launch(const BlockShape &block, const DeviceTier &tier,
                                std::span<const DeviceRows> experts);
    /// Blocks until the results are here.
    void wait();
    /// Copies the results to the rows of the down product's tensor. After wait().
    void scatter() const;

  private:
    [[nodiscard]] ggml_cgraph *build(const BlockShape &block, const DeviceTier &tier, int64_t n_rows,
                                     bool one_x);
    [[nodiscard]] Status place();

    ggml_backend_t stream_;
    bool running_ = false;
    std::vector<std::byte> arena_;
    ggml_context_ptr context_;        ///< of the last launch
    ggml_backend_buffer_ptr work_;    ///< device memory of everything but slots; grows
    ggml_backend_buffer_ptr staging_; ///< host memory for inputs and results, pinned if the device can; grows
    ggml_tensor *x_ = nullptr;
    ggml_tensor *ids_ = nullptr;
    ggml_tensor *result_ = nullptr;
    const std::byte *results_ = nullptr; ///< in staging_
    const ggml_tensor *down_ = nullptr;
    std::vector<RoutedCall::Row> rows_; ///< in the order of results_
};

} // namespace spice

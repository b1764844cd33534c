// One device in one llama context: its stream of kernels, and its share of each layer call.
//
// The share is computed in launches on that stream: first what is in the pool, then chunk after chunk of what
// is on its way, each behind its own transfer, so that link and kernels overlap. Chunks that pass through the
// same slots are sent when the graph before them in these slots has been queued; the device keeps the order.
//
// Thread: the context's compute thread. share() does not block on devices with streams, but when its memory
// must grow; wait() blocks until everything queued has been computed. Errors: see share().
#pragma once

#include "backend/device_block.h"
#include "backend/input_copies.h"
#include "policy/function_ref.h"

#include "ggml-cpp.h"

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace spice {

class DeviceLane {
  public:
    /// nullptr when the device gives no stream.
    [[nodiscard]] static std::unique_ptr<DeviceLane> make(DeviceTier &tier);
    ~DeviceLane() { wait(); }
    DeviceLane(const DeviceLane &) = delete;
    DeviceLane &operator=(const DeviceLane &) = delete;

    [[nodiscard]] DeviceTier &tier() const { return tier_; }
    /// One share at a time: from share() until the copies of results_to() have run and free() says so.
    enum class State : uint8_t { free, computing, handed_over };
    [[nodiscard]] State state() const { return state_; }
    void free(); ///< waits
    /// Starts the device on its share of the call, whose block is in `graph`; `routed` is [tokens][n_routed].
    /// Activations that the device has among the split's `inputs` are used there, others sent up.
    /// `pending`: is the tensor computed later than now? Where the device cannot compute the block, or has no
    /// memory for it now, it gets no share. Errors: device.
    [[nodiscard]] Status share(ggml_cgraph *graph, RoutedCall &call, std::span<const int32_t> routed,
                               const InputCopies &inputs,
                               policy::FunctionRef<bool(const ggml_tensor *)> pending);
    void wait();
    /// The copies that bring the results of the last share to the block's tensor. They may run after wait().
    void results_to(RowCopies &to);

  private:
    explicit DeviceLane(DeviceTier &tier) : tier_(tier) {}
    enum class Fit : uint8_t { unknown, yes, no };
    [[nodiscard]] bool fits(int32_t group, const std::optional<BlockShape> &block);
    [[nodiscard]] Status make_room();
    [[nodiscard]] Status place_activations(const InputCopies &inputs);
    [[nodiscard]] Status send_activations();
    [[nodiscard]] Status launch(RoutedCall &call);
    [[nodiscard]] Status launch_rows(std::span<const DeviceExpert> experts);
    [[nodiscard]] DeviceLaunch &next_launch();
    [[nodiscard]] ggml_backend_event_t event(size_t index);

    DeviceTier &tier_;
    ggml_backend_ptr stream_;
    std::optional<DeviceWork> work_;
    std::deque<DeviceLaunch> launches_;
    size_t launches_used_ = 0;
    bool running_ = false;
    State state_ = State::free;
    std::vector<Fit> fits_;                      ///< of each group: can the device compute its block?
    std::vector<ggml_backend_event_ptr> events_; ///< of the chunks whose slots others wait for

    // Of the present share:
    std::optional<BlockShape> block_;
    std::vector<RoutedCall::Row> rows_; ///< by expert
    std::vector<uint32_t> first_;       ///< the rows of expert e are first_[e] up to first_[e + 1]
    std::vector<std::byte> x_arena_;
    ggml_context_ptr x_context_;
    ggml_tensor *x_ = nullptr;         ///< the block's activations, on the device
    ggml_backend_buffer_ptr x_buffer_; ///< of activations that were sent up; grows
    ggml_backend_buffer_ptr staging_;  ///< host memory of inputs and results, pinned if the device can; grows
    std::byte *staging_next_ = nullptr;
};

} // namespace spice

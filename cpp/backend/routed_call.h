// One block in one compute(): its LayerCall, and which rows of the batch each expert gets.
//
// Thread: the context's compute thread. Nothing blocks but the LayerCall's destructor (see there).
#pragma once

#include "backend/substitution.h"
#include "compute/expert_matmul.h"
#include "policy/function_ref.h"
#include "runtime/capture.h"
#include "runtime/device_call.h"
#include "runtime/layer_call.h"

#include "ggml.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace spice {

class DeviceLane;

struct RoutedCall {
    struct Row {
        int32_t i = 0; ///< which of the token's routed experts
        int32_t t = 0; ///< token
    };

    LayerCall layer;
    const ggml_tensor *ids = nullptr; ///< as in llama.cpp's graph, [routed, tokens]
    int32_t group = 0;
    std::vector<Row> rows;       ///< that the host multiplies, by expert, in the order of layer.experts()
    std::vector<uint32_t> first; ///< the rows of experts()[e] are first[e] up to first[e + 1]
    int64_t most_rows = 0;       ///< of one expert

    // What the projections of the block share once the first of them has made it.
    ggml_tensor *slot_ids = nullptr;
    const ggml_tensor *packed_from = nullptr; ///< the activations that `packed` holds
    ggml_type packed_type = GGML_TYPE_COUNT;
    const compute::PackJob *packed = nullptr;

    /// The routing that predictions are still to be made from; done while other threads multiply.
    struct Forecast {
        Engine *engine = nullptr;
        RouterInput input;
        std::vector<int32_t> ids; ///< [tokens][n_routed]
    };
    std::optional<Forecast> forecast;
    compute::MatmulJob *first_product = nullptr; ///< the node that does it

    // With a device tier and a block that the device can compute:
    DeviceCall device;                     ///< its experts are not in `layer`
    const ggml_tensor *merge_at = nullptr; ///< the down product, where the device's results join
    DeviceLane *lane = nullptr;            ///< that computes them
    double launched = 0.0;                 ///< when

    std::unique_ptr<Substituted> stand_ins; ///< null: no pair is computed by stand-ins

    /// Whether our own dot products compute the host's share.
    [[nodiscard]] bool is_direct() const { return !layer.streaming() && most_rows < compute::batched_rows(); }

    /// Makes the predictions. On one thread, any of the graph's; without memory there are none.
    void predict() noexcept;

    struct Captured { ///< where what the experts give is kept
        Capture *capture = nullptr;
        int32_t layer = 0;
        const ggml_tensor *down = nullptr;
        void keep() const noexcept; ///< on one thread
    };
    Captured captured; ///< with a capture that wants outputs

    /// Waits for the device, whose rows can be copied then. On one thread.
    void join();

    /// Sorts the rows by expert; `routed` is [tokens][n_routed], the ids that `layer` was begun with.
    void sort_rows(std::span<const int32_t> routed, int64_t n_routed, int32_t n_expert);
};

/// Sorts the n rows of a batch, [tokens][n_routed]: row r to place_of(r), 0 .. n_places - 1, or nowhere below
/// 0. The rows of place p are first[p] up to first[p + 1], in the order of the batch.
void sort_rows(size_t n, int64_t n_routed, size_t n_places, policy::FunctionRef<int32_t(size_t)> place_of,
               std::vector<RoutedCall::Row> &rows, std::vector<uint32_t> &first);

} // namespace spice

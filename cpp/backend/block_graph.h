// Builds and runs the ggml graphs of one compute(): the block's own nodes, with each MUL_MAT_ID on expert
// weights replaced by one of three exact equivalents.
//
//   direct    few rows per expert (decode): our dot products on each expert's slot, in one node, experts in
//             the order of their arrival; threads wait inside the node for bytes that are on their way
//   batched   every expert is there: ggml's MUL_MAT_ID on the slot tensor, slot numbers for expert ids
//   waves     some are not: gather the rows of those that have arrived, ggml's MUL_MAT_ID on them, scatter
//             the results, and again; each expert's rows stay together, so the arithmetic is that of one call
//
// Pairs of a row and an expert that stand-ins compute (substitution.h) are left out of all three.
//
// While experts are on their way, the shared expert's nodes run before their turn.
//
// Thread: the context's compute thread. Blocks while bytes are read. Errors: ggml_status, the reason through
// Engine::fail. May throw std::bad_alloc.
#pragma once

#include "backend/device_lane.h"
#include "backend/early_nodes.h"
#include "backend/routed_call.h"
#include "backend/row_copies.h"

#include "ggml-cpp.h"

#include <deque>
#include <memory>
#include <vector>

namespace spice {

class BlockGraph {
  public:
    /// `cpu`: the CPU backend that computes. `inputs`: those of the split at run(). Both outlive it; buffers
    /// are kept between runs.
    BlockGraph(ggml_backend_t cpu, const InputCopies &inputs) : cpu_(cpu), inputs_(inputs) {}

    [[nodiscard]] ggml_status run(ggml_cgraph *graph, int n_threads);
    [[nodiscard]] Engine *engine() const { return engine_; } ///< of the last block seen, for error reports

  private:
    [[nodiscard]] ggml_status add_matmul(ggml_tensor *node, const ExpertTensor &weights);
    [[nodiscard]] ggml_status find_call(const ggml_tensor *node, const ExpertTensor &weights,
                                        RoutedCall **out);
    [[nodiscard]] RouterInput router_input(const ggml_tensor *node) const;
    /// The lane of the device that owns the group; nullptr: there is none.
    [[nodiscard]] DeviceLane *lane_of(const ExpertTensor &weights);
    void add_merge(RoutedCall &call);
    [[nodiscard]] ggml_status multiply_on_host(ggml_tensor *node, const ExpertTensor &weights,
                                               RoutedCall &call); // these five: block_products.cpp
    void add_direct(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call);
    void add_batched(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call);
    [[nodiscard]] ggml_status run_waves(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call);
    [[nodiscard]] ggml_status run_wave(ggml_tensor *node, const ExpertTensor &weights, RoutedCall &call,
                                       std::span<const size_t> wave);
    void substitute(const ExpertTensor &weights, RoutedCall &call, std::span<const int32_t> routed,
                    std::vector<int32_t> &left); // these two: substitution_graph.cpp
    void add_stand_ins(ggml_tensor *node, RoutedCall &call);
    void capture(const ExpertTensor &weights, RoutedCall &call); // these two: capture_graph.cpp
    void add_captured_outputs(RoutedCall &call);
    void add_early();
    void add_early_results();
    [[nodiscard]] ggml_status run_nodes(ggml_cgraph *graph, int n_threads);
    [[nodiscard]] ggml_status run_pending();
    [[nodiscard]] bool is_pending(const ggml_tensor *tensor) const;
    [[nodiscard]] ggml_status fail(Status status);
    std::byte *scratch(size_t bytes);
    void reset();

    ggml_backend_t cpu_;
    const InputCopies &inputs_;
    ggml_cgraph *graph_ = nullptr; ///< of this run
    int n_threads_ = 1;
    Engine *engine_ = nullptr;
    Engine::GraphCount count_;
    ggml_context_ptr context_; ///< of the tensors made for this run
    std::vector<std::byte> arena_;
    std::span<ggml_tensor *const> nodes_; ///< of the split
    size_t turn_ = 0;                     ///< the node in hand
    EarlyNodes early_;
    std::deque<RowCopies> copies_;
    ggml_cgraph *pending_ = nullptr;                 ///< nodes collected and not yet run
    std::vector<std::unique_ptr<DeviceLane>> lanes_; ///< of the devices that hold experts, made at first use
    std::deque<RoutedCall> calls_;
    std::deque<compute::PackJob> packs_;
    std::deque<compute::MatmulJob> matmuls_;
    std::vector<std::vector<std::byte>> scratch_;
    size_t scratch_used_ = 0;
};

} // namespace spice

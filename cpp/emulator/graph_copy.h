// A graph as the device keeps it: copies of its tensors, with the device's real bytes for data.
//
// Made when the graph is queued, like the parameters of a kernel launch: the caller may change or free its
// own graph as soon as compute() returns. Thread: make on any, run on the stream's. Errors: make returns
// nullptr for a graph that uses memory that is not the device's, with the reason.
#pragma once

#include "emulator/device_memory.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace spice::emulator {

class GraphCopy {
  public:
    /// `without_experts`: products by experts become zeros.
    [[nodiscard]] static std::unique_ptr<GraphCopy> make(ggml_cgraph *graph, const DeviceMemory &memory,
                                                         bool without_experts, std::string &why);
    [[nodiscard]] ggml_status run(ggml_backend_t cpu) { return ggml_backend_graph_compute(cpu, graph_); }
    [[nodiscard]] uint64_t n_nodes() const { return n_nodes_; }
    [[nodiscard]] uint64_t n_matmul_ids() const { return n_matmul_ids_; }
    /// Of the experts that its products read, if no two rows of a token's share one.
    [[nodiscard]] uint64_t expert_bytes() const { return expert_bytes_; }

  private:
    std::deque<ggml_tensor> tensors_; ///< stable addresses
    ggml_context_ptr context_;
    ggml_cgraph *graph_ = nullptr;
    uint64_t n_nodes_ = 0;
    uint64_t n_matmul_ids_ = 0;
    uint64_t expert_bytes_ = 0;
};

} // namespace spice::emulator

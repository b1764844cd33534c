// The backend of one llama context: runs the splits that hold our MoE blocks.
//
// compute() gets a split with everything before it computed, and hands it to a CPU backend of its own with
// the multiplications by expert weights replaced (block_graph.h). So the threads are those of ggml-cpu's
// OpenMP runtime, in one parallel region per layer call when every expert is there, and the bits are stock's.
//
// Thread: the context's compute thread. Blocks on disk while experts are read. Errors go to Engine::fail and
// back to llama.cpp as GGML_STATUS_FAILED; nothing throws across ggml.
#pragma once

#include "backend/ggml_abi.h"

namespace spice {

/// A new backend, or nullptr when there is no memory or no CPU backend.
[[nodiscard]] ggml_backend_t make_backend(ggml_backend_dev_t device);

// Looked up by name through the registration, signatures as in ggml-backend.h.
void set_n_threads(ggml_backend_t backend, int n_threads);
void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void *data);

} // namespace spice

// Decode arithmetic: rows of expert weights times a few activations, with ggml's own dot products.
//
// Two steps that the threads of one ggml graph run together: pack the activations into the type that the
// weights' dot product wants, then multiply. Both give the bits of ggml's MUL_MAT_ID as long as no expert has
// `batched_rows` or more rows (from there on ggml uses another arithmetic, see docs/seam.md).
//
// Thread: run_* is called by every thread of the graph with its number; nothing else is touched. run_matmul
// blocks in `arrived` while an expert's bytes are still on their way. No errors: what never arrives is
// skipped, and the caller knows.
#pragma once

#include "ggml-cpu.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace spice::compute {

/// Rows of one expert in one batch at which ggml may leave vec_dot for its tiled kernel.
[[nodiscard]] int64_t batched_rows();

/// Activations of one projection, packed: row r at packed + r * row_bytes, in the dot product's type.
struct PackJob {
    ggml_from_float_t convert = nullptr;
    std::vector<const float *> rows; ///< each n_in floats
    int64_t n_in = 0;
    int64_t block = 1;      ///< elements per block of the packed type
    size_t block_bytes = 0; ///< bytes per block
    size_t row_bytes = 0;
    std::byte *packed = nullptr;
};

void run_pack(const PackJob &job, int thread, int n_threads);

/// One routed expert: its weight rows and the (activation, result) pairs it is multiplied with.
struct MatmulExpert {
    const std::byte *weights = nullptr; ///< n_out rows, row_stride bytes apart
    int32_t index = 0;                  ///< what `arrived` is asked for
    uint32_t first = 0;                 ///< its pairs in MatmulJob::pairs
    uint32_t count = 0;
};

struct MatmulPair {
    const void *activation = nullptr; ///< packed row
    float *result = nullptr;          ///< n_out floats
};

struct MatmulJob {
    ggml_vec_dot_t dot = nullptr;
    int64_t n_in = 0;
    int64_t n_out = 0;
    size_t row_stride = 0;
    int64_t chunk = 64;                ///< weight rows that a thread takes at a time
    std::vector<MatmulExpert> experts; ///< in the order in which their bytes are expected
    std::vector<MatmulPair> pairs;
    /// Blocks until the expert's weights are there; false: they will not come.
    bool (*arrived)(void *context, int32_t index) = nullptr;
    void *context = nullptr;
    std::atomic<int64_t> next{0}; ///< the next chunk that nobody has taken
};

/// Chunks small enough that `n_threads` threads end at about the same time.
[[nodiscard]] int64_t chunk_rows(int64_t n_out, int64_t n_experts, int n_threads);

void run_matmul(MatmulJob &job);

} // namespace spice::compute

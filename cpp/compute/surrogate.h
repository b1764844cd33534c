// Low-rank stand-ins for experts (LoRE, papers.md section 1): for a row h of a layer,
//
//     y = bias + sum_r z_r b_r,     z_r = scale_r act(gate_scale_r (G h)_r) (A h)_r + offset_r
//
// where only the first rows have an activation: neurons that are kept from the expert. A, B and G are of
// integers of 8 bits, the scales of a row of A and its row of B are one number. All (row, expert) pairs of a
// layer call take two steps that the threads of one ggml graph run together: run_down for the inner products
// z, and run_up for the sums. The steps are apart because a graph's memory is reused: h may be gone when y is
// to be written.
//
// The cost is reading the matrices once; the variant for AVX-512, AVX2 or any CPU is chosen at run time.
// Results do not depend on the number of threads; between variants they differ in the last bits.
//
// Thread: run_* is called by every thread of the graph, nothing else is touched. Nothing blocks. No errors:
// what is not finite in the input is not finite in the output.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace spice::compute {

enum class SurrogateActivation : uint8_t { silu, gelu, relu };

/// The stand-ins of one layer. A null pointer: the part is absent and counts as zero.
struct SurrogateMatrices {
    int64_t n_in = 0;  ///< width of h
    int64_t n_out = 0; ///< width of y
    int64_t rank = 0;
    int64_t n_gated = 0; ///< rows of A with an activation, the first
    SurrogateActivation activation = SurrogateActivation::silu;
    const int8_t *a = nullptr;         ///< [n_expert][rank][n_in]
    const int8_t *b = nullptr;         ///< [n_expert][rank][n_out]
    const int8_t *gate = nullptr;      ///< [n_expert][n_gated][n_in]
    const float *scale = nullptr;      ///< [n_expert][rank], with a and b
    const float *gate_scale = nullptr; ///< [n_expert][n_gated], with gate
    const float *offset = nullptr;     ///< [n_expert][rank]
    const uint16_t *bias = nullptr;    ///< [n_expert][n_out] halves
};

/// The kernels of one instruction set.
struct SurrogateKernels {
    /// z[r] = row r . h for n_rows rows of n integers.
    void (*dot)(const int8_t *rows, int64_t n_rows, int64_t n, const float *h, float *z);
    /// y[0 .. n) += sum_r z[r] * row r, rows `stride` integers apart.
    void (*add)(const int8_t *rows, int64_t n_rows, int64_t stride, int64_t n, const float *z, float *y);
    const char *name;
};

/// Those that this CPU can run, the fastest first; the last runs anywhere.
[[nodiscard]] std::span<const SurrogateKernels> surrogate_kernels();

/// How much of the formula is used.
enum class SurrogateKind : uint8_t {
    drop, ///< y = 0
    base, ///< the bias alone
    full,
};

struct SurrogateRow { ///< of the batch; its pairs follow each other
    const float *h = nullptr;
    uint32_t first = 0; ///< its pairs
    uint32_t count = 0;
};

struct SurrogatePair {
    int32_t expert = 0;
    float *y = nullptr; ///< where the result goes
};

struct SurrogateJob {
    SurrogateMatrices matrices;
    SurrogateKind kind = SurrogateKind::full;
    const SurrogateKernels *kernels = nullptr;
    std::vector<SurrogateRow> rows;
    std::vector<SurrogatePair> pairs;
    float *z = nullptr; ///< z_floats() floats of scratch

    std::atomic<int64_t> next_down{0}; ///< the next piece of work that nobody has taken
    std::atomic<int64_t> next_up{0};

    [[nodiscard]] size_t z_floats() const { return pairs.size() * static_cast<size_t>(matrices.rank); }
    [[nodiscard]] float *pair_z(size_t pair) const { return z + pair * static_cast<size_t>(matrices.rank); }
};

void run_down(SurrogateJob &job);
/// After every thread has left run_down.
void run_up(SurrogateJob &job, int n_threads);

} // namespace spice::compute

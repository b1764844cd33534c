#include "compute/surrogate.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace spice::compute {

namespace {

constexpr int64_t k_down_rows = 8; // rows of A that a thread takes at a time: 16 KiB at a width of 2048
constexpr int64_t k_least_columns = 256;

float activate(SurrogateActivation activation, float x) {
    switch (activation) {
    case SurrogateActivation::silu:
        return x / (1.0F + std::exp(-x));
    case SurrogateActivation::gelu: {
        constexpr float root = 0.797884560802865F; // of 2 / pi
        return 0.5F * x * (1.0F + std::tanh(root * x * (1.0F + 0.044715F * x * x)));
    }
    case SurrogateActivation::relu:
        return std::max(x, 0.0F);
    }
    return 0.0F;
}

/// z of one piece of a pair's rows, from the rows' products with h.
void finish_down(const SurrogateJob &job, int64_t expert, int64_t first, int64_t n, const float *h,
                 float *z) {
    const SurrogateMatrices &m = job.matrices;
    float gates[k_down_rows];
    const int64_t gated = std::clamp<int64_t>(m.n_gated - first, 0, n);
    if (gated > 0) {
        job.kernels->dot(m.gate + (expert * m.n_gated + first) * m.n_in, gated, m.n_in, h, gates);
    }
    for (int64_t r = 0; r < gated; ++r) {
        z[r] *= activate(m.activation, m.gate_scale[expert * m.n_gated + first + r] * gates[r]);
    }
    for (int64_t r = 0; r < n; ++r) z[r] *= m.scale[expert * m.rank + first + r];
    if (m.offset == nullptr) return;
    for (int64_t r = 0; r < n; ++r) z[r] += m.offset[expert * m.rank + first + r];
}

} // namespace

void run_down(SurrogateJob &job) {
    if (job.kind != SurrogateKind::full) return;
    const SurrogateMatrices &m = job.matrices;
    const int64_t per_pair = (m.rank + k_down_rows - 1) / k_down_rows;
    const int64_t total = per_pair * static_cast<int64_t>(job.pairs.size());
    // Pairs are in the order of their rows: a thread finds its row by walking on.
    size_t row = 0;
    for (;;) {
        const int64_t turn = job.next_down.fetch_add(1, std::memory_order_relaxed);
        if (turn >= total) return;
        const auto p = static_cast<size_t>(turn / per_pair);
        while (p >= job.rows[row].first + job.rows[row].count) ++row;
        const auto expert = static_cast<int64_t>(job.pairs[p].expert);
        const float *h = job.rows[row].h;
        const int64_t first = turn % per_pair * k_down_rows;
        const int64_t n = std::min(k_down_rows, m.rank - first);
        float *z = job.pair_z(p) + first;
        job.kernels->dot(m.a + (expert * m.rank + first) * m.n_in, n, m.n_in, h, z);
        finish_down(job, expert, first, n, h, z);
    }
}

void run_up(SurrogateJob &job, int n_threads) {
    const SurrogateMatrices &m = job.matrices;
    // One stretch of columns for each thread, so that rows of B are read in long runs; more rows of the batch
    // than threads share the work by themselves.
    const auto n_rows = static_cast<int64_t>(job.rows.size());
    const int64_t split = n_rows >= 2 * n_threads ? 1 : n_threads;
    int64_t columns = std::max((m.n_out + split - 1) / split, k_least_columns);
    columns = (columns + 31) / 32 * 32; // threads do not share cache lines
    const int64_t per_row = (m.n_out + columns - 1) / columns;
    for (;;) {
        const int64_t turn = job.next_up.fetch_add(1, std::memory_order_relaxed);
        if (turn >= per_row * n_rows) return;
        const auto r = static_cast<size_t>(turn / per_row);
        const SurrogateRow &row = job.rows[r];
        const int64_t begin = turn % per_row * columns;
        const int64_t n = std::min(columns, m.n_out - begin);
        const std::span<const SurrogatePair> pairs = std::span(job.pairs).subspan(row.first, row.count);
        for (size_t i = 0; i < pairs.size(); ++i) {
            const auto expert = static_cast<int64_t>(pairs[i].expert);
            float *y = pairs[i].y + begin;
            if (job.kind == SurrogateKind::drop || m.bias == nullptr) {
                std::fill_n(y, n, 0.0F);
            } else {
                ggml_cpu_fp16_to_fp32(m.bias + expert * m.n_out + begin, y, n);
            }
            if (job.kind == SurrogateKind::full && m.rank > 0) {
                job.kernels->add(m.b + expert * m.rank * m.n_out + begin, m.rank, m.n_out, n,
                                 job.pair_z(row.first + i), y);
            }
        }
    }
}

} // namespace spice::compute

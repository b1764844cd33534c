#include "compute/expert_matmul.h"

#include <algorithm>
#include <cstdlib>

namespace spice::compute {

int64_t batched_rows() {
    // ggml reads the same variable once: with it, the tiled kernel is used for any number of rows.
    static const bool forced = [] {
        const char *value = std::getenv("GGML_CPU_TILED_MM_FORCE");
        return value != nullptr && std::atoi(value) == 1;
    }();
    return forced ? 1 : 8;
}

void run_pack(const PackJob &job, int thread, int n_threads) {
    const auto n_rows = static_cast<int64_t>(job.rows.size());
    const int64_t n_blocks = job.n_in / job.block;
    // Few rows: every thread converts its share of each row's blocks, as blocks are independent.
    const bool by_row = n_rows >= 4 * n_threads;
    const int64_t total = by_row ? n_rows : n_blocks;
    const int64_t begin = total * thread / n_threads;
    const int64_t end = total * (thread + 1) / n_threads;
    if (begin == end) return;
    for (int64_t r = by_row ? begin : 0; r < (by_row ? end : n_rows); ++r) {
        const int64_t b0 = by_row ? 0 : begin;
        const int64_t b1 = by_row ? n_blocks : end;
        std::byte *to = job.packed + static_cast<size_t>(r) * job.row_bytes;
        job.convert(job.rows[static_cast<size_t>(r)] + b0 * job.block,
                    to + static_cast<size_t>(b0) * job.block_bytes, (b1 - b0) * job.block);
    }
}

int64_t chunk_rows(int64_t n_out, int64_t n_experts, int n_threads) {
    // About 8 turns for each thread; 64 rows, like ggml, amortise the turn itself.
    return std::clamp<int64_t>(n_out * n_experts / (8 * n_threads), 8, 64);
}

void run_matmul(MatmulJob &job) {
    const int64_t per_expert = (job.n_out + job.chunk - 1) / job.chunk;
    const int64_t total = per_expert * static_cast<int64_t>(job.experts.size());
    for (;;) {
        const int64_t turn = job.next.fetch_add(1, std::memory_order_relaxed);
        if (turn >= total) return;
        const MatmulExpert &expert = job.experts[static_cast<size_t>(turn / per_expert)];
        if (job.arrived != nullptr && !job.arrived(job.context, expert.index)) continue;
        const int64_t row0 = turn % per_expert * job.chunk;
        const int64_t row1 = std::min(row0 + job.chunk, job.n_out);
        for (const MatmulPair &pair : std::span(job.pairs).subspan(expert.first, expert.count)) {
            for (int64_t row = row0; row < row1; ++row) {
                job.dot(static_cast<int>(job.n_in), pair.result + row, 0,
                        expert.weights + static_cast<size_t>(row) * job.row_stride, 0, pair.activation, 0, 1);
            }
        }
    }
}

} // namespace spice::compute

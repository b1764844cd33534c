#include "check.h"

#include "compute/surrogate.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

using namespace spice::compute;

namespace {

using Floats = std::vector<float>;
using Halves = std::vector<uint16_t>;
using Bytes = std::vector<int8_t>;

class Random {
  public:
    explicit Random(uint32_t seed) : engine_(seed) {}
    Floats floats(size_t n) {
        std::normal_distribution<float> normal;
        Floats out(n);
        for (float &v : out) v = normal(engine_);
        return out;
    }
    Halves halves(size_t n) {
        const Floats values = floats(n);
        Halves out(n);
        ggml_fp32_to_fp16_row(values.data(), out.data(), static_cast<int64_t>(n));
        return out;
    }
    Bytes bytes(size_t n) {
        Bytes out(n);
        for (int8_t &v : out) v = static_cast<int8_t>(between(-128, 127));
        return out;
    }
    int64_t between(int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(engine_);
    }

  private:
    std::mt19937 engine_;
};

double value(uint16_t half) {
    return ggml_fp16_to_fp32(half);
}

/// One layer's stand-ins, a batch, and where its results go.
struct Case {
    int64_t n_in, n_out, rank, n_gated;
    int32_t n_expert;
    SurrogateActivation activation;
    Bytes a, b, gate;
    Halves bias;
    Floats scale, gate_scale, offset;
    std::vector<Floats> h;
    std::vector<std::vector<int32_t>> experts; // of each row
    std::vector<std::vector<Floats>> y;

    Case(Random &random, int64_t n_in, int64_t n_out, int64_t rank, int64_t n_rows)
        : n_in(n_in), n_out(n_out), rank(rank), n_gated(random.between(0, rank)), n_expert(5),
          activation(static_cast<SurrogateActivation>(random.between(0, 2))) {
        const auto n = [](int64_t x, int64_t y) { return static_cast<size_t>(x * y); };
        a = random.bytes(n(n_expert * rank, n_in));
        b = random.bytes(n(n_expert * rank, n_out));
        gate = random.bytes(n(n_expert * n_gated, n_in));
        scale = random.floats(n(n_expert, rank));
        gate_scale = random.floats(n(n_expert, n_gated));
        for (float &v : scale) v *= 1e-4F;
        for (float &v : gate_scale) v *= 1e-2F;
        offset = random.floats(n(n_expert, rank));
        bias = random.halves(n(n_expert, n_out));
        for (int64_t r = 0; r < n_rows; ++r) {
            h.push_back(random.floats(static_cast<size_t>(n_in)));
            auto &chosen = experts.emplace_back();
            for (int32_t e = 0; e < n_expert; ++e) {
                if (random.between(0, 1) == 1) chosen.push_back(e);
            }
            y.emplace_back(chosen.size(), Floats(static_cast<size_t>(n_out), NAN));
        }
    }

    [[nodiscard]] SurrogateMatrices matrices() const {
        return {.n_in = n_in,
                .n_out = n_out,
                .rank = rank,
                .n_gated = n_gated,
                .activation = activation,
                .a = a.data(),
                .b = b.data(),
                .gate = gate.data(),
                .scale = scale.data(),
                .gate_scale = gate_scale.data(),
                .offset = offset.data(),
                .bias = bias.data()};
    }

    /// The format's definition in doubles.
    [[nodiscard]] double expected(size_t row, int32_t e, int64_t c, SurrogateKind kind) const {
        if (kind == SurrogateKind::drop) return 0.0;
        const auto dot = [&](const Bytes &rows, int64_t r) {
            double sum = 0.0;
            for (int64_t i = 0; i < n_in; ++i) {
                sum += static_cast<double>(rows[static_cast<size_t>(r * n_in + i)]) *
                       h[row][static_cast<size_t>(i)];
            }
            return sum;
        };
        const auto number = [](const Floats &values, int64_t i) {
            return static_cast<double>(values[static_cast<size_t>(i)]);
        };
        double sum = value(bias[static_cast<size_t>(e * n_out + c)]);
        if (kind == SurrogateKind::base) return sum;
        for (int64_t r = 0; r < rank; ++r) {
            double z = number(scale, e * rank + r) * dot(a, e * rank + r);
            if (r < n_gated) {
                const int64_t g = e * n_gated + r;
                z *= activated(number(gate_scale, g) * dot(gate, g));
            }
            sum += (z + number(offset, e * rank + r)) *
                   static_cast<double>(b[static_cast<size_t>((e * rank + r) * n_out + c)]);
        }
        return sum;
    }

    [[nodiscard]] double activated(double x) const {
        if (activation == SurrogateActivation::silu) return x / (1.0 + std::exp(-x));
        if (activation == SurrogateActivation::relu) return std::max(x, 0.0);
        return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
    }

    void run(const SurrogateKernels &kernels, SurrogateKind kind, int n_threads) {
        SurrogateJob job;
        job.matrices = matrices();
        job.kernels = &kernels;
        job.kind = kind;
        for (size_t r = 0; r < h.size(); ++r) {
            if (experts[r].empty()) continue;
            job.rows.push_back({h[r].data(), static_cast<uint32_t>(job.pairs.size()),
                                static_cast<uint32_t>(experts[r].size())});
            for (size_t i = 0; i < experts[r].size(); ++i) {
                std::ranges::fill(y[r][i], NAN);
                job.pairs.push_back({experts[r][i], y[r][i].data()});
            }
        }
        Floats z(job.z_floats(), NAN);
        job.z = z.data();
        for (const auto &step :
             {+[](SurrogateJob &j, int) { run_down(j); }, +[](SurrogateJob &j, int n) { run_up(j, n); }}) {
            std::vector<std::thread> threads;
            for (int t = 0; t < n_threads; ++t) threads.emplace_back([&] { step(job, n_threads); });
            for (std::thread &thread : threads) thread.join();
        }
    }

    /// Relative to the largest, as products of two inner products are large.
    [[nodiscard]] double worst(SurrogateKind kind) const {
        double worst = 0.0;
        double largest = 1.0;
        for (size_t r = 0; r < h.size(); ++r) {
            for (size_t i = 0; i < experts[r].size(); ++i) {
                for (int64_t c = 0; c < n_out; ++c) {
                    const double wanted = expected(r, experts[r][i], c, kind);
                    const double off =
                        std::abs(static_cast<double>(y[r][i][static_cast<size_t>(c)]) - wanted);
                    largest = std::max(largest, std::abs(wanted));
                    worst = std::isnan(off) ? 1e9 : std::max(worst, off);
                }
            }
        }
        return worst / largest;
    }
};

} // namespace

TEST(every_instruction_set_gives_what_a_plain_loop_gives) {
    Random random(1);
    for (int round = 0; round < 40; ++round) {
        // Widths around the vectors' and the blocks', ranks around the four rows that are read at a time.
        Case it(random, random.between(1, 300), random.between(1, 600), random.between(0, 19),
                random.between(1, 6));
        for (const SurrogateKernels &kernels : surrogate_kernels()) {
            for (const auto kind : {SurrogateKind::drop, SurrogateKind::base, SurrogateKind::full}) {
                it.run(kernels, kind, 1 + round % 3);
                const double worst = it.worst(kind);
                CHECK(worst < 2e-5);
            }
        }
    }
}

TEST(results_do_not_depend_on_the_number_of_threads) {
    Random random(2);
    Case it(random, 256, 2048, 32, 1);
    it.experts.front() = {0, 2, 4};
    it.y.front().assign(3, Floats(2048));
    for (const SurrogateKernels &kernels : surrogate_kernels()) {
        it.run(kernels, SurrogateKind::full, 1);
        const auto once = it.y;
        it.run(kernels, SurrogateKind::full, 4);
        CHECK(it.y == once);
    }
}

TEST(absent_parts_are_zero) {
    Random random(3);
    Case it(random, 33, 47, 0, 3);
    it.experts = {{1}, {}, {0, 3}};
    it.y = {{Floats(47)}, {}, {Floats(47), Floats(47)}};
    for (const SurrogateKernels &kernels : surrogate_kernels()) {
        SurrogateJob job;
        job.matrices = {.n_in = 33, .n_out = 47};
        job.kernels = &kernels;
        job.rows.push_back({it.h[0].data(), 0, 1});
        job.pairs.push_back({1, it.y[0][0].data()});
        std::ranges::fill(it.y[0][0], NAN);
        run_down(job);
        run_up(job, 2);
        CHECK(it.y[0][0] == Floats(47, 0.0F));
    }
}

TEST(the_last_variant_runs_anywhere) {
    CHECK(!surrogate_kernels().empty());
    CHECK_EQ(std::string_view(surrogate_kernels().back().name), "portable");
}

RUN_TESTS()

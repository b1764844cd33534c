#include "compute/dot_speed.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace spice::compute {

namespace {

constexpr int64_t width = 4096;     // a multiple of every block size
constexpr int64_t n_different = 16; // rows that are quantised; the rest repeats them

using Clock = std::chrono::steady_clock;

/// Quantised rows of a smooth function: what is in them does not change how long a product takes.
std::vector<std::byte> some_rows(ggml_type type) {
    std::vector<float> values(static_cast<size_t>(width * n_different));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 37) % 101) / 50.0F - 1.0F;
    const std::vector<float> importance(static_cast<size_t>(width), 1.0F);
    std::vector<std::byte> rows(ggml_row_size(type, width) * static_cast<size_t>(n_different));
    ggml_quantize_chunk(type, values.data(), rows.data(), 0, n_different, width, importance.data());
    return rows;
}

struct Worker {
    std::vector<std::byte> weights;
    std::vector<std::byte> activation;
    double speed = 0.0; ///< bytes per second
};

/// Joins what was started, whatever happens next.
struct Threads {
    std::vector<std::thread> threads;
    Threads() = default;
    Threads(const Threads &) = delete;
    Threads &operator=(const Threads &) = delete;
    ~Threads() {
        for (std::thread &thread : threads) thread.join();
    }
};

} // namespace

Result<double> dot_speed(ggml_type type, int32_t n_threads, double seconds, uint64_t bytes,
                         double pause) try {
    const bool known = type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size(type) > 0;
    const ggml_type_traits_cpu *traits = known ? ggml_get_type_traits_cpu(type) : nullptr;
    if (traits == nullptr || traits->vec_dot == nullptr ||
        (!ggml_is_quantized(type) && type != GGML_TYPE_F16 && type != GGML_TYPE_BF16 &&
         type != GGML_TYPE_F32)) {
        return Status(Code::unsupported, "there is no dot product of weights of that type");
    }
    const std::vector<std::byte> rows = some_rows(type);
    const size_t row_bytes = rows.size() / static_cast<size_t>(n_different);
    const ggml_type packed = traits->vec_dot_type;
    std::vector<float> ones(static_cast<size_t>(width), 0.5F);
    std::vector<std::byte> activation(ggml_row_size(packed, width));
    if (packed == GGML_TYPE_F32) {
        std::memcpy(activation.data(), ones.data(), activation.size());
    } else {
        ggml_get_type_traits_cpu(packed)->from_float(ones.data(), activation.data(), width);
    }

    const auto count = static_cast<size_t>(std::max(n_threads, 1));
    const size_t n_rows = std::max<size_t>(bytes / count / row_bytes, static_cast<size_t>(n_different));
    std::vector<Worker> workers(count);
    for (Worker &worker : workers) {
        worker.activation = activation;
        worker.weights.reserve(n_rows * row_bytes);
        while (worker.weights.size() < n_rows * row_bytes) {
            const size_t n = std::min(rows.size(), n_rows * row_bytes - worker.weights.size());
            worker.weights.insert(worker.weights.end(), rows.begin(),
                                  rows.begin() + static_cast<ptrdiff_t>(n));
        }
    }
    const auto work = [&](Worker &mine) {
        const auto start = Clock::now();
        const auto end = start + std::chrono::duration<double>(seconds);
        const auto piece = std::chrono::duration<double>(pause > 0.0 ? 0.002 : seconds);
        std::chrono::duration<double> slept{0.0};
        auto awake = start;
        uint64_t done = 0;
        float sum = 0.0F;
        size_t row = 0;
        for (auto now = start; now < end; now = Clock::now()) {
            if (now - awake >= piece) {
                std::this_thread::sleep_for(std::chrono::duration<double>(pause));
                awake = Clock::now();
                slept += awake - now;
            }
            for (int i = 0; i < 64; ++i, row = row + 1 == n_rows ? 0 : row + 1) {
                float one = 0.0F;
                traits->vec_dot(width, &one, 0, mine.weights.data() + row * row_bytes, 0,
                                mine.activation.data(), 0, 1);
                sum += one;
            }
            done += 64 * row_bytes;
        }
        const std::chrono::duration<double> worked = Clock::now() - start - slept;
        mine.speed = static_cast<double>(done) / worked.count();
        mine.activation[0] = static_cast<std::byte>(sum > 0.0F); // the products are used
    };
    {
        Threads others;
        for (size_t i = 1; i < count; ++i) others.threads.emplace_back(work, std::ref(workers[i]));
        work(workers[0]);
    }
    double speed = 0.0;
    for (const Worker &worker : workers) speed += worker.speed;
    return speed;
} catch (const std::bad_alloc &) {
    return Status(Code::out_of_memory, "no memory to time dot products");
} catch (const std::system_error &error) {
    return Status(Code::out_of_memory, std::string("cannot start a thread: ") + error.what());
}

} // namespace spice::compute

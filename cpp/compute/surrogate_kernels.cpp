// The inner loops of surrogate.h for each instruction set. Each variant is compiled always, for the machine
// that builds need not be the one that runs. Every loop reads four rows at a time: four streams keep the
// memory busy, and what they share (h, y) is loaded once for the four.
#include "compute/surrogate.h"

#include "ggml-cpu.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // GCC bug 105593: false alarms in its own header
#endif
#include <immintrin.h>
#endif

namespace spice::compute {

namespace {

constexpr int64_t k_rows = 4;

/// Every 64 columns: the lines of the next four rows, which are too short for the CPU to see a stream in
/// time.
inline void fetch_next(const int8_t *rows, int64_t stride, int64_t column) {
    if (column % 64 != 0) return;
    for (int64_t r = k_rows; r < 2 * k_rows; ++r) __builtin_prefetch(rows + r * stride + column);
}

// Any CPU: loops that compilers can vectorise.

void dot_any(const int8_t *rows, int64_t n_rows, int64_t n, const float *h, float *z) {
    for (int64_t r = 0; r < n_rows; ++r) {
        const int8_t *row = rows + r * n;
        float lanes[8] = {};
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) {
            for (int64_t k = 0; k < 8; ++k) lanes[k] += static_cast<float>(row[i + k]) * h[i + k];
        }
        for (; i < n; ++i) lanes[0] += static_cast<float>(row[i]) * h[i];
        float sum = 0.0F;
        for (const float lane : lanes) sum += lane;
        z[r] = sum;
    }
}

void add_any(const int8_t *rows, int64_t n_rows, int64_t stride, int64_t n, const float *z, float *y) {
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t i = 0; i < n; ++i) y[i] += z[r] * static_cast<float>(rows[r * stride + i]);
    }
}

#if defined(__x86_64__)

// What is left over at the end of a row: less than a vector.

float dot_rest(const int8_t *row, int64_t from, int64_t n, const float *h) {
    float sum = 0.0F;
    for (int64_t i = from; i < n; ++i) sum += static_cast<float>(row[i]) * h[i];
    return sum;
}

#define SPICE_AVX2 __attribute__((target("avx2,fma")))

SPICE_AVX2 inline __m256 load8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}

SPICE_AVX2 inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

SPICE_AVX2 void dot_avx2(const int8_t *rows, int64_t n_rows, int64_t n, const float *h, float *z) {
    const int64_t whole = n / 8 * 8;
    int64_t r = 0;
    for (; r + k_rows <= n_rows; r += k_rows) {
        const int8_t *p = rows + r * n;
        __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
        for (int64_t i = 0; i < whole; i += 8) {
            fetch_next(p, n, i);
            const __m256 x = _mm256_loadu_ps(h + i);
            s0 = _mm256_fmadd_ps(load8(p + i), x, s0);
            s1 = _mm256_fmadd_ps(load8(p + n + i), x, s1);
            s2 = _mm256_fmadd_ps(load8(p + 2 * n + i), x, s2);
            s3 = _mm256_fmadd_ps(load8(p + 3 * n + i), x, s3);
        }
        z[r] = sum8(s0) + dot_rest(p, whole, n, h);
        z[r + 1] = sum8(s1) + dot_rest(p + n, whole, n, h);
        z[r + 2] = sum8(s2) + dot_rest(p + 2 * n, whole, n, h);
        z[r + 3] = sum8(s3) + dot_rest(p + 3 * n, whole, n, h);
    }
    for (; r < n_rows; ++r) {
        const int8_t *p = rows + r * n;
        __m256 s = _mm256_setzero_ps();
        for (int64_t i = 0; i < whole; i += 8) s = _mm256_fmadd_ps(load8(p + i), _mm256_loadu_ps(h + i), s);
        z[r] = sum8(s) + dot_rest(p, whole, n, h);
    }
}

SPICE_AVX2 void add_avx2(const int8_t *rows, int64_t n_rows, int64_t stride, int64_t n, const float *z,
                         float *y) {
    const int64_t whole = n / 8 * 8;
    int64_t r = 0;
    for (; r + k_rows <= n_rows; r += k_rows) {
        const int8_t *p = rows + r * stride;
        const __m256 z0 = _mm256_set1_ps(z[r]), z1 = _mm256_set1_ps(z[r + 1]);
        const __m256 z2 = _mm256_set1_ps(z[r + 2]), z3 = _mm256_set1_ps(z[r + 3]);
        for (int64_t i = 0; i < whole; i += 8) {
            fetch_next(p, stride, i);
            __m256 sum = _mm256_fmadd_ps(load8(p + i), z0, _mm256_loadu_ps(y + i));
            __m256 other = _mm256_mul_ps(load8(p + stride + i), z1);
            sum = _mm256_fmadd_ps(load8(p + 2 * stride + i), z2, sum);
            other = _mm256_fmadd_ps(load8(p + 3 * stride + i), z3, other);
            _mm256_storeu_ps(y + i, _mm256_add_ps(sum, other));
        }
    }
    for (; r < n_rows; ++r) {
        const int8_t *p = rows + r * stride;
        const __m256 z0 = _mm256_set1_ps(z[r]);
        for (int64_t i = 0; i < whole; i += 8) {
            _mm256_storeu_ps(y + i, _mm256_fmadd_ps(load8(p + i), z0, _mm256_loadu_ps(y + i)));
        }
    }
    if (whole < n) add_any(rows + whole, n_rows, stride, n - whole, z, y + whole);
}

#define SPICE_AVX512 __attribute__((target("avx512f,avx512vl,avx2,fma")))

SPICE_AVX512 inline __m512 load16(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

SPICE_AVX512 inline float sum16(__m512 v) {
    const __m256 low = _mm512_castps512_ps256(v);
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    return sum8(_mm256_add_ps(low, high));
}

SPICE_AVX512 void dot_avx512(const int8_t *rows, int64_t n_rows, int64_t n, const float *h, float *z) {
    const int64_t whole = n / 16 * 16;
    int64_t r = 0;
    for (; r + k_rows <= n_rows; r += k_rows) {
        const int8_t *p = rows + r * n;
        __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
        for (int64_t i = 0; i < whole; i += 16) {
            fetch_next(p, n, i);
            const __m512 x = _mm512_loadu_ps(h + i);
            s0 = _mm512_fmadd_ps(load16(p + i), x, s0);
            s1 = _mm512_fmadd_ps(load16(p + n + i), x, s1);
            s2 = _mm512_fmadd_ps(load16(p + 2 * n + i), x, s2);
            s3 = _mm512_fmadd_ps(load16(p + 3 * n + i), x, s3);
        }
        z[r] = sum16(s0) + dot_rest(p, whole, n, h);
        z[r + 1] = sum16(s1) + dot_rest(p + n, whole, n, h);
        z[r + 2] = sum16(s2) + dot_rest(p + 2 * n, whole, n, h);
        z[r + 3] = sum16(s3) + dot_rest(p + 3 * n, whole, n, h);
    }
    if (r < n_rows) dot_avx2(rows + r * n, n_rows - r, n, h, z + r);
}

SPICE_AVX512 void add_avx512(const int8_t *rows, int64_t n_rows, int64_t stride, int64_t n, const float *z,
                             float *y) {
    const int64_t whole = n / 16 * 16;
    int64_t r = 0;
    for (; r + k_rows <= n_rows; r += k_rows) {
        const int8_t *p = rows + r * stride;
        const __m512 z0 = _mm512_set1_ps(z[r]), z1 = _mm512_set1_ps(z[r + 1]);
        const __m512 z2 = _mm512_set1_ps(z[r + 2]), z3 = _mm512_set1_ps(z[r + 3]);
        for (int64_t i = 0; i < whole; i += 16) {
            fetch_next(p, stride, i);
            __m512 sum = _mm512_fmadd_ps(load16(p + i), z0, _mm512_loadu_ps(y + i));
            __m512 other = _mm512_mul_ps(load16(p + stride + i), z1);
            sum = _mm512_fmadd_ps(load16(p + 2 * stride + i), z2, sum);
            other = _mm512_fmadd_ps(load16(p + 3 * stride + i), z3, other);
            _mm512_storeu_ps(y + i, _mm512_add_ps(sum, other));
        }
    }
    if (r < n_rows) add_avx2(rows + r * stride, n_rows - r, stride, whole, z + r, y);
    if (whole < n) add_any(rows + whole, n_rows, stride, n - whole, z, y + whole);
}

#undef SPICE_AVX2
#undef SPICE_AVX512

#endif

} // namespace

std::span<const SurrogateKernels> surrogate_kernels() {
    static const std::vector<SurrogateKernels> found = [] {
        ggml_cpu_init(); // its tables, which the conversion of biases needs, where nobody has made them yet
        std::vector<SurrogateKernels> list;
#if defined(__x86_64__)
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
            list.push_back({dot_avx512, add_avx512, "AVX-512"});
        }
        if (avx2) list.push_back({dot_avx2, add_avx2, "AVX2"});
#endif
        list.push_back({dot_any, add_any, "portable"});
        return list;
    }();
    return found;
}

} // namespace spice::compute

// fuzz_gguf [iterations=20000] [seconds=0 (no limit)] [seed=1] [keep-folder]
// Damages good files and reads them: never a crash, never memory out of proportion. Deterministic for a seed.
// Mutants of the one-file model that check_model lets pass are written to the keep-folder, to be tried with
// llama.cpp itself.
#include "gguf_builder.h"

#include "store/expert_index.h"
#include "store/gguf_model.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <malloc.h>
#include <new>
#include <random>

namespace {

size_t g_live = 0;
size_t g_peak = 0;

void *counted(size_t size) {
    void *memory = std::malloc(size == 0 ? 1 : size);
    if (memory == nullptr) throw std::bad_alloc();
    g_live += malloc_usable_size(memory);
    if (g_live > g_peak) g_peak = g_live;
    return memory;
}

void uncounted(void *memory) {
    if (memory == nullptr) return;
    g_live -= malloc_usable_size(memory);
    std::free(memory);
}

} // namespace

void *operator new(size_t size) {
    return counted(size);
}
void *operator new[](size_t size) {
    return counted(size);
}
void operator delete(void *memory) noexcept {
    uncounted(memory);
}
void operator delete[](void *memory) noexcept {
    uncounted(memory);
}
void operator delete(void *memory, size_t) noexcept {
    uncounted(memory);
}
void operator delete[](void *memory, size_t) noexcept {
    uncounted(memory);
}

namespace {

using Random = std::mt19937_64;

constexpr uint64_t k_extremes[] = {0,          1,          2,          0x7f,       0xff,       0x7fff,
                                   0xffff,     0x10000,    0x7fffffff, 0x80000000, 0xffffffff, 0x100000000,
                                   1ull << 40, 1ull << 61, 1ull << 62, INT64_MAX,  1ull << 63, UINT64_MAX};

/// One damage in the first `header` bytes: where the counts, sizes and offsets are.
void damage(std::string &bytes, size_t header, Random &random) {
    const size_t at = random() % std::min(header, bytes.size());
    switch (random() % 8) {
    case 0:
    case 1:
    case 2:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
        break;
    case 3:
        bytes[at] = static_cast<char>(random());
        break;
    case 4:
        bytes.resize(1 + random() % bytes.size());
        break;
    case 5:
        bytes.erase(at, 1 + random() % 8);
        break;
    case 6:
        bytes.insert(at, 1 + random() % 8, static_cast<char>(random()));
        break;
    default: {
        const uint64_t extreme =
            k_extremes[random() % std::size(k_extremes)] + (random() % 4 == 0 ? random() % 9 : 0);
        std::memcpy(bytes.data() + at, &extreme,
                    std::min<size_t>(random() % 2 == 0 ? 8 : 4, bytes.size() - at));
        break;
    }
    }
    if (bytes.empty()) bytes.push_back('G');
}

struct Seed {
    std::vector<std::string> names;
    std::vector<std::string> files;
    std::vector<size_t> headers;
    void add(const std::string &name, const test::GgufBuilder &builder) {
        names.push_back(name);
        files.push_back(builder.bytes());
        headers.push_back(builder.header().size());
    }
};

std::vector<Seed> seeds() {
    std::vector<Seed> all(4);
    test::GgufBuilder model = test::good_model();
    all[0].add("model.gguf", model);
    const auto [first, second] = test::split_model(model, 11); // inside layer 0
    all[1].add("model-00001-of-00002.gguf", first);
    all[1].add("model-00002-of-00002.gguf", second);
    test::GgufBuilder small; // a header of little else than counts
    small.version = 2;
    small.text("general.architecture", "llama");
    small.u32("general.alignment", 64);
    small.alignment = 64;
    small.array<uint32_t>("llama.attention.head_count", GGUF_TYPE_UINT32, {2, 2});
    small.tensor("blk.0.ffn_up_exps.weight", {32, 2, 3}, GGML_TYPE_Q4_0);
    small.tensor("blk.0.ffn_down_exps.weight", {32, 2, 3}, GGML_TYPE_Q4_0);
    all[2].add("small.gguf", small);
    test::GgufBuilder grove = model;
    grove.text("general.architecture", "grovemoe");
    for (test::Pair &pair : grove.pairs) {
        if (pair.key.starts_with("llama.")) pair.key = "grovemoe." + pair.key.substr(6);
    }
    grove.u32("grovemoe.experts_per_group", 2);
    grove.tensor("blk.0.ffn_gate_up_chexps.weight", {32, 64, 2});
    grove.tensor("blk.0.ffn_down_chexps.weight", {32, 32, 2});
    grove.tensor("blk.0.ffn_down_chexps.bias", {32, 2});
    grove.tensor("blk.0.ffn_down_chexps.scale", {2});
    all[3].add("grove.gguf", grove);
    return all;
}

int64_t number(int argc, char **argv, int at, int64_t otherwise) {
    return argc > at ? std::strtoll(argv[at], nullptr, 10) : otherwise;
}

} // namespace

int main(int argc, char **argv) {
    const int64_t iterations = number(argc, argv, 1, 20000);
    const int64_t seconds = number(argc, argv, 2, 0);
    Random random(static_cast<uint64_t>(number(argc, argv, 3, 1)));
    const std::string keep = argc > 4 ? argv[4] : "";
    const test::TempDir dir;
    const std::vector<Seed> all = seeds();
    const auto start = std::chrono::steady_clock::now();
    int64_t opened = 0;
    int64_t passed = 0;
    int64_t done = 0;
    for (; done < iterations; ++done) {
        if (seconds > 0 && std::chrono::steady_clock::now() - start > std::chrono::seconds(seconds)) break;
        const size_t which = keep.empty() ? random() % all.size() : 0;
        const Seed &seed = all[which];
        const size_t victim = random() % seed.files.size();
        std::filesystem::path first;
        std::string damaged;
        size_t total = 0;
        for (size_t i = 0; i < seed.files.size(); ++i) {
            std::string bytes = seed.files[i];
            if (i == victim && done >= static_cast<int64_t>(all.size())) { // the first ones undamaged
                for (uint64_t n = 1 + (random() % 4 == 0 ? random() % 4 : 0); n > 0; --n) {
                    damage(bytes, seed.headers[i], random);
                }
                damaged = bytes;
            }
            total += bytes.size();
            const auto file = dir.write(seed.names[i], bytes);
            if (i == 0) first = file;
        }
        g_peak = g_live;
        const size_t before = g_live;
        {
            const auto model = spice::GgufModel::open(first);
            if (model.ok()) {
                ++opened;
                const auto index = spice::ExpertIndex::build(model.value());
                const spice::Status status =
                    spice::check_model(model.value(), static_cast<int64_t>(random() % 3));
                if (status.ok() && index.ok()) {
                    ++passed;
                    if (!keep.empty() && !damaged.empty() && spice::check_model(model.value()).ok()) {
                        std::ofstream(keep + "/" + std::to_string(done) + ".gguf", std::ios::binary)
                            << damaged;
                    }
                }
            } else if (model.status().code() == spice::Code::internal || model.status().message().empty()) {
                std::fprintf(stderr, "iteration %lld: an error without a reason: %s\n",
                             static_cast<long long>(done), model.status().message().c_str());
                return 1;
            }
        }
        if (g_peak - before > total * 16 + (size_t{8} << 20)) {
            std::fprintf(stderr, "iteration %lld: %zu bytes of memory for files of %zu\n",
                         static_cast<long long>(done), g_peak - before, total);
            return 1;
        }
    }
    std::printf("%lld files: %lld opened, %lld passed the check\n", static_cast<long long>(done),
                static_cast<long long>(opened), static_cast<long long>(passed));
    return opened > 0 && passed > 0 && passed < done ? 0 : 1;
}

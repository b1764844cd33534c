// The replay of routing, and Belady's optimum: small cases by hand. The comparison with exhaustive search is
// in tests/policy.
#include "check.h"
#include "sim/replay.h"

#include <vector>

using namespace spice;
using namespace spice::sim;

namespace {

struct Trace {
    std::vector<int32_t> ids;
    std::vector<int32_t> lens;
    int32_t layers = 1;
    int32_t top_k = 1;
    int32_t experts = 4;
    [[nodiscard]] Routing routing() const {
        const int32_t tokens = static_cast<int32_t>(ids.size()) / layers / top_k;
        return {ids, {}, lens, layers, tokens, top_k, experts};
    }
};

struct Sum {
    uint64_t hits = 0;
    uint64_t misses = 0;
    friend bool operator==(const Sum &, const Sum &) = default;
    friend std::ostream &operator<<(std::ostream &out, const Sum &s) {
        return out << s.hits << "+" << s.misses;
    }
};

Sum sum(Result<ReplayResult> result) {
    Sum all;
    CHECK(result.ok());
    if (!result.ok()) return all;
    for (const LayerHits &layer : result.value().layers) {
        all.hits += layer.hits + layer.prefill_hits;
        all.misses += layer.misses + layer.prefill_misses;
    }
    return all;
}

} // namespace

TEST(a_scan) {
    const Trace scan{{0, 1, 2, 0, 1, 2, 0, 1, 2}, {9}};
    CHECK_EQ(sum(replay(scan.routing(), {.n_slots = 2}, "lru")), (Sum{0, 9}));
    CHECK_EQ(sum(replay(scan.routing(), {.n_slots = 3}, "lru")), (Sum{6, 3}));
    CHECK_EQ(sum(belady(scan.routing(), {.n_slots = 2}, false)), (Sum{3, 6}));
    CHECK_EQ(sum(belady(scan.routing(), {.n_slots = 1}, false)), (Sum{0, 9}));
}

TEST(sequences_keep_or_clear_the_pool) {
    const Trace twice{{0, 1, 0, 1}, {2, 2}};
    CHECK_EQ(sum(replay(twice.routing(), {.n_slots = 2}, "lru")), (Sum{0, 4}));
    CHECK_EQ(sum(replay(twice.routing(), {.n_slots = 2, .keep = true}, "lru")), (Sum{2, 2}));
    CHECK_EQ(sum(belady(twice.routing(), {.n_slots = 2}, false)), (Sum{0, 4}));
    CHECK_EQ(sum(belady(twice.routing(), {.n_slots = 2, .keep = true}, false)), (Sum{2, 2}));
}

TEST(a_batch_asks_for_each_expert_once) {
    const Trace trace{{0, 0, 1, 1, 0, 2}, {6}};
    CHECK_EQ(sum(replay(trace.routing(), {.n_slots = 4, .batch = 2}, "lru")), (Sum{1, 3}));
    CHECK_EQ(sum(replay(trace.routing(), {.n_slots = 4, .prefill = -1}, "lru")), (Sum{0, 3}));
    const auto split = replay(trace.routing(), {.n_slots = 4, .prefill = 4}, "lru");
    CHECK(split.ok() && split.status().ok());
    auto counts = replay(trace.routing(), {.n_slots = 4, .prefill = 4}, "lru").take();
    CHECK_EQ(counts.layers[0].prefill_misses, 2U);
    CHECK_EQ(counts.layers[0].hits, 1U);
    CHECK_EQ(counts.layers[0].misses, 1U);
    CHECK_EQ(counts.n_calls, 3U);
}

TEST(waves) {
    // Two tokens in one call: 0 1 2 3, wider than the pool; then 2 and 3.
    const Trace trace{{0, 1, 2, 3, 2, 3}, {3}, 1, 2, 4};
    const ReplayOptions options{.n_slots = 2, .prefill = 2, .wave = 1};
    CHECK_EQ(sum(replay(trace.routing(), options, "lru")), (Sum{2, 4}));
    CHECK_EQ(sum(belady(trace.routing(), options, false)), (Sum{2, 4}));
}

TEST(belady_per_layer_splits_the_pool) {
    // Layer 0 always uses expert 0, layer 1 walks through four: one pool can give layer 1 three slots.
    const Trace trace{{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 1, 2, 3}, {8}, 2};
    CHECK_EQ(sum(belady(trace.routing(), {.n_slots = 5}, false)), (Sum{11, 5}));
    auto split = belady(trace.routing(), {.n_slots = 4}, true).take();
    CHECK_EQ(split.layers[0].hits, 7U);
    CHECK_EQ(split.layers[1].hits, 2U);
    CHECK_EQ(sum(belady(trace.routing(), {.n_slots = 1}, true)), (Sum{7, 9})); // layer 1 has no slot
}

TEST(wrong_arguments_have_messages) {
    const Trace good{{0, 1}, {2}};
    for (const ReplayOptions &options :
         {ReplayOptions{}, ReplayOptions{.n_slots = 1, .batch = 0},
          ReplayOptions{.n_slots = 1, .prefill = -2}, ReplayOptions{.n_slots = 1, .wave = -1}}) {
        CHECK(!replay(good.routing(), options, "lru").ok());
        CHECK(!belady(good.routing(), options, false).status().message().empty());
    }
    CHECK(!replay(Trace{{0, 4}, {2}}.routing(), {.n_slots = 1}, "lru").ok());
    CHECK(!replay(Trace{{0, -1}, {2}}.routing(), {.n_slots = 1}, "lru").ok());
    CHECK(!replay(Trace{{0, 1}, {3}}.routing(), {.n_slots = 1}, "lru").ok());
    CHECK(!replay(good.routing(), {.n_slots = 1}, "nothing").ok());
    CHECK(!replay(Routing{}, {.n_slots = 1}, "lru").ok());
}

RUN_TESTS()

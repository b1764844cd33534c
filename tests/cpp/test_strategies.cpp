// The strategies of the papers on cases worked by hand.
#include "check.h"
#include "policy/moe_spac.h"
#include "policy/moe_speq.h"
#include "policy/strategy.h"
#include "policy/strategy_adapmoe.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

using namespace spice::policy;

namespace {

/// Says what it is told: chances by horizon.
class Told final : public Predictor {
  public:
    std::map<int32_t, std::vector<float>> by_horizon;

    [[nodiscard]] std::string_view name() const override { return "told"; }
    [[nodiscard]] ScoreSource scores() const override { return ScoreSource::none; }
    [[nodiscard]] int32_t max_horizon() const override { return 6; }
    void begin_call(int32_t, std::span<const int32_t>, int32_t) override {}
    bool predict(int32_t, int32_t horizon, std::span<const float>, std::span<float> out) override {
        const auto it = by_horizon.find(horizon);
        if (it == by_horizon.end()) return false;
        std::copy(it->second.begin(), it->second.end(), out.begin());
        return true;
    }
};

struct Play {
    std::unique_ptr<Strategy> strategy;
    std::vector<SlabId> pool;
    Told told;
    double transfer = 1.0;
    double layer = 10.0;
    double draft_left = 0.0;
    double link_queued = 0.0;

    Play(std::string_view name, const PoolShape &shape) : strategy(make_strategy(name, shape)) {}

    [[nodiscard]] bool has(SlabId id) const { return std::find(pool.begin(), pool.end(), id) != pool.end(); }

    /// A call of one token, whose misses are loaded; returns the evicted ones.
    std::vector<SlabId> call(int32_t group, const std::vector<int32_t> &experts,
                             std::vector<float> weights = {}) {
        const std::vector<int32_t> rows(experts.size(), 1);
        if (weights.empty()) weights.assign(experts.size(), 1.0F);
        strategy->begin_call({group, experts, rows, weights, 1});
        std::vector<SlabId> out;
        for (const int32_t e : experts) {
            const SlabId id{group, e};
            if (has(id)) continue;
            if (strategy->full(id)) {
                const auto victim = strategy->victim(id, true, [&](SlabId slab) {
                    return has(slab) && (slab.group != group || std::find(experts.begin(), experts.end(),
                                                                          slab.expert) == experts.end());
                });
                CHECK(victim.has_value());
                strategy->on_evict(*victim);
                std::erase(pool, *victim);
                out.push_back(*victim);
            }
            strategy->on_load(id);
            pool.push_back(id);
        }
        return out;
    }

    std::vector<SlabId> plan(int32_t group) {
        std::vector<SlabId> wanted;
        const auto present = [this](SlabId id) { return has(id); };
        strategy->plan({.group = group,
                        .transfer = transfer,
                        .layer = layer,
                        .link_queued = link_queued,
                        .link_bandwidth = 1.0 / transfer,
                        .slab_bytes = 1.0,
                        .draft_left = draft_left,
                        .present = present,
                        .predictor = &told},
                       wanted);
        return wanted;
    }
};

using Slabs = std::vector<SlabId>;

} // namespace

TEST(names_and_shapes) {
    CHECK_EQ(strategy_names()[0], "spice");
    CHECK_EQ(strategy_names().size(), 17U);
    for (const std::string_view name : strategy_names()) {
        const auto strategy = make_strategy(name, {2, 4, 4, 2});
        CHECK(strategy != nullptr);
        if (strategy != nullptr) CHECK_EQ(strategy->name(), name);
    }
    CHECK(make_strategy("best", {2, 4, 4, 2}) == nullptr);
    CHECK(make_strategy("spice", {0, 4, 4, 2}) == nullptr);
    CHECK(make_strategy("adapmoe", {4, 4, 3, 2}) == nullptr); // less than a slot per layer
    CHECK(make_strategy("lru", {4, 4, 3, 2}) != nullptr);
}

TEST(split_pools_evict_in_their_own_layer) {
    Play play("mixtral-offloading", {2, 4, 5, 1}); // 3 and 2 slots
    for (const int32_t e : {0, 1, 2}) CHECK(play.call(0, {e}).empty());
    CHECK(play.call(0, {3}) == (Slabs{{0, 0}})); // though layer 1 has free slots
    for (const int32_t e : {0, 1}) CHECK(play.call(1, {e}).empty());
    CHECK(play.call(1, {0}).empty());
    CHECK(play.call(1, {2}) == (Slabs{{1, 1}})); // LRU
}

TEST(mixtral_offloading_loads_two_ahead) {
    Play play("mixtral-offloading", {3, 4, 12, 3});
    play.told.by_horizon = {{1, {0.1F, 0.9F, 0.8F, 0.7F}}};
    CHECK(play.plan(0) == (Slabs{{1, 1}, {1, 2}}));
    play.call(1, {1});
    CHECK(play.plan(0) == (Slabs{{1, 2}})); // of the two likeliest, the missing ones
}

TEST(adapmoe_loads_the_first_missing_of_two) {
    Play play("adapmoe", {3, 4, 12, 2});
    play.told.by_horizon = {{1, {0.1F, 0.9F, 0.8F, 0.7F}}};
    CHECK(play.plan(0) == (Slabs{{1, 1}}));
    play.call(1, {1});
    CHECK(play.plan(0) == (Slabs{{1, 2}}));
    play.call(1, {2});
    CHECK(play.plan(0).empty());
    CHECK(play.plan(2).empty()); // the last layer has no next gate
}

TEST(adapmoe_slots) {
    // n 4, k 2, 2 slots: P(no miss) = 2/4 * 1/3; the mean number of misses is 1.
    CHECK(std::abs(adapmoe_loads(4, 2, 2, 0.5) - (1.0 - 0.5 * 5.0 / 6.0)) < 1e-12);
    CHECK(std::abs(adapmoe_loads(4, 2, 4, 0.5)) < 1e-12);
    CHECK(std::abs(adapmoe_loads(4, 2, 0, 0.5) - 1.5) < 1e-12);
    // Against every way to share 9 slots over three layers.
    const std::vector<double> accuracy{0.2, 0.6, 0.9};
    const auto cost = [&](const std::vector<int32_t> &q) {
        double sum = 0.0;
        for (size_t l = 0; l < 3; ++l) sum += adapmoe_loads(6, 2, q[l], accuracy[l]);
        return sum;
    };
    double least = 1e9;
    for (int32_t a = 1; a <= 6; ++a) {
        for (int32_t b = 1; b <= 6; ++b) {
            const int32_t c = 9 - a - b;
            if (c >= 1 && c <= 6) least = std::min(least, cost({a, b, c}));
        }
    }
    const auto quotas = adapmoe_quotas({3, 6, 9, 2}, accuracy);
    CHECK_EQ(quotas[0] + quotas[1] + quotas[2], 9);
    CHECK(cost(quotas) < least + 1e-9);
    CHECK(quotas[0] >= quotas[2]); // worse predictions, more slots
    const auto all = adapmoe_quotas({2, 4, 100, 2}, {0.5, 0.5});
    CHECK(all == (std::vector<int32_t>{4, 4}));
}

TEST(hybrimoe_scores) {
    Play play("hybrimoe", {2, 4, 4, 2});                          // two slots per layer
    play.call(0, {0, 1}, {3.0F, 1.0F});                           // S = .375, .125
    CHECK(play.call(0, {2, 0}, {1.0F, 1.0F}) == (Slabs{{0, 1}})); // S(1) = .0625 against S(0) = .4375
    // S: 0 .4375, 1 .0625, 2 .25: the two best of layer 0 from layer 1 on; both are there.
    CHECK(play.plan(1).empty());
    CHECK(play.call(0, {3, 2}, {1.0F, 9.0F}) == (Slabs{{0, 0}})); // 0 is the only one to go
    CHECK(play.plan(1) == (Slabs{{0, 0}}));                       // 2: .575, 0: .21875, 3: .05
}

TEST(promoe_looks_three_layers_ahead) {
    Play play("promoe", {4, 3, 12, 1});
    play.told.by_horizon = {{1, {0.9F, 0, 0}}, {2, {0, 0.9F, 0}}, {3, {0, 0, 0.9F}}, {4, {1, 1, 1}}};
    CHECK(play.plan(2) == (Slabs{{3, 0}, {0, 1}, {1, 2}})); // the last two in the next pass
}

TEST(specprefetch_takes_what_arrives_in_time) {
    Play play("specprefetch", {3, 12, 36, 2});
    play.told.by_horizon = {{1, {}}};
    for (int32_t e = 0; e < 12; ++e) play.told.by_horizon[1].push_back(1.0F - 0.05F * static_cast<float>(e));
    CHECK_EQ(play.plan(0).size(), 8U); // ten would arrive; more than eight hurt
    play.layer = 3.5;
    play.link_queued = 1.0;
    CHECK(play.plan(0) == (Slabs{{1, 0}, {1, 1}})); // floor(2.5 / 1)
    play.call(1, {0});
    CHECK(play.plan(0) == (Slabs{{1, 1}, {1, 2}}));
    play.link_queued = 9.0;
    CHECK(play.plan(0).empty());
}

TEST(static_pools_keep_their_profile) {
    Play play("static", {2, 3, 3, 1});
    std::vector<SlabId> start;
    const std::vector<int64_t> uses{5, 1, 9, 9, 0, 2};
    play.strategy->start_with(uses, start);
    CHECK(start == (Slabs{{0, 2}, {1, 0}, {0, 0}}));
    for (const SlabId id : start) {
        play.strategy->on_load(id);
        play.pool.push_back(id);
    }
    CHECK(play.call(1, {1}) == (Slabs{{0, 0}})); // the last one's slot is the one for passing through
    CHECK(play.call(1, {2}) == (Slabs{{1, 1}}));
}

TEST(moe_infinity) {
    Play play("moe-infinity", {2, 4, 3, 1});
    const auto text = [&](int32_t first, int32_t second) {
        play.strategy->begin_sequence();
        for (int i = 0; i < 3; ++i) {
            play.call(0, {first});
            play.call(1, {second});
        }
    };
    text(0, 0); // two kinds of text: 0 is followed by 0, 1 by 3
    text(1, 3);
    play.strategy->begin_sequence();
    play.call(0, {1});
    CHECK(play.plan(0).empty()); // nothing of this text was seen when the pass began
    play.call(1, {3});
    play.call(0, {1});
    play.pool.erase(std::remove(play.pool.begin(), play.pool.end(), SlabId{1, 3}), play.pool.end());
    play.strategy->on_evict({1, 3});
    CHECK(play.plan(0) == (Slabs{{1, 3}})); // the second text is the nearest
    // Eviction: (1, 0) has not been used in this text, (0, 1) has.
    Play other("moe-infinity", {1, 4, 2, 1});
    other.strategy->begin_sequence();
    other.call(0, {0});
    other.call(0, {1});
    other.call(0, {1});
    CHECK(other.call(0, {2}) == (Slabs{{0, 0}}));
}

TEST(spac_levels) {
    // The released code: up 5, down 1. Nine uses are needed to reach the highest level.
    CHECK_EQ(spac::next_level(0, 5, 5.0F, 1.0F), 1);
    CHECK_EQ(spac::next_level(0, 4, 5.0F, 1.0F), 0);
    CHECK_EQ(spac::next_level(4, 9, 5.0F, 1.0F), 5);
    CHECK_EQ(spac::next_level(4, 8, 5.0F, 1.0F), 4);
    CHECK_EQ(spac::next_level(3, 2, 5.0F, 1.0F), 2);
    CHECK_EQ(spac::next_level(3, 2, 5.0F, 2.0F), 3);
    CHECK_EQ(spac::next_level(0, 0, 5.0F, 1.0F), 0);
    CHECK_EQ(spac::next_level(5, 20, 5.0F, 1.0F), 5);
}

TEST(spac_boundaries) {
    spac::Boundaries b{.mean = 2.0F, .deviation = 1.0F, .nudge = 0.0F};
    b.observe(7); // mean 2 + .1 * 5, deviation 1 + .1 * (5 - 1)
    CHECK(std::abs(b.mean - 2.5F) < 1e-6F);
    CHECK(std::abs(b.deviation - 1.4F) < 1e-6F);
    CHECK(std::abs(b.up(9) - 1.4F) < 1e-6F);
    b.nudge = 2.0F;
    CHECK(std::abs(b.up(9) - 3.4F) < 1e-6F);
    CHECK(std::abs(b.up(3) - 3.0F) < 1e-6F); // at most the tokens of a verification
    b.deviation = 0.1F;
    CHECK_EQ(b.down(9), 1.0F);
}

TEST(spac_balance) {
    spac::Balance b{.device_fixed = 1.0,
                    .device_each = 1.0,
                    .host_each = 3.0,
                    .active = 8,
                    .resident = 8,
                    .loads = 0,
                    .slots = 8};
    CHECK_EQ(spac::balanced_hot(b), 6); // root 5.75: 6 takes 7, 5 takes 9
    b.slots = 4;
    CHECK_EQ(spac::balanced_hot(b), 4);
    b.slots = 8;
    b.resident = 1;
    b.loads = 2;
    CHECK_EQ(spac::balanced_hot(b), 3);
    b.device_fixed = 100.0; // never worth starting the device
    CHECK_EQ(spac::balanced_hot(b), 0);
    for (int32_t active = 1; active < 12; ++active) { // against trying every number
        for (const double each : {0.1, 0.7, 2.0, 9.0}) {
            b = {.device_fixed = 0.5,
                 .device_each = each,
                 .host_each = 1.0,
                 .active = active,
                 .resident = active / 2,
                 .loads = 2,
                 .slots = 7};
            const auto takes = [&](int32_t x) {
                return std::max(x > 0 ? 0.5 + each * x : 0.0, 1.0 * (active - x));
            };
            double least = 1e9;
            for (int32_t x = 0; x <= std::min({active, active / 2 + 2, 7}); ++x)
                least = std::min(least, takes(x));
            CHECK(takes(spac::balanced_hot(b)) < least + 1e-12);
        }
    }
    const std::vector<int32_t> histogram{40, 10, 5, 3, 2, 1};
    CHECK_EQ(spac::threshold(histogram, 6), 3);
    CHECK_EQ(spac::threshold(histogram, 5), 4);
    CHECK_EQ(spac::threshold(histogram, 0), 6);
    CHECK_EQ(spac::threshold(histogram, 100), 1);
}

TEST(speq_buffer) {
    const PoolShape shape{2, 4, 8, 2};
    speq::LookaheadBuffer buffer(shape);
    buffer.add(std::vector<int32_t>{0, 1, 3, 2}, 2); // layer 0: 0 1, layer 1: 3 2
    buffer.add(std::vector<int32_t>{1, 2, 3, 0}, 2);
    CHECK_EQ(buffer.tokens(), 2);
    CHECK_EQ(buffer.remaining({0, 1}), 2);
    CHECK_EQ(buffer.remaining({0, 3}), 0);
    std::vector<SlabId> out;
    const auto nothing = [](SlabId) { return false; };
    buffer.missing(2, false, nothing, out); // phase II
    CHECK(out == (Slabs{{0, 1}, {1, 3}}));
    out.clear();
    buffer.missing(1, true, [](SlabId id) { return id == SlabId{0, 0}; }, out); // phase III
    CHECK(out == (Slabs{{0, 1}, {0, 2}, {1, 3}, {1, 0}, {1, 2}}));
    buffer.passed(1);
    CHECK_EQ(buffer.remaining({0, 1}), 0);
    CHECK_EQ(buffer.remaining({1, 3}), 2);
    buffer.clear();
    CHECK_EQ(buffer.tokens(), 0);
    CHECK_EQ(buffer.remaining({1, 3}), 0);
}

TEST(speq_governor) {
    speq::Cycle c{.draft_token = 1.0,
                  .transfer = 0.5,
                  .verify_fixed = 10.0,
                  .verify_row = 1.0,
                  .acceptance = 0.5,
                  .n_groups = 2,
                  .n_experts = 4,
                  .top_k = 1,
                  .miss_rate = 0.5};
    // Two tokens: 4 (1 - .75^2) = 1.75 experts of each layer, half of them missing: 1.75 slabs.
    CHECK(std::abs(speq::new_slabs(c, 2) - 1.75) < 1e-12);
    // .5 + .25 accepted, and one more; 2 to draft, which hides the loads; 10 + 3 to verify.
    CHECK(std::abs(speq::throughput(c, 2) - 1.75 / 15.0) < 1e-12);
    c.transfer = 2.0; // 3.5 of loads: 1.5 follow the draft
    CHECK(std::abs(speq::throughput(c, 2) - 1.75 / 16.5) < 1e-12);
    c.acceptance = 0.0;
    CHECK_EQ(speq::best_length(c, 16), 1);
    c.acceptance = 1.0;
    c.miss_rate = 0.0;
    CHECK_EQ(speq::best_length(c, 16), 16);
    c.acceptance = 0.7;
    int32_t best = 1;
    for (int32_t k = 1; k <= 16; ++k) best = speq::throughput(c, k) > speq::throughput(c, best) ? k : best;
    CHECK_EQ(speq::best_length(c, 16), best);
    CHECK(best > 1 && best < 16);
}

TEST(moe_speq_has_three_phases) {
    Play play("moe-speq", {2, 4, 4, 1});
    const DraftCosts costs{.token = 1.0, .transfer = 1.0, .layer = 10.0, .row = 0.0, .acceptance = 1.0};
    const int32_t k = play.strategy->draft_length(costs);
    CHECK_EQ(k, 16); // all accepted, and a verification costs much more than a draft
    const std::vector<int32_t> ids{3, 2};
    for (int32_t j = 1; j <= 3; ++j) { // 3 of 16 are phase I
        play.strategy->draft_token(ids, 1);
        play.draft_left = 16.0 - j;
        CHECK(play.plan(1).empty());
    }
    play.strategy->draft_token(ids, 1);
    play.draft_left = 1.5; // phase II: one load fits in what is left of the draft
    CHECK(play.plan(1) == (Slabs{{0, 3}}));
    play.strategy->draft_token(std::vector<int32_t>{1, 2}, 1);
    play.draft_left = 0.0; // phase III: everything, in layer order
    CHECK(play.plan(1) == (Slabs{{0, 3}, {0, 1}, {1, 2}}));
}

TEST(moe_speq_evicts_what_the_buffer_names_least) {
    Play play("moe-speq", {1, 6, 3, 1});
    (void)play.strategy->draft_length({.token = 1.0, .transfer = 1.0, .layer = 1.0, .acceptance = 0.5});
    for (const int32_t e : {0, 1, 2}) play.call(0, {e});
    for (const int32_t e : {1, 2, 2}) play.strategy->draft_token(std::vector<int32_t>{e}, 1);
    CHECK(play.call(0, {3}) == (Slabs{{0, 0}}));
    CHECK(play.call(0, {4}) == (Slabs{{0, 3}})); // 3 was used last, but 1 and 2 are named
    // Ahead, nothing comes in for what is named as often.
    CHECK(!play.strategy->victim({0, 5}, false, [](SlabId) { return true; }).has_value());
}

TEST(spice_keeps_what_nearer_layers_need) {
    Play play("spice", {3, 2, 2, 1});
    play.layer = 10.0;
    play.call(0, {0});
    play.call(1, {0});
    play.told.by_horizon = {{1, {0.9F, 0.0F}}, {2, {0.0F, 0.9F}}};
    // From layer 2: layer 0 will use its 0, layer 1 its 1.
    play.strategy->begin_call(
        {2, std::vector<int32_t>{0}, std::vector<int32_t>{1}, std::vector<float>{1.0F}, 1});
    CHECK(play.plan(2) == (Slabs{{1, 1}}));
    const auto all = [&](SlabId id) { return play.has(id); };
    CHECK((play.strategy->victim({1, 1}, false, all) == std::optional(SlabId{1, 0})));
    // Nothing but what is needed: a load ahead gives up, a demand does not.
    const auto only = [&](SlabId id) { return id == SlabId{0, 0}; };
    CHECK(!play.strategy->victim({1, 1}, false, only).has_value());
    CHECK((play.strategy->victim({2, 0}, true, only) == std::optional(SlabId{0, 0})));
}

RUN_TESTS()

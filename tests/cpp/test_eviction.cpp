// The eviction strategies: what the contract promises of each. The comparison with references on random calls
// is in tests/policy.
#include "check.h"
#include "policy/eviction.h"

#include <algorithm>
#include <ctime>
#include <string>
#include <vector>

using namespace spice::policy;

namespace {

/// What a victim() returned, as text.
std::string text(const std::optional<SlabId> &id) {
    if (!id) return "none";
    return std::to_string(id->group) + ":" + std::to_string(id->expert);
}

constexpr auto any = [](SlabId) { return true; };

std::unique_ptr<Eviction> make(std::string_view name, int32_t groups = 3, int32_t experts = 4,
                               int32_t top_k = 1) {
    return make_eviction(name, {groups, experts, groups * experts, top_k});
}

void call(Eviction &eviction, int32_t group, std::vector<int32_t> experts, std::vector<float> weights = {}) {
    eviction.begin_call(group, experts, weights);
}

/// A numerical recipe, so that the test needs no library's random numbers.
struct Random {
    uint64_t state;
    uint32_t below(uint32_t n) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<uint32_t>(state >> 33) % n;
    }
};

/// 48 layers of 128 experts, top-8, through a pool of `n_slots`. Returns the victims.
std::vector<SlabId> decode(Eviction &eviction, int32_t tokens, size_t n_slots) {
    constexpr int32_t groups = 48;
    constexpr int32_t n = 128;
    Random random{7};
    std::vector<uint8_t> resident(groups * n, 0);
    size_t used = 0;
    std::vector<SlabId> victims;
    for (int32_t t = 0; t < tokens; ++t) {
        for (int32_t g = 0; g < groups; ++g) {
            std::vector<int32_t> experts;
            while (experts.size() < 8) {
                const auto e = static_cast<int32_t>(random.below(n) * random.below(n) / n);
                if (std::find(experts.begin(), experts.end(), e) == experts.end()) experts.push_back(e);
            }
            eviction.begin_call(g, experts, {});
            for (const int32_t e : experts) {
                if (resident[static_cast<size_t>(g * n + e)] != 0) continue;
                if (used == n_slots) {
                    const auto victim = eviction.victim([&](SlabId id) {
                        return id.group != g ||
                               std::find(experts.begin(), experts.end(), id.expert) == experts.end();
                    });
                    if (!victim || resident[static_cast<size_t>(victim->group * n + victim->expert)] == 0)
                        return {};
                    eviction.on_evict(*victim);
                    resident[static_cast<size_t>(victim->group * n + victim->expert)] = 0;
                    victims.push_back(*victim);
                    --used;
                }
                eviction.on_load({g, e});
                resident[static_cast<size_t>(g * n + e)] = 1;
                ++used;
            }
        }
    }
    return victims;
}

} // namespace

TEST(names_and_factory) {
    CHECK_EQ(eviction_names().size(), 5U);
    CHECK_EQ(eviction_names().front(), "spice");
    for (const std::string_view name : eviction_names()) {
        CHECK_EQ(make(name)->name(), name);
        CHECK(make_eviction(name, {0, 4, 4, 1}) == nullptr);
        CHECK(make_eviction(name, {3, 0, 4, 1}) == nullptr);
        CHECK(make_eviction(name, {3, 4, -1, 1}) == nullptr);
        CHECK(make_eviction(name, {1 << 30, 1 << 30, 4, 1}) == nullptr);
    }
    CHECK(make("best") == nullptr);
    CHECK(make("") == nullptr);
}

TEST(an_empty_pool_has_no_victim) {
    for (const std::string_view name : eviction_names()) {
        const auto eviction = make(name);
        CHECK_EQ(text(eviction->victim(any)), "none");
        call(*eviction, 0, {1, 2});
        CHECK_EQ(text(eviction->victim(any)), "none");
        eviction->on_load({0, 1});
        CHECK_EQ(text(eviction->victim([](SlabId) { return false; })), "none");
        CHECK_EQ(text(eviction->victim(any)), "0:1");
        eviction->on_evict({0, 1});
        CHECK_EQ(text(eviction->victim(any)), "none");
    }
}

TEST(a_refusal_lasts_for_one_victim) {
    for (const std::string_view name : eviction_names()) {
        const auto eviction = make(name);
        for (int32_t g = 0; g < 3; ++g) {
            call(*eviction, g, {0, 1, 2, 3});
            for (int32_t e = 0; e < 4; ++e) eviction->on_load({g, e});
        }
        const auto first = eviction->victim(any);
        for (int32_t g = 0; g < 3; ++g) {
            for (int32_t e = 0; e < 4; ++e) {
                const SlabId only{g, e};
                const auto accept = [only](SlabId id) { return id == only; };
                CHECK_EQ(text(eviction->victim(accept)), text(only));
            }
        }
        CHECK_EQ(text(eviction->victim(any)), text(first));
    }
}

TEST(lru_order) {
    const auto lru = make("lru");
    for (int32_t e = 0; e < 3; ++e) {
        call(*lru, 0, {e});
        lru->on_load({0, e});
    }
    call(*lru, 0, {0});
    CHECK_EQ(text(lru->victim(any)), "0:1");
    CHECK_EQ(text(lru->victim([](SlabId id) { return id.expert != 1; })), "0:2");
}

TEST(on_demand_ignores_uses) {
    const auto fifo = make("on-demand");
    for (int32_t e = 0; e < 3; ++e) {
        call(*fifo, 0, {e});
        fifo->on_load({0, e});
    }
    call(*fifo, 0, {0});
    CHECK_EQ(text(fifo->victim(any)), "0:0");
}

TEST(lfu_counts_while_absent) {
    const auto lfu = make("lfu");
    for (int i = 0; i < 3; ++i) call(*lfu, 0, {0}); // used three times, never resident
    for (int i = 0; i < 2; ++i) call(*lfu, 0, {1});
    lfu->on_load({0, 1});
    lfu->on_load({0, 0});
    CHECK_EQ(text(lfu->victim(any)), "0:1");
    for (int i = 0; i < 2; ++i) call(*lfu, 0, {1});
    CHECK_EQ(text(lfu->victim(any)), "0:0");
}

TEST(least_stale_order) {
    const auto eviction = make("least-stale");
    for (int32_t g = 0; g < 3; ++g) {
        call(*eviction, g, {0, 1});
        eviction->on_load({g, 0});
        eviction->on_load({g, 1});
    }
    call(*eviction, 0, {0}); // a new pass; nothing is behind it but what it uses now
    call(*eviction, 1, {0}); // leaves 0:1 behind
    CHECK_EQ(text(eviction->victim(any)), "0:1");
    eviction->on_evict({0, 1});
    // 1:1 belongs to the present group, whose next visit is the farthest; then 1:0, 0:0, group 2.
    for (const SlabId expected : {SlabId{1, 1}, SlabId{1, 0}, SlabId{0, 0}, SlabId{2, 0}, SlabId{2, 1}}) {
        CHECK_EQ(text(eviction->victim(any)), text(expected));
        eviction->on_evict(expected);
    }
}

TEST(spice_prefers_the_near_and_the_frequent) {
    const auto eviction = make("spice", 4, 8);
    for (int pass = 0; pass < 6; ++pass) {
        for (int32_t g = 0; g < 4; ++g) call(*eviction, g, {pass == 2 ? 1 : 0});
    }
    for (int32_t g = 0; g < 4; ++g) {
        eviction->on_load({g, 0});
        eviction->on_load({g, 1});
    }
    call(*eviction, 0, {0});
    CHECK_EQ(text(eviction->victim(any)), "0:1"); // seldom used, and a whole pass away
    const auto of_zero = [](SlabId id) { return id.expert == 0; };
    CHECK_EQ(text(eviction->victim(of_zero)), "0:0");
    call(*eviction, 1, {0});
    CHECK_EQ(text(eviction->victim(of_zero)), "1:0");
}

TEST(spice_follows_what_followed) {
    // After 0 always comes 1, after 1 comes 2, after 2 comes 0: all three equally frequent.
    const auto eviction = make("spice", 1, 16);
    for (int32_t e = 0; e < 3; ++e) eviction->on_load({0, e});
    for (int32_t i = 0; i < 60; ++i) call(*eviction, 0, {i % 3});
    call(*eviction, 0, {0}); // next comes 1
    const auto but_present = [](SlabId id) { return id.expert != 0; };
    CHECK_EQ(text(eviction->victim(but_present)), "0:2");
    call(*eviction, 0, {1}); // next comes 2
    CHECK_EQ(text(eviction->victim([](SlabId id) { return id.expert != 1; })), "0:0");
}

TEST(spice_takes_a_prompts_weights_as_evidence) {
    const auto eviction = make("spice", 1, 8, 2);
    for (int32_t e = 0; e < 8; ++e) eviction->on_load({0, e});
    call(*eviction, 0, {0, 1, 2, 3, 4, 5, 6, 7}, {50, 40, 30, 20, 10, 1, 60, 70});
    CHECK_EQ(text(eviction->victim(any)), "0:5");
    call(*eviction, 0, {0, 1}); // one decode step does not outweigh it
    CHECK_EQ(text(eviction->victim(any)), "0:5");
}

TEST(deterministic_and_cheap_for_thousands_of_slots) {
    constexpr int32_t tokens = 24;
    for (const std::string_view name : eviction_names()) {
        for (const size_t slots : {size_t{400}, size_t{3000}}) {
            const auto make_one = [&] {
                return make_eviction(name, {48, 128, static_cast<int32_t>(slots), 8});
            };
            const auto one = make_one();
            const std::clock_t start = std::clock();
            const std::vector<SlabId> victims = decode(*one, tokens, slots);
            const double ns = 1e9 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
            CHECK(!victims.empty());
            CHECK(decode(*make_one(), tokens, slots) == victims);
            std::cerr << "  " << name << ", " << slots << " slots: " << ns / (tokens * 48)
                      << " ns per layer call (of this test, too) with "
                      << static_cast<double>(victims.size()) / (tokens * 48) << " victims\n";
        }
    }
}

RUN_TESTS()

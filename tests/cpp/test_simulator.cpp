// The simulator on cases worked by hand: seconds to the last digit.
#include "check.h"
#include "sim/link.h"
#include "sim/simulator.h"

#include <cmath>
#include <string>
#include <vector>

using namespace spice;
using namespace spice::sim;

namespace {

/// Slabs of 10 bytes; 1 second on either link, 0.1 on the device, 0.5 on the host.
struct Case {
    std::vector<int32_t> ids;
    std::vector<int32_t> lens;
    int32_t layers = 1;
    int32_t top_k = 1;
    int32_t experts = 4;
    double other = 0.0;  ///< bytes
    double shared = 0.0; ///< of these
    Machine machine{.has_device = true,
                    .host = {.stream = 20.0, .row = 20.0, .call = 0.0},
                    .device = {.stream = 100.0, .row = 1e12, .call = 0.0},
                    .link = {.bandwidth = 10.0, .latency = 0.0, .chunk = 0.0, .in_flight = 1},
                    .disk = {.bandwidth = 10.0, .latency = 0.0, .chunk = 0.0, .in_flight = 1},
                    .layer_call = 0.0,
                    .contention = 0.0,
                    .drowsiness = 0.0,
                    .power = {}};

    [[nodiscard]] Result<SimResult> result(const SimOptions &options) const {
        const int32_t tokens = static_cast<int32_t>(ids.size()) / layers / top_k;
        const Model model{std::vector<double>(static_cast<size_t>(layers), 10.0), other, shared};
        return simulate({ids, {}, lens, layers, tokens, top_k, experts}, machine, model, options);
    }
    [[nodiscard]] SimResult run(const SimOptions &options) const {
        auto got = result(options);
        CHECK(got.ok());
        if (!got.ok()) std::cerr << got.status().message() << "\n";
        return got.ok() ? got.value() : SimResult{};
    }
};

bool near(double a, double b) {
    if (std::fabs(a - b) > 1e-9) std::cerr << a << " against " << b << "\n";
    return std::fabs(a - b) <= 1e-9;
}

} // namespace

TEST(energy) {
    Case c{{0, 1, 0, 2, 0}, {5}};
    CHECK_EQ(c.run({.strategy = "lru", .slots = 2}).joules, 0.0); // nobody said what anything takes
    c.machine.power = {.idle = 10.0, .host = 1000.0, .device = 4.0, .link = 2.0, .disk = 1000.0};
    c.machine.layer_call = 0.1; // beside the experts, on the device
    const SimResult r = c.run({.strategy = "lru", .slots = 2});
    CHECK(near(r.seconds, 3 * 1.0 + 5 * 0.2));
    CHECK(near(r.joules, 10.0 * 4.0 + 4.0 * (5 * 0.1 + 5 * 0.1) + 2.0 * 3.0));
    CHECK_EQ(r.prefill_joules, 0.0);
    const SimResult split = c.run({.strategy = "lru", .slots = 2, .prefill = 2, .prefill_batch = 1});
    CHECK(near(split.joules + split.prefill_joules, r.joules));
    CHECK(near(split.prefill_joules, 10.0 * 2.4 + 4.0 * 0.4 + 2.0 * 2.0)); // two loads, two tokens
    c.machine.has_device = false; // the host computes, the disk loads
    const SimResult host = c.run({.strategy = "lru", .slots = 2});
    CHECK(near(host.joules, 10.0 * host.seconds + 1000.0 * (5 * 0.6) + 1000.0 * 3.0));
}

TEST(a_cache) {
    const Case c{{0, 1, 0, 2, 0}, {5}};
    const SimResult r = c.run({.strategy = "lru", .slots = 2});
    CHECK_EQ(r.misses, 3);
    CHECK_EQ(r.hits, 2);
    CHECK(near(r.seconds, 3 * 1.0 + 5 * 0.1));
    CHECK(near(r.link_busy, 3.0));
    CHECK(near(r.link_bytes, 30.0));
    CHECK(near(r.device_busy, 0.5));
    CHECK_EQ(r.tokens, 5);
}

TEST(without_a_device_memory_is_the_pool) {
    Case c{{0, 1, 0}, {3}};
    c.machine.has_device = false;
    c.machine.disk.latency = 0.25;
    const SimResult r = c.run({.strategy = "lru", .slots = 2});
    // Of a miss, the first two parts are computed while the next one is read.
    CHECK(near(r.seconds, 2 * (1.25 + 0.5 / 3) + 0.5));
    c.machine.contention = 0.1; // slower, and still done before the next part arrives
    CHECK(near(c.run({.strategy = "lru", .slots = 2}).seconds, 2 * (1.25 + 0.5 / 3) + 0.5));
}

TEST(reads_in_flight_share_the_disk) {
    Case c{{0, 1}, {1}, 1, 2};
    c.machine.has_device = false;
    c.machine.disk.latency = 0.5;
    c.machine.disk.in_flight = 4;
    // Six parts of 1/3 s after the latency of the first. Four arrive together at .5 + 4/3, two at 2.5; four
    // parts of .5 / 3 are computed in between, two after the end.
    const SimResult r = c.run({.strategy = "lru", .slots = 4});
    CHECK(near(r.seconds, 2.5 + 2 * 0.5 / 3));
    CHECK(near(r.link_busy, 2.5));
    c.machine.disk.in_flight = 6; // all of them arrive at the end
    CHECK(near(c.run({.strategy = "lru", .slots = 4}).seconds, 2.5 + 6 * 0.5 / 3));
    c.machine.disk.in_flight = 0;
    CHECK(!c.result({.strategy = "lru", .slots = 4}).ok());
}

TEST(a_host_that_waits_is_slower_afterwards) {
    Case c{{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}, {12}};
    c.machine.has_device = false;
    const SimOptions one{.strategy = "lru", .slots = 1}; // always misses: more than half of the time idle
    const double awake = c.run(one).seconds;
    c.machine.drowsiness = 1.0;
    const double drowsy = c.run(one).seconds;
    CHECK(drowsy > awake + 1e-3);
    CHECK(drowsy < awake + 12 * 0.5 / 3 + 1e-9); // the last part of each, at most twice as slow
    // Where everything is there after four tokens, what was idle fades.
    const SimOptions all{.strategy = "lru", .slots = 4};
    const double hits = c.run(all).seconds;
    c.machine.drowsiness = 0.0;
    CHECK(hits > c.run(all).seconds && hits < c.run(all).seconds * 1.1);
    c.machine.drowsiness = -1.0;
    CHECK(!c.result(all).ok());
}

TEST(a_shared_expert_is_computed_while_a_miss_is_read) {
    Case c{{0, 0}, {2}};
    c.machine.has_device = false;
    c.other = 8.0;
    const double apart = c.run({.strategy = "lru", .slots = 2}).seconds;
    CHECK(near(apart, 2 * 0.4 + (1.0 + 0.5 / 3) + 0.5));
    c.shared = 4.0; // .2 s of the .4, of which the miss hides all
    const SimResult r = c.run({.strategy = "lru", .slots = 2});
    CHECK(near(r.seconds, apart - 0.2));
    CHECK(near(r.other_seconds, 2 * 0.4));
    c.shared = 9.0;
    CHECK(!c.result({.strategy = "lru", .slots = 2}).ok());
}

TEST(residents_are_computed_while_a_miss_is_read) {
    Case c{{0, 1, 0, 2}, {2}, 1, 2};
    c.machine.has_device = false;
    c.machine.contention = 0.2;
    // Both miss. Their parts arrive in turn, every 1/3 s, and each takes .2 while reads run: the last one
    // arrives at 2 and takes .5 / 3.
    // Then one hit beside one read. The hit's parts take .2 each, the miss's arrive at 1/3, 2/3 and 1:
    // .2, .533, .733, .933, 1.133, and the last one .5 / 3.
    const SimResult r = c.run({.strategy = "lru", .slots = 4});
    CHECK(near(r.seconds, 2.0 + 0.5 / 3 + 1.0 / 3 + 4 * 0.2 + 0.5 / 3));
}

TEST(the_host_computes_misses) {
    const Case c{{0, 1, 2, 0, 1, 2}, {2}, 1, 3};
    CHECK(near(c.run({.strategy = "all-host", .slots = 1}).seconds, 2 * 1.5));
    // Two on the host and one over the link: max(1.1, 1) beats 1.5.
    const SimResult spice = c.run({.strategy = "spice", .slots = 4, .recall = {0.0F}});
    CHECK_EQ(spice.fetched, 1);
    CHECK_EQ(spice.hosted + spice.hits + spice.late + spice.fetched, 6);
    // A profile fills a static pool before the first token.
    SimOptions profiled{.strategy = "static", .slots = 1};
    profiled.profile = {0, 0, 7, 0};
    CHECK(near(c.run(profiled).seconds, 2 * 1.0));
    // And any other that is one for all layers.
    profiled.strategy = "lru";
    profiled.slots = 4;
    profiled.profile = {5, 6, 7, 0};
    CHECK_EQ(c.run(profiled).hits, 6);
}

TEST(each_launch_on_the_device_takes_its_time) {
    Case c{{0, 1, 0, 2}, {2}, 1, 2, 8};
    c.machine.device.call = 0.05;
    // Two fetches, the first computed while the second is sent; then one that is there, and one fetched.
    CHECK(near(c.run({.strategy = "lru", .slots = 4}).seconds, (2.0 + 0.15) + (1.0 + 0.15)));
    Case together{{0, 1}, {1}, 1, 2, 8}; // half a transfer: two are launched at once
    together.machine.device.call = 0.5;
    CHECK(near(together.run({.strategy = "lru", .slots = 8}).seconds, 2.0 + 0.5 + 0.2));
    CHECK(
        near(together.run({.strategy = "lru", .slots = 4}).seconds, 2.0 + 0.5 + 0.1)); // of a small pool not
}

TEST(a_late_prefetch_is_late) {
    Case c{{0, 1}, {1}, 2};
    c.machine.layer_call = 0.4;
    const SimResult without = c.run({.strategy = "lru", .slots = 8});
    CHECK(near(without.seconds, 2 * (0.4 + 1.1)));
    // Layer 0 is fetched from 0.4 to 1.4 and done at 1.5; the next one is on the link from 1.4 to 2.4, needed
    // at 1.9.
    SimOptions oracle{.strategy = "promoe", .slots = 8, .predictor = "replay"};
    const SimResult with = c.run(oracle);
    CHECK(near(with.seconds, 2.5));
    CHECK_EQ(with.late, 1);
    CHECK_EQ(with.ahead, 1);
    CHECK_EQ(with.ahead_used, 1);
    c.machine.layer_call = 2.0; // 3.1 is done, 4.0 on the link, needed at 5.1
    const SimResult early = c.run(oracle);
    CHECK(near(early.seconds, 2.0 + 1.1 + 2.0 + 0.1));
    CHECK_EQ(early.late, 0);
    CHECK_EQ(early.hits, 1);
}

TEST(a_wrong_prefetch_costs_its_rest_or_its_chunk) {
    Case c{{0, 1}, {1}, 2, 1, 2};
    c.machine.layer_call = 0.4;
    // Recall 0: the other expert of layer 1 is on the link from 1.4; the demand at 1.9 waits until 2.4.
    SimOptions wrong{.strategy = "promoe", .slots = 4};
    wrong.recall = {0.0F, 0.0F, 0.0F};
    wrong.predictor = "replay";
    const SimResult r = c.run(wrong);
    CHECK_EQ(r.late, 0);
    // What replay tells has chance 0 then, and is not loaded.
    CHECK(near(r.seconds, 3.0));
    Link link({.bandwidth = 10.0, .latency = 0.0, .chunk = 0.0, .in_flight = 1});
    Link pieces({.bandwidth = 10.0, .latency = 0.0, .chunk = 3.0, .in_flight = 1});
    for (Link *l : {&link, &pieces}) {
        l->plan({{0, 0}, 1.0, 10.0});
        l->advance(
            1.5, [](const Link::Load &, double at) { return near(at, 1.0); }, [](policy::SlabId, double) {});
    }
    CHECK(!link.interrupt(1.5));
    CHECK(near(link.demand(1.5, 10.0), 3.0));
    CHECK(near(pieces.free_for_demand(1.5), 1.6)); // two pieces of .3
    CHECK(pieces.interrupt(1.5) == (std::optional(policy::SlabId{0, 0})));
    CHECK(near(pieces.demand(1.5, 10.0), 2.6));
    CHECK(near(pieces.waiting(), 0.4));
    double end = 0.0;
    pieces.advance(
        9.0, [](const Link::Load &, double) { return true; }, [&](policy::SlabId, double e) { end = e; });
    CHECK(near(end, 3.0)); // the rest goes on at 2.6
    CHECK(near(pieces.busy(), 2.0));
}

TEST(demands_go_before_loads_ahead_and_fills_last) {
    Link link({.bandwidth = 1.0, .latency = 0.0, .chunk = 0.0, .in_flight = 1});
    link.fill({{0, 9}, 0.0, 1.0}, 2);
    link.plan({{0, 1}, 0.0, 1.0});
    link.plan({{0, 2}, 0.0, 1.0});
    CHECK(near(link.demand(0.0, 5.0), 5.0));
    std::vector<int32_t> order;
    link.advance(
        9.0, [&](const Link::Load &load, double) { return order.push_back(load.id.expert), true; },
        [](policy::SlabId, double) {});
    CHECK(order == (std::vector<int32_t>{1, 2, 9}));
    link.fill({{0, 3}, 0.0, 1.0}, 2);
    link.fill({{0, 4}, 0.0, 1.0}, 2);
    link.fill({{0, 5}, 0.0, 1.0}, 2); // the oldest goes
    link.plan({{0, 6}, 0.0, 1.0});
    link.clear_planned();
    order.clear();
    link.advance(
        99.0, [&](const Link::Load &load, double) { return order.push_back(load.id.expert), true; },
        [](policy::SlabId, double) {});
    CHECK(order == (std::vector<int32_t>{4, 5}));
}

TEST(three_tiers) {
    const Case c{{0, 1, 0, 1}, {4}};
    // Memory holds one slab, the device one: every miss is read and sent.
    const SimResult r = c.run({.strategy = "lru", .slots = 1, .memory_slots = 1, .memory_eviction = "lru"});
    CHECK(near(r.seconds, 4 * (1.0 + 1.0 + 0.1)));
    CHECK_EQ(r.disk_demands, 4);
    CHECK(near(r.disk_bytes, 40.0));
    const SimResult two = c.run({.strategy = "lru", .slots = 1, .memory_slots = 2, .memory_eviction = "lru"});
    CHECK(near(two.seconds, 2 * 2.1 + 2 * 1.1));
    const SimResult host =
        c.run({.strategy = "all-host", .slots = 1, .memory_slots = 2, .memory_eviction = "lru"});
    CHECK(near(host.seconds, 2 * 1.5 + 2 * 0.5));
}

TEST(a_call_wider_than_the_pool_passes_through) {
    Case c{{0, 1, 2, 3}, {4}};
    // A prefill of four experts through two slots: transfers follow each other, the slots are free in time.
    const SimResult r = c.run({.strategy = "lru", .slots = 2, .prefill = -1});
    CHECK_EQ(r.prefill_tokens, 4);
    CHECK(near(r.prefill_seconds, 4.1));
    // With one slot each transfer waits for the arithmetic before it.
    CHECK(near(c.run({.strategy = "lru", .slots = 1, .prefill = -1}).prefill_seconds, 4 * 1.1));
    c.machine.has_device = false;
    CHECK(near(c.run({.strategy = "lru", .slots = 2, .prefill = -1}).prefill_seconds, 4.5));
}

TEST(batches_share_experts) {
    Case c{{0, 0, 1, 0}, {4}};
    const SimResult r = c.run({.strategy = "lru", .slots = 4, .batch = 2});
    CHECK_EQ(r.steps, 2);
    CHECK_EQ(r.misses, 2);
    CHECK_EQ(r.hits, 1);
    c.machine.has_device = false; // further rows cost arithmetic
    c.machine.host.row = 40.0;    // .25 + .25 per row
    CHECK(near(c.run({.strategy = "lru", .slots = 4, .batch = 2}).seconds, 1.0 + 0.25 + 1.0 + 0.5 / 3));
}

TEST(drafts) {
    const Case c{{0, 1, 2, 3, 0, 1}, {6}};
    SimOptions all{.strategy = "lru", .slots = 4, .draft = 2, .draft_seconds = 0.25};
    all.acceptance = 1.0;
    const SimResult r = c.run(all);
    CHECK_EQ(r.steps, 2);
    CHECK_EQ(r.tokens, 6);
    CHECK(near(r.draft_seconds, 2 * 2 * 0.25));
    all.acceptance = 0.0; // each step yields one token; the others are drafted again, the last ones fewer
    const SimResult none = c.run(all);
    CHECK_EQ(none.steps, 6);
    CHECK_EQ(none.tokens, 6);
    // A faithful draft of moe-speq brings everything during the draft.
    SimOptions speq{.strategy = "moe-speq", .slots = 4, .draft_seconds = 50.0};
    speq.acceptance = 1.0;
    speq.fidelity = 1.0;
    const SimResult s = c.run(speq);
    CHECK_EQ(s.tokens, 6);
    CHECK(s.steps < 6);
}

TEST(sequences_may_start_anew) {
    const Case c{{0, 0}, {1, 1}};
    CHECK_EQ(c.run({.strategy = "lru", .slots = 2}).hits, 1);
    SimOptions cold{.strategy = "lru", .slots = 2};
    cold.keep = false;
    CHECK_EQ(c.run(cold).hits, 0);
}

TEST(wrong_arguments_are_named) {
    const Case good{{0, 1}, {2}};
    const auto message = [&](const SimOptions &o) { return good.result(o).status().message(); };
    CHECK(message({.strategy = "lru", .slots = 1}).empty());
    CHECK(message({.strategy = "best", .slots = 1}).find("there are spice") != std::string::npos);
    CHECK(message({.strategy = "lru", .slots = 0}).find("slots") != std::string::npos);
    CHECK(message({.strategy = "lru", .slots = 1, .batch = 0}).find("batch") != std::string::npos);
    CHECK(message({.strategy = "lru", .slots = 1, .batch = 2, .draft = 2}).find("draft") !=
          std::string::npos);
    CHECK(message({.strategy = "spice", .slots = 1, .predictor = "x"}).find("predictor") !=
          std::string::npos);
    Case split{{0, 1}, {1}, 2};
    CHECK(split.result({.strategy = "adapmoe", .slots = 1}).status().message().find("per layer") !=
          std::string::npos);
    Case slow = good;
    slow.machine.link.bandwidth = 0.0;
    CHECK(slow.result({.strategy = "lru", .slots = 1}).status().message().find("link") != std::string::npos);
    slow = good;
    slow.machine.host.row = 1.0;
    CHECK(slow.result({.strategy = "lru", .slots = 1}).status().message().find("host") != std::string::npos);
}

RUN_TESTS()

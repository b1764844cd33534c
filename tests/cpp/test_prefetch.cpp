// What to prefetch, and whether: Algorithm 1, the window of the plan, the benefit meter, by hand-worked
// cases. Random inputs are in tests/policy/test_prediction.py.
#include "check.h"
#include "policy/benefit_meter.h"
#include "policy/lookahead.h"
#include "policy/prefetch_plan.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

using namespace spice::policy;

namespace {

constexpr double mb = 1e6;

/// "group:expert" of each load, in the order of the plan.
std::string text(std::span<const PrefetchLoad> plan) {
    std::string out;
    for (const PrefetchLoad &load : plan) {
        out += std::to_string(load.id.group) + ":" + std::to_string(load.id.expert) + " ";
    }
    return out;
}

constexpr auto nothing_present = [](SlabId) { return false; };
constexpr auto free_slots = [](int32_t) { return 0.0F; };
constexpr auto one_mb = [](int32_t) { return mb; };

/// Passes of `off` or `on` seconds, as the meter chooses. Returns the share of passes that prefetched.
double drive(BenefitMeter &meter, int32_t passes, double off, double on) {
    int32_t n_on = 0;
    for (int32_t i = 0; i < passes; ++i) {
        n_on += meter.on() ? 1 : 0;
        const double drift = 1.0 + 0.3 * std::sin(i * 0.05); // slower and faster times, as on a shared disk
        meter.end_pass({.seconds = (meter.on() ? on : off) * drift, .missed_bytes = 1});
    }
    return static_cast<double>(n_on) / passes;
}

} // namespace

TEST(least_depth_is_the_time_of_a_load_in_layers) {
    // 8 loads of 6.5 MB at 2 GB/s take 26 ms; a layer takes 5 ms: 5.2 layers.
    CHECK_EQ(least_depth(8, 6.5 * mb, 2000 * mb, 0.005, 8), 6);
    CHECK_EQ(least_depth(8, 6.5 * mb, 2000 * mb, 0.005, 4), 4);
    CHECK_EQ(least_depth(8, 6.5 * mb, 2000 * mb, 0.026, 8), 1);
    CHECK_EQ(least_depth(8, 6.5 * mb, 2000 * mb, 0.0259, 8), 2);
    CHECK_EQ(least_depth(1, 1 * mb, 20000 * mb, 0.005, 8), 1);
    for (const double bad : {0.0, -1.0, std::nan("")}) { // not measured yet
        CHECK_EQ(least_depth(bad, mb, mb, 1, 6), 1);
        CHECK_EQ(least_depth(1, bad, mb, 1, 6), 1);
        CHECK_EQ(least_depth(1, mb, bad, 1, 6), 1);
        CHECK_EQ(least_depth(1, mb, mb, bad, 6), 1);
    }
    CHECK_EQ(least_depth(1, std::numeric_limits<double>::infinity(), mb, 1, 6), 6);
}

TEST(confidence_is_the_expected_share_of_the_best) {
    std::vector<float> scratch;
    const auto of = [&](std::vector<float> chances) { return confidence(chances, scratch); };
    CHECK_EQ(of({1, 1, 0, 0}), 1.0F);
    CHECK(std::abs(of({0.5F, 0.5F, 0.5F, 0.5F}) - 0.5F) < 1e-6F); // two are expected
    CHECK(std::abs(of({0.9F, 0.6F, 0.3F, 0.2F}) - 0.75F) < 1e-6F);
    CHECK(std::abs(of({0.1F, 0.1F, 0.0F, 0.0F}) - 0.1F) < 1e-6F); // at least one is
    CHECK_EQ(of({}), 0.0F);
}

TEST(algorithm_1) {
    const LookaheadOptions options{.tau = 0.7F, .l_max = 6};
    const auto depth = [&](const std::vector<float> &confidences, int32_t l_min) {
        int32_t d = 1;
        while (look_further(options, d, l_min, confidences[static_cast<size_t>(d) - 1])) ++d;
        return d;
    };
    CHECK_EQ(depth({0.9F, 0.8F, 0.7F, 0.6F, 0.9F, 0.9F}, 1), 4); // the unsure layer is still queued
    CHECK_EQ(depth({0.1F, 0.1F, 0.1F, 0.1F, 0.1F, 0.1F}, 1), 1);
    CHECK_EQ(depth({0.1F, 0.1F, 0.1F, 0.1F, 0.1F, 0.1F}, 3), 3); // as far as a load takes
    CHECK_EQ(depth({0.9F, 0.9F, 0.9F, 0.9F, 0.9F, 0.9F}, 1), 6); // never past l_max
}

TEST(only_what_can_arrive_is_planned) {
    PrefetchPlanner planner(4, 2, {.p_min = 0.1F, .max_queue = 8, .share = 1.0F});
    const std::vector<float> near = {0.9F, 0.8F, 0.3F, 0.0F};
    const std::vector<float> far = {0.7F, 0.05F, 0.6F, 0.5F};
    const auto plan = [&](double queued, double near_seconds, double far_seconds) {
        planner.begin();
        planner.add(1, 1, near_seconds, near, nothing_present);
        planner.add(2, 2, far_seconds, far, nothing_present);
        return text(planner.plan({1000 * mb, queued, 0}, one_mb, free_slots)); // 1 ms a load
    };
    // Windows of 2 and 4 ms: two near ones and two far ones. 1:2 comes too late, 2:3 after the far window.
    CHECK_EQ(plan(0, 0.002, 0.004), "1:0 1:1 2:0 2:2 ");
    // 2.5 MB on the way already: none of the near ones, 1.5 ms are left for the far ones.
    CHECK_EQ(plan(2.5 * mb, 0.002, 0.004), "2:0 ");
    // A near load would make the far ones late: it is taken, because its priority is higher, and they are
    // not.
    CHECK_EQ(plan(0, 0.002, 0.002), "1:0 1:1 ");
    CHECK_EQ(plan(0, 0.0009, 0.0009), "");
    CHECK_EQ(plan(0, 0.0, 0.001), "2:0 ");
}

TEST(a_far_load_is_not_made_late_by_a_near_one) {
    PrefetchPlanner planner(2, 2, {.p_min = 0.1F, .max_queue = 8, .share = 1.0F});
    planner.begin();
    planner.add(1, 1, 0.002, std::vector<float>{0.3F, 0.2F}, nothing_present);
    planner.add(2, 2, 0.002, std::vector<float>{0.9F, 0.1F}, nothing_present);
    // Both windows hold two loads together: the two best, whichever layer they are for.
    CHECK_EQ(text(planner.plan({1000 * mb, 0, 0}, one_mb, free_slots)), "1:0 2:0 ");
}

TEST(the_queue_is_bounded_and_time_is_kept_free) {
    PrefetchPlanner planner(16, 1, {.p_min = 0.1F, .max_queue = 3, .share = 0.5F});
    const std::vector<float> chances(16, 0.5F);
    const auto count = [&](int32_t n_queued, double seconds) {
        planner.begin();
        planner.add(0, 1, seconds, chances, nothing_present);
        return planner.plan({1000 * mb, 0, n_queued}, one_mb, free_slots).size();
    };
    CHECK_EQ(count(0, 1.0), 3U);
    CHECK_EQ(count(2, 1.0), 1U);
    CHECK_EQ(count(5, 1.0), 0U);
    CHECK_EQ(count(0, 0.0041), 2U); // half of 4.1 ms
    planner.begin();
    planner.add(0, 1, 1.0, chances, nothing_present);
    CHECK(planner.plan({0.0, 0, 0}, one_mb, free_slots).empty()); // bandwidth not known yet
}

TEST(what_is_present_or_unlikely_is_left_out) {
    PrefetchPlanner planner(4, 1, {.p_min = 0.25F, .max_queue = 8, .share = 1.0F});
    planner.begin();
    planner.add(3, 1, 1.0, std::vector<float>{0.9F, 0.25F, 0.24F, std::nanf("")},
                [](SlabId id) { return id.expert == 0; });
    const auto plan = planner.plan({1000 * mb, 0, 0}, one_mb, free_slots);
    CHECK_EQ(text(plan), "3:1 ");
    CHECK_EQ(plan[0].horizon, 1);
    CHECK(std::abs(plan[0].priority - 0.25F * 0.001F) < 1e-8F); // seconds of stall that it may save
}

TEST(victims_are_worth_something) {
    PrefetchPlanner planner(4, 1, {.p_min = 0.1F, .max_queue = 8, .share = 1.0F});
    planner.begin();
    planner.add(0, 1, 1.0, std::vector<float>{0.9F, 0.6F, 0.5F, 0.4F}, nothing_present);
    // One free slot, then victims that are needed with the chances .3, .5, ..
    const auto value = [](int32_t n) { return n == 0 ? 0.0F : 0.1F + 0.2F * static_cast<float>(n); };
    const auto plan = planner.plan({1000 * mb, 0, 0}, one_mb, value);
    CHECK_EQ(text(plan), "0:0 0:1 ");
    CHECK(std::abs(plan[1].priority - 0.3F * 0.001F) < 1e-7F);
    const auto none = [](int32_t) { return 1.0F; };
    CHECK(planner.plan({1000 * mb, 0, 0}, one_mb, none).empty());
}

TEST(bigger_slabs_save_more_and_take_longer) {
    PrefetchPlanner planner(1, 2, {.p_min = 0.1F, .max_queue = 1, .share = 1.0F});
    planner.begin();
    planner.add(0, 1, 0.01, std::vector<float>{0.5F}, nothing_present);
    planner.add(1, 2, 0.01, std::vector<float>{0.4F}, nothing_present);
    const auto bytes = [](int32_t group) { return group == 0 ? mb : 2 * mb; };
    CHECK_EQ(text(planner.plan({1000 * mb, 0, 0}, bytes, free_slots)), "1:0 "); // .4 * 2 ms > .5 * 1 ms
}

TEST(meter_keeps_what_pays) {
    BenefitMeter meter;
    CHECK(meter.on());
    const double share = drive(meter, 600, 1.0, 0.8);
    CHECK(meter.settled_on());
    CHECK(meter.saving() > 0.15 && meter.saving() < 0.29);
    CHECK(share > 0.94); // a probe costs a quarter of a pass: 4 % of them, and the first eight pairs
    CHECK_EQ(meter.n_switches(), 0);
}

TEST(meter_turns_off_what_costs_and_on_again) {
    BenefitMeter meter;
    drive(meter, 200, 1.0, 1.2);
    CHECK(!meter.settled_on());
    const double on = drive(meter, 1000, 1.0, 1.2);
    CHECK(on < 0.06);            // 1 % of the time at 20 % is 5 % of the passes
    drive(meter, 600, 1.0, 0.7); // conditions change
    CHECK(meter.settled_on());
    drive(meter, 600, 1.0, 1.1);
    CHECK(!meter.settled_on());
}

TEST(meter_probes_cost_about_one_percent) {
    for (const double on : {0.5, 0.9, 0.98, 1.02, 1.1, 2.0}) {
        BenefitMeter meter;
        constexpr int32_t passes = 4000;
        double spent = 0.0;
        for (int32_t i = 0; i < passes; ++i) {
            const double seconds = meter.on() ? on : 1.0;
            spent += seconds;
            meter.end_pass({.seconds = seconds, .missed_bytes = 1});
        }
        const double best = passes * std::min(on, 1.0);
        CHECK(spent / best < 1.02);
        if (std::abs(on - 1.0) > 0.05) CHECK_EQ(meter.settled_on(), on < 1.0);
    }
}

TEST(meter_ignores_idle_and_unlike_passes) {
    BenefitMeter meter;
    for (int32_t i = 0; i < 100; ++i) meter.end_pass({.seconds = 1.0 + i}); // nothing missed, nothing moved
    CHECK(meter.on());
    CHECK_EQ(meter.n_pairs(), 0);
    for (int32_t i = 0; i < 100; ++i) { // never two passes that can be compared
        meter.end_pass({.seconds = 1.0, .missed_bytes = 1});
        meter.skip_pass();
    }
    CHECK_EQ(meter.n_pairs(), 0);
    for (int32_t i = 0; i < 100; ++i) meter.end_pass({.seconds = std::nan(""), .missed_bytes = 1});
    CHECK_EQ(meter.n_pairs(), 0);
}

TEST(one_hiccup_does_not_decide) {
    BenefitMeter meter;
    drive(meter, 300, 1.0, 0.9);
    for (int32_t i = 0; i < 3; ++i) meter.end_pass({.seconds = 50.0, .missed_bytes = 1});
    drive(meter, 20, 1.0, 0.9);
    CHECK(meter.settled_on());
    CHECK_EQ(meter.n_switches(), 0);
}

RUN_TESTS()

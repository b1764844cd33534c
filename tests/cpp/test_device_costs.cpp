// DeviceCosts: what launches and experts take, told apart by calls of different size.
#include "check.h"

#include "runtime/device_costs.h"

#include <cmath>
#include <vector>

using spice::DeviceCosts;

namespace {

constexpr uint64_t slab = 4'000'000;

bool near(double a, double b, double share) {
    return std::abs(a - b) <= share * b;
}

} // namespace

TEST(a_launch_and_an_expert_are_told_apart) {
    DeviceCosts costs;
    for (size_t i = 0; i < 200; ++i) {
        const std::vector<int32_t> rows(1 + i % 6, 1);
        const double noise = i % 2 == 0 ? 20e-6 : -20e-6;
        costs.device(slab, rows, 500e-6 + 200e-6 * static_cast<double>(rows.size()) + noise, true);
    }
    const auto found = costs.get(slab, false);
    CHECK(near(found.device_call, 500e-6, 0.1));
    CHECK(near(found.device.at(1), 200e-6, 0.1));
    CHECK(near(costs.get(2 * slab, false).device.at(1), 400e-6, 0.1));
    CHECK(near(costs.get(slab, true).device_call, 60e-6, 1e-9)); // of many rows nothing was seen
}

TEST(calls_of_one_size_keep_the_proportion) {
    DeviceCosts costs;
    const auto before = costs.get(slab, false);
    const std::vector<int32_t> rows(4, 1);
    const double expected = before.device_call + 4.0 * before.device.at(1);
    for (int i = 0; i < 50; ++i) costs.device(slab, rows, 3.0 * expected, true);
    const auto after = costs.get(slab, false);
    CHECK(near(after.device_call, 3.0 * before.device_call, 1e-6));
    CHECK(near(after.device.at(1), 3.0 * before.device.at(1), 1e-6));
}

TEST(costs_are_not_negative_whatever_is_measured) {
    DeviceCosts costs;
    for (size_t i = 0; i < 100; ++i) { // the more experts, the shorter
        const std::vector<int32_t> rows(1 + i % 6, 1);
        costs.device(slab, rows, 1e-3 / static_cast<double>(rows.size()), true);
    }
    const auto found = costs.get(slab, false);
    CHECK(found.device_call >= 0.0 && found.device.at(1) > 0.0);
    costs.device(slab, std::vector<int32_t>(6, 1), 0.0, true); // no time at all teaches nothing
    CHECK(near(costs.get(slab, false).device_call, found.device_call, 1e-9));
}

TEST(an_end_that_was_not_seen_teaches_only_that_it_was_earlier) {
    DeviceCosts costs;
    const std::vector<int32_t> rows(4, 1);
    for (int i = 0; i < 50; ++i) costs.device(slab, rows, 1e-3, true);
    const double before = costs.get(slab, false).device_call;
    costs.device(slab, rows, 5e-3, false);
    CHECK(near(costs.get(slab, false).device_call, before, 1e-9));
    costs.device(slab, rows, 0.5e-3, false);
    CHECK(costs.get(slab, false).device_call < before);
}

RUN_TESTS()

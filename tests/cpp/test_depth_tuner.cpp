// DepthTuner on disks of which the best depth is known.
#include "check.h"

#include "store/depth_tuner.h"

#include <functional>

using spice::DepthTuner;

namespace {

constexpr uint64_t megabyte = 1'000'000;

/// Reads 2 MB pieces until tuned; `speed` gives bytes per second for a depth.
DepthTuner tune(const std::function<double(int32_t)> &speed, double backlog_share = 1.0) {
    DepthTuner tuner({4, 2, 8}); // as the reader tries them
    double now = 0.0;
    for (int i = 0; i < 100'000 && !tuner.tuned(); ++i) {
        now += 2.0 * megabyte / speed(tuner.depth());
        tuner.ended(2 * megabyte, now, (i % 100) < backlog_share * 100);
    }
    return tuner;
}

} // namespace

TEST(finds_the_best_depth) {
    CHECK_EQ(tune([](int32_t depth) { return depth == 4 ? 2e9 : 1e9; }).depth(), 4);
    CHECK_EQ(tune([](int32_t depth) { return 1e8 * depth; }).depth(), 8);
    CHECK_EQ(tune([](int32_t depth) { return 1e9 / depth; }).depth(), 2);
}

TEST(the_smallest_that_is_nearly_as_good) {
    CHECK_EQ(tune([](int32_t depth) { return depth == 2 ? 1.0e9 : 1.04e9; }).depth(), 2);
    CHECK_EQ(tune([](int32_t depth) { return depth == 2 ? 1.0e9 : 1.2e9; }).depth(), 4);
}

TEST(idle_time_is_not_counted) {
    // With little backlog the windows fill slowly; the verdict is the same.
    const DepthTuner tuner = tune([](int32_t depth) { return depth == 8 ? 2e9 : 1e9; }, 0.2);
    CHECK(tuner.tuned());
    CHECK_EQ(tuner.depth(), 8);
    DepthTuner never({2, 4});
    for (int i = 0; i < 1000; ++i) never.ended(megabyte, i, false);
    CHECK(!never.tuned());
    CHECK_EQ(never.depth(), 2);
}

TEST(one_depth_is_taken_as_it_is) {
    DepthTuner fixed({3});
    CHECK(fixed.tuned());
    CHECK_EQ(fixed.depth(), 3);
}

RUN_TESTS()

// Placement: every strategy on cases worked by hand, and `spice` against all possible choices.
#include "check.h"
#include "policy/placement.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

using namespace spice::policy;

namespace {

constexpr double none = PlacementCall::absent;

/// A call that owns its spans. One transfer takes 4 seconds, the device 1 per expert, the host 2 per row.
struct Case {
    std::vector<int32_t> rows;
    std::vector<double> on_device;
    std::vector<double> in_memory{};
    PlacementCosts costs{.device = {1.0, 0.0}, .host = {0.0, 2.0}, .link_bandwidth = 1.0};
    double link_queued = 0.0;
    double prefetch_queued = 0.0;

    [[nodiscard]] PlacementCall call() const {
        return {.rows = rows,
                .on_device = on_device,
                .in_memory = in_memory,
                .slab_bytes = 4,
                .link_queued = link_queued,
                .prefetch_queued = prefetch_queued};
    }
};

/// One letter per expert: d, f, h, + (host and fill).
std::string place(std::string_view name, const Case &c) {
    std::vector<Place> places(c.rows.size());
    make_placement(name)->place(c.call(), c.costs, places);
    std::string text;
    for (const Place p : places) text += "dfh+"[static_cast<size_t>(p)];
    return text;
}

double finish(const Case &c, const std::string &text) {
    std::vector<Place> places;
    std::vector<int32_t> order;
    for (const char letter : text) {
        places.push_back(static_cast<Place>(std::string_view("dfh+").find(letter)));
    }
    return finish_time(c.call(), c.costs, places, order);
}

/// The least finish of any choice for the misses.
double best(const Case &c) {
    std::string text;
    std::vector<size_t> misses;
    for (size_t i = 0; i < c.rows.size(); ++i) {
        text += c.on_device[i] == none ? 'h' : 'd';
        if (c.on_device[i] == none) misses.push_back(i);
    }
    double least = finish(c, text);
    for (size_t choice = 1; choice < size_t{1} << misses.size(); ++choice) {
        for (size_t m = 0; m < misses.size(); ++m) text[misses[m]] = (choice >> m & 1) != 0 ? 'f' : 'h';
        least = std::min(least, finish(c, text));
    }
    return least;
}

std::string plain(std::string text) {
    std::replace(text.begin(), text.end(), '+', 'h');
    return text;
}

} // namespace

TEST(names) {
    CHECK_EQ(placement_names().size(), 8U);
    CHECK_EQ(placement_names()[0], "spice");
    for (const std::string_view name : placement_names()) CHECK_EQ(make_placement(name)->name(), name);
    CHECK(make_placement("best") == nullptr);
}

TEST(finish_times) {
    const Case c{{1, 3, 1}, {0.0, none, none}};
    CHECK_EQ(finish(c, "dhh"), 8.0); // host 6 + 2
    CHECK_EQ(finish(c, "dfh"), 5.0); // link 4, device 1
    CHECK_EQ(finish(c, "dhf"), 6.0); // host 6
    CHECK_EQ(finish(c, "dff"), 9.0); // link 8, device 1
    CHECK_EQ(finish(c, "d++"), 8.0); // a fill takes no time of this call
    Case queued = c;
    queued.link_queued = 3.0;
    CHECK_EQ(finish(queued, "dfh"), 8.0);
    Case late{{1, 1}, {2.5, 0.0}}; // one transfer ends at 2.5, the device computes the other one meanwhile
    CHECK_EQ(finish(late, "dd"), 3.5);
    CHECK_EQ(finish(late, "hd"), 2.0);
    Case disk{{1, 1}, {none, none}, {5.0, 0.0}};
    CHECK_EQ(finish(disk, "hh"), 7.0);  // the second first, then waits for the first
    CHECK_EQ(finish(disk, "fh"), 10.0); // 5 + 4 + 1
    CHECK_EQ(finish(disk, "ff"), 10.0); // the second takes the link while the first is read
    Case calls = c;
    calls.costs.host_call = 0.5;
    calls.costs.device_call = 0.25;
    CHECK_EQ(finish(calls, "dhh"), 8.5);
    CHECK_EQ(finish(calls, "dff"), 9.25); // the last fetch's launch follows its transfer
    CHECK_EQ(fetches_per_launch(calls.costs, 4, 2), 1);
    calls.costs.device_call = 2.0; // half a transfer: worth waiting for two
    CHECK_EQ(fetches_per_launch(calls.costs, 4, 9), 2);
    CHECK_EQ(finish(calls, "dff"), 12.0);
    late.costs.device_call = 0.25;
    CHECK_EQ(finish(late, "dd"), 3.75); // a launch for what is there, and one for what lands
    CHECK_EQ(finish(Case{{}, {}}, ""), 0.0);
}

TEST(the_fetch_order_is_johnsons) {
    const Case c{{1, 3, 2}, {none, none, none}};
    std::vector<int32_t> order;
    fetch_order(c.call(), std::vector(3, Place::fetch), order);
    CHECK(order == (std::vector<int32_t>{1, 2, 0}));
}

TEST(fixed_strategies) {
    const Case c{{1, 1, 9}, {0.0, none, none}};
    CHECK_EQ(place("all-host", c), "hhh");
    CHECK_EQ(place("all-fetch", c), "dff");
    CHECK_EQ(place("adapmoe", c), "dff");
    CHECK_EQ(place("static", c), "dhh");
    CHECK_EQ(place("cg-moe", c), "d++");
}

TEST(fiddler_with_the_constants_of_its_code) {
    Case c{{1, 9, 10, 11, 200}, {none, none, none, none, 0.0}};
    c.costs = {.device = {0.0, 0.0}, .host = {0.0, 7.0}, .link_bandwidth = 4.0 / 70.0};
    CHECK_EQ(place("fiddler", c), "hhffd");
    c.link_queued = 1000.0; // it does not look
    CHECK_EQ(place("fiddler", c), "hhffd");
}

TEST(hybrimoe_with_the_constants_of_its_code) {
    // host 1 * rows + 0.79, device 0.5, transfer 0.418
    Case c{{1, 2, 1, 1}, {0.0, none, none, none}};
    c.costs = {.device = {0.5, 0.0}, .host = {0.79, 1.0}, .link_bandwidth = 4.0 / 0.418};
    // Queue: 0 (resident), 1 (2 rows), 2, 3. Device 0 at 0.5, 1 at 1.418; host would have 3 at 1.79, the
    // device 2 at 2.336: host. Then 2: device 2.336, host 3.58: device.
    CHECK_EQ(place("hybrimoe", c), "dffh");
    // A slow device: the host takes even residents from the back.
    Case slow{{3, 1}, {0.0, 0.0}};
    slow.costs = {.device = {5.0, 0.0}, .host = {0.0, 1.0}};
    CHECK_EQ(place("hybrimoe", slow), "hh");
    slow.rows = {9, 1};
    CHECK_EQ(place("hybrimoe", slow), "dh");
}

TEST(spice_by_hand) {
    // Four misses of one token. Host 2 each, link 4 each: 0 fetched 8, 1 fetched max(5, 6) = 6, 2 fetched 9.
    Case c{{1, 1, 1, 1, 1}, {0.0, none, none, none, none}};
    CHECK_EQ(plain(place("spice", c)), "dfhhh");
    c.link_queued = 0.5; // max(5.5, 6): still
    CHECK_EQ(plain(place("spice", c)), "dfhhh");
    c.link_queued = 3.0; // max(8, 6) is no better than 8
    CHECK_EQ(plain(place("spice", c)), "dhhhh");
    // Many rows: the link is the shorter way for all.
    Case many{{50, 50}, {none, none}};
    CHECK_EQ(place("spice", many), "ff");
    // The one with many rows is fetched.
    Case mixed{{1, 6, 1}, {none, none, none}};
    CHECK_EQ(plain(place("spice", mixed)), "hfh");
}

TEST(spice_does_not_wait_for_what_lands_too_late) {
    Case c{{1, 1}, {0.0, 2.5}}; // both on the device: 3.5; the second by the host: 2
    CHECK_EQ(place("spice", c), "dh");
    c.on_device = {0.0, 0.5}; // 2 either way
    CHECK_EQ(place("spice", c), "dd");
    Case two{{1, 1, 1}, {2.0, 1.0, none}}; // 4 if it waits for both, 4 if the host computes two
    CHECK_EQ(plain(place("spice", two)), "ddh");
    two.on_device = {9.0, 2.0, none};
    CHECK_EQ(plain(place("spice", two)), "hdh");
}

TEST(spice_gives_an_idle_host_what_the_device_has) {
    Case c{{1, 1, 1}, {0.0, 0.0, 0.0}}; // 3 on the device alone; 2 if the host computes one
    CHECK_EQ(place("spice", c), "hdd");
    c.rows = {9, 9, 1}; // the one with fewest rows
    CHECK_EQ(place("spice", c), "ddh");
    c.in_memory = {9.0, 9.0, 9.0}; // not what it would have to read first
    CHECK_EQ(place("spice", c), "ddd");
    c = {{1, 1, 1}, {0.0, 0.0, 0.0}, {0.5, 0.5, 0.5}}; // not even if that would be in time
    CHECK_EQ(place("spice", c), "ddd");
    Case slow{{1, 1, 1}, {0.0, 0.0, 0.0}};
    slow.costs.host = {2.97, 0.0}; // 2.97 against 3: not worth it
    CHECK_EQ(place("spice", slow), "ddd");
}

TEST(spice_fills_when_the_link_is_idle) {
    Case c{{1, 1, 1, 1, 1}, {0.0, none, none, none, none}};
    CHECK_EQ(place("spice", c), "df+hh"); // the layer takes 6, the link is busy for 4: one, as no other waits
    c.prefetch_queued = 4.0;
    CHECK_EQ(place("spice", c), "dfhhh");
    // A fast link and a faster host: 0.25 for a transfer, but the device takes 10.
    Case slow{{1, 2, 1}, {none, none, none}};
    slow.costs = {.device = {10.0, 0.0}, .host = {0.0, 0.2}, .link_bandwidth = 16.0};
    CHECK_EQ(place("spice", slow), "+++"); // 0.8 seconds are three transfers
    slow.prefetch_queued = 0.5;
    CHECK_EQ(place("spice", slow), "h+h"); // and now one, of the expert with most rows
}

TEST(spice_is_the_best_choice) {
    std::mt19937 random(5);
    const auto real = [&](double from, double to) {
        return std::uniform_real_distribution<double>(from, to)(random);
    };
    for (int round = 0; round < 400; ++round) {
        Case c{{}, {}};
        const size_t n = 1 + random() % 8;
        const uint32_t spread = round % 2 == 0 ? 1 : 9;
        for (size_t i = 0; i < n; ++i) {
            c.rows.push_back(static_cast<int32_t>(1 + random() % spread));
            const uint32_t kind = random() % 6;
            c.on_device.push_back(kind == 0 ? 0.0 : kind == 1 ? real(0, 4) : none);
            if (round % 4 == 0) c.in_memory.push_back(random() % 2 == 0 ? 0.0 : real(0, 9));
        }
        c.costs = {.device = {real(0, 2), real(0, 0.5)},
                   .host = {real(0, 2), real(0, 3)},
                   .device_call = real(0, 1),
                   .host_call = real(0, 1),
                   .link_latency = real(0, 1),
                   .link_bandwidth = real(0.5, 4)};
        c.link_queued = random() % 2 == 0 ? 0.0 : real(0, 5);
        const double mine = finish(c, place("spice", c));
        CHECK(mine <= best(c) + 1e-12);
    }
}

TEST(spice_on_prompts_is_close_to_the_best_choice) {
    std::mt19937 random(6);
    double worst = 1.0;
    for (int round = 0; round < 60; ++round) {
        Case c{{}, {}};
        for (int32_t i = 0; i < 11; ++i) { // 2^11 choices, all of them different: the bisection
            c.rows.push_back(1 + 3 * i + static_cast<int32_t>(random() % 3));
            c.on_device.push_back(none);
        }
        const auto real = [&](double from, double to) {
            return std::uniform_real_distribution<double>(from, to)(random);
        };
        c.costs = {.device = {real(0, 2), real(0, 0.1)},
                   .host = {real(0, 2), real(0, 1)},
                   .link_bandwidth = real(0.3, 4)};
        worst = std::max(worst, finish(c, place("spice", c)) / best(c));
    }
    CHECK(worst < 1.1);
    std::cerr << "     worst of 60: " << worst << " times the optimum\n";
}

TEST(places_fit_the_call) {
    std::mt19937 random(7);
    for (int round = 0; round < 300; ++round) {
        Case c{{}, {}};
        const size_t n = random() % 20;
        for (size_t i = 0; i < n; ++i) {
            c.rows.push_back(static_cast<int32_t>(1 + random() % 30));
            c.on_device.push_back(random() % 2 == 0 ? 0.0 : none);
        }
        for (const std::string_view name : placement_names()) {
            const std::string text = place(name, c);
            for (size_t i = 0; i < n; ++i) {
                CHECK(c.on_device[i] == none ? text[i] != 'd' : text[i] == 'd' || text[i] == 'h');
            }
        }
    }
}

RUN_TESTS()

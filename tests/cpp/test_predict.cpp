// Prediction: gating by hand-worked cases, what the history counts, what the predictors promise. Random calls
// and recall on planted routing are in tests/policy/test_prediction.py.
#include "check.h"
#include "policy/fast_math.h"
#include "policy/gating.h"
#include "policy/predictor.h"
#include "policy/routing_history.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

using namespace spice::policy;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();

std::vector<float> rank(const Gating &gating, std::vector<float> raw, std::vector<float> router_bias = {},
                        std::vector<float> selection_bias = {}) {
    std::vector<float> out(raw.size());
    ranking_scores(gating, raw, router_bias, selection_bias, out);
    return out;
}

/// The experts in the order of the scores, as text; excluded ones left out.
std::string order(const std::vector<float> &scores) {
    std::vector<size_t> ids(scores.size());
    std::iota(ids.begin(), ids.end(), size_t{0});
    std::stable_sort(ids.begin(), ids.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    std::string text;
    for (const size_t id : ids) {
        if (scores[id] != -inf) text += std::to_string(id) + " ";
    }
    return text;
}

struct Random {
    uint64_t state;
    uint32_t below(uint32_t n) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<uint32_t>(state >> 33) % n;
    }
};

std::vector<float> predict(Predictor &predictor, int32_t group, int32_t horizon, size_t n_experts,
                           const std::vector<float> &scores = {}) {
    std::vector<float> out(n_experts, -1.0F);
    if (!predictor.predict(group, horizon, scores, out)) return {};
    return out;
}

float sum(const std::vector<float> &values) {
    return std::accumulate(values.begin(), values.end(), 0.0F);
}

} // namespace

TEST(fast_math_agrees_with_the_library) {
    for (float x = -90.0F; x < 90.0F; x += 0.37F) {
        const float expected = std::exp(std::clamp(x, -80.0F, 80.0F));
        CHECK(std::abs(fast_exp(x) / expected - 1.0F) < 3e-6F);
        const float p = fast_exp(x * 0.4F);
        CHECK(std::abs(fast_log(p) - std::log(p)) < 2e-6F * std::max(1.0F, std::abs(std::log(p))));
    }
    CHECK_EQ(limit(3.0F, 2.0F), 2.0F);
    CHECK_EQ(limit(-3.0F, 2.0F), -2.0F);
    CHECK_EQ(limit(-1.5F, 2.0F), -1.5F);
    CHECK_EQ(limit(inf, 2.0F), 2.0F);
    CHECK(std::abs(limit(std::nanf(""), 2.0F)) == 2.0F);
}

TEST(gating_without_biases_keeps_the_raw_scores) {
    for (const Activation activation :
         {Activation::softmax, Activation::sigmoid, Activation::none, Activation::sqrt_softplus}) {
        const std::vector<float> raw = {0.5F, -2.0F, 3.0F, 1.0F};
        CHECK(rank({activation, 1, 1}, raw) == raw);
        CHECK(rank({activation, 0, 0}, raw) == raw);
    }
}

TEST(router_bias_comes_before_the_activation) {
    // gpt-oss: top-k of logits + bias.
    CHECK_EQ(order(rank({Activation::none, 1, 1}, {1.0F, 2.0F, 3.0F}, {5.0F, 0.0F, 0.0F})), "0 2 1 ");
}

TEST(selection_bias_comes_after_the_activation) {
    // sigmoid: .119, .881, .982. A bias of .8 on the first makes .919: between the others. Before the
    // activation it would change nothing (-2 + .8 is still the smallest).
    const std::vector<float> raw = {-2.0F, 2.0F, 4.0F};
    const std::vector<float> scores = rank({Activation::sigmoid, 1, 1}, raw, {}, {0.8F, 0.0F, 0.0F});
    CHECK_EQ(order(scores), "2 0 1 ");
    CHECK(std::abs(scores[0] - 0.9192F) < 1e-3F);
    // softmax: .0024, .1189, .8788 with the same bias: the first is second.
    const std::vector<float> soft = rank({Activation::softmax, 1, 1}, raw, {}, {0.8F, 0.0F, 0.0F});
    CHECK_EQ(order(soft), "2 0 1 ");
    CHECK(std::abs(soft[2] - 0.8788F) < 1e-3F);
    // sqrt(softplus): sqrt(.1269) = .3563, sqrt(2.1269) = 1.4584, sqrt(4.0182) = 2.0045.
    const std::vector<float> root = rank({Activation::sqrt_softplus, 1, 1}, raw, {}, {1.2F, 0.0F, 0.0F});
    CHECK_EQ(order(root), "2 0 1 ");
    CHECK(std::abs(root[1] - 1.4584F) < 1e-3F);
    // both biases
    CHECK_EQ(order(rank({Activation::sigmoid, 1, 1}, raw, {0.0F, 0.0F, -9.0F}, {0.8F, 0.0F, 0.0F})),
             "0 1 2 ");
}

TEST(only_the_best_groups_of_experts_remain) {
    // Sums of the two best sigmoids of each pair: .98 + .05, .73 + .73, .88 + .12: the second group leads,
    // although the best expert is in the first.
    const std::vector<float> raw = {4.0F, -3.0F, 1.0F, 1.0F, 2.0F, -2.0F};
    CHECK_EQ(order(rank({Activation::sigmoid, 3, 1}, raw)), "2 3 ");
    CHECK_EQ(order(rank({Activation::sigmoid, 3, 2}, raw)), "0 2 3 1 ");
    CHECK_EQ(order(rank({Activation::sigmoid, 3, 3}, raw)), "0 4 2 3 5 1 ");
    // The raw scores would have chosen otherwise (4 - 3 < 1 + 1, but 4 + 4 of the first is not its pair's).
    const std::vector<float> close = {9.0F, -9.0F, 0.5F, 0.4F}; // sigmoids 1.00 + 0, .62 + .60
    CHECK_EQ(order(rank({Activation::sigmoid, 2, 1}, close)), "2 3 ");
    CHECK_EQ(order(rank({Activation::softmax, 2, 1}, close)), "0 1 "); // softmax: .9996 against .0004
    // The selection bias counts for the groups, too; the bigger groups take their two best only.
    CHECK_EQ(order(rank({Activation::sigmoid, 3, 1}, raw, {}, {0, 0, 0, 0, 1.0F, 0})), "4 5 ");
    const std::vector<float> three = {2.0F, 2.0F, -9.0F, 1.5F, 1.5F, 1.5F};
    CHECK_EQ(order(rank({Activation::sigmoid, 2, 1}, three)), "0 1 2 ");
    CHECK_EQ(order(rank({Activation::sigmoid, 2, 1}, {1.0F, 1.0F, 1.0F, 1.0F})), "0 1 "); // a tie: the first
}

TEST(scores_that_are_not_numbers_rank_last) {
    const float nan = std::nanf("");
    CHECK_EQ(order(rank({Activation::sigmoid, 1, 1}, {nan, 1.0F, inf, 2.0F})), "3 1 ");
    CHECK_EQ(order(rank({Activation::softmax, 1, 1}, {nan, 1.0F, 3.0F}, {}, {9.0F, 0.0F, 0.0F})), "2 1 ");
    CHECK_EQ(order(rank({Activation::softmax, 2, 1}, {nan, nan, nan, nan})), "");
}

TEST(possible_gatings) {
    CHECK(possible({Activation::softmax, 0, 0}, 60));
    CHECK(possible({Activation::softmax, 8, 4}, 256));
    CHECK(!possible({Activation::softmax, 8, 4}, 60));
    CHECK(!possible({Activation::softmax, 8, 0}, 64));
    CHECK(!possible({Activation::softmax, 8, 9}, 64));
    CHECK(!possible({Activation::softmax, 8, 4}, 8));
    CHECK(!possible({Activation::softmax, 1, 1}, 0));
}

TEST(history_counts_who_follows_whom) {
    RoutingHistory history({2, 8, 1, 2}, 2);
    for (int32_t t = 0; t < 40; ++t) { // group 0: 0, 1, 0, 1, ..; group 1: the same plus 4
        history.begin_call(0, std::vector<int32_t>{t % 2}, 1);
        history.begin_call(1, std::vector<int32_t>{t % 2 + 4}, 1);
    }
    history.begin_call(0, std::vector<int32_t>{0}, 1);
    std::vector<float> ratio(8);
    history.cross(0, 1, 0, ratio);             // 0 is followed by 4 in the next group, half of all its uses
    CHECK(ratio[4] > 0.5F && ratio[4] < 1.0F); // log 2 = .69, and some for the slow start of the averages
    CHECK(ratio[5] < -1.0F);
    CHECK(ratio[0] > -1.3F && ratio[0] < 0.5F); // never used: little is known
    history.cross(0, 2, 0, ratio);              // two calls on is group 0 of the next pass
    CHECK(ratio[1] > 0.5F && ratio[0] < -1.0F);
    CHECK(history.follow(0)[1] > 0.5F && history.follow(0)[0] < -1.0F); // and that is what follows
    CHECK(history.use(0)[0] > history.use(0)[3]);
    CHECK(history.long_use(0)[1] > history.long_use(0)[3]);
    CHECK(history.recent(0)[0] > 0.6F && history.recent(0)[0] > history.recent(0)[1]);
}

TEST(history_learns_from_a_prompt) {
    RoutingHistory prompt({2, 8, 1, 1}, 1);
    std::vector<int32_t> first(32);
    std::vector<int32_t> second(32);
    for (int32_t t = 0; t < 32; ++t) {
        first[static_cast<size_t>(t)] = t % 2;
        second[static_cast<size_t>(t)] = t % 2 + 4;
    }
    prompt.begin_call(0, first, 32);
    prompt.begin_call(1, second, 32);
    prompt.begin_call(0, std::vector<int32_t>{0}, 1);
    std::vector<float> ratio(8);
    prompt.cross(0, 1, 0, ratio);
    CHECK(ratio[4] > 0.3F && ratio[5] < -0.7F);
    CHECK(prompt.follow(0)[1] > 0.3F);
    CHECK_EQ(prompt.rows(0), 1);
    CHECK_EQ(prompt.rows(1), 32);
}

TEST(history_knows_no_pair_across_rows_that_it_leaves_out) {
    for (const int32_t rows : {RoutingHistory::max_rows, RoutingHistory::max_rows + 1}) {
        RoutingHistory history({1, 8, 1, 1}, 1);
        history.begin_call(0, std::vector<int32_t>{7}, 1);
        std::vector<int32_t> ids(static_cast<size_t>(rows), 5);
        ids.front() =
            rows == RoutingHistory::max_rows ? 5 : 3; // what followed 7; the second time it is cut off
        history.begin_call(0, ids, rows);
        history.begin_call(0, std::vector<int32_t>{7}, 1);
        const float follows = history.follow(0)[5];
        CHECK(rows == RoutingHistory::max_rows ? follows > 0.1F : std::abs(follows) < 0.01F);
    }
}

TEST(history_is_bounded) {
    const RoutingHistory small({48, 128, 8, 6}, 10);
    CHECK_EQ(small.n_distances(), 10);
    CHECK(small.bytes() < 11 << 20);
    const RoutingHistory large({48, 512, 10, 6}, 10);
    CHECK(large.n_distances() >= 1 && large.n_distances() < 10);
    CHECK(large.bytes() < RoutingHistory::max_table_bytes + (8 << 20));
}

TEST(predictors_and_their_factory) {
    CHECK_EQ(predictor_names().size(), 6U);
    CHECK_EQ(predictor_names().front(), "ensemble");
    for (const std::string_view name : predictor_names()) {
        const auto predictor = make_predictor(name, {3, 8, 2, 4});
        CHECK_EQ(predictor->name(), name);
        CHECK_EQ(predictor->max_horizon(), 4);
        for (const RoutingShape &shape :
             {RoutingShape{0, 8, 2, 4}, RoutingShape{3, 0, 2, 4}, RoutingShape{3, 8, 0, 4},
              RoutingShape{3, 8, 9, 4}, RoutingShape{3, 8, 2, 0}, RoutingShape{1 << 20, 8, 2, 4}}) {
            CHECK(make_predictor(name, shape) == nullptr);
        }
    }
    CHECK(make_predictor("oracle", {3, 8, 2, 4}) == nullptr);
    CHECK(make_predictor("router", {3, 8, 2, 4})->scores() == ScoreSource::frozen);
    CHECK(make_predictor("adapter", {3, 8, 2, 4})->scores() == ScoreSource::fitted);
    CHECK(make_predictor("history", {3, 8, 2, 4})->scores() == ScoreSource::none);
}

TEST(scores_decide_and_chances_sum_to_k) {
    for (const std::string_view name : {"ensemble", "router", "adapter", "draft"}) {
        const auto predictor = make_predictor(name, {3, 8, 2, 2});
        predictor->begin_call(0, std::vector<int32_t>{0, 1}, 1);
        const std::vector<float> scores = {0.0F, 0.1F, 3.0F, -1.0F, -inf, 2.0F, std::nanf(""), 0.2F};
        const std::vector<float> p = predict(*predictor, 0, 1, 8, scores);
        CHECK(p.size() == 8 && std::abs(sum(p) - 2.0F) < 0.1F);
        CHECK(p[2] > 0.8F && p[5] > 0.5F && p[4] < 0.1F && p[6] < 0.1F);
        CHECK(p[2] > p[5] && p[5] > p[7] && p[7] > p[3] && p[3] > p[4]);
    }
    // history does not look at them
    const auto history = make_predictor("history", {3, 8, 2, 2});
    history->begin_call(0, std::vector<int32_t>{0, 1}, 1);
    CHECK(std::abs(predict(*history, 0, 1, 8, {9, 0, 0, 0, 0, 0, 0, 0})[0] - 0.25F) < 0.05F);
}

TEST(rows_are_combined) {
    // Two rows with the chances p and q: 1 - (1 - p)(1 - q).
    const auto one = make_predictor("router", {2, 8, 1, 1});
    const auto both = make_predictor("router", {2, 8, 1, 1});
    const std::vector<float> first = {3, 1, 0, 0, 0, 0, 0, 0};
    const std::vector<float> second = {0, 0, 2, 1, 1, 0, 0, 0};
    one->begin_call(0, std::vector<int32_t>{0}, 1);
    const std::vector<float> p = predict(*one, 0, 1, 8, first);
    const auto other = make_predictor("router", {2, 8, 1, 1});
    other->begin_call(0, std::vector<int32_t>{0}, 1);
    const std::vector<float> q = predict(*other, 0, 1, 8, second);
    both->begin_call(0, std::vector<int32_t>{0, 3}, 2);
    std::vector<float> scores = first;
    scores.insert(scores.end(), second.begin(), second.end());
    const std::vector<float> together = predict(*both, 0, 1, 8, scores);
    for (size_t e = 0; e < 8; ++e) {
        CHECK(std::abs(together[e] - (1.0F - (1.0F - p[e]) * (1.0F - q[e]))) < 0.03F);
    }
}

TEST(nothing_is_said_of_prompts) {
    for (const std::string_view name : {"ensemble", "history"}) {
        const auto predictor = make_predictor(name, {2, 8, 1, 1});
        predictor->begin_call(0, std::vector<int32_t>(9, 3), 9);
        CHECK(predict(*predictor, 0, 1, 8).empty());
        predictor->begin_call(1, std::vector<int32_t>(8, 3), 8);
        CHECK(predict(*predictor, 1, 1, 8).size() == 8);
    }
}

TEST(replay_tells_the_future) {
    const auto replay = make_predictor("replay", {2, 8, 2, 3});
    replay->begin_call(0, std::vector<int32_t>{0, 1}, 1);
    CHECK(predict(*replay, 0, 1, 8).empty()); // not told yet
    replay->set_future({{0, 1, {0, 1}}, {1, 1, {2, 3}}, {0, 1, {4, 5}}, {1, 1, {6, 7}}}, {}, 0);
    replay->begin_call(0, std::vector<int32_t>{0, 1}, 1);
    CHECK(predict(*replay, 0, 1, 8) == (std::vector<float>{0, 0, 1, 1, 0, 0, 0, 0}));
    CHECK(predict(*replay, 0, 2, 8) == (std::vector<float>{0, 0, 0, 0, 1, 1, 0, 0}));
    replay->begin_call(1, std::vector<int32_t>{2, 3}, 1);
    CHECK(predict(*replay, 1, 2, 8) == (std::vector<float>{0, 0, 0, 0, 0, 0, 1, 1}));
    CHECK(predict(*replay, 1, 3, 8).empty()); // past the end
    // a call that was recorded but not made is passed over
    replay->begin_call(1, std::vector<int32_t>{6, 7}, 1);
    CHECK(predict(*replay, 1, 1, 8).empty());
}

TEST(replay_with_a_stated_recall) {
    const auto replay = make_predictor("replay", {1, 64, 8, 1});
    std::vector<FutureCall> future;
    Random random{1};
    for (int32_t t = 0; t < 400; ++t) {
        const auto first = static_cast<int32_t>(random.below(57));
        future.push_back({0, 1, {}});
        for (int32_t i = 0; i < 8; ++i) future.back().ids.push_back(first + i);
    }
    replay->set_future(future, std::vector<float>{0.75F}, 3);
    int32_t right = 0;
    int32_t told = 0;
    for (size_t t = 0; t + 1 < future.size(); ++t) {
        replay->begin_call(0, future[t].ids, 1);
        const std::vector<float> p = predict(*replay, 0, 1, 64);
        told += static_cast<int32_t>(std::count(p.begin(), p.end(), 0.75F));
        for (const int32_t e : future[t + 1].ids) right += p[static_cast<size_t>(e)] == 0.75F ? 1 : 0;
    }
    CHECK_EQ(told, 399 * 8);
    CHECK(right > 399 * 8 * 0.72 && right < 399 * 8 * 0.78);
}

TEST(deterministic_and_cheap) {
    for (const auto &[n, k] : {std::pair{64, 6}, std::pair{128, 8}}) {
        std::vector<float> last;
        for (int run = 0; run < 2; ++run) {
            const auto predictor = make_predictor("ensemble", {48, n, k, 6});
            Random random{7};
            std::vector<float> scores(static_cast<size_t>(n));
            std::vector<float> out(static_cast<size_t>(n));
            std::clock_t ticks = 0;
            constexpr int32_t tokens = 40;
            for (int32_t t = 0; t < tokens; ++t) {
                for (int32_t g = 0; g < 48; ++g) {
                    std::vector<int32_t> ids;
                    while (ids.size() < static_cast<size_t>(k)) {
                        const auto e = static_cast<int32_t>(random.below(static_cast<uint32_t>(n)));
                        if (std::find(ids.begin(), ids.end(), e) == ids.end()) ids.push_back(e);
                    }
                    for (float &score : scores) score = static_cast<float>(random.below(1000)) * 0.01F;
                    const std::clock_t start = std::clock();
                    predictor->begin_call(g, ids, 1);
                    for (int32_t h = 1; h <= 6; ++h) (void)predictor->predict(g, h, scores, out);
                    ticks += std::clock() - start;
                }
            }
            if (run == 0) {
                last = out;
                std::cerr << "  " << n << " experts, top-" << k << ": "
                          << 1e6 * static_cast<double>(ticks) / CLOCKS_PER_SEC / (tokens * 48)
                          << " us per layer call, six horizons\n";
            }
            CHECK(out == last);
        }
    }
}

RUN_TESTS()

#include "check.h"

#include "policy/substitution.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace spice::policy;

namespace {

using Pairs = std::vector<RoutedPair>;
using Taken = std::vector<uint8_t>;

constexpr auto k_free = SubstitutionRules::no_budget;

SubstitutionRules wide() { // no threshold but the account
    return {.max_share = 1.0F, .max_mass = 1.0F, .max_confidence = 1.0F, .max_rows = 8, .budget = k_free};
}

Taken choose(Substitution &policy, const Pairs &pairs, size_t top_k) {
    Taken taken(pairs.size(), 7);
    policy.choose(pairs, top_k, taken);
    return taken;
}

Taken choose(const SubstitutionRules &rules, const Pairs &pairs, size_t top_k) {
    Substitution policy(rules, 1, static_cast<int32_t>(top_k));
    return choose(policy, pairs, top_k);
}

} // namespace

TEST(thresholds) {
    const Pairs row = {{.expert = 3, .gate = 0.5F},
                       {.expert = 5, .gate = 0.25F},
                       {.expert = 8, .gate = 0.15F},
                       {.expert = 1, .gate = 0.1F}};
    CHECK_EQ(choose(wide(), row, 4) == Taken({0, 1, 1, 1}), true); // never the top
    SubstitutionRules rules = wide();
    rules.max_share = 0.2F;
    CHECK_EQ(choose(rules, row, 4) == Taken({0, 0, 1, 1}), true);
    rules = wide();
    rules.max_mass = 0.3F; // the lightest first
    CHECK_EQ(choose(rules, row, 4) == Taken({0, 0, 1, 1}), true);
    rules.max_mass = 0.2F;
    CHECK_EQ(choose(rules, row, 4) == Taken({0, 0, 0, 1}), true);
    rules = wide();
    rules.max_confidence = 0.5F;
    Pairs sure = row;
    sure[1].confidence = 0.6F;
    CHECK_EQ(choose(rules, sure, 4) == Taken({0, 0, 1, 1}), true);
    Pairs resident = row;
    resident[2].candidate = false;
    CHECK_EQ(choose(wide(), resident, 4) == Taken({0, 1, 0, 1}), true);
}

TEST(shares_are_of_the_row_and_signs_do_not_matter) {
    const Pairs row = {
        {.expert = 0, .gate = -2.0F}, {.expert = 1, .gate = 1.0F}, {.expert = 2, .gate = -1.0F}};
    SubstitutionRules rules = wide();
    rules.max_share = 0.25F;
    CHECK_EQ(choose(rules, row, 3) == Taken({0, 1, 1}), true);
    rules.max_share = 0.24F;
    CHECK_EQ(choose(rules, row, 3) == Taken({0, 0, 0}), true);
}

TEST(odd_rows) {
    CHECK_EQ(choose(wide(), {{.expert = 0, .gate = 1.0F}}, 1) == Taken({0}), true); // its top
    const Pairs zeros = {{.expert = 0}, {.expert = 1}};
    CHECK_EQ(choose(wide(), zeros, 2) == Taken({0, 0}), true);
    const Pairs nan = {{.expert = 0, .gate = 1.0F}, {.expert = 1, .gate = NAN}};
    CHECK_EQ(choose(wide(), nan, 2) == Taken({0, 0}), true);
    CHECK_EQ(choose(wide(), {}, 2).size(), 0u);
}

TEST(an_expert_is_taken_for_all_rows_or_for_none) {
    // Expert 7 is light in the first row and the top of the second; 9 is light in both.
    const Pairs rows = {{.expert = 1, .gate = 0.8F}, {.expert = 7, .gate = 0.1F},
                        {.expert = 9, .gate = 0.1F}, {.expert = 7, .gate = 0.8F},
                        {.expert = 2, .gate = 0.1F}, {.expert = 9, .gate = 0.1F}};
    CHECK_EQ(choose(wide(), rows, 3) == Taken({0, 0, 1, 0, 1, 1}), true);
    SubstitutionRules rules = wide();
    rules.max_rows = 1; // a prompt
    CHECK_EQ(choose(rules, rows, 3) == Taken({0, 0, 0, 0, 0, 0}), true);
}

TEST(the_account_is_never_overdrawn_and_is_spent) {
    for (const double misses : {0.05, 0.3, 0.9}) {
        constexpr int32_t layers = 10;
        constexpr int n_tokens = 3000;
        SubstitutionRules rules = wide();
        rules.budget = 0.01;
        Substitution policy(rules, layers, 4);
        std::mt19937 random(1);
        std::uniform_real_distribution<float> uniform;
        double spent = 0.0;
        double cheapest_refused = k_free;
        double offered = 0.0;
        for (int token = 0; token < n_tokens; ++token) {
            for (int32_t layer = 0; layer < layers; ++layer) {
                Pairs row;
                for (int32_t e = 0; e < 4; ++e) {
                    RoutedPair pair{.expert = e, .gate = 0.1F + uniform(random)};
                    pair.cost = 1e-5F * std::exp(6.0F * uniform(random)); // 1e-5 .. 4e-3
                    pair.candidate = static_cast<double>(uniform(random)) < misses;
                    row.push_back(pair);
                }
                const Taken taken = choose(policy, row, 4);
                const size_t top = top_pair(row);
                for (size_t i = 0; i < row.size(); ++i) {
                    const auto cost = static_cast<double>(row[i].cost);
                    if (taken[i] != 0) spent += cost;
                    if (!row[i].candidate || i == top) continue;
                    offered += cost;
                    if (taken[i] == 0 && token > 1000) cheapest_refused = std::min(cheapest_refused, cost);
                }
                CHECK(policy.balance() >= 0.0);
                CHECK(spent <= rules.budget * (token + 1));
            }
        }
        const double income = rules.budget * n_tokens;
        // What is offered is taken as long as it can be paid; else nearly all that came in is spent, and what
        // is refused are the dear ones.
        CHECK(spent > std::min(offered, income) * 0.85);
        if (offered > income) CHECK(cheapest_refused > 1e-5 * std::exp(1.0));
    }
}

TEST(what_is_not_calibrated_has_no_price) {
    SubstitutionRules rules = wide();
    rules.budget = 1.0;
    Substitution policy(rules, 1, 2);
    const Pairs unknown = {{.expert = 0, .gate = 0.9F},
                           {.expert = 1, .gate = 0.1F, .cost = std::numeric_limits<float>::infinity()}};
    for (int i = 0; i < 100; ++i) CHECK_EQ(choose(policy, unknown, 2) == Taken({0, 0}), true);
    Pairs free = unknown;
    free[1].cost = 0.0F;
    CHECK_EQ(choose(policy, free, 2) == Taken({0, 1}), true);
    Substitution none({.budget = 0.0}, 1, 2); // a budget of nothing
    free[1].cost = 1e-9F;
    CHECK_EQ(choose(none, free, 2) == Taken({0, 0}), true);
}

TEST(a_larger_lot_takes_a_superset) {
    std::mt19937 random(3);
    std::uniform_real_distribution<float> uniform;
    size_t n_taken = 0;
    size_t n_all = 0;
    for (uint64_t n = 0; n < 2000; ++n) {
        Pairs row;
        for (int32_t e = 0; e < 6; ++e) row.push_back({.expert = 3 * e, .gate = uniform(random)});
        Taken before(6, 0);
        for (const float share : {0.0F, 0.3F, 0.6F, 1.0F}) {
            Taken taken(6);
            ForcedSubstitution(share, 42).choose(1, n, row, taken);
            Taken again(6);
            ForcedSubstitution(share, 42).choose(1, n, row, again);
            CHECK(taken == again);
            CHECK_EQ(taken[top_pair(row)], 0);
            for (size_t i = 0; i < 6; ++i) CHECK(taken[i] >= before[i]);
            before = taken;
            if (share == 0.3F) n_taken += static_cast<size_t>(std::ranges::count(taken, 1));
        }
        CHECK_EQ(std::ranges::count(before, 1), 5);
        n_all += 5;
    }
    CHECK(std::abs(static_cast<double>(n_taken) / static_cast<double>(n_all) - 0.3) < 0.02);
    Taken one(6), other(6);
    Pairs row;
    for (int32_t e = 0; e < 6; ++e) row.push_back({.expert = e, .gate = 1.0F});
    bool differ = false;
    for (uint64_t n = 0; n < 20; ++n) {
        ForcedSubstitution(0.5F, 1).choose(0, n, row, one);
        ForcedSubstitution(0.5F, 2).choose(0, n, row, other);
        differ = differ || one != other;
    }
    CHECK(differ);
}

RUN_TESTS()

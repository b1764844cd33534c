// Which routed experts of a row are replaced by their low-rank stand-ins (LoRE, papers.md section 1).
//
// Two ways to choose. ForcedSubstitution takes a share of all pairs (row, expert) by lot, to measure what
// substituting costs, whatever is in memory. Substitution takes missed experts that matter little.
// Both are deterministic, and neither ever takes the expert of a row that has the largest gate weight.
//
// Who calls: runtime/surrogate_use.h, and tests. Thread: one at a time. Nothing blocks. Errors: none.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace spice::policy {

/// One (row, expert) pair of a layer call.
struct RoutedPair {
    int32_t expert = 0;
    float gate = 0.0F;       ///< weight of the expert's output in the row's sum
    float confidence = 0.0F; ///< chance that was predicted for it; 0 without a prediction
    float cost = 0.0F;       ///< nats of KL that substituting it is expected to cost; 0 where not known
    bool candidate = true;   ///< may be taken: for Substitution, it is missed
};

/// Sum of |gate| over the row.
[[nodiscard]] float gate_sum(std::span<const RoutedPair> row);
/// Index of the pair with the largest |gate|, the first of several.
[[nodiscard]] size_t top_pair(std::span<const RoutedPair> row);

class ForcedSubstitution {
  public:
    /// `share` of the pairs that are candidates and not their row's top, 0 .. 1. With the same seed and the
    /// same routing a larger share takes a superset. Of these, only those with at most `max_share` of the
    /// row's gate sum, and only in the layer `layer` (a group of the Engine; -1: all).
    ForcedSubstitution(float share, uint64_t seed, int32_t layer = -1, float max_share = 1.0F)
        : share_(share), max_share_(max_share), layer_(layer), seed_(seed) {}

    /// The n-th row of that layer; taken[i] says whether pair i is substituted.
    void choose(int32_t layer, uint64_t n, std::span<const RoutedPair> row, std::span<uint8_t> taken) const;

  private:
    float share_;
    float max_share_;
    int32_t layer_;
    uint64_t seed_;
};

/// Thresholds; a pair that is over one of them is computed exactly.
struct SubstitutionRules {
    static constexpr double no_budget = std::numeric_limits<double>::infinity();

    float max_share = 0.2F;      ///< of the row's gate sum, for one pair
    float max_mass = 0.4F;       ///< of the row's gate sum, for all pairs of a layer together
    float max_confidence = 0.5F; ///< what was expected more surely is worth waiting for
    int32_t max_rows = 8;        ///< calls with more rows, prompts, are exact
    double budget = no_budget;   ///< nats per token, spent on average at most
};

/// Chooses among missed experts. A missed expert is taken for all rows of a call or for none, as one exact
/// row needs it read. The cheapest are taken first.
///
/// With a budget, each row brings budget / n_layers nats into an account, which holds at most what
/// `saved_tokens` tokens bring and is never overdrawn. What an expert may cost depends on the balance x, as a
/// share of the most that it can be: between c_low at x = 0 and c_high at x = 1,
///     c_max = c_low (c_high / c_low)^x,     c_high = budget,     c_low = budget / (10 pairs of a token).
/// So where misses are many the balance falls until only cheap ones are taken, and where they are few dear
/// ones are taken too: the pricing of online knapsack algorithms, with an account that fills up again. The
/// balance settles where what is spent is what comes in.
class Substitution {
  public:
    static constexpr double saved_tokens = 32.0;

    /// `n_layers` that have stand-ins, `top_k` pairs for each row in them.
    Substitution(const SubstitutionRules &rules, int32_t n_layers, int32_t top_k);

    /// The pairs of one layer call, [rows][top_k], experts of a row distinct; taken[i] says which are
    /// substituted.
    void choose(std::span<const RoutedPair> pairs, size_t top_k, std::span<uint8_t> taken);

    [[nodiscard]] const SubstitutionRules &rules() const { return rules_; }
    [[nodiscard]] double balance() const { return balance_; } ///< nats; infinite without a budget

  private:
    struct Missed {
        int32_t expert = 0;
        double cost = 0.0;
        double mass = 0.0;
        bool allowed = true;
        uint32_t first = 0, count = 0; ///< in order_
    };
    [[nodiscard]] double most_for_one() const;
    void group(std::span<const RoutedPair> pairs, size_t top_k);

    SubstitutionRules rules_;
    double income_ = 0.0; ///< of one row in one layer
    double most_ = 0.0;   ///< that the account holds
    double low_ = 0.0;    ///< c_low
    double balance_ = SubstitutionRules::no_budget;
    // Of the present call:
    std::vector<float> shares_;   ///< of each pair
    std::vector<double> masses_;  ///< taken, of each row
    std::vector<uint32_t> order_; ///< pairs by expert
    std::vector<Missed> missed_;
};

} // namespace spice::policy

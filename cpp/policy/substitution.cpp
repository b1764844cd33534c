#include "policy/substitution.h"

#include "policy/split_mix.h"

#include <algorithm>
#include <cmath>

namespace spice::policy {

float gate_sum(std::span<const RoutedPair> row) {
    float sum = 0.0F;
    for (const RoutedPair &pair : row) sum += std::fabs(pair.gate);
    return sum;
}

size_t top_pair(std::span<const RoutedPair> row) {
    const auto best =
        std::ranges::max_element(row, {}, [](const RoutedPair &pair) { return std::fabs(pair.gate); });
    return static_cast<size_t>(best - row.begin());
}

void ForcedSubstitution::choose(int32_t layer, uint64_t n, std::span<const RoutedPair> row,
                                std::span<uint8_t> taken) const {
    const size_t top = top_pair(row);
    const float heaviest = max_share_ * gate_sum(row);
    for (size_t i = 0; i < row.size(); ++i) {
        uint64_t lot = split_mix(seed_);
        for (const uint64_t part : {static_cast<uint64_t>(layer), n, static_cast<uint64_t>(row[i].expert)}) {
            lot = split_mix_finish(lot ^ (part + split_mix_step));
        }
        const double drawn = static_cast<double>(lot >> 11) * 0x1p-53;
        const bool light = max_share_ >= 1.0F || std::fabs(row[i].gate) <= heaviest;
        const bool drawn_here = drawn < static_cast<double>(share_) && (layer_ < 0 || layer_ == layer);
        taken[i] = i != top && row[i].candidate && light && drawn_here ? 1 : 0;
    }
}

Substitution::Substitution(const SubstitutionRules &rules, int32_t n_layers, int32_t top_k) : rules_(rules) {
    if (!std::isfinite(rules.budget)) return;
    income_ = rules.budget / std::max(n_layers, 1);
    most_ = rules.budget * saved_tokens;
    low_ = rules.budget / (10.0 * std::max(n_layers, 1) * std::max(top_k, 1));
    balance_ = 0.0; // what is spent never exceeds what came in
}

double Substitution::most_for_one() const {
    if (!std::isfinite(rules_.budget)) return SubstitutionRules::no_budget;
    if (!(most_ > 0.0)) return -1.0;
    return std::min(low_ * std::pow(rules_.budget / low_, balance_ / most_), balance_);
}

/// Sorts out the missed experts of the call, those that the rules for one pair allow, the cheapest first.
void Substitution::group(std::span<const RoutedPair> pairs, size_t top_k) {
    shares_.assign(pairs.size(), 0.0F);
    order_.clear();
    for (size_t first = 0; first < pairs.size(); first += top_k) {
        const auto row = pairs.subspan(first, top_k);
        const float sum = gate_sum(row);
        const size_t top = top_pair(row);
        for (size_t i = 0; i < row.size(); ++i) {
            // A row without weights has no pair that matters little.
            shares_[first + i] = i == top || !(sum > 0.0F) ? 1.0F : std::fabs(row[i].gate) / sum;
            if (row[i].candidate) order_.push_back(static_cast<uint32_t>(first + i));
        }
    }
    std::ranges::stable_sort(order_, {}, [&](uint32_t p) { return pairs[p].expert; });
    missed_.clear();
    for (uint32_t k = 0; k < order_.size(); ++k) {
        const RoutedPair &pair = pairs[order_[k]];
        if (missed_.empty() || missed_.back().expert != pair.expert) {
            missed_.push_back({.expert = pair.expert, .first = k});
        }
        Missed &missed = missed_.back();
        const float share = shares_[order_[k]];
        missed.count += 1;
        missed.cost += static_cast<double>(pair.cost);
        missed.mass += static_cast<double>(share);
        missed.allowed = missed.allowed && share < 1.0F && share <= rules_.max_share &&
                         pair.confidence <= rules_.max_confidence && pair.cost >= 0.0F;
    }
    std::erase_if(missed_, [](const Missed &missed) { return !missed.allowed; });
    std::ranges::stable_sort(missed_, [](const Missed &a, const Missed &b) {
        return a.cost != b.cost ? a.cost < b.cost : a.mass < b.mass;
    });
}

void Substitution::choose(std::span<const RoutedPair> pairs, size_t top_k, std::span<uint8_t> taken) {
    std::ranges::fill(taken, uint8_t{0});
    if (pairs.empty() || top_k == 0) return;
    const size_t n_rows = pairs.size() / top_k;
    if (n_rows > static_cast<size_t>(rules_.max_rows)) return;
    if (std::isfinite(rules_.budget)) {
        balance_ = std::min(balance_ + income_ * static_cast<double>(n_rows), most_);
    }
    group(pairs, top_k);
    masses_.assign(n_rows, 0.0);
    for (const Missed &missed : missed_) {
        if (missed.cost > most_for_one()) break; // the others cost more
        const auto of_expert = std::span(order_).subspan(missed.first, missed.count);
        const bool light = std::ranges::all_of(of_expert, [&](uint32_t p) {
            return masses_[p / top_k] + static_cast<double>(shares_[p]) <=
                   static_cast<double>(rules_.max_mass);
        });
        if (!light) continue;
        for (const uint32_t p : of_expert) {
            masses_[p / top_k] += static_cast<double>(shares_[p]);
            taken[p] = 1;
        }
        if (std::isfinite(rules_.budget)) balance_ -= missed.cost;
    }
}

} // namespace spice::policy

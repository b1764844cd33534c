// What an Engine does with stand-ins for its experts: which (row, expert) pairs of a layer call they replace,
// and the account of it.
//
// Off until rules or a forced share are set; then on() is true and choose() is asked for every layer call.
// Thread: choose() from compute threads, the rest from any; one at a time through a lock of its own. Nothing
// blocks on disk. Errors: Status of the setters.
#pragma once

#include "policy/kl_curve.h"
#include "policy/substitution.h"
#include "runtime/surrogates.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace spice {

/// Since the last reset. A row is counted once in each layer.
struct SurrogateCounters {
    uint64_t rows = 0;  ///< that were asked about
    uint64_t pairs = 0; ///< experts that those rows were routed to
    uint64_t taken = 0; ///< of these, replaced by stand-ins
    uint64_t unfit = 0; ///< layer calls whose graph does not show what a stand-in needs
    double mass = 0.0;  ///< sum of the taken pairs' shares of their row's gate weights
    double error = 0.0; ///< expected squared error of the rows' outputs, relative, summed
    double nats = 0.0;  ///< expected KL divergence of the tokens, summed
};

/// A layer call before anything of it is read.
struct RoutedRows {
    int32_t group = 0;
    size_t top_k = 0;
    std::span<const int32_t> ids;        ///< [rows][top_k]
    std::span<const float> gates;        ///< [rows][top_k]
    std::span<const uint8_t> candidates; ///< [rows][top_k]: pairs that may be replaced
    std::span<const float> forecast;     ///< of each expert, the chance that was predicted; empty: none
};

class SurrogateUse {
  public:
    /// `n_groups`: of the Engine.
    explicit SurrogateUse(int32_t n_groups) : n_rows_(static_cast<size_t>(n_groups), 0) {}

    /// Errors: internal, while it is on.
    [[nodiscard]] Status set_surrogates(std::shared_ptr<const SurrogateSet> set);
    [[nodiscard]] const SurrogateSet *surrogates() const { return set_.get(); }

    /// Replaces experts that are missed, by those rules; their budget is of KL as it is measured. Errors:
    /// unsupported, without stand-ins, or with a budget where no layer has been calibrated.
    [[nodiscard]] Status follow(const policy::SubstitutionRules &rules, int32_t top_k);
    /// Replaces a share (0 .. 1) of the pairs by lot, wherever the experts are. Errors: unsupported, for a
    /// kind other than drop without stand-ins.
    [[nodiscard]] Status force(compute::SurrogateKind kind, const policy::ForcedSubstitution &lot);
    void turn_off();

    [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }
    /// True when some pair is replaced: taken[r * top_k + i] tells which. For groups that it serves().
    [[nodiscard]] bool choose(const RoutedRows &rows, std::span<uint8_t> taken);
    [[nodiscard]] compute::SurrogateKind kind() const { return kind_; }
    [[nodiscard]] bool only_missed() const { return only_missed_; } ///< false: wherever the experts are
    [[nodiscard]] int32_t max_rows() const { return max_rows_; } ///< of a call that choose() is asked about
    /// The group's stand-ins; nullptr where it has none and needs none.
    [[nodiscard]] const SurrogateLayer *layer(int32_t group) const;
    /// True when calls of the group can be asked about at all.
    [[nodiscard]] bool serves(int32_t group) const;
    void count_unfit();

    [[nodiscard]] SurrogateCounters counters() const;
    void reset_counters();

  private:
    [[nodiscard]] double cost(const SurrogateLayer *layer, const policy::RoutedPair &pair) const;
    void count(int32_t group, size_t top_k, std::span<const uint8_t> taken);

    std::shared_ptr<const SurrogateSet> set_;
    std::atomic<bool> on_{false};
    std::atomic<compute::SurrogateKind> kind_{compute::SurrogateKind::full};
    std::atomic<bool> only_missed_{true};
    std::atomic<int32_t> max_rows_{0};

    mutable std::mutex mutex_;                         ///< guards everything below
    std::optional<policy::ForcedSubstitution> forced_; ///< one of these two, while it is on
    std::optional<policy::Substitution> rules_;
    std::vector<uint64_t> n_rows_; ///< by group, since force()
    std::vector<policy::RoutedPair> pairs_;
    policy::KlAccount account_;
    SurrogateCounters counters_;
};

} // namespace spice

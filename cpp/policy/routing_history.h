// What was routed, as features that say what will be: decayed use of every expert, which experts a group used
// last, and how often an expert followed another, one token later in the same group or some groups later in
// the same pass.
//
// Who calls: the learned predictors. One object each; the same calls give the same numbers everywhere.
// Thread: one at a time. Nothing blocks, no I/O, no clock. Memory is allocated in the constructor only,
// bytes() of it: n_groups * n_experts^2 counts of one byte for the next token, and as many for every distance
// within a pass. Distances whose tables would take it above `max_table_bytes` are left out, the longest
// first; n_distances() says what is left (48 layers of 128 experts: all 10, 9 MB; 58 of 256: all, 42 MB; 48
// of 512: 2). Errors: none; ids outside the shape are bugs of the caller (assert).
//
// A *call* is one layer call of some rows (tokens) with the same number of experts each. Calls of many rows
// (prefill) teach too, by their last `max_rows` rows. A pass begins when a call's group is not above the one
// before it; distances run on into the next pass.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spice::policy {

struct RoutingShape {
    int32_t n_groups = 0;    ///< MoE layers, numbered densely in execution order
    int32_t n_experts = 0;   ///< per group, the maximum
    int32_t top_k = 0;       ///< experts per token, the maximum
    int32_t max_horizon = 6; ///< layer calls ahead that are to be predicted
};

class RoutingHistory {
  public:
    static constexpr int32_t max_rows = 64;
    static constexpr int64_t max_table_bytes = int64_t{48} << 20;

    /// Counts of followers at distances 1 .. n_distances, if they fit.
    RoutingHistory(const RoutingShape &shape, int32_t n_distances);

    [[nodiscard]] int32_t n_distances() const { return static_cast<int32_t>(n_distances_); }
    [[nodiscard]] int64_t bytes() const;

    /// `group` routes `rows` tokens to ids [rows][k], k <= top_k, each row's experts distinct.
    void begin_call(int32_t group, std::span<const int32_t> ids, int32_t rows);

    /// Rows of the group's last call that the history holds (its last ones), 0 before the first.
    [[nodiscard]] int32_t rows(int32_t group) const { return n_rows_[static_cast<size_t>(group)]; }

    // Features of each expert at the next call of the group, [n_experts]; they change with its calls only.

    /// Log-odds of the decayed use by the last few dozen tokens.
    [[nodiscard]] std::span<const float> use(int32_t group) const { return of(use_, group); }
    /// Log-odds of the use over as long as the counts of followers remember (about a thousand tokens).
    [[nodiscard]] std::span<const float> long_use(int32_t group) const { return of(long_use_, group); }
    /// The use by the last one or two calls, 0..1.
    [[nodiscard]] std::span<const float> recent(int32_t group) const { return of(recent_, group); }
    /// Log of how many times more often than usual the expert follows, a token later, those of the last call;
    /// the product over them, as if they were independent.
    [[nodiscard]] std::span<const float> follow(int32_t group) const { return of(follow_, group); }

    /// out[n_experts]: the same for the group `distance` calls after `group`, given the experts that `row` of
    /// the last call of `group` used. 1 <= distance <= n_distances(); 0 <= row < rows(group).
    void cross(int32_t group, int32_t distance, int32_t row, std::span<float> out) const;

  private:
    /// How often each expert followed each, with the visits of the first: one byte each, halved when full.
    struct Table {
        std::vector<uint8_t> visits; ///< [n_experts]
        std::vector<uint8_t> counts; ///< [n_experts][n_experts]
    };

    [[nodiscard]] std::span<const float> of(const std::vector<float> &all, int32_t group) const {
        return {&all[static_cast<size_t>(group) * n_experts_], n_experts_};
    }
    [[nodiscard]] std::span<const int32_t> row_of(size_t group, size_t row) const;
    void count(Table &table, std::span<const int32_t> from, std::span<const int32_t> to) const;
    void log_ratio(const Table &table, std::span<const int32_t> from, size_t target,
                   std::span<float> out) const;
    void learn_use(size_t g, std::span<const int32_t> ids, size_t rows);
    void learn_tables(size_t g, std::span<const int32_t> ids, size_t rows, size_t k);

    size_t n_groups_;
    size_t n_experts_;
    size_t top_k_;
    size_t n_distances_;
    float uniform_;    ///< top_k / n_experts, below 1
    float alpha_long_; ///< of long_: as slow as the counts
    int32_t previous_group_ = -1;
    uint64_t call_ = 0;               ///< position in the walk: pass * n_groups + group
    std::vector<float> slow_;         ///< by group, expert: decayed averages of "was used"
    std::vector<float> long_;         ///< by group, expert
    std::vector<float> seen_;         ///< by group: rows that long_ averages, until it decays
    std::vector<float> recent_;       ///< by group, expert
    std::vector<float> use_;          ///< by group, expert
    std::vector<float> long_use_;     ///< by group, expert
    std::vector<float> chance_;       ///< by group, expert: what long_use_ is the log-odds of
    std::vector<float> follow_;       ///< by group, expert
    std::vector<Table> next_;         ///< by group
    std::vector<Table> later_;        ///< by group (of the first), distance - 1
    std::vector<int32_t> ids_;        ///< by group: max_rows * top_k of its last call
    std::vector<int32_t> n_rows_;     ///< by group
    std::vector<int32_t> n_used_;     ///< by group: experts per row in ids_
    std::vector<int32_t> total_rows_; ///< by group: rows of the call itself
    std::vector<uint64_t> called_;    ///< by group: call_ of its last call
};

} // namespace spice::policy

// Prediction heads: from what the experts of one group read, the router scores (logits) of a later group.
//
// FrozenRouters holds the model's own routers, one per group, as Q8_0 rows. RouterHeads maps (group, horizon)
// to the scores of group + horizon:
//
//     - training-free   s = W_t u + b_t,   u = (h - in_shift) / in_scale * router_scale_t + router_shift_t
//     - fitted          s = [W_t u + b_t  or  F h] + B (A h) + P i + Q j + b
//
// h: the input of the routed experts of the group (one token); W_t, b_t and the scales: the frozen router and
// norms of the target and of the present group (the next-gate predictor of AdapMoE and Mixtral-Offloading,
// with the norms' weights exchanged); F: a full map that replaces the router; A, B: low rank, added to the
// router (SpecPrefetch's adapter); i, j: which experts the present group chose now and the target group chose
// for the token before (SPICE's routing context). Each fitted part may be absent.
//
// Thread: build on one thread; then scores() is const and may be called by any number of threads, each with
// its own HeadCall. Nothing blocks, scores() allocates nothing. Errors: Status while building, false from
// scores(). Scores follow the input: NaN in, NaN out.
#pragma once

#include "store/status.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace spice::compute {

/// Rows of a matrix as Q8_0, each padded with zeros to whole blocks, for ggml's dot product.
class PackedRows {
  public:
    PackedRows() = default;
    PackedRows(std::span<const float> rows, int64_t n_in); ///< rows.size() is a multiple of n_in
    [[nodiscard]] bool empty() const { return n_rows_ == 0; }
    [[nodiscard]] int64_t n_rows() const { return n_rows_; }
    [[nodiscard]] uint64_t bytes() const { return data_.size(); }
    /// out[r] = row r . activation, which pack_activation made.
    void multiply(const void *activation, float *out) const;

  private:
    std::vector<std::byte> data_;
    int64_t n_rows_ = 0;
    int64_t padded_ = 0;
    size_t row_bytes_ = 0;
};

/// Rows as F16 of which few are added at a time.
class AddedRows {
  public:
    AddedRows() = default;
    AddedRows(std::span<const float> rows, int64_t n_out);
    [[nodiscard]] uint64_t bytes() const { return data_.size() * sizeof(uint16_t); }
    /// out += factor * row; ignores a row that does not exist. `scratch` has room for one row.
    void add(int64_t row, float factor, float *scratch, float *out) const;

  private:
    std::vector<uint16_t> data_;
    int64_t n_out_ = 0;
};

/// One group's router, as spans over the caller's floats. Empty spans: absent (scales 1, shifts and bias 0).
struct RouterRows {
    std::span<const float> weight = {}; ///< [n_out][n_embd]
    std::span<const float> bias = {};   ///< [n_out]
    std::span<const float> input_scale = {}, input_shift = {}, router_scale = {},
                           router_shift = {}; ///< [n_embd]
};

class FrozenRouters {
  public:
    explicit FrozenRouters(int32_t n_groups) : groups_(static_cast<size_t>(n_groups)) {}
    /// Errors: malformed, when lengths do not fit or the group has a router already.
    [[nodiscard]] Status add(int32_t group, int64_t n_embd, int32_t n_out, const RouterRows &rows);

    [[nodiscard]] int32_t n_groups() const { return static_cast<int32_t>(groups_.size()); }
    [[nodiscard]] bool has(int32_t group) const;
    [[nodiscard]] int32_t n_out(int32_t group) const;  ///< 0 without a router
    [[nodiscard]] int64_t n_embd(int32_t group) const; ///< 0 without a router
    [[nodiscard]] uint64_t bytes() const;

    /// The router input of `target` as far as `h` of `present` tells it: [n_embd] floats.
    void rescale(int32_t present, int32_t target, std::span<const float> h, float *u) const;
    /// out = router rows of `target` . activation + bias.
    void multiply(int32_t target, const void *activation, float *out) const;

  private:
    struct Group {
        int64_t n_embd = 0;
        int32_t n_out = 0;
        PackedRows weight;
        std::vector<float> bias, inverse, input_shift, router_scale, router_shift;
    };
    std::vector<Group> groups_;
};

/// The parts of a fitted head, as spans over the caller's floats; empty: absent.
struct HeadParts {
    std::span<const float> full = {};     ///< [n_out][n_embd]
    std::span<const float> a = {};        ///< [rank][n_embd]
    std::span<const float> b = {};        ///< [rank][n_out]
    std::span<const float> present = {};  ///< [experts of the present group][n_out]
    std::span<const float> previous = {}; ///< [n_out][n_out]
    std::span<const float> bias = {};     ///< [n_out]
};

class RouterHeads;

/// The buffers of one caller and what it has packed of one token. start() before each token.
class HeadCall {
  public:
    explicit HeadCall(const RouterHeads &heads);
    void start(std::span<const float> hidden) {
        hidden_ = hidden;
        packed_plain_ = false;
    }

  private:
    friend class RouterHeads;
    std::span<const float> hidden_;
    bool packed_plain_ = false;
    std::vector<std::byte> plain_, scaled_;
    std::vector<float> floats_, row_, rank_;
};

class RouterHeads {
  public:
    /// Training-free heads for every (group, horizon 1..max_horizon) whose present and target group have
    /// routers of one width.
    RouterHeads(std::shared_ptr<const FrozenRouters> routers, int32_t max_horizon);

    /// Replaces the training-free head of (group, horizon). Errors: malformed (no such head, lengths that do
    /// not fit, numbers that are not finite).
    [[nodiscard]] Status set(int32_t group, int32_t horizon, const HeadParts &parts);

    [[nodiscard]] int32_t n_groups() const { return routers_->n_groups(); }
    [[nodiscard]] bool has(int32_t group, int32_t horizon) const;
    [[nodiscard]] bool fitted(int32_t group, int32_t horizon) const;
    [[nodiscard]] int32_t n_out(int32_t group, int32_t horizon) const; ///< scores of the head, 0 for no head
    [[nodiscard]] int64_t n_embd(int32_t group) const { return routers_->n_embd(group); }
    [[nodiscard]] uint64_t bytes() const; ///< of the fitted parts; FrozenRouters::bytes() come on top, once

    /// The scores of group + horizon for the token that `call` was started with, into out[0 .. n_out).
    /// `present`: experts that the group chose for this token; `previous`: experts that the target group
    /// chose for the token before (both may be empty; ids that do not exist are ignored). False, and `out`
    /// untouched, when there is no such head or a length does not fit.
    [[nodiscard]] bool scores(int32_t group, int32_t horizon, std::span<const int32_t> present,
                              std::span<const int32_t> previous, HeadCall &call, std::span<float> out) const;

  private:
    friend class HeadCall;
    struct Head {
        bool exists = false;
        bool fitted = false;
        PackedRows full, a;
        AddedRows b, present, previous;
        std::vector<float> bias;
    };
    [[nodiscard]] const Head *find(int32_t group, int32_t horizon) const;
    [[nodiscard]] const void *plain(HeadCall &call) const;

    std::shared_ptr<const FrozenRouters> routers_;
    int32_t max_horizon_;
    std::vector<Head> heads_; ///< [group][horizon - 1]
};

} // namespace spice::compute

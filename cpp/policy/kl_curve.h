// What replacing experts costs all together: KL divergence over the sum of what each of them costs alone.
//
// Errors of many layers add up to less than their sum where they are large, since what can happen to a token
// is bounded, so spice-fit measures a few points of this curve (docs/lore.md). Who calls:
// runtime/surrogate_use.h, runtime/surrogates.h, and tests. Thread: any; const after construction. Nothing
// blocks. Errors: none.
#pragma once

#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace spice::policy {

class KlCurve {
  public:
    struct Point {
        double sum = 0.0; ///< nats per token, each replaced expert by itself
        double kl = 0.0;  ///< nats per token, measured
    };

    KlCurve() = default; ///< the sum itself
    /// Straight lines from (0, 0) through the points, the last of them going on. `points` are valid().
    explicit KlCurve(std::vector<Point> points) : points_(std::move(points)) {}

    /// At least one point, all numbers finite and above 0, both growing from point to point.
    [[nodiscard]] static bool valid(std::span<const Point> points);

    [[nodiscard]] double kl(double sum) const;
    /// The sum at which kl() is `nats`; infinite for infinite ones.
    [[nodiscard]] double sum(double nats) const;

  private:
    std::vector<Point> points_;
};

/// Adds up the KL of tokens from the sums of their layer calls, which come layer by layer. Tokens of one
/// pass over the layers share its mean, as they did where the curve was measured.
class KlAccount {
  public:
    /// What one layer call of `n_rows` rows adds to the expected KL of all its tokens together; `sum` is over
    /// the rows. A layer that is no later than the last one begins another pass.
    [[nodiscard]] double add(const KlCurve &curve, int layer, double n_rows, double sum);

  private:
    int last_ = std::numeric_limits<int>::max();
    double sum_ = 0.0; ///< of this pass, for each of its tokens
};

} // namespace spice::policy

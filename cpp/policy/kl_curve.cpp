#include "policy/kl_curve.h"

#include <algorithm>
#include <cmath>

namespace spice::policy {

namespace {

/// y at x, on the straight lines from (0, 0) through the points.
double along(std::span<const KlCurve::Point> points, double KlCurve::Point::*x, double KlCurve::Point::*y,
             double at) {
    if (points.empty()) return at;
    auto right = std::ranges::lower_bound(points, at, {}, x);
    if (right == points.end()) --right;
    const KlCurve::Point left = right == points.begin() ? KlCurve::Point{} : *(right - 1);
    const double slope = ((*right).*y - left.*y) / ((*right).*x - left.*x);
    return left.*y + slope * (at - left.*x);
}

} // namespace

bool KlCurve::valid(std::span<const Point> points) {
    Point left;
    for (const Point &p : points) {
        if (!(p.sum > left.sum && p.kl > left.kl && std::isfinite(p.sum) && std::isfinite(p.kl)))
            return false;
        left = p;
    }
    return !points.empty();
}

double KlCurve::kl(double sum) const {
    return along(points_, &Point::sum, &Point::kl, sum);
}

double KlCurve::sum(double nats) const {
    return along(points_, &Point::kl, &Point::sum, nats);
}

double KlAccount::add(const KlCurve &curve, int layer, double n_rows, double sum) {
    if (layer <= last_) sum_ = 0.0;
    last_ = layer;
    if (!(n_rows > 0.0) || !(sum > 0.0)) return 0.0;
    const double before = curve.kl(sum_);
    sum_ += sum / n_rows;
    return n_rows * (curve.kl(sum_) - before);
}

} // namespace spice::policy

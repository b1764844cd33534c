#include "check.h"

#include "policy/kl_curve.h"

#include <cmath>
#include <limits>
#include <vector>

using namespace spice::policy;

namespace {

const KlCurve k_curve({{.sum = 0.1, .kl = 0.2}, {.sum = 0.5, .kl = 0.4}, {.sum = 1.0, .kl = 0.5}});
constexpr double k_inf = std::numeric_limits<double>::infinity();

bool near(double a, double b) {
    return std::fabs(a - b) < 1e-12;
}

} // namespace

TEST(lines_from_point_to_point) {
    CHECK_EQ(k_curve.kl(0.0), 0.0);
    CHECK_EQ(near(k_curve.kl(0.05), 0.1), true);
    CHECK_EQ(near(k_curve.kl(0.1), 0.2), true);
    CHECK_EQ(near(k_curve.kl(0.3), 0.3), true);
    CHECK_EQ(near(k_curve.kl(2.0), 0.7), true); // the last line goes on
    for (const double sum : {0.0, 0.02, 0.1, 0.4, 1.0, 3.0})
        CHECK_EQ(near(k_curve.sum(k_curve.kl(sum)), sum), true);
    CHECK_EQ(k_curve.sum(k_inf), k_inf);
    const KlCurve none;
    CHECK_EQ(none.kl(0.3), 0.3);
    CHECK_EQ(none.sum(k_inf), k_inf);
}

TEST(what_is_no_curve) {
    using Points = std::vector<KlCurve::Point>;
    CHECK_EQ(KlCurve::valid(Points{{0.1, 0.2}, {0.2, 0.3}}), true);
    CHECK_EQ(KlCurve::valid(Points{}), false);
    CHECK_EQ(KlCurve::valid(Points{{0.0, 0.2}}), false);
    CHECK_EQ(KlCurve::valid(Points{{0.1, 0.2}, {0.2, 0.2}}), false);
    CHECK_EQ(KlCurve::valid(Points{{0.2, 0.2}, {0.1, 0.3}}), false);
    CHECK_EQ(KlCurve::valid(Points{{0.1, std::nan("")}}), false);
    CHECK_EQ(KlCurve::valid(Points{{0.1, 0.2}, {k_inf, 0.3}}), false);
}

TEST(layers_of_a_pass_add_up_along_the_curve) {
    KlAccount account;
    double kl = 0.0;
    for (const int layer : {0, 2, 5}) kl += account.add(k_curve, layer, 4.0, 4 * 0.2);
    CHECK_EQ(near(kl, 4 * k_curve.kl(0.6)), true);
    // The next tokens start from nothing: at the first layer, or at any that is not later.
    CHECK_EQ(near(account.add(k_curve, 5, 2.0, 2 * 0.05), 2 * 0.1), true);
    CHECK_EQ(near(account.add(k_curve, 0, 1.0, 0.1), 0.2), true);
    CHECK_EQ(account.add(k_curve, 1, 1.0, 0.0), 0.0);
    CHECK_EQ(near(account.add(k_curve, 2, 1.0, 0.4), 0.2), true);
    // A layer without any pair replaced ends a pass, too.
    CHECK_EQ(account.add(k_curve, 0, 1.0, 0.0), 0.0);
    CHECK_EQ(near(account.add(k_curve, 2, 1.0, 0.1), 0.2), true);
    // Fewer rows in the last layer, of a prompt: their share of it.
    CHECK_EQ(near(account.add(k_curve, 3, 0.5, 0.5 * 0.4), 0.5 * 0.2), true);
}

RUN_TESTS()

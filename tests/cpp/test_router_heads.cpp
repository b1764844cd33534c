#include "check.h"

#include "compute/router_heads.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

using namespace spice;
using namespace spice::compute;

namespace {

using Floats = std::vector<float>;

Floats random(size_t n, uint32_t seed, float scale = 1.0f) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    Floats out(n);
    for (float &v : out) v = normal(engine);
    return out;
}

constexpr int64_t k_embd = 72; // no multiple of a Q8_0 block
constexpr int32_t k_experts = 8;

struct Routers {
    std::vector<Floats> weight, scale;
    std::shared_ptr<FrozenRouters> frozen;
};

Routers make_routers(int32_t n_groups, bool scaled) {
    Routers out;
    out.frozen = std::make_shared<FrozenRouters>(n_groups);
    for (int32_t g = 0; g < n_groups; ++g) {
        const auto seed = static_cast<uint32_t>(g);
        out.weight.push_back(random(k_embd * k_experts, 10 + seed));
        Floats scale = random(k_embd, 50 + seed, 0.2f);
        for (float &v : scale) v += 1.0f;
        out.scale.push_back(scaled ? scale : Floats());
        const Status status = out.frozen->add(
            g, k_embd, k_experts,
            {.weight = out.weight.back(), .input_scale = out.scale.back(), .router_scale = out.scale.back()});
        CHECK(status.ok());
    }
    return out;
}

Floats product(const Floats &rows, const Floats &x) {
    Floats out(rows.size() / x.size());
    for (size_t r = 0; r < out.size(); ++r) {
        double sum = 0.0;
        for (size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(rows[r * x.size() + i]) * x[i];
        out[r] = static_cast<float>(sum);
    }
    return out;
}

/// Close by the precision of two Q8_0 operands of these widths.
bool close(const Floats &a, const Floats &b, float tolerance = 0.4f) {
    for (size_t i = 0; i < a.size(); ++i) {
        if (!(std::abs(a[i] - b[i]) < tolerance)) return false;
    }
    return a.size() == b.size();
}

Floats run(const RouterHeads &heads, int32_t group, int32_t horizon, const Floats &h,
           const std::vector<int32_t> &present = {}, const std::vector<int32_t> &previous = {}) {
    HeadCall call(heads);
    call.start(h);
    Floats out(k_experts, -1.0f);
    if (!heads.scores(group, horizon, present, previous, call, out)) return {};
    return out;
}

} // namespace

TEST(training_free_exchanges_the_norms) {
    const Routers r = make_routers(3, true);
    const RouterHeads heads(r.frozen, 6);
    const Floats h = random(k_embd, 1);
    Floats u = h;
    for (size_t i = 0; i < u.size(); ++i) u[i] = h[i] / r.scale[0][i] * r.scale[2][i];
    CHECK(close(run(heads, 0, 2, h), product(r.weight[2], u)));
    CHECK(!close(run(heads, 0, 2, h), product(r.weight[2], h)));
    CHECK(!close(run(heads, 0, 2, h), product(r.weight[1], u)));
}

TEST(without_norms_the_input_is_taken_as_it_is) {
    const Routers r = make_routers(2, false);
    const Floats h = random(k_embd, 1);
    CHECK(close(run(RouterHeads(r.frozen, 1), 0, 1, h), product(r.weight[1], h)));
}

TEST(a_channel_that_the_norm_removes_is_left_out) {
    FrozenRouters frozen(2);
    const Floats weight = random(k_embd * k_experts, 1);
    Floats scale(k_embd, 1.0f);
    scale[3] = 1e-6f;
    CHECK(frozen.add(0, k_embd, k_experts, {.weight = weight, .input_scale = scale, .router_scale = scale})
              .ok());
    CHECK(frozen.add(1, k_embd, k_experts, {.weight = weight}).ok());
    const Floats h(k_embd, 1.0f);
    Floats u(k_embd);
    frozen.rescale(0, 1, h, u.data());
    CHECK_EQ(u[3], 0.0f);
    CHECK_EQ(u[4], 1.0f);
}

TEST(shifts_and_biases_are_undone_and_applied) {
    FrozenRouters frozen(2);
    const Floats weight = random(k_embd * k_experts, 1);
    const Floats shift = random(k_embd, 2);
    const Floats bias = random(k_experts, 3, 5.0f);
    CHECK(frozen.add(0, k_embd, k_experts, {.weight = weight, .input_shift = shift}).ok());
    CHECK(frozen.add(1, k_embd, k_experts, {.weight = weight, .bias = bias, .router_shift = shift}).ok());
    const Floats h = random(k_embd, 4);
    Floats u(k_embd);
    frozen.rescale(0, 1, h, u.data());
    CHECK(close(u, h, 1e-5f));
    const auto shared = std::make_shared<FrozenRouters>(std::move(frozen));
    Floats expected = product(weight, h);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += bias[i];
    CHECK(close(run(RouterHeads(shared, 1), 0, 1, h), expected));
}

TEST(fitted_parts_add_up) {
    const Routers r = make_routers(3, true);
    RouterHeads heads(r.frozen, 2);
    const Floats h = random(k_embd, 1);
    const Floats base = run(heads, 0, 2, h);
    const Floats full = random(k_embd * k_experts, 2), a = random(4 * k_embd, 3),
                 b = random(4 * k_experts, 4);
    const Floats present = random(k_experts * k_experts, 5, 9.0f),
                 previous = random(k_experts * k_experts, 6, 9.0f);
    const Floats bias = random(k_experts, 7, 9.0f);
    CHECK(heads.set(0, 2, {.bias = bias}).ok());
    Floats expected = base;
    for (int i = 0; i < k_experts; ++i) expected[i] += bias[i];
    CHECK(close(run(heads, 0, 2, h), expected, 1e-3f));
    CHECK(heads.fitted(0, 2));
    CHECK(!heads.fitted(0, 1));

    CHECK(heads.set(0, 2, {.a = a, .b = b}).ok());
    const Floats low = product(a, h);
    expected = base;
    for (int r4 = 0; r4 < 4; ++r4) {
        for (int i = 0; i < k_experts; ++i) expected[i] += low[r4] * b[r4 * k_experts + i];
    }
    CHECK(close(run(heads, 0, 2, h), expected, 1.0f));

    CHECK(heads.set(0, 2, {.full = full, .present = present, .previous = previous, .bias = bias}).ok());
    expected = product(full, h);
    for (int i = 0; i < k_experts; ++i) {
        expected[i] +=
            bias[i] + present[1 * k_experts + i] + present[6 * k_experts + i] + previous[3 * k_experts + i];
    }
    CHECK(close(run(heads, 0, 2, h, {1, 6}, {3}), expected));
    // Ids that do not exist change nothing.
    CHECK(close(run(heads, 0, 2, h, {1, -1, 6, k_experts}, {3, INT32_MAX}), expected));
    CHECK(!close(run(heads, 0, 2, h, {1, 5}, {3}), expected));
    CHECK(heads.bytes() > 0);
}

TEST(a_call_is_reused_for_every_head_of_a_token) {
    const Routers r = make_routers(4, true);
    RouterHeads heads(r.frozen, 3);
    CHECK(heads.set(0, 2, {.full = r.weight[0]}).ok());
    CHECK(heads.set(0, 3, {.a = random(2 * k_embd, 3), .b = random(2 * k_experts, 4)}).ok());
    HeadCall call(heads);
    for (uint32_t token = 0; token < 3; ++token) {
        const Floats h = random(k_embd, 100 + token);
        call.start(h);
        for (int32_t horizon = 1; horizon <= 3; ++horizon) {
            Floats out(k_experts);
            CHECK(heads.scores(0, horizon, {}, {}, call, out));
            CHECK(close(out, run(heads, 0, horizon, h), 1e-6f));
        }
    }
}

TEST(what_cannot_be_is_refused) {
    const Routers r = make_routers(2, false);
    RouterHeads heads(r.frozen, 6);
    const Floats h = random(k_embd, 1);
    CHECK(run(heads, 1, 1, h).empty()); // no group 2
    CHECK(run(heads, 0, 0, h).empty());
    CHECK(run(heads, -1, 1, h).empty());
    CHECK(run(heads, 0, 7, h).empty());
    CHECK(run(heads, 0, 1, Floats(k_embd - 1, 0.0f)).empty());
    CHECK_EQ(heads.n_out(1, 1), 0);
    CHECK(!heads.set(1, 1, {.bias = Floats(k_experts)}).ok());
    CHECK(!heads.set(0, 1, {.bias = Floats(k_experts + 1)}).ok());
    CHECK(!heads.set(0, 1, {.full = Floats(k_embd)}).ok());
    CHECK(!heads.set(0, 1, {.a = Floats(k_embd)}).ok());
    CHECK(!heads.set(0, 1, {.a = Floats(k_embd), .b = Floats(k_experts + 1)}).ok());
    CHECK(!heads.set(0, 1, {.bias = Floats(k_experts, std::numeric_limits<float>::infinity())}).ok());
    CHECK(!heads.fitted(0, 1));
    FrozenRouters frozen(1);
    CHECK(!frozen.add(1, k_embd, k_experts, {.weight = r.weight[0]}).ok());
    CHECK(!frozen.add(0, k_embd, k_experts, {.weight = h}).ok());
    CHECK(!frozen.add(0, k_embd, k_experts, {.weight = r.weight[0], .input_scale = Floats(3, 1.0f)}).ok());
    CHECK(frozen.add(0, k_embd, k_experts, {.weight = r.weight[0]}).ok());
    CHECK(!frozen.add(0, k_embd, k_experts, {.weight = r.weight[0]}).ok());
}

RUN_TESTS()

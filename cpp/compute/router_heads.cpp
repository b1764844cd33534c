#include "compute/router_heads.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace spice::compute {

namespace {

constexpr ggml_type k_type = GGML_TYPE_Q8_0;

int64_t padded(int64_t n) {
    const int64_t block = ggml_blck_size(k_type);
    return (n + block - 1) / block * block;
}

ggml_type activation_type() {
    return ggml_get_type_traits_cpu(k_type)->vec_dot_type;
}

size_t activation_bytes(int64_t n) {
    return ggml_row_size(activation_type(), padded(n));
}

/// Packs n floats for PackedRows::multiply. `floats` must be readable and zero up to padded(n).
void pack_activation(const float *floats, int64_t n, std::byte *to) {
    ggml_get_type_traits_cpu(activation_type())->from_float(floats, to, padded(n));
}

bool all_finite(std::span<const float> values) {
    return std::ranges::all_of(values, [](float v) { return std::isfinite(v); });
}

Status wrong(const std::string &what) {
    return {Code::malformed, what};
}

} // namespace

PackedRows::PackedRows(std::span<const float> rows, int64_t n_in) {
    if (rows.empty() || n_in < 1) return;
    n_rows_ = static_cast<int64_t>(rows.size()) / n_in;
    padded_ = padded(n_in);
    row_bytes_ = ggml_row_size(k_type, padded_);
    data_.resize(row_bytes_ * static_cast<size_t>(n_rows_));
    std::vector<float> row(static_cast<size_t>(padded_), 0.0f);
    for (int64_t r = 0; r < n_rows_; ++r) {
        std::copy_n(rows.data() + r * n_in, n_in, row.data());
        ggml_get_type_traits_cpu(k_type)->from_float(
            row.data(), data_.data() + static_cast<size_t>(r) * row_bytes_, padded_);
    }
}

void PackedRows::multiply(const void *activation, float *out) const {
    const ggml_vec_dot_t dot = ggml_get_type_traits_cpu(k_type)->vec_dot;
    for (int64_t r = 0; r < n_rows_; ++r) {
        dot(static_cast<int>(padded_), out + r, 0, data_.data() + static_cast<size_t>(r) * row_bytes_, 0,
            activation, 0, 1);
    }
}

AddedRows::AddedRows(std::span<const float> rows, int64_t n_out) : data_(rows.size()), n_out_(n_out) {
    static_assert(sizeof(ggml_fp16_t) == sizeof(uint16_t));
    ggml_fp32_to_fp16_row(rows.data(), data_.data(), static_cast<int64_t>(rows.size()));
}

void AddedRows::add(int64_t row, float factor, float *scratch, float *out) const {
    if (row < 0 || (row + 1) * n_out_ > static_cast<int64_t>(data_.size())) return;
    ggml_cpu_fp16_to_fp32(data_.data() + row * n_out_, scratch, n_out_);
    for (int64_t i = 0; i < n_out_; ++i) out[i] += factor * scratch[i];
}

Status FrozenRouters::add(int32_t group, int64_t n_embd, int32_t n_out, const RouterRows &rows) {
    ggml_cpu_init(); // the tables that F16 conversions use; done once, whoever comes first
    const std::string name = "the router of group " + std::to_string(group);
    if (group < 0 || group >= n_groups() || n_embd < 1 || n_out < 1) return wrong(name + " does not exist");
    Group &g = groups_[static_cast<size_t>(group)];
    if (g.n_out != 0) return wrong(name + " is given twice");
    const auto width = static_cast<size_t>(n_embd);
    const auto count = static_cast<size_t>(n_out);
    const auto fits = [](std::span<const float> v, size_t n) { return v.empty() || v.size() == n; };
    if (rows.weight.size() != width * count || !fits(rows.bias, count) || !fits(rows.input_scale, width) ||
        !fits(rows.input_shift, width) || !fits(rows.router_scale, width) ||
        !fits(rows.router_shift, width)) {
        return wrong(name + " has parts whose lengths do not fit " + std::to_string(n_out) + " x " +
                     std::to_string(n_embd));
    }
    g.n_embd = n_embd;
    g.n_out = n_out;
    g.weight = PackedRows(rows.weight, n_embd);
    const auto copy = [](std::span<const float> v) { return std::vector<float>(v.begin(), v.end()); };
    g.bias = copy(rows.bias);
    g.input_shift = copy(rows.input_shift);
    g.router_scale = copy(rows.router_scale);
    g.router_shift = copy(rows.router_shift);
    // A channel that the norm all but removes tells nothing: dividing by its weight would only raise noise.
    double square = 0.0;
    for (const float v : rows.input_scale) square += static_cast<double>(v) * v;
    const auto tiny = static_cast<float>(1e-3 * std::sqrt(square / static_cast<double>(width)));
    for (const float v : rows.input_scale) g.inverse.push_back(std::abs(v) > tiny ? 1.0f / v : 0.0f);
    return {};
}

bool FrozenRouters::has(int32_t group) const {
    return n_out(group) > 0;
}

int32_t FrozenRouters::n_out(int32_t group) const {
    return group >= 0 && group < n_groups() ? groups_[static_cast<size_t>(group)].n_out : 0;
}

int64_t FrozenRouters::n_embd(int32_t group) const {
    return group >= 0 && group < n_groups() ? groups_[static_cast<size_t>(group)].n_embd : 0;
}

uint64_t FrozenRouters::bytes() const {
    uint64_t sum = 0;
    for (const Group &g : groups_) {
        sum += g.weight.bytes() + sizeof(float) * (g.bias.size() + g.inverse.size() + g.input_shift.size() +
                                                   g.router_scale.size() + g.router_shift.size());
    }
    return sum;
}

void FrozenRouters::rescale(int32_t present, int32_t target, std::span<const float> h, float *u) const {
    const Group &from = groups_[static_cast<size_t>(present)];
    const Group &to = groups_[static_cast<size_t>(target)];
    const size_t n = h.size();
    std::copy(h.begin(), h.end(), u);
    if (!from.input_shift.empty()) {
        for (size_t i = 0; i < n; ++i) u[i] -= from.input_shift[i];
    }
    if (!from.inverse.empty()) {
        for (size_t i = 0; i < n; ++i) u[i] *= from.inverse[i];
    }
    if (!to.router_scale.empty()) {
        for (size_t i = 0; i < n; ++i) u[i] *= to.router_scale[i];
    }
    if (!to.router_shift.empty()) {
        for (size_t i = 0; i < n; ++i) u[i] += to.router_shift[i];
    }
}

void FrozenRouters::multiply(int32_t target, const void *activation, float *out) const {
    const Group &g = groups_[static_cast<size_t>(target)];
    g.weight.multiply(activation, out);
    for (size_t i = 0; i < g.bias.size(); ++i) out[i] += g.bias[i];
}

RouterHeads::RouterHeads(std::shared_ptr<const FrozenRouters> routers, int32_t max_horizon)
    : routers_(std::move(routers)), max_horizon_(std::max(max_horizon, 0)),
      heads_(static_cast<size_t>(routers_->n_groups()) * static_cast<size_t>(max_horizon_)) {
    for (int32_t group = 0; group < n_groups(); ++group) {
        for (int32_t horizon = 1; horizon <= max_horizon_; ++horizon) {
            const bool both = routers_->has(group) && routers_->has(group + horizon) &&
                              routers_->n_embd(group) == routers_->n_embd(group + horizon);
            heads_[static_cast<size_t>(group) * static_cast<size_t>(max_horizon_) +
                   static_cast<size_t>(horizon - 1)]
                .exists = both;
        }
    }
}

const RouterHeads::Head *RouterHeads::find(int32_t group, int32_t horizon) const {
    if (group < 0 || group >= n_groups() || horizon < 1 || horizon > max_horizon_) return nullptr;
    const Head &head = heads_[static_cast<size_t>(group) * static_cast<size_t>(max_horizon_) +
                              static_cast<size_t>(horizon - 1)];
    return head.exists ? &head : nullptr;
}

bool RouterHeads::has(int32_t group, int32_t horizon) const {
    return find(group, horizon) != nullptr;
}

bool RouterHeads::fitted(int32_t group, int32_t horizon) const {
    const Head *head = find(group, horizon);
    return head != nullptr && head->fitted;
}

int32_t RouterHeads::n_out(int32_t group, int32_t horizon) const {
    return has(group, horizon) ? routers_->n_out(group + horizon) : 0;
}

uint64_t RouterHeads::bytes() const {
    uint64_t sum = 0;
    for (const Head &head : heads_) {
        sum += head.full.bytes() + head.a.bytes() + head.b.bytes() + head.present.bytes() +
               head.previous.bytes() + sizeof(float) * head.bias.size();
    }
    return sum;
}

Status RouterHeads::set(int32_t group, int32_t horizon, const HeadParts &parts) {
    const std::string name =
        "the head of group " + std::to_string(group) + ", horizon " + std::to_string(horizon);
    const Head *found = find(group, horizon);
    if (found == nullptr) return wrong(name + " cannot exist in this model");
    const auto width = static_cast<size_t>(routers_->n_embd(group));
    const auto n_in = static_cast<size_t>(routers_->n_out(group));
    const auto count = static_cast<size_t>(routers_->n_out(group + horizon));
    const size_t rank = parts.a.size() / width;
    const auto fits = [](std::span<const float> v, size_t n) { return v.empty() || v.size() == n; };
    if (!fits(parts.full, count * width) || parts.a.size() != rank * width ||
        parts.b.size() != rank * count || !fits(parts.present, n_in * count) ||
        !fits(parts.previous, count * count) || !fits(parts.bias, count)) {
        return wrong(name + " has parts whose lengths do not fit " + std::to_string(count) + " experts and " +
                     std::to_string(width) + " values");
    }
    for (const auto part : {parts.full, parts.a, parts.b, parts.present, parts.previous, parts.bias}) {
        if (!all_finite(part)) return wrong(name + " has numbers that are not finite");
    }
    Head head;
    head.exists = head.fitted = true;
    head.full = PackedRows(parts.full, static_cast<int64_t>(width));
    head.a = PackedRows(parts.a, static_cast<int64_t>(width));
    const auto n_out = static_cast<int64_t>(count);
    head.b = AddedRows(parts.b, n_out);
    head.present = AddedRows(parts.present, n_out);
    head.previous = AddedRows(parts.previous, n_out);
    head.bias.assign(parts.bias.begin(), parts.bias.end());
    heads_[static_cast<size_t>(found - heads_.data())] = std::move(head);
    return {};
}

HeadCall::HeadCall(const RouterHeads &heads) {
    int64_t width = 1;
    int64_t count = 1;
    int64_t rank = 1;
    for (int32_t group = 0; group < heads.n_groups(); ++group) {
        width = std::max(width, heads.routers_->n_embd(group));
        count = std::max<int64_t>(count, heads.routers_->n_out(group));
    }
    for (const RouterHeads::Head &head : heads.heads_) rank = std::max(rank, head.a.n_rows());
    plain_.resize(activation_bytes(width));
    scaled_.resize(activation_bytes(width));
    floats_.resize(static_cast<size_t>(padded(width)), 0.0f);
    row_.resize(static_cast<size_t>(count));
    rank_.resize(static_cast<size_t>(rank));
}

const void *RouterHeads::plain(HeadCall &call) const {
    if (!call.packed_plain_) {
        const auto n = static_cast<int64_t>(call.hidden_.size());
        std::ranges::copy(call.hidden_, call.floats_.begin());
        std::fill(call.floats_.begin() + n, call.floats_.begin() + padded(n), 0.0f);
        pack_activation(call.floats_.data(), n, call.plain_.data());
        call.packed_plain_ = true;
    }
    return call.plain_.data();
}

bool RouterHeads::scores(int32_t group, int32_t horizon, std::span<const int32_t> present,
                         std::span<const int32_t> previous, HeadCall &call, std::span<float> out) const {
    const Head *head = find(group, horizon);
    if (head == nullptr) return false;
    const int32_t target = group + horizon;
    const int64_t width = routers_->n_embd(group);
    const auto count = static_cast<size_t>(routers_->n_out(target));
    if (static_cast<int64_t>(call.hidden_.size()) != width || out.size() < count) return false;
    if (!head->full.empty()) {
        head->full.multiply(plain(call), out.data());
    } else {
        routers_->rescale(group, target, call.hidden_, call.floats_.data());
        std::fill(call.floats_.begin() + width, call.floats_.begin() + padded(width), 0.0f);
        pack_activation(call.floats_.data(), width, call.scaled_.data());
        routers_->multiply(target, call.scaled_.data(), out.data());
    }
    for (size_t i = 0; i < head->bias.size(); ++i) out[i] += head->bias[i];
    if (!head->a.empty()) {
        head->a.multiply(plain(call), call.rank_.data());
        for (int64_t r = 0; r < head->a.n_rows(); ++r) {
            head->b.add(r, call.rank_[static_cast<size_t>(r)], call.row_.data(), out.data());
        }
    }
    for (const int32_t id : present) head->present.add(id, 1.0f, call.row_.data(), out.data());
    for (const int32_t id : previous) head->previous.add(id, 1.0f, call.row_.data(), out.data());
    return true;
}

} // namespace spice::compute

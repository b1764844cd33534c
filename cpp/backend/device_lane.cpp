#include "backend/device_lane.h"

#include "backend/tensor_rows.h"
#include "store/align.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace spice {

std::unique_ptr<DeviceLane> DeviceLane::make(DeviceTier &tier) {
    std::unique_ptr<DeviceLane> lane(new DeviceLane(tier));
    lane->stream_.reset(ggml_backend_dev_init(tier.device(), nullptr));
    if (lane->stream_ == nullptr) return nullptr;
    lane->work_.emplace(lane->stream_.get());
    return lane;
}

DeviceLaunch &DeviceLane::next_launch() {
    if (launches_used_ == launches_.size()) launches_.emplace_back(stream_.get(), *work_);
    return launches_[launches_used_++];
}

ggml_backend_event_t DeviceLane::event(size_t index) {
    if (events_.size() <= index) {
        events_.resize(index + 1);
    }
    if (events_[index] == nullptr) {
        events_[index].reset(ggml_backend_event_new(tier_.device()));
    }
    return events_[index].get();
}

bool DeviceLane::fits(int32_t group, const std::optional<BlockShape> &block) {
    if (fits_.size() <= static_cast<size_t>(group)) fits_.resize(static_cast<size_t>(group) + 1);
    Fit &fit = fits_[static_cast<size_t>(group)];
    if (fit == Fit::unknown) {
        const std::optional<bool> can =
            block.has_value() ? next_launch().supported(*block, tier_) : std::optional(false);
        launches_used_ = 0;
        if (!can) { // no memory to find out: next time, perhaps
            tier_.count_refused();
            return false;
        }
        fit = *can ? Fit::yes : Fit::no;
    }
    if (fit == Fit::yes && block.has_value()) return true;
    tier_.count_unfit();
    return false;
}

Status DeviceLane::share(ggml_cgraph *graph, RoutedCall &call, std::span<const int32_t> routed,
                         const InputCopies &inputs, policy::FunctionRef<bool(const ggml_tensor *)> pending) {
    free();
    block_ = BlockShape::recognise(graph, call.ids, call.group);
    if (block_ && pending(block_->x)) block_.reset();
    if (!fits(call.group, block_)) return {};
    call.device.begin(tier_, call.group, routed);
    call.merge_at = block_->down;
    call.launched = Timeline::now();
    if (call.device.empty()) return {};
    sort_rows(
        routed.size(), call.ids->ne[0], static_cast<size_t>(std::ranges::max(routed)) + 1,
        [&](size_t r) { return call.device.takes(routed[r]) ? routed[r] : -1; }, rows_, first_);
    Status status = make_room();
    if (status.ok()) status = place_activations(inputs);
    if (status.ok()) status = launch(call);
    if (status.ok()) {
        state_ = State::computing;
        call.lane = this;
    } else if (status.code() == Code::out_of_memory) {
        wait();
        call.device.give_up();
        call.merge_at = nullptr;
        return {};
    }
    return status;
}

/// Room for everything that crosses the link.
Status DeviceLane::make_room() {
    const ggml_tensor *x = block_->x;
    // Each launch rounds up; there are at most as many as experts, and some for max_rows.
    const size_t n_launches = first_.size() + 2 * (rows_.size() / DeviceLaunch::max_rows + 1);
    const size_t total = align_up(ggml_nelements(x) * sizeof(float), DeviceLaunch::staging_unit) +
                         DeviceLaunch::staging_bytes(*block_, rows_.size()) +
                         n_launches * 4 * DeviceLaunch::staging_unit;
    if (staging_ == nullptr || ggml_backend_buffer_get_size(staging_.get()) < total) {
        ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(tier_.device());
        if (host == nullptr) host = ggml_backend_cpu_buffer_type();
        staging_.reset();
        staging_.reset(ggml_backend_buft_alloc_buffer(host, total));
        if (staging_ == nullptr) return {Code::out_of_memory, "no memory for a layer call's results"};
    }
    staging_next_ = static_cast<std::byte *>(ggml_backend_buffer_get_base(staging_.get()));
    running_ = true;
    return {};
}

Status DeviceLane::place_activations(const InputCopies &inputs) {
    const ggml_tensor *x = block_->x;
    x_arena_.resize(ggml_tensor_overhead());
    x_context_.reset(
        ggml_init({.mem_size = x_arena_.size(), .mem_buffer = x_arena_.data(), .no_alloc = true}));
    if (x_context_ == nullptr) throw std::bad_alloc();
    x_ = ggml_new_tensor_2d(x_context_.get(), GGML_TYPE_F32, x->ne[0], x->ne[1] * x->ne[2]);
    ggml_backend_buffer_t buffer = nullptr;
    void *there = inputs.on(tier_.device(), x, buffer);
    if (there == nullptr) return send_activations();
    tier_.count_in_place();
    if (ggml_backend_tensor_alloc(buffer, x_, there) != GGML_STATUS_SUCCESS) {
        return {Code::out_of_memory, "the device refused a tensor"};
    }
    return {};
}

Status DeviceLane::send_activations() {
    const ggml_tensor *x = block_->x;
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(tier_.device());
    const size_t bytes = ggml_backend_buft_get_alloc_size(type, x_);
    if (x_buffer_ == nullptr || ggml_backend_buffer_get_size(x_buffer_.get()) < bytes) {
        x_buffer_.reset();
        x_buffer_.reset(ggml_backend_buft_alloc_buffer(type, bytes));
        if (x_buffer_ == nullptr) return {Code::out_of_memory, "the device has no memory for activations"};
        ggml_backend_buffer_clear(x_buffer_.get(), 0);
    }
    if (ggml_backend_tensor_alloc(x_buffer_.get(), x_, ggml_backend_buffer_get_base(x_buffer_.get())) !=
        GGML_STATUS_SUCCESS) {
        return {Code::out_of_memory, "the device refused a tensor"};
    }
    const size_t row_bytes = static_cast<size_t>(x->ne[0]) * sizeof(float);
    std::byte *in = staging_next_;
    for (int64_t r = 0; r < x_->ne[1]; ++r) {
        std::memcpy(staging_next_, row_at<std::byte>(x, r % x->ne[1], r / x->ne[1]), row_bytes);
        staging_next_ += row_bytes;
    }
    staging_next_ = in + align_up(ggml_nbytes(x_), DeviceLaunch::staging_unit);
    ggml_backend_tensor_set_async(stream_.get(), x_, in, 0, ggml_nbytes(x_));
    return {};
}

Status DeviceLane::launch(RoutedCall &call) {
    if (Status status = launch_rows(call.device.resident()); !status.ok()) return status;
    const size_t n_chunks = call.device.n_chunks();
    for (size_t c = 0; c < n_chunks; ++c) {
        const std::optional<size_t> before = call.device.waits_for(c);
        ggml_backend_event_t done = before ? event(*before) : nullptr;
        if (before && done == nullptr) ggml_backend_synchronize(stream_.get());
        tier_.order(stream_.get(), call.device.send(c, done));
        if (Status status = launch_rows(call.device.chunk(c)); !status.ok()) return status;
        // Who passes through these slots next waits for it. An event for each: none is recorded twice while
        // somebody may still wait for it.
        if (call.device.is_waited_for(c) && event(c) != nullptr) {
            ggml_backend_event_record(event(c), stream_.get());
        }
    }
    return {};
}

Status DeviceLane::launch_rows(std::span<const DeviceExpert> experts) {
    std::vector<DeviceRows> piece;
    size_t n_rows = 0;
    const auto flush = [&]() -> Status {
        if (piece.empty()) return {};
        Status status = next_launch().launch(*block_, tier_, x_, piece, staging_next_);
        staging_next_ += DeviceLaunch::staging_bytes(*block_, n_rows);
        piece.clear();
        n_rows = 0;
        return status;
    };
    for (const DeviceExpert &expert : experts) {
        const auto e = static_cast<size_t>(expert.expert);
        std::span<const RoutedCall::Row> rows =
            std::span(rows_).subspan(first_[e], first_[e + 1] - first_[e]);
        while (!rows.empty()) {
            const size_t n = std::min(rows.size(), DeviceLaunch::max_rows - n_rows);
            piece.push_back({expert, rows.first(n)});
            rows = rows.subspan(n);
            n_rows += n;
            if (n_rows < DeviceLaunch::max_rows) continue;
            if (Status status = flush(); !status.ok()) return status;
        }
    }
    return flush();
}

void DeviceLane::wait() {
    if (std::exchange(running_, false)) ggml_backend_synchronize(stream_.get());
}

void DeviceLane::free() {
    wait();
    launches_used_ = 0;
    state_ = State::free;
}

void DeviceLane::results_to(RowCopies &to) {
    state_ = State::handed_over;
    for (size_t i = 0; i < launches_used_; ++i) launches_[i].results_to(block_->down, to);
}

} // namespace spice

#include "store/depth_tuner.h"

#include <algorithm>
#include <utility>

namespace spice {

DepthTuner::DepthTuner(std::vector<int32_t> depths)
    : depths_(std::move(depths)), best_(depths_.size(), 0.0), tuned_(depths_.size() == 1) {}

void DepthTuner::ended(uint64_t bytes, double now, bool backlog) {
    if (tuned_) return;
    if (counting_) {
        bytes_ += bytes;
        seconds_ += now - since_;
    }
    since_ = now;
    counting_ = backlog;
    if (bytes_ >= window_bytes && seconds_ > 0.0) close_window();
}

void DepthTuner::close_window() {
    best_[current_] = std::max(best_[current_], static_cast<double>(bytes_) / seconds_);
    bytes_ = 0;
    seconds_ = 0.0;
    counting_ = false; // reads that began at the old depth end first
    current_ = (current_ + 1) % depths_.size();
    if (current_ != 0 || ++turn_ < turns) return;
    const double enough = 0.95 * *std::ranges::max_element(best_);
    for (size_t i = 0; i < depths_.size(); ++i) {
        const bool better = best_[current_] < enough || depths_[i] < depths_[current_];
        if (best_[i] >= enough && better) current_ = i;
    }
    tuned_ = true;
}

} // namespace spice

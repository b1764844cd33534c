// `hybrimoe`: device and host take experts from the two ends of one queue.
//
// Source: HybriMoE (arXiv 2504.05897) and its code. The queue holds residents by load (rows), descending,
// then misses by load, descending. At each step the next expert goes to whichever side would finish its own
// one earlier: the device takes from the front and pays the transfer for a miss, the host takes from the
// back. So the host may compute a resident. The code's constants, for its machine, are host 1 * rows + 0.79,
// device 0.5, transfer 0.418; here these are the measured costs. On a tie the device takes its own. What it
// overlooks: transfers could run while the device computes (here as there they are added), and what is queued
// already.
#include "policy/placement_strategies.h"

#include <algorithm>

namespace spice::policy {

namespace {

class HybriMoe final : public Placement {
  public:
    [[nodiscard]] std::string_view name() const override { return "hybrimoe"; }
    void place(const PlacementCall &call, const PlacementCosts &costs, std::span<Place> places) override {
        queue_.clear();
        for (size_t i = 0; i < places.size(); ++i) queue_.push_back(i);
        std::sort(queue_.begin(), queue_.end(), [&](size_t a, size_t b) {
            if (has(call, a) != has(call, b)) return has(call, a);
            return call.rows[a] != call.rows[b] ? call.rows[a] > call.rows[b] : a < b;
        });
        double device = 0.0;
        double host = 0.0;
        for (size_t front = 0, back = queue_.size(); front < back;) {
            const size_t first = queue_[front];
            const size_t last = queue_[back - 1];
            const double device_then = device + costs.device.at(call.rows[first]) +
                                       (has(call, first) ? 0.0 : costs.transfer(call.slab_bytes));
            const double host_then = host + costs.host.at(call.rows[last]);
            if (device_then <= host_then) {
                places[first] = has(call, first) ? Place::device : Place::fetch;
                device = device_then;
                ++front;
            } else {
                places[last] = Place::host;
                host = host_then;
                --back;
            }
        }
    }

  private:
    std::vector<size_t> queue_;
};

} // namespace

std::unique_ptr<Placement> make_place_hybrimoe() {
    return std::make_unique<HybriMoe>();
}

} // namespace spice::policy

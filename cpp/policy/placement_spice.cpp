// `spice`, the default: the split of the misses between link + device and host that is done first, with what
// is queued on each; idle time of the link then brings host-computed experts to the pool.
//
// Source: the cost model of the SPICE paper (arXiv 2608.21240): t_fetch = S_e / B + t_device,
// t_host = t_cpu + 2 H / B, and fetch only with a clear benefit over host alone. The paper leaves the subset
// and the margin open. Here:
//   choose F, the fetched misses, to minimise finish_time() = max(link then device, host).
// Misses with equal rows and equal time in memory are interchangeable, so it is enough to say how many of
// each kind are fetched: one decoded token has one kind, and n + 1 candidates for n misses. Up to
// `max_candidates` all are tried, which is the optimum. Beyond (prompts), the misses with most rows are
// fetched first, since each costs the link the same and saves the host most, and their number is found by
// bisection: with it the fetching side only grows and the host's only shrinks. Equal times go to fewer
// fetches.
//
// Experts whose transfer is under way can be waited for, or be computed by the host as well: the one that
// lands last goes to the host, and the next, as long as the call is done earlier for it. (A prefetch that
// comes late must not cost more than none.) So does what the device has, those with fewest rows first, if the
// host has a copy: a launch alone takes a device as long as an expert takes some hosts, which would idle.
//
// Fill: of the host's experts, those with most rows are sent for later tokens as long as the link would idle
// until the call is done (`slack`), and one in any case when no prefetch waits: layers are often shorter
// than a transfer, and the link would never be used otherwise.
#include "policy/placement_strategies.h"

#include <algorithm>
#include <cmath>

namespace spice::policy {

namespace {

constexpr size_t max_candidates = 256;
constexpr double worth_moving = 0.98; ///< costs are estimates: less is not worth leaving the device for

class SpicePlacement final : public Placement {
  public:
    [[nodiscard]] std::string_view name() const override { return "spice"; }
    [[nodiscard]] bool loads_ahead() const override { return true; }

    void place(const PlacementCall &call, const PlacementCosts &costs, std::span<Place> places) override {
        misses_.clear();
        for (size_t i = 0; i < places.size(); ++i) {
            places[i] = has(call, i) ? Place::device : Place::host;
            if (!has(call, i)) misses_.push_back(i);
        }
        std::sort(misses_.begin(), misses_.end(), [&](size_t a, size_t b) {
            if (call.rows[a] != call.rows[b]) return call.rows[a] > call.rows[b];
            return call.memory_at(a) != call.memory_at(b) ? call.memory_at(a) < call.memory_at(b) : a < b;
        });
        movable_.clear();
        for (size_t i = 0; i < places.size(); ++i) {
            if (has(call, i) && (call.on_device[i] > 0.0 || call.memory_at(i) <= 0.0)) movable_.push_back(i);
        }
        double finish = split(call, costs, places);
        std::sort(movable_.begin(), movable_.end(), [&](size_t a, size_t b) {
            if (call.on_device[a] != call.on_device[b]) return call.on_device[a] > call.on_device[b];
            return call.rows[a] != call.rows[b] ? call.rows[a] < call.rows[b] : a < b;
        });
        bool lands = true; // of what lands, the next may still be in time when the last is not
        for (const size_t i : movable_) {
            if (call.on_device[i] > 0.0 && !lands) continue;
            best_.assign(places.begin(), places.end());
            places[i] = Place::host;
            const double other = split(call, costs, places);
            if (other < (call.on_device[i] > 0.0 ? finish : worth_moving * finish)) {
                finish = other;
                continue;
            }
            std::copy(best_.begin(), best_.end(), places.begin());
            if (call.on_device[i] <= 0.0) break;
            lands = false;
        }
        if (!misses_.empty()) fill(call, costs, places, finish);
    }

  private:
    struct Kind {
        size_t begin = 0; ///< in misses_
        size_t size = 0;
        size_t fetched = 0;
        size_t best = 0;
    };

    /// The best split of the misses, the other experts being where they are. Returns when the call is done.
    double split(const PlacementCall &call, const PlacementCosts &costs, std::span<Place> places) {
        for (const size_t i : misses_) places[i] = Place::host;
        group_kinds(call);
        return kinds_.empty() ? bisect(call, costs, places) : try_all(call, costs, places);
    }

    /// The kinds of misses; none when there are more than max_candidates ways to choose.
    void group_kinds(const PlacementCall &call) {
        kinds_.clear();
        for (size_t at = 0; at < misses_.size(); ++at) {
            const size_t i = misses_[at];
            const size_t before = at == 0 ? i : misses_[at - 1];
            if (at == 0 || call.rows[i] != call.rows[before] || call.memory_at(i) != call.memory_at(before)) {
                kinds_.push_back({.begin = at});
            }
            ++kinds_.back().size;
        }
        size_t candidates = 1;
        for (const Kind &kind : kinds_) {
            candidates *= kind.size + 1;
            if (candidates > max_candidates) {
                kinds_.clear();
                return;
            }
        }
    }

    double try_all(const PlacementCall &call, const PlacementCosts &costs, std::span<Place> places) {
        double best = finish_time(call, costs, places, order_);
        size_t fewest = 0;
        while (next(places)) {
            const double finish = finish_time(call, costs, places, order_);
            size_t fetched = 0;
            for (const Kind &kind : kinds_) fetched += kind.fetched;
            if (finish < best || (finish == best && fetched < fewest)) {
                best = finish;
                fewest = fetched;
                for (Kind &kind : kinds_) kind.best = kind.fetched;
            }
        }
        for (const Kind &kind : kinds_) {
            for (size_t n = 0; n < kind.size; ++n) {
                places[misses_[kind.begin + n]] = n < kind.best ? Place::fetch : Place::host;
            }
        }
        return best;
    }

    /// Counts up over the kinds like the digits of a number; false after the last.
    bool next(std::span<Place> places) {
        for (Kind &kind : kinds_) {
            if (kind.fetched < kind.size) {
                places[misses_[kind.begin + kind.fetched]] = Place::fetch;
                ++kind.fetched;
                return true;
            }
            for (size_t n = 0; n < kind.size; ++n) places[misses_[kind.begin + n]] = Place::host;
            kind.fetched = 0;
        }
        return false;
    }

    /// The first n of misses_ are fetched, the others computed by the host.
    double fetch_first(size_t n, const PlacementCall &call, const PlacementCosts &costs,
                       std::span<Place> places) {
        for (size_t at = 0; at < misses_.size(); ++at) {
            places[misses_[at]] = at < n ? Place::fetch : Place::host;
        }
        return finish_time(call, costs, places, order_);
    }

    double bisect(const PlacementCall &call, const PlacementCosts &costs, std::span<Place> places) {
        // The finish falls with n while the host is last, and does not fall any more when the device is.
        size_t low = 0;
        size_t high = misses_.size();
        while (low < high) {
            const size_t middle = low + (high - low) / 2;
            if (fetch_first(middle + 1, call, costs, places) < fetch_first(middle, call, costs, places))
                low = middle + 1;
            else
                high = middle;
        }
        return fetch_first(low, call, costs, places);
    }

    void fill(const PlacementCall &call, const PlacementCosts &costs, std::span<Place> places,
              double finish) {
        const double transfer = costs.transfer(call.slab_bytes);
        double used = call.link_queued + call.prefetch_queued;
        for (const Place place : places) used += place == Place::fetch ? transfer : 0.0;
        double room = std::floor((finish - used) / transfer);
        if (room < 1.0) room = call.prefetch_queued > 0.0 ? 0.0 : 1.0;
        for (const size_t i : misses_) {
            if (room < 1.0) return;
            if (places[i] != Place::host) continue;
            places[i] = Place::host_fill;
            room -= 1.0;
        }
    }

    std::vector<size_t> misses_;  ///< of the call, most rows first
    std::vector<size_t> movable_; ///< on the device or on their way, the first to go to the host first
    std::vector<Place> best_;
    std::vector<Kind> kinds_;
    std::vector<int32_t> order_;
};

} // namespace

std::unique_ptr<Placement> make_place_spice() {
    return std::make_unique<SpicePlacement>();
}

} // namespace spice::policy

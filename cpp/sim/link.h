// One link in virtual time: transfers one after the other, demands ahead of loads ahead.
//
// Who calls: the Simulator, with times that never decrease from call to call (demands and advance() alike).
// A load ahead that is under way is finished first, or interrupted at the next multiple of the link's chunk.
// Nothing here knows pools: `start` asks the owner for a slot.
#pragma once

#include "policy/eviction.h"
#include "sim/machine.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>
#include <vector>

namespace spice::sim {

class Link {
  public:
    static constexpr double never = std::numeric_limits<double>::infinity();

    struct Load {
        policy::SlabId id;
        double ready = 0.0; ///< not before
        double bytes = 0.0;
        bool fill = false; ///< of lowest priority, not planned
    };

    explicit Link(const LinkSpec &spec) : spec_(spec) {}

    [[nodiscard]] double free_at() const { return free_at_; }
    [[nodiscard]] double busy() const { return busy_; }
    [[nodiscard]] double seconds(double bytes) const { return spec_.seconds(bytes); }

    /// A transfer that goes first, not before `ready`. Returns when it ends.
    double demand(double ready, double bytes) {
        const double start = std::max(free_at_, ready);
        const bool follows = spec_.in_flight > 1 && demanded_ && free_at_ >= ready;
        const double takes = spec_.seconds(bytes) - (follows ? spec_.latency : 0.0);
        demanded_ = true;
        busy_ += takes;
        free_at_ = start + takes;
        ahead_.reset();
        return free_at_;
    }

    /// Bytes per second, and how many reads share them.
    [[nodiscard]] const LinkSpec &spec() const { return spec_; }

    /// When a demand that comes now can begin.
    [[nodiscard]] double free_for_demand(double now) const {
        return std::max(now, free_at_ - interruptible(now));
    }

    /// A demand comes now: the load ahead that is under way gives way. Returns its id if it was interrupted;
    /// it goes on, before other loads ahead, when the link is free again.
    std::optional<policy::SlabId> interrupt(double now) {
        const double left = interruptible(now);
        if (left <= 0.0) return std::nullopt;
        interrupted_ = Interrupted{*ahead_, left};
        busy_ -= left;
        free_at_ -= left;
        ahead_.reset();
        return interrupted_->id;
    }
    /// The load ahead that is under way at `now`, if any.
    [[nodiscard]] std::optional<policy::SlabId> under_way(double now) const {
        return free_at_ > now ? ahead_ : std::nullopt;
    }

    /// The interrupted load, which a layer needs now, goes on at once. Returns when it ends.
    double resume(double now) {
        const double start = std::max(free_at_, now);
        busy_ += interrupted_->left;
        free_at_ = start + interrupted_->left;
        interrupted_.reset();
        return free_at_;
    }
    /// The interrupted load will not go on. Returns its id.
    std::optional<policy::SlabId> abandon() {
        if (!interrupted_) return std::nullopt;
        const policy::SlabId id = interrupted_->id;
        interrupted_.reset();
        return id;
    }
    [[nodiscard]] bool is_interrupted(policy::SlabId id) const {
        return interrupted_ && interrupted_->id == id;
    }

    /// Starts loads ahead until `until`. `start(load, at)` says whether it may begin; false drops it.
    /// `lands(id, end)` says when what began will end.
    template <class Start, class Lands>
    void advance(double until, const Start &start, const Lands &lands) {
        if (interrupted_ && free_at_ < until) {
            const policy::SlabId id = interrupted_->id;
            ahead_start_ = free_at_; // its pieces count from here
            const double end = resume(free_at_);
            ahead_ = id;
            lands(id, end);
        }
        while (free_at_ < until) {
            std::deque<Load> &queue = !planned_.empty() ? planned_ : fills_;
            if (queue.empty()) return;
            auto next = queue.begin();
            for (auto it = queue.begin(); it != queue.end() && next->ready > free_at_; ++it) {
                if (it->ready < next->ready) next = it;
            }
            const double at = std::max(free_at_, next->ready);
            if (at >= until) return;
            const Load load = *next;
            queue.erase(next);
            if (!start(load, at)) continue;
            const double takes = spec_.seconds(load.bytes);
            busy_ += takes;
            free_at_ = at + takes;
            ahead_ = load.id;
            ahead_start_ = at;
            demanded_ = false;
            lands(load.id, free_at_);
        }
    }

    /// Nothing waits any more, and what is under way has no owner.
    void forget() {
        ahead_.reset();
        interrupted_.reset();
        planned_.clear();
        fills_.clear();
    }

    void clear_planned() { planned_.clear(); }
    void plan(const Load &load) { planned_.push_back(load); }
    /// Loads of lowest priority; the oldest makes room beyond `most`.
    void fill(const Load &load, size_t most) {
        fills_.push_back(load);
        fills_.back().fill = true;
        if (fills_.size() > most) fills_.pop_front();
    }
    [[nodiscard]] double waiting() const {
        double sum = interrupted_ ? interrupted_->left : 0.0;
        for (const Load &load : planned_) sum += spec_.seconds(load.bytes);
        for (const Load &load : fills_) sum += spec_.seconds(load.bytes);
        return sum;
    }

  private:
    /// Seconds of the load ahead under way that a demand at `now` need not wait for.
    [[nodiscard]] double interruptible(double now) const {
        if (!ahead_ || spec_.chunk <= 0.0 || free_at_ <= now) return 0.0;
        const double piece = spec_.chunk / spec_.bandwidth;
        const double done = std::ceil((now - ahead_start_) / piece) * piece;
        return std::max(0.0, free_at_ - (ahead_start_ + done));
    }

    struct Interrupted {
        policy::SlabId id;
        double left = 0.0;
    };
    LinkSpec spec_;
    double free_at_ = 0.0;
    double busy_ = 0.0;
    bool demanded_ = false;               ///< the last transfer was a demand
    std::optional<policy::SlabId> ahead_; ///< the last transfer, if it is a load ahead
    double ahead_start_ = 0.0;
    std::optional<Interrupted> interrupted_;
    std::deque<Load> planned_;
    std::deque<Load> fills_;
};

} // namespace spice::sim

// Whether prefetching pays, from measured passes: on while it does, off while it does not.
//
// Who calls: the runtime's Prefetcher, and the simulator:
//     on()            before a pass: whether it prefetches
//     end_pass(...)   after it, when it can be compared: a decode pass, of as many rows as the one before it
//     skip_pass()     after any other; nothing is learned from it or its neighbours
// Thread: one at a time. No clock: the caller measures. The same reports give the same decisions. Errors:
// none; times that are not above zero count as skip_pass().
//
// Method. Times drift (contexts grow, disks slow down), so only neighbours are compared: now and then one
// pass is made in the other mode (a *probe*), and compared with the mean of the passes before and after it.
// The saving of a pair is 2 (off - on) / (off + on); their decaying average decides, with a small hysteresis.
// A pair is held within three mean deviations of the average, so that one hiccup does not decide.
//
// Cost. A probe costs the difference of the modes, about |average saving| of a pass. `probe_share` of the
// time of the passes is put aside for them, plus enough for the first pairs; the larger the difference, the
// rarer the probes. A pair that says the opposite of the average brings the next probes forward. Passes in
// which prefetching had nothing to do (nothing missed, nothing moved) are the same in both modes: they call
// for no probes and teach nothing.
#pragma once

#include <cstdint>

namespace spice::policy {

/// What a pass did.
struct PassReport {
    double seconds = 0.0;
    int64_t missed_bytes = 0; ///< waited for: demand reads
    int64_t useful_bytes = 0; ///< prefetched, there in time, and used
    int64_t late_bytes = 0;   ///< prefetched and used, but waited for
    int64_t wasted_bytes = 0; ///< prefetched and not used
};

class BenefitMeter {
  public:
    [[nodiscard]] bool on() const { return settled_ != probing_; }
    void end_pass(const PassReport &report);
    void skip_pass();

    /// The mode between probes.
    [[nodiscard]] bool settled_on() const { return settled_; }
    /// The share of a pass's time that prefetching saves; below zero: costs. 0 before the first pair.
    [[nodiscard]] double saving() const { return saving_; }
    [[nodiscard]] int64_t n_pairs() const { return n_pairs_; }
    [[nodiscard]] int64_t n_switches() const { return n_switches_; }

  private:
    void compare(double before, double probe, double after);
    void schedule();

    bool settled_ = true;
    bool probing_ = false;   ///< the present pass is a probe
    double before_ = 0.0;    ///< seconds of the last pass in the settled mode, 0: none
    double probe_ = 0.0;     ///< seconds of the last probe, 0: none, or already compared
    double saving_ = 0.0;    ///< decaying average
    double deviation_ = 0.1; ///< decaying average of the pairs' distance from it
    double credit_ = 0.0;    ///< passes put aside for probes
    int32_t gap_ = 0;        ///< passes since the last probe
    int32_t eager_ = 8;      ///< pairs still to be made quickly: at the start, and in doubt
    int64_t n_pairs_ = 0;
    int64_t n_switches_ = 0;
};

} // namespace spice::policy

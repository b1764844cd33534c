#include "policy/benefit_meter.h"

#include <algorithm>
#include <cmath>

namespace spice::policy {

namespace {

constexpr double probe_share = 0.01;  ///< of the passes' time, for probes
constexpr double credit_max = 2.0;    ///< passes; what an undisturbed time can save up
constexpr double memory = 1.0 / 16.0; ///< weight of a pair once there are many
constexpr double hysteresis = 0.03;   ///< below it the other mode may cost more than it brings
constexpr int32_t gap_eager = 2;      ///< passes from a probe to the next: at the start and in doubt
constexpr int32_t gap_min = 8;
constexpr int32_t doubt_pairs = 4; ///< quick pairs after one that says the opposite
constexpr double doubt = 0.02;     ///< what counts as the opposite

} // namespace

void BenefitMeter::skip_pass() {
    probing_ = false;
    before_ = 0.0;
    probe_ = 0.0;
}

void BenefitMeter::end_pass(const PassReport &report) {
    if (!(report.seconds > 0.0) || !std::isfinite(report.seconds)) {
        skip_pass();
        return;
    }
    const bool idle =
        report.missed_bytes + report.useful_bytes + report.late_bytes + report.wasted_bytes == 0;
    if (idle) {
        skip_pass();
        return;
    }
    credit_ = std::min(credit_ + probe_share, credit_max);
    if (probing_) {
        probing_ = false;
        probe_ = report.seconds;
        gap_ = 0;
        return;
    }
    ++gap_;
    if (probe_ > 0.0 && before_ > 0.0) compare(before_, probe_, report.seconds);
    probe_ = 0.0;
    before_ = report.seconds;
    schedule();
}

void BenefitMeter::compare(double before, double probe, double after) {
    const double settled = 0.5 * (before + after);
    const double off = settled_ ? probe : settled;
    const double on = settled_ ? settled : probe;
    const double pair = 2.0 * (off - on) / (off + on);
    const double reach = 3.0 * deviation_;
    const double held = std::clamp(pair, saving_ - reach, saving_ + reach);
    ++n_pairs_;
    // The mode at the start counts as two pairs: one hiccup does not decide.
    const double weight = std::max(1.0 / static_cast<double>(n_pairs_ + 2), memory);
    deviation_ += memory * (std::abs(held - saving_) - deviation_);
    saving_ += weight * (held - saving_);
    if (eager_ > 0) {
        --eager_;
    } else if (settled_ ? held < -doubt : held > doubt) {
        eager_ = doubt_pairs;
    }
    if (settled_ ? saving_ < -hysteresis : saving_ > hysteresis) {
        settled_ = !settled_;
        ++n_switches_;
    }
}

void BenefitMeter::schedule() {
    const bool starting = n_pairs_ < 4;
    const double size = std::min(std::abs(saving_), 1.9);
    const double cost = 2.0 * size / (2.0 - size); // what the other mode takes more, in passes of this one
    const int32_t gap = eager_ > 0 ? gap_eager : gap_min;
    if (gap_ < gap - 1 || (!starting && credit_ < cost)) return;
    if (!starting) credit_ -= cost;
    probing_ = true;
}

} // namespace spice::policy

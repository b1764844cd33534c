#include "runtime/timeline.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <new>

namespace spice {

namespace {

constexpr size_t max_spans = 1'000'000;
constexpr std::array<const char *, 4> track_names = {"layer calls", "host experts", "device experts",
                                                     "link to the device"};

} // namespace

void Timeline::start() {
    const std::lock_guard lock(mutex_);
    origin_ = now();
    spans_.clear();
    dropped_ = 0;
    on_ = true;
}

void Timeline::add(Track track, policy::FunctionRef<std::string()> name, double begin, double end,
                   int32_t lane) noexcept {
    const std::lock_guard lock(mutex_);
    try {
        if (spans_.size() < max_spans) {
            spans_.push_back({track, lane, name(), begin, end});
            if (track == Track::read) n_lanes_ = std::max(n_lanes_, lane + 1);
            return;
        }
    } catch (const std::bad_alloc &) { // the timeline is a courtesy
    }
    ++dropped_;
}

Status Timeline::write(const std::filesystem::path &path) const {
    std::ofstream out(path);
    const std::lock_guard lock(mutex_);
    out << "{\"displayTimeUnit\": \"ms\", \"otherData\": {\"dropped\": \"" << dropped_
        << "\"}, \"traceEvents\": [\n";
    const auto name_track = [&](size_t t, const std::string &name) {
        out << "{\"ph\": \"M\", \"pid\": 1, \"tid\": " << t
            << ", \"name\": \"thread_name\", \"args\": {\"name\": \"" << name << "\"}},\n";
    };
    for (size_t t = 0; t < track_names.size(); ++t) name_track(t, track_names[t]);
    for (int32_t lane = 0; lane < n_lanes_; ++lane) {
        name_track(track_names.size() + static_cast<size_t>(lane), "disk reads " + std::to_string(lane + 1));
    }
    out.precision(3);
    out << std::fixed;
    for (const Span &span : spans_) {
        // Microseconds; names are our own words and numbers, nothing to escape.
        out << "{\"ph\": \"X\", \"pid\": 1, \"tid\": " << static_cast<int>(span.track) + span.lane
            << ", \"name\": \"" << span.name << "\", \"ts\": " << (span.begin - origin_) * 1e6
            << ", \"dur\": " << (span.end - span.begin) * 1e6 << "},\n";
    }
    out << "{\"ph\": \"M\", \"pid\": 1, \"name\": \"process_name\", \"args\": {\"name\": \"SPICE\"}}\n]}\n";
    out.close();
    if (!out) return {Code::io, path.string() + ": the timeline could not be written"};
    return {};
}

} // namespace spice

#include "runtime/timeline.h"

#include <array>
#include <fstream>

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

void Timeline::add(Track track, std::string name, double begin, double end) {
    const std::lock_guard lock(mutex_);
    if (spans_.size() >= max_spans) {
        ++dropped_;
        return;
    }
    spans_.push_back({track, std::move(name), begin, end});
}

Status Timeline::write(const std::filesystem::path &path) const {
    std::ofstream out(path);
    const std::lock_guard lock(mutex_);
    out << "{\"displayTimeUnit\": \"ms\", \"otherData\": {\"dropped\": \"" << dropped_
        << "\"}, \"traceEvents\": [\n";
    for (size_t t = 0; t < track_names.size(); ++t) {
        out << "{\"ph\": \"M\", \"pid\": 1, \"tid\": " << t
            << ", \"name\": \"thread_name\", \"args\": {\"name\": \"" << track_names[t] << "\"}},\n";
    }
    out.precision(3);
    out << std::fixed;
    for (const Span &span : spans_) {
        // Microseconds; names are our own words and numbers, nothing to escape.
        out << "{\"ph\": \"X\", \"pid\": 1, \"tid\": " << static_cast<int>(span.track) << ", \"name\": \""
            << span.name << "\", \"ts\": " << (span.begin - origin_) * 1e6
            << ", \"dur\": " << (span.end - span.begin) * 1e6 << "},\n";
    }
    out << "{\"ph\": \"M\", \"pid\": 1, \"name\": \"process_name\", \"args\": {\"name\": \"SPICE\"}}\n]}\n";
    out.close();
    if (!out) return {Code::io, path.string() + ": the timeline could not be written"};
    return {};
}

} // namespace spice

// What happened when, as spans on a few tracks: written in Chrome's trace format, which Perfetto opens.
//
// Off until start(); then every layer call, read, upload and wait is kept, up to a million spans (what comes
// later is counted as dropped). Thread: any; short sections under a lock of its own. Errors: write() says io.
#pragma once

#include "policy/function_ref.h"
#include "store/clock.h"
#include "store/status.h"

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

namespace spice {

class Timeline {
  public:
    enum class Track : uint8_t { layer, host, device, upload, read };

    [[nodiscard]] static double now() { return steady_now(); }
    void start();
    [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }
    /// A span from `begin` to `end` (seconds of now()). Call it only while on(). One that finds no memory is
    /// dropped: it may be called where nothing can be thrown.
    /// `lane`: for things of one kind that overlap: the I/O thread of a read.
    void add(Track track, policy::FunctionRef<std::string()> name, double begin, double end,
             int32_t lane = 0) noexcept;
    /// Writes what was kept and keeps going. Errors: io, with the file's name.
    [[nodiscard]] Status write(const std::filesystem::path &path) const;

  private:
    struct Span {
        Track track = Track::layer;
        int32_t lane = 0;
        std::string name;
        double begin = 0.0;
        double end = 0.0;
    };
    std::atomic<bool> on_{false};
    mutable std::mutex mutex_;
    double origin_ = 0.0;
    std::vector<Span> spans_;
    uint64_t dropped_ = 0;
    int32_t n_lanes_ = 0; ///< of reads
};

} // namespace spice

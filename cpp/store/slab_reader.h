// Asynchronous reads of expert bytes: two queues, demand before prefetch, served by a few blocking threads.
//
// A prefetch that has begun is not interrupted, so only `prefetch_in_flight` of them run at once: a demand
// read shares the disk with those at most. One that waits can be withdrawn or, when a layer turns out to need
// it, made a demand read.
//
// With direct files a read covers whole aligned units, so it also writes up to alignment()-1 bytes before and
// after its destination: the caller leaves that room. A destination whose address does not agree with the
// file offset modulo alignment() is read into a buffer and copied. Buffered files are dropped from the page
// cache behind the read: the slot is the cache.
//
// Thread: submit() from any thread, does not block. Completion::done runs on an I/O thread, must not block,
// and is called exactly once for each request, also when the reader is destroyed first (with an error), but
// not for a request that was withdrawn.
// Errors (through done): io (the kernel's, with file and offset), truncated (the file ends before the range
// does: it was cut or replaced since it was opened). After an error the destination's bytes are undefined.
#pragma once

#include "store/depth_tuner.h"
#include "store/file_ops.h"
#include "store/status.h"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace spice {

enum class Priority : uint8_t { demand, prefetch };

class Completion {
  public:
    virtual void done(const Status &status) noexcept = 0;

  protected:
    ~Completion() = default;
};

struct ReadRequest {
    uint32_t file = 0; ///< index into the reader's files
    uint64_t offset = 0;
    std::span<std::byte> to;
    Completion *completion = nullptr; ///< told once per request
};

/// Told of reads that ended, for a timeline. Called on I/O threads, must not block.
class ReadWatcher {
  public:
    [[nodiscard]] virtual bool watching() const noexcept = 0;
    /// From `begin` to `end`, seconds of the steady clock, by the I/O thread of that number.
    virtual void watched(Priority priority, int32_t thread, double begin, double end) noexcept = 0;

  protected:
    ~ReadWatcher() = default;
};

struct ReaderCounters {
    uint64_t bytes = 0;        ///< asked for and delivered
    uint64_t prefetched = 0;   ///< of these, read as prefetches
    uint64_t reads = 0;        ///< system calls
    double busy_seconds = 0.0; ///< wall time with at least one read in flight
};

class SlabReader {
  public:
    struct Options {
        int32_t n_threads = 0;             ///< reads in flight; 0 tries a few numbers and keeps the best
        int32_t prefetch_in_flight = 2;    ///< of these, prefetches at most
        bool direct = true;                ///< try O_DIRECT
        size_t max_read = size_t{4} << 20; ///< bytes per system call
        std::shared_ptr<FileOps> ops;      ///< null: the real ones
        ReadWatcher *watcher = nullptr;    ///< lives longer than the reader
    };
    /// Opens the files (in the order of their indices) and starts the threads. Errors: not_found, io,
    /// out_of_memory.
    [[nodiscard]] static Result<std::unique_ptr<SlabReader>> open(std::vector<std::filesystem::path> files,
                                                                  const Options &options);
    ~SlabReader();
    SlabReader(const SlabReader &) = delete;
    SlabReader &operator=(const SlabReader &) = delete;

    void submit(const ReadRequest &request, Priority priority);
    /// Makes a waiting prefetch a demand read, the last of its queue; false when it does not wait (any more).
    bool promote(const Completion &completion);
    /// Forgets waiting prefetches, if all of them wait; false when one was begun or is done.
    [[nodiscard]] bool withdraw(std::span<const Completion *const> completions);
    /// Reads now and waits, for the rare caller without a slot.
    [[nodiscard]] Status read(uint32_t file, uint64_t offset, std::span<std::byte> to);

    [[nodiscard]] uint32_t alignment() const { return alignment_; } ///< 1 when all files are buffered
    [[nodiscard]] bool direct() const { return direct_; } ///< every file is read past the page cache
    [[nodiscard]] int32_t depth() const;                  ///< reads in flight at most, now
    /// Bytes per second of the last reads, while at least one was in flight; 0 before the first.
    [[nodiscard]] double bandwidth() const;
    [[nodiscard]] uint64_t bytes_waiting() const; ///< of requests that are not done
    [[nodiscard]] ReaderCounters counters() const;
    void reset_counters();

  private:
    struct Bounce; ///< an aligned buffer of one thread

    SlabReader() = default;
    void work(int32_t thread);
    [[nodiscard]] std::deque<ReadRequest> *next_queue();
    void account(const ReadRequest &request, bool prefetch, const Status &status);
    [[nodiscard]] Status serve(const ReadRequest &request, Bounce &bounce);
    [[nodiscard]] Status read_range(const OpenFile &file, uint32_t index, std::byte *to, uint64_t offset,
                                    size_t wanted, size_t room);
    [[nodiscard]] Status failure(uint32_t file, uint64_t offset, size_t bytes, int error) const;

    Options options_;
    std::vector<std::filesystem::path> paths_;
    std::vector<OpenFile> files_;
    uint32_t alignment_ = 1;
    bool direct_ = false;

    mutable std::mutex mutex_; ///< guards everything below
    std::condition_variable has_work_;
    std::deque<ReadRequest> demand_;
    std::deque<ReadRequest> prefetch_;
    DepthTuner tuner_;
    int32_t in_flight_ = 0;
    int32_t prefetches_ = 0; ///< of these
    uint64_t waiting_ = 0;
    double busy_since_ = 0.0;
    double window_seconds_ = 0.0; ///< decayed, of busy time: what bandwidth() is measured over
    double window_bytes_ = 0.0;
    double measured_until_ = 0.0;
    ReaderCounters counters_;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

} // namespace spice

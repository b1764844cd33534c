// Asynchronous reads of expert bytes: two queues, demand before prefetch, served by a few blocking threads.
//
// A prefetch is read in pieces and makes way for demand reads after each, so that a layer waits for a few small
// pieces at most. One that waits for its turn can be withdrawn; any can be made a demand read, when a layer
// turns out to need it.
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
        int32_t prefetch_in_flight = 1;    ///< of these, prefetches at most
        bool direct = true;                ///< try O_DIRECT
        size_t max_read = size_t{4} << 20; ///< bytes per system call
        size_t prefetch_piece = size_t{512} << 10; ///< bytes after which a prefetch makes way
        std::shared_ptr<FileOps> ops;      ///< null: the real ones
    };
    /// Opens the files (in the order of their indices) and starts the threads. Errors: not_found, io,
    /// out_of_memory.
    [[nodiscard]] static Result<std::unique_ptr<SlabReader>> open(std::vector<std::filesystem::path> files,
                                                                  const Options &options);
    ~SlabReader();
    SlabReader(const SlabReader &) = delete;
    SlabReader &operator=(const SlabReader &) = delete;

    void submit(const ReadRequest &request, Priority priority);
    /// Makes a prefetch a demand read, the last of its queue; false when it is none, or done.
    bool promote(const Completion &completion);
    /// Forgets prefetches, if all of them wait for their turn; false when a piece is being read, or all is done.
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
    struct Queued {
        ReadRequest request;
        size_t done = 0; ///< bytes read so far
    };

    SlabReader() = default;
    void work();
    [[nodiscard]] std::deque<Queued> *next_queue();
    void account(size_t bytes, bool prefetch, const Status &status);
    [[nodiscard]] Status serve(const ReadRequest &request, size_t from, size_t to, Bounce &bounce);
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
    std::deque<Queued> demand_;
    std::deque<Queued> prefetch_;
    std::vector<const Completion *> pieces_;   ///< prefetches of which a piece is being read
    std::vector<const Completion *> promoted_; ///< of these, the ones that go on as demand reads
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

#include "store/slab_reader.h"

#include "store/align.h"
#include "store/clock.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <future>
#include <new>
#include <system_error>

namespace spice {

struct SlabReader::Bounce {
    struct Free {
        void operator()(std::byte *p) const { std::free(p); }
    };
    std::unique_ptr<std::byte, Free> data;
    size_t bytes = 0;

    /// At least `n` bytes, aligned for any direct file; nullptr when there is no memory.
    std::byte *get(size_t n) {
        if (n > bytes) {
            const size_t rounded = align_up(n, 4096);
            data.reset(static_cast<std::byte *>(std::aligned_alloc(4096, rounded)));
            bytes = data == nullptr ? 0 : rounded;
        }
        return data.get();
    }
};

Result<std::unique_ptr<SlabReader>> SlabReader::open(std::vector<std::filesystem::path> files,
                                                     const Options &options) {
    std::unique_ptr<SlabReader> reader(new SlabReader);
    reader->options_ = options;
    if (reader->options_.ops == nullptr) reader->options_.ops = std::make_shared<FileOps>();
    reader->direct_ = true;
    for (const auto &path : files) {
        OpenFile file;
        if (const int error = reader->options_.ops->open(path, options.direct, file); error != 0) {
            return Status(error == ENOENT ? Code::not_found : Code::io,
                          path.string() + ": cannot open: " + std::strerror(error));
        }
        reader->alignment_ = std::max(reader->alignment_, file.alignment);
        reader->direct_ = reader->direct_ && file.direct;
        reader->files_.push_back(file);
    }
    reader->paths_ = std::move(files);
    const std::vector<int32_t> depths =
        options.n_threads > 0 ? std::vector<int32_t>{options.n_threads} : std::vector<int32_t>{4, 2, 8};
    reader->tuner_ = DepthTuner(depths);
    try {
        for (int32_t i = 0; i < *std::ranges::max_element(depths); ++i) {
            reader->threads_.emplace_back([r = reader.get(), i] { r->work(i); });
        }
    } catch (const std::system_error &error) {
        return Status(Code::out_of_memory,
                      std::string("cannot start an I/O thread: ") + error.what() + "; lower io_threads");
    }
    return reader;
}

SlabReader::~SlabReader() {
    std::deque<ReadRequest> left;
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
        std::ranges::move(demand_, std::back_inserter(left));
        std::ranges::move(prefetch_, std::back_inserter(left));
        demand_.clear();
        prefetch_.clear();
    }
    has_work_.notify_all();
    for (auto &thread : threads_) thread.join();
    for (const ReadRequest &request : left) request.completion->done({Code::io, "the model was closed"});
    for (OpenFile &file : files_) options_.ops->close(file);
}

void SlabReader::submit(const ReadRequest &request, Priority priority) {
    {
        const std::lock_guard lock(mutex_);
        (priority == Priority::demand ? demand_ : prefetch_).push_back(request);
        waiting_ += request.to.size();
    }
    has_work_.notify_one();
}

Status SlabReader::read(uint32_t file, uint64_t offset, std::span<std::byte> to) {
    struct Waiter final : Completion {
        std::promise<Status> result;
        void done(const Status &status) noexcept override { result.set_value(status); }
    };
    try {
        // The destination has no room around it: go through a buffer, piece by piece.
        std::vector<std::byte> padded(std::min(to.size(), options_.max_read) + 2 * size_t{alignment_});
        std::byte *start = padded.data() + alignment_;
        for (size_t done = 0; done < to.size();) {
            const size_t n = std::min(to.size() - done, options_.max_read);
            Waiter waiter;
            submit({file, offset + done, {start, n}, &waiter}, Priority::demand);
            if (Status status = waiter.result.get_future().get(); !status.ok()) return status;
            std::memcpy(to.data() + done, start, n);
            done += n;
        }
        return {};
    } catch (const std::bad_alloc &) {
        return {Code::out_of_memory, paths_[file].string() + ": no memory for a read buffer"};
    }
}

bool SlabReader::promote(const Completion &completion) {
    {
        const std::lock_guard lock(mutex_);
        const auto it = std::ranges::find(prefetch_, &completion, &ReadRequest::completion);
        if (it == prefetch_.end()) return false;
        demand_.push_back(*it);
        prefetch_.erase(it);
    }
    has_work_.notify_one();
    return true;
}

bool SlabReader::withdraw(std::span<const Completion *const> completions) {
    const std::lock_guard lock(mutex_);
    const auto named = [&](const ReadRequest &request) {
        return std::ranges::find(completions, request.completion) != completions.end();
    };
    if (static_cast<size_t>(std::ranges::count_if(prefetch_, named)) != completions.size()) return false;
    for (const ReadRequest &request : prefetch_) waiting_ -= named(request) ? request.to.size() : 0;
    std::erase_if(prefetch_, named);
    return true;
}

/// The queue that the next read comes from, or nullptr when none may start.
std::deque<ReadRequest> *SlabReader::next_queue() {
    if (in_flight_ >= tuner_.depth()) return nullptr;
    if (!demand_.empty()) return &demand_;
    return !prefetch_.empty() && prefetches_ < options_.prefetch_in_flight ? &prefetch_ : nullptr;
}

void SlabReader::work(int32_t thread) {
    Bounce bounce;
    std::unique_lock lock(mutex_);
    for (;;) {
        std::deque<ReadRequest> *queue = nullptr;
        has_work_.wait(lock, [&] { return stop_ || (queue = next_queue()) != nullptr; });
        if (stop_) return;
        const ReadRequest request = queue->front();
        const bool prefetch = queue == &prefetch_;
        queue->pop_front();
        prefetches_ += prefetch ? 1 : 0;
        if (in_flight_++ == 0) {
            busy_since_ = steady_now();
            measured_until_ = busy_since_;
        }
        lock.unlock();
        ReadWatcher *watcher = options_.watcher;
        const double begun = watcher != nullptr && watcher->watching() ? steady_now() : 0.0;
        const Status status = serve(request, bounce);
        if (begun > 0.0) {
            watcher->watched(prefetch ? Priority::prefetch : Priority::demand, thread, begun, steady_now());
        }
        lock.lock();
        account(request, prefetch, status);
        lock.unlock();
        request.completion->done(status);
        lock.lock();
    }
}

/// Counts a read that ended. Under the lock.
void SlabReader::account(const ReadRequest &request, bool prefetch, const Status &status) {
    const double ended = steady_now();
    prefetches_ -= prefetch ? 1 : 0;
    waiting_ -= request.to.size();
    if (--in_flight_ == 0) counters_.busy_seconds += ended - busy_since_;
    const auto bytes = static_cast<double>(request.to.size());
    if (status.ok()) {
        counters_.bytes += request.to.size();
        counters_.prefetched += prefetch ? request.to.size() : 0;
        constexpr double memory =
            256.0 * (1 << 20); // bytes after which a measurement has lost 63 % of its weight
        const double keep = std::exp(-bytes / memory);
        window_bytes_ = window_bytes_ * keep + bytes;
        window_seconds_ = window_seconds_ * keep + (ended - measured_until_);
    }
    measured_until_ = ended;
    const int32_t depth = tuner_.depth();
    tuner_.ended(request.to.size(), ended, !demand_.empty());
    // Threads that the old depth or another prefetch held back.
    if (tuner_.depth() > depth || (prefetch && !prefetch_.empty())) has_work_.notify_all();
}

Status SlabReader::serve(const ReadRequest &request, Bounce &bounce) {
    const OpenFile &file = files_[request.file];
    const uint64_t align = file.alignment;
    const auto address = reinterpret_cast<uintptr_t>(request.to.data());
    const bool in_place = (address - request.offset) % align == 0;
    size_t done = 0;
    while (done < request.to.size()) {
        const uint64_t offset = request.offset + done;
        const uint64_t first = offset / align * align;
        const auto head = static_cast<size_t>(offset - first);
        // Whole units, at most max_read; the last one may reach past the range.
        const size_t wanted = std::min(request.to.size() - done + head, options_.max_read / align * align);
        const size_t room = align_up(wanted, align);
        std::byte *to = request.to.data() + done - head;
        if (!in_place) {
            to = bounce.get(room);
            if (to == nullptr) return {Code::out_of_memory, "no memory for a read buffer; lower io_threads"};
        }
        if (Status status = read_range(file, request.file, to, first, wanted, room); !status.ok())
            return status;
        if (!in_place) std::memcpy(request.to.data() + done, to + head, wanted - head);
        done += wanted - head;
    }
    if (!file.direct) options_.ops->forget(file, request.offset, request.to.size());
    return {};
}

Status SlabReader::read_range(const OpenFile &file, uint32_t index, std::byte *to, uint64_t offset,
                              size_t wanted, size_t room) {
    size_t done = 0;
    while (done < wanted) {
        const ssize_t n = options_.ops->read_at(file, to + done, room - done, offset + done);
        {
            const std::lock_guard lock(mutex_);
            ++counters_.reads;
        }
        if (n == -EINTR) continue;
        if (n < 0) return failure(index, offset, wanted, static_cast<int>(-n));
        const size_t before = done;
        done += static_cast<size_t>(n);
        if (done >= wanted) break;
        // A direct read may stop short anywhere: go on from a whole unit. No whole unit is the end of the
        // file.
        done = done / file.alignment * file.alignment;
        if (done == before) {
            return {Code::truncated, paths_[index].string() + ": the file ends before byte " +
                                         std::to_string(offset + wanted) +
                                         "; it was cut after loading, restore it and load again"};
        }
    }
    return {};
}

Status SlabReader::failure(uint32_t file, uint64_t offset, size_t bytes, int error) const {
    return {Code::io, paths_[file].string() + ": reading " + std::to_string(bytes) + " bytes at " +
                          std::to_string(offset) + ": " + std::strerror(error) +
                          "; check the disk, then try again"};
}

int32_t SlabReader::depth() const {
    const std::lock_guard lock(mutex_);
    return tuner_.depth();
}

double SlabReader::bandwidth() const {
    const std::lock_guard lock(mutex_);
    return window_seconds_ > 0.0 ? window_bytes_ / window_seconds_ : 0.0;
}

uint64_t SlabReader::bytes_waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_;
}

ReaderCounters SlabReader::counters() const {
    const std::lock_guard lock(mutex_);
    return counters_;
}

void SlabReader::reset_counters() {
    const std::lock_guard lock(mutex_);
    counters_ = {};
}

} // namespace spice

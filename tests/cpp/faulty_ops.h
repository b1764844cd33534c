// FileOps that fail on demand: the n-th read returns an error, stops short, is interrupted, or finds the end.
#pragma once

#include "store/file_ops.h"

#include <atomic>
#include <cerrno>
#include <functional>
#include <mutex>
#include <optional>

namespace test {

class FaultyOps final : public spice::FileOps {
  public:
    /// Called for each read with its number from 0 and the bytes asked for; returns what to do instead:
    /// nullopt reads, a negative value is -errno, 0 is the end of the file, n > 0 reads at most n bytes.
    std::function<std::optional<ssize_t>(int number, size_t bytes)> plan;
    std::function<void()> after; ///< called when a read has ended
    bool allow_direct = true;
    std::atomic<int> reads{0};
    std::atomic<int> forgotten{0};

    int open(const std::filesystem::path &path, bool want_direct, spice::OpenFile &out) override {
        return FileOps::open(path, want_direct && allow_direct, out);
    }
    ssize_t read_at(const spice::OpenFile &file, void *to, size_t bytes, uint64_t offset) override {
        const int number = reads.fetch_add(1);
        std::optional<ssize_t> instead;
        {
            const std::lock_guard lock(mutex_);
            if (plan) instead = plan(number, bytes);
        }
        if (instead && *instead <= 0) return *instead;
        const ssize_t n = FileOps::read_at(file, to, instead ? static_cast<size_t>(*instead) : bytes, offset);
        if (after) after();
        return n;
    }
    void forget(const spice::OpenFile &file, uint64_t offset, uint64_t bytes) override {
        ++forgotten;
        FileOps::forget(file, offset, bytes);
    }

  private:
    std::mutex mutex_;
};

} // namespace test

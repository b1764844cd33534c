// Reads pieces of files into memory with a few blocking I/O threads.
//
// Thread: read() from any thread, one call at a time per caller; it blocks until all pieces have arrived or
// one failed. The reader's own threads sleep when there is nothing to read and never compute.
// Errors: io (the kernel's error, with file and offset), truncated (the file ends before the piece does: it
// has been cut or replaced since it was opened). After an error the destination bytes are undefined; the
// next read() works again.
#pragma once

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

/// An open file, closed by the destructor.
class FileHandle {
  public:
    FileHandle() = default;
    FileHandle(FileHandle &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileHandle &operator=(FileHandle &&other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~FileHandle();
    [[nodiscard]] static Result<FileHandle> open(const std::filesystem::path &path);
    [[nodiscard]] int fd() const { return fd_; }

  private:
    int fd_ = -1;
};

/// One contiguous piece of one file.
struct ReadPiece {
    uint32_t file = 0; ///< index into the reader's files
    uint64_t offset = 0;
    std::span<std::byte> to;
};

class SlabReader {
  public:
    /// Opens the files (in the order of their indices) and starts `n_threads` >= 1 threads.
    [[nodiscard]] static Result<std::unique_ptr<SlabReader>> open(std::vector<std::filesystem::path> files,
                                                                  int32_t n_threads);
    ~SlabReader();
    SlabReader(const SlabReader &) = delete;
    SlabReader &operator=(const SlabReader &) = delete;

    [[nodiscard]] Status read(std::span<const ReadPiece> pieces);

  private:
    struct Batch { ///< what one read() waits for
        size_t open = 0;
        Status error;
    };
    struct Task {
        ReadPiece piece;
        Batch *batch = nullptr;
    };

    SlabReader() = default;
    void work();
    [[nodiscard]] Status read_piece(const ReadPiece &piece) const;

    std::vector<std::filesystem::path> paths_;
    std::vector<FileHandle> files_;
    std::mutex mutex_;
    std::condition_variable has_work_;
    std::condition_variable has_result_;
    std::deque<Task> queue_;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

} // namespace spice

#include "store/slab_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <system_error>
#include <unistd.h>

namespace spice {

namespace {
// Large enough for full disk speed, small enough that the parts of one expert are read in parallel.
constexpr size_t max_read = size_t{4} << 20;

std::string at(const std::filesystem::path &path, uint64_t offset, size_t bytes) {
    return path.string() + ": " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset);
}
} // namespace

FileHandle::~FileHandle() {
    if (fd_ >= 0) ::close(fd_);
}

Result<FileHandle> FileHandle::open(const std::filesystem::path &path) {
    FileHandle handle;
    do {
        handle.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    } while (handle.fd_ < 0 && errno == EINTR);
    if (handle.fd_ < 0) {
        const int error = errno;
        const Code code = error == ENOENT ? Code::not_found : Code::io;
        return Status(code, path.string() + ": cannot open: " + std::strerror(error));
    }
    return handle;
}

Result<std::unique_ptr<SlabReader>> SlabReader::open(std::vector<std::filesystem::path> files,
                                                     int32_t n_threads) {
    std::unique_ptr<SlabReader> reader(new SlabReader);
    for (const auto &path : files) {
        Result<FileHandle> handle = FileHandle::open(path);
        if (!handle.ok()) return handle.status();
        reader->files_.push_back(handle.take());
    }
    reader->paths_ = std::move(files);
    try {
        for (int32_t i = 0; i < n_threads; ++i) {
            reader->threads_.emplace_back([r = reader.get()] { r->work(); });
        }
    } catch (const std::system_error &error) {
        return Status(Code::out_of_memory,
                      std::string("cannot start an I/O thread: ") + error.what() + "; lower io_threads");
    }
    return reader;
}

SlabReader::~SlabReader() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    has_work_.notify_all();
    for (auto &thread : threads_) thread.join();
}

Status SlabReader::read(std::span<const ReadPiece> pieces) {
    Batch batch;
    std::unique_lock lock(mutex_);
    for (const ReadPiece &piece : pieces) {
        for (size_t done = 0; done < piece.to.size(); done += max_read) {
            const size_t n = std::min(max_read, piece.to.size() - done);
            queue_.push_back({{piece.file, piece.offset + done, piece.to.subspan(done, n)}, &batch});
            ++batch.open;
        }
    }
    has_work_.notify_all();
    has_result_.wait(lock, [&] { return batch.open == 0; });
    return batch.error;
}

void SlabReader::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        has_work_.wait(lock, [&] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return; // stop, and nobody waits
        const Task task = queue_.front();
        queue_.pop_front();
        Status status;
        if (task.batch->error.ok()) { // after a failure the rest of the batch is not worth reading
            lock.unlock();
            status = read_piece(task.piece);
            lock.lock();
        }
        if (!status.ok() && task.batch->error.ok()) task.batch->error = std::move(status);
        if (--task.batch->open == 0) has_result_.notify_all();
    }
}

Status SlabReader::read_piece(const ReadPiece &piece) const {
    const int fd = files_[piece.file].fd();
    const std::filesystem::path &path = paths_[piece.file];
    size_t done = 0;
    while (done < piece.to.size()) {
        const ssize_t n = pread(fd, piece.to.data() + done, piece.to.size() - done,
                                static_cast<off_t>(piece.offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            return {Code::io, at(path, piece.offset, piece.to.size()) + ": " + std::strerror(errno) +
                                  "; check the disk, then try again"};
        }
        if (n == 0) {
            return {Code::truncated, at(path, piece.offset, piece.to.size()) + ": the file ends after " +
                                         std::to_string(piece.offset + done) +
                                         " bytes; it was cut after loading, restore it and load again"};
        }
        done += static_cast<size_t>(n);
    }
    return {};
}

} // namespace spice

// The four system calls that reading experts needs, behind an interface, so that tests can make them fail.
//
// Thread: read_at is called by several I/O threads at once. Blocks on disk. Errors as in errno.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <sys/types.h>

namespace spice {

/// How a file can be read.
struct OpenFile {
    int fd = -1;
    bool direct = false;    ///< O_DIRECT: past the page cache
    uint32_t alignment = 1; ///< of file offsets, lengths and memory, for direct files
};

class FileOps {
  public:
    virtual ~FileOps() = default;
    /// Opens for direct reading where the file system allows it, else buffered. 0 or an errno.
    [[nodiscard]] virtual int open(const std::filesystem::path &path, bool want_direct, OpenFile &out);
    /// Like pread: bytes read, 0 at the end of the file, or -errno.
    [[nodiscard]] virtual ssize_t read_at(const OpenFile &file, void *to, size_t bytes, uint64_t offset);
    /// The range will not be read again soon: drop it from the page cache (buffered files only).
    virtual void forget(const OpenFile &file, uint64_t offset, uint64_t bytes);
    virtual void close(OpenFile &file);
};

} // namespace spice

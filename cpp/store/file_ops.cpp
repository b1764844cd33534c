#include "store/file_ops.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#ifdef __linux__
#include <linux/magic.h>
#include <sys/vfs.h>
#endif
#include <unistd.h>
#include <utility>

namespace spice {

namespace {

constexpr uint32_t safe_alignment = 4096; // holds on every file system and disk that takes O_DIRECT

/// What the file system asks of direct reads. 0: it refuses them, or they mean nothing.
uint32_t direct_alignment([[maybe_unused]] int fd) {
#ifdef __linux__
    // Files in memory may accept O_DIRECT, but what they give is no disk speed and must not be called so.
    struct statfs system = {};
    if (fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC) return 0;
#endif
#ifdef STATX_DIOALIGN
    struct statx info = {};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
        const uint32_t align = std::max(info.stx_dio_offset_align, info.stx_dio_mem_align);
        return align;
    }
#endif
    return safe_alignment;
}

} // namespace

int FileOps::open(const std::filesystem::path &path, bool want_direct, OpenFile &out) {
    out = {};
#ifdef O_DIRECT
    if (want_direct) {
        do {
            out.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        } while (out.fd < 0 && errno == EINTR);
        if (out.fd >= 0) {
            out.alignment = direct_alignment(out.fd);
            out.direct = out.alignment > 0;
            if (!out.direct) ::close(std::exchange(out.fd, -1));
        }
    }
#endif
    if (out.fd < 0) { // tmpfs, some overlays and network file systems refuse O_DIRECT
        out.alignment = 1;
        do {
            out.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        } while (out.fd < 0 && errno == EINTR);
        if (out.fd < 0) return errno;
#ifdef POSIX_FADV_RANDOM
        // Read-ahead would fetch experts that nobody asked for, and they would stay in the page cache.
        (void)posix_fadvise(out.fd, 0, 0, POSIX_FADV_RANDOM);
#endif
#ifdef F_NOCACHE
        if (want_direct) (void)fcntl(out.fd, F_NOCACHE, 1); // macOS: the same wish, no alignment asked
#endif
    }
    return 0;
}

ssize_t FileOps::read_at(const OpenFile &file, void *to, size_t bytes, uint64_t offset) {
    const ssize_t n = pread(file.fd, to, bytes, static_cast<off_t>(offset));
    return n >= 0 ? n : -errno;
}

void FileOps::forget([[maybe_unused]] const OpenFile &file, [[maybe_unused]] uint64_t offset,
                     [[maybe_unused]] uint64_t bytes) {
#ifdef POSIX_FADV_DONTNEED
    // The kernel keeps a folio that the range covers only in part, and folios grow to 2 MiB.
    constexpr uint64_t folio = uint64_t{2} << 20;
    const uint64_t first = offset - std::min(offset, folio);
    (void)posix_fadvise(file.fd, static_cast<off_t>(first),
                        static_cast<off_t>(offset - first + bytes + folio), POSIX_FADV_DONTNEED);
#endif
}

void FileOps::close(OpenFile &file) {
    if (file.fd >= 0) ::close(std::exchange(file.fd, -1));
}

} // namespace spice

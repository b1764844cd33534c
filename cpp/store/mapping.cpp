#include "store/mapping.h"

#include <algorithm>
#include <sys/mman.h>

namespace spice {

Mapping::Mapping(Kind kind, uint64_t bytes) {
    bytes = std::max<uint64_t>(bytes, 1); // ggml may ask for nothing, and mmap refuses that
    const int protection = kind == Kind::addresses ? PROT_NONE : PROT_READ | PROT_WRITE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    if (kind != Kind::memory) flags |= MAP_NORESERVE;
#endif
    void *base = mmap(nullptr, bytes, protection, flags, -1, 0);
    if (base == MAP_FAILED) return;
    base_ = static_cast<std::byte *>(base);
    bytes_ = bytes;
#ifdef MADV_HUGEPAGE
    // Weights are read from end to end: huge pages save most of the TLB misses. Only advice, may fail.
    if (kind != Kind::addresses) (void)madvise(base, bytes, MADV_HUGEPAGE);
#endif
}

Mapping::~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
}

} // namespace spice

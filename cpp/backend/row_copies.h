// Copies of rows from one place to another, done by every thread of a graph. Thread: as ggml's custom nodes.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <vector>

namespace spice {

struct RowCopies {
    struct Copy {
        const void *from = nullptr;
        void *to = nullptr;
        size_t bytes = 0;
    };
    std::vector<Copy> copies; ///< none writes to where another reads or writes

    static void run(ggml_tensor *, int thread, int n_threads, void *job); ///< `job`: the RowCopies
};

} // namespace spice

// A model's fingerprint: two fine-tunes of one model differ in it, two copies of one file do not.
//
// 128 bits over the architecture, the name, type and shape of every tensor (in the order of their names, so
// that splitting a file changes nothing), and all bytes of every router (`ffn_gate_inp`). No cryptography: it
// tells models apart, it does not prove anything. The algorithm is in docs/sidecar-format.md.
//
// Thread: any; blocks on disk (reads the routers). Errors: those of read_bytes.
#pragma once

#include "store/gguf_model.h"
#include "store/status.h"

#include <string>

namespace spice {

/// 32 hexadecimal digits.
[[nodiscard]] Result<std::string> fingerprint(const GgufModel &model);

} // namespace spice

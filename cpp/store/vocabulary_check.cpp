// The rules of check_model for a model's vocabulary: see model_check.cpp.
#include "store/model_rules.h"

#include "gguf.h"

#include <algorithm>
#include <array>

namespace spice {

namespace {

Status check_tokens(const CheckedModel &m) {
    const std::string tokenizer = m.model().get_string("tokenizer.ggml.model").value_or("");
    const GgufTensor *rows = m.model().find("token_embd.weight");
    if (tokenizer == "none" || tokenizer == "no_vocab") {
        // That many empty tokens are made before any tensor is looked at.
        const int64_t size = m.number("vocab_size").value_or(0);
        if (rows != nullptr && size > rows->shape[1]) {
            return m.refuse_key("vocab_size", size,
                                "up to " + std::to_string(rows->shape[1]) + " by the tensors");
        }
        return {};
    }
    const GgufArray *list = m.array("tokenizer.ggml.tokens");
    if (list == nullptr) return {};
    if (list->type != GGUF_TYPE_STRING || list->count == 0) {
        return m.refuse("tokenizer.ggml.tokens is not a list of at least one text");
    }
    if (list->has_twins) return m.refuse("tokenizer.ggml.tokens holds the same token twice");
    if (tokenizer == "llama" && list->missing_byte >= 0) {
        return m.refuse("tokenizer.ggml.tokens has no token for the byte " +
                        std::to_string(list->missing_byte));
    }
    for (const char *name : {"tokenizer.ggml.scores", "tokenizer.ggml.token_type"}) {
        const GgufArray *other = m.array(name);
        if (other != nullptr && other->count < list->count) {
            return m.refuse(std::string(name) + " has " + std::to_string(other->count) + " elements for " +
                            std::to_string(list->count) + " tokens");
        }
    }
    // Draft models speak another vocabulary than their tokenizer's.
    if (rows != nullptr && m.arch() != "eagle3" && m.arch() != "dflash" &&
        static_cast<uint64_t>(rows->shape[1]) != list->count) {
        return m.refuse("token_embd.weight has " + std::to_string(rows->shape[1]) + " rows for " +
                        std::to_string(list->count) + " tokens");
    }
    return {};
}

/// llama.cpp replaces an id out of range by the tokenizer's default, or by none when that is out of range
/// too; only a token that is none and has to be added aborts, at the first text.
Status check_special_tokens(const CheckedModel &m) {
    const std::string tokenizer = m.model().get_string("tokenizer.ggml.model").value_or("");
    const GgufArray *list = m.array("tokenizer.ggml.tokens");
    if (list == nullptr) return {};
    const bool spm = tokenizer == "llama";
    const bool wpm = tokenizer == "bert";
    const bool ugm = tokenizer == "t5";
    const bool gemma4 = tokenizer == "gemma4";
    const bool bpe = tokenizer == "gpt2";
    if (!spm && !wpm && !ugm && !bpe && !gemma4) return {};
    struct Special {
        const char *id;
        const char *add;
        int64_t fallback;
        bool added;
    };
    const std::array<Special, 3> specials = {
        Special{"bos_token_id", "add_bos_token",
                spm   ? 1
                : wpm ? 101
                : bpe ? 11
                      : -1,
                spm || wpm || gemma4},
        Special{"eos_token_id", "add_eos_token",
                spm   ? 2
                : ugm ? 1
                : bpe ? 11
                      : -1,
                ugm},
        Special{"seperator_token_id", "add_sep_token", wpm ? 102 : -1, wpm},
    };
    for (const Special &special : specials) {
        const std::string prefix = "tokenizer.ggml.";
        const auto count = static_cast<int64_t>(std::min<uint64_t>(list->count, INT64_MAX));
        bool added = special.added;
        const auto at = m.model().metadata().find(prefix + special.add);
        if (at != m.model().metadata().end()) {
            // WPM and Gemma 4 add theirs whatever the flag says.
            if (const auto *flag = std::get_if<bool>(&at->second))
                added = *flag || (added && (wpm || gemma4));
        }
        if (std::string_view(special.add) == "add_sep_token" && !wpm) continue; // only WPM adds it
        const std::optional<int64_t> id = m.model().get_int(prefix + special.id);
        const bool found =
            (id && *id >= 0 && *id < count) || (special.fallback >= 0 && special.fallback < count);
        if (added && !found) {
            return m.refuse(prefix + special.id + " is " + std::to_string(id.value_or(special.fallback)) +
                            " of " + std::to_string(count) + " tokens, and " + special.add + " asks for it");
        }
    }
    return {};
}

} // namespace

Status check_vocabulary(const CheckedModel &model) {
    if (Status status = check_tokens(model); !status.ok()) return status;
    return check_special_tokens(model);
}

} // namespace spice

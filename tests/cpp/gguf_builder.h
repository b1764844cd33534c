// Writes GGUF files for tests, good ones and, with the public fields, lying ones. No checks: that is the
// point.
#pragma once

#include "ggml.h"
#include "gguf.h"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace test {

template <class T>
std::string raw(T value) {
    std::string bytes(sizeof(T), '\0');
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
}

inline std::string raw_string(const std::string &text) {
    return raw<uint64_t>(text.size()) + text;
}

struct Pair {
    std::string key;
    uint32_t type = 0;
    std::string payload; ///< the bytes behind the type
};

struct Tensor {
    std::string name;
    std::vector<int64_t> shape;
    int32_t type = GGML_TYPE_F32;
    std::optional<uint64_t> offset; ///< in the data; by default behind the tensor before
    std::optional<uint32_t> n_dims;
    std::optional<uint64_t> bytes; ///< of data that are written; by default what type and shape ask for
};

class GgufBuilder {
  public:
    uint32_t version = 3;
    uint64_t alignment = 32;
    std::optional<uint64_t> n_tensors;
    std::optional<uint64_t> n_pairs;
    std::string magic = "GGUF";
    std::vector<Pair> pairs;
    std::vector<Tensor> tensors;

    Pair &pair(const std::string &key) {
        for (Pair &p : pairs) {
            if (p.key == key) return p;
        }
        pairs.push_back({key, 0, ""});
        return pairs.back();
    }
    template <class T>
    void set(const std::string &key, uint32_t type, T value) {
        Pair &p = pair(key);
        p.type = type;
        p.payload = raw(value);
    }
    void u16(const std::string &key, uint16_t value) { set(key, GGUF_TYPE_UINT16, value); }
    void u32(const std::string &key, uint32_t value) { set(key, GGUF_TYPE_UINT32, value); }
    void i32(const std::string &key, int32_t value) { set(key, GGUF_TYPE_INT32, value); }
    void f32(const std::string &key, float value) { set(key, GGUF_TYPE_FLOAT32, value); }
    void flag(const std::string &key, uint8_t value) { set(key, GGUF_TYPE_BOOL, value); }
    void text(const std::string &key, const std::string &value) {
        Pair &p = pair(key);
        p.type = GGUF_TYPE_STRING;
        p.payload = raw_string(value);
    }
    void texts(const std::string &key, const std::vector<std::string> &values) {
        std::string payload = raw<uint32_t>(GGUF_TYPE_STRING) + raw<uint64_t>(values.size());
        for (const std::string &value : values) payload += raw_string(value);
        Pair &p = pair(key);
        p.type = GGUF_TYPE_ARRAY;
        p.payload = payload;
    }
    template <class T>
    void array(const std::string &key, uint32_t type, const std::vector<T> &values) {
        std::string payload = raw<uint32_t>(type) + raw<uint64_t>(values.size());
        for (const T value : values) payload += raw(value);
        Pair &p = pair(key);
        p.type = GGUF_TYPE_ARRAY;
        p.payload = payload;
    }
    void erase(const std::string &key) {
        std::erase_if(pairs, [&](const Pair &p) { return p.key == key; });
    }
    void tensor(const std::string &name, std::vector<int64_t> shape, int32_t type = GGML_TYPE_F32) {
        tensors.push_back({name, std::move(shape), type, {}, {}, {}});
    }
    Tensor &at(const std::string &name) {
        for (Tensor &t : tensors) {
            if (t.name == name) return t;
        }
        std::abort(); // a typing error in a test
    }

    static uint64_t size_of(const Tensor &t) {
        if (t.bytes) return *t.bytes;
        if (t.type < 0 || t.type >= GGML_TYPE_COUNT || ggml_type_size(static_cast<ggml_type>(t.type)) == 0)
            return 32;
        const auto type = static_cast<ggml_type>(t.type);
        uint64_t bytes = ggml_row_size(type, t.shape.empty() ? 1 : t.shape[0]);
        for (size_t i = 1; i < t.shape.size(); ++i) bytes *= static_cast<uint64_t>(t.shape[i]);
        return bytes;
    }

    [[nodiscard]] std::string header() const {
        std::string out = magic + raw(version) + raw(n_tensors.value_or(tensors.size())) +
                          raw(n_pairs.value_or(pairs.size()));
        for (const Pair &p : pairs) out += raw_string(p.key) + raw(p.type) + p.payload;
        uint64_t next = 0;
        for (const Tensor &t : tensors) {
            out += raw_string(t.name) + raw(t.n_dims.value_or(static_cast<uint32_t>(t.shape.size())));
            for (const int64_t ne : t.shape) out += raw(ne);
            out += raw(t.type) + raw(t.offset.value_or(next));
            next += padded(size_of(t));
        }
        return out;
    }
    [[nodiscard]] uint64_t data_offset() const { return padded(header().size()); }
    [[nodiscard]] std::string bytes() const {
        std::string out = header();
        if (tensors.empty()) return out;
        out.resize(padded(out.size()));
        uint32_t seed = 1;
        for (const Tensor &t : tensors) {
            const uint64_t size = size_of(t);
            std::string data(padded(size), '\0');
            // Small floats, so that a model of F32 tensors really runs; for other types any bytes do.
            for (uint64_t i = 0; i + 4 <= size; i += 4) {
                seed = seed * 1664525u + 1013904223u;
                const float value = static_cast<float>(static_cast<int32_t>(seed >> 8) - (1 << 23)) * 1e-9f;
                std::memcpy(data.data() + i, &value, 4);
            }
            out += data;
        }
        return out;
    }

  private:
    [[nodiscard]] uint64_t padded(uint64_t size) const {
        return (size + alignment - 1) / alignment * alignment;
    }
};

/// A folder of its own, gone at the end.
class TempDir {
  public:
    /// In memory, if wanted and where there is such a folder: the fuzzer writes 100000 files. Direct reads
    /// need a disk: the folder of the build.
    explicit TempDir(bool want_memory = true) {
        std::error_code error;
        const bool memory = want_memory && ::access("/dev/shm", W_OK) == 0;
        const std::filesystem::path parent =
            memory ? std::filesystem::path("/dev/shm") : std::filesystem::current_path(error);
        std::string name = (parent / "spice-test-XXXXXX").string();
        if (mkdtemp(name.data()) == nullptr) std::abort();
        path_ = name;
    }
    ~TempDir() {
        std::error_code error;
        std::filesystem::remove_all(path_, error);
    }
    TempDir(const TempDir &) = delete;
    TempDir &operator=(const TempDir &) = delete;
    [[nodiscard]] const std::filesystem::path &path() const { return path_; }
    std::filesystem::path write(const std::string &name, const std::string &bytes) const {
        const std::filesystem::path file = path_ / name;
        std::ofstream(file, std::ios::binary | std::ios::trunc)
            .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
        return file;
    }

  private:
    std::filesystem::path path_;
};

inline constexpr int64_t k_width = 32;
inline constexpr int64_t k_hidden = 64;
inline constexpr int64_t k_experts = 4;
inline constexpr int64_t k_vocabulary = 259;

/// A llama-architecture MoE that llama.cpp really loads and runs, unless a layer is to have no router.
inline GgufBuilder good_model(int n_layers = 2, int without_router = -1) {
    GgufBuilder b;
    b.text("general.architecture", "llama");
    b.text("general.name", "test");
    b.u32("llama.block_count", static_cast<uint32_t>(n_layers));
    b.u32("llama.context_length", 64);
    b.u32("llama.embedding_length", k_width);
    b.u32("llama.feed_forward_length", k_hidden);
    b.u32("llama.attention.head_count", 2);
    b.u32("llama.attention.head_count_kv", 1);
    b.f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    b.u32("llama.rope.dimension_count", 16);
    b.u32("llama.expert_count", k_experts);
    b.u32("llama.expert_used_count", 2);
    std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
    std::vector<int32_t> types = {2, 3, 3};
    for (int i = 0; i < 256; ++i) {
        char name[8];
        std::snprintf(name, sizeof(name), "<0x%02X>", i);
        tokens.emplace_back(name);
        types.push_back(6);
    }
    b.text("tokenizer.ggml.model", "llama");
    b.texts("tokenizer.ggml.tokens", tokens);
    b.array("tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, std::vector<float>(tokens.size(), 0.0f));
    b.array("tokenizer.ggml.token_type", GGUF_TYPE_INT32, types);
    b.u32("tokenizer.ggml.bos_token_id", 1);
    b.u32("tokenizer.ggml.eos_token_id", 2);
    b.flag("tokenizer.ggml.add_bos_token", 1);
    b.tensor("token_embd.weight", {k_width, k_vocabulary});
    b.tensor("output_norm.weight", {k_width});
    b.tensor("output.weight", {k_width, k_vocabulary});
    for (int layer = 0; layer < n_layers; ++layer) {
        const std::string p = "blk." + std::to_string(layer) + ".";
        b.tensor(p + "attn_norm.weight", {k_width});
        b.tensor(p + "attn_q.weight", {k_width, k_width});
        b.tensor(p + "attn_k.weight", {k_width, 16});
        b.tensor(p + "attn_v.weight", {k_width, 16});
        b.tensor(p + "attn_output.weight", {k_width, k_width});
        b.tensor(p + "ffn_norm.weight", {k_width});
        if (layer != without_router) b.tensor(p + "ffn_gate_inp.weight", {k_width, k_experts});
        b.tensor(p + "ffn_gate_exps.weight", {k_width, k_hidden, k_experts}, GGML_TYPE_Q8_0);
        b.tensor(p + "ffn_down_exps.weight", {k_hidden, k_width, k_experts}, GGML_TYPE_Q8_0);
        b.tensor(p + "ffn_up_exps.weight", {k_width, k_hidden, k_experts}, GGML_TYPE_Q8_0);
    }
    return b;
}

/// The model cut in two behind tensor number `cut`: first file, second file.
inline std::pair<GgufBuilder, GgufBuilder> split_model(const GgufBuilder &whole, size_t cut) {
    std::pair<GgufBuilder, GgufBuilder> parts;
    parts.first = whole;
    parts.first.tensors.assign(whole.tensors.begin(),
                               whole.tensors.begin() + static_cast<std::ptrdiff_t>(cut));
    parts.second.tensors.assign(whole.tensors.begin() + static_cast<std::ptrdiff_t>(cut),
                                whole.tensors.end());
    uint16_t number = 0;
    for (GgufBuilder *part : {&parts.first, &parts.second}) {
        part->u16("split.no", number++);
        part->u16("split.count", 2);
        part->i32("split.tensors.count", static_cast<int32_t>(whole.tensors.size()));
    }
    return parts;
}

} // namespace test

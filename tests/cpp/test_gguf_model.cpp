// The parser and check_model: a good file passes and gives the expected table; for each rule, a file that
// breaks it.
#include "check.h"
#include "gguf_builder.h"

#include "store/gguf_model.h"

#include <chrono>
#include <cmath>
#include <sys/stat.h>

using spice::Code;
using spice::GgufModel;
using test::GgufBuilder;
using test::good_model;

namespace {

std::ostream &print(std::ostream &out, Code code) {
    return out << static_cast<int>(code);
}

struct Outcome {
    Code code = Code::ok;
    std::string message;
};
std::ostream &operator<<(std::ostream &out, const Outcome &o) {
    return print(out, o.code) << " '" << o.message << "'";
}

Outcome outcome(const spice::Status &status) {
    return {status.code(), status.message()};
}

Outcome open_bytes(const std::string &bytes) {
    const test::TempDir dir;
    return outcome(GgufModel::open(dir.write("m.gguf", bytes)).status());
}

void expect(const Outcome &got, Code code, const std::string &part, int line) {
    std::ostringstream what;
    what << "expected code " << static_cast<int>(code) << " and '" << part << "', got " << got;
    check::report(got.code == code && got.message.find(part) != std::string::npos, __FILE__, line,
                  what.str());
}
#define EXPECT_OPEN(builder, code, part) expect(open_bytes((builder).bytes()), code, part, __LINE__)

Outcome check_built(const GgufBuilder &builder, int64_t used = 0) {
    const test::TempDir dir;
    const auto model = GgufModel::open(dir.write("m.gguf", builder.bytes()));
    return outcome(model.ok() ? spice::check_model(model.value(), used) : model.status());
}
#define EXPECT_CHECK(builder, code, part) expect(check_built(builder), code, part, __LINE__)

/// check_model of the good model after one change.
template <class Change>
Outcome check_changed(Change change, int64_t used = 0) {
    GgufBuilder b = good_model();
    change(b);
    return check_built(b, used);
}
#define EXPECT_CHANGED(statement, code, part)                                                                \
    expect(check_changed([](GgufBuilder &b) { statement; }), code, part, __LINE__)

GgufBuilder one_tensor() {
    GgufBuilder b;
    b.text("general.architecture", "llama");
    b.tensor("a.weight", {32, 2});
    b.tensor("b.weight", {32, 2});
    return b;
}

} // namespace

TEST(good_file_gives_the_expected_table) {
    const test::TempDir dir;
    const GgufBuilder b = good_model();
    const auto path = dir.write("m.gguf", b.bytes());
    const auto opened = GgufModel::open(path);
    CHECK(opened.ok());
    if (!opened.ok()) return;
    const GgufModel &model = opened.value();
    CHECK_EQ(model.files().size(), 1u);
    CHECK_EQ(model.files()[0].size, b.bytes().size());
    CHECK_EQ(model.files()[0].data_offset, b.data_offset());
    CHECK_EQ(model.tensors().size(), b.tensors.size());
    uint64_t next = b.data_offset();
    for (size_t i = 0; i < b.tensors.size(); ++i) {
        const auto &t = model.tensors()[i];
        CHECK_EQ(t.name, b.tensors[i].name);
        CHECK_EQ(t.offset, next);
        CHECK_EQ(t.bytes, GgufBuilder::size_of(b.tensors[i]));
        CHECK_EQ(t.shape[0], b.tensors[i].shape[0]);
        CHECK_EQ(static_cast<size_t>(t.n_dims), b.tensors[i].shape.size());
        next += (t.bytes + 31) / 32 * 32;
    }
    CHECK_EQ(model.find("output.weight")->shape[1], test::k_vocabulary);
    CHECK(model.find("output") == nullptr);
    CHECK_EQ(model.architecture(), "llama");
    CHECK_EQ(model.get_int("llama.expert_count").value_or(-1), 4);
    CHECK(!model.get_int("general.name"));
    CHECK(!model.get_int("tokenizer.ggml.tokens"));
    CHECK_EQ(outcome(spice::check_model(model)).message, "");
    CHECK_EQ(outcome(spice::check_model(model, 4)).message, "");
}

TEST(values_of_all_types) {
    GgufBuilder b = one_tensor();
    b.set<uint8_t>("u8", GGUF_TYPE_UINT8, 200);
    b.set<int8_t>("i8", GGUF_TYPE_INT8, -3);
    b.set<int64_t>("i64", GGUF_TYPE_INT64, INT64_MIN);
    b.set<uint64_t>("u64", GGUF_TYPE_UINT64, UINT64_MAX);
    b.set<double>("f64", GGUF_TYPE_FLOAT64, 0.5);
    b.flag("bool", 7);
    b.array<int16_t>("i16s", GGUF_TYPE_INT16, {4, -5});
    b.array<uint8_t>("bools", GGUF_TYPE_BOOL, {0, 9});
    b.array<uint32_t>("long", GGUF_TYPE_UINT32, std::vector<uint32_t>(4097, 1));
    b.version = 2;
    const test::TempDir dir;
    const auto opened = GgufModel::open(dir.write("m.gguf", b.bytes()));
    CHECK(opened.ok());
    if (!opened.ok()) return;
    const GgufModel &m = opened.value();
    CHECK_EQ(m.get_int("u8").value_or(0), 200);
    CHECK_EQ(m.get_int("i8").value_or(0), -3);
    CHECK_EQ(m.get_int("i64").value_or(0), INT64_MIN);
    CHECK_EQ(m.get_int("u64").value_or(0), INT64_MAX);
    CHECK_EQ(std::get<double>(m.metadata().at("f64")), 0.5);
    CHECK_EQ(std::get<bool>(m.metadata().at("bool")), true);
    CHECK_EQ(m.get_int("i16s", 1).value_or(0), -5);
    CHECK_EQ(m.get_int("i16s", 2).value_or(9), 0);
    CHECK_EQ(m.get_int("bools", 1).value_or(9), 1);
    CHECK(!m.get_int("long"));
    CHECK(!m.get_int("none"));
    CHECK_EQ(std::get<spice::GgufArray>(m.metadata().at("long")).count, 4097u);
}

TEST(things_that_are_no_gguf) {
    const test::TempDir dir;
    expect(outcome(GgufModel::open(dir.path() / "none.gguf").status()), Code::not_found, "none.gguf",
           __LINE__);
    expect(outcome(GgufModel::open(dir.path()).status()), Code::not_gguf, "directory", __LINE__);
    expect(outcome(GgufModel::open(dir.write("e.gguf", "")).status()), Code::not_gguf, "empty", __LINE__);
    expect(outcome(GgufModel::open(dir.write("s.gguf", "GG")).status()), Code::not_gguf, "GGUF", __LINE__);
    expect(open_bytes("version https://git-lfs.github.com/spec/v1"), Code::not_gguf, "git-lfs", __LINE__);
    expect(open_bytes("GGUF"), Code::truncated, "header", __LINE__);
    const auto pipe = dir.path() / "fifo.gguf";
    CHECK(mkfifo(pipe.c_str(), 0600) == 0);
    expect(outcome(GgufModel::open(pipe).status()), Code::not_gguf, "regular file", __LINE__);
    if (geteuid() != 0) { // root reads everything
        const auto secret = dir.write("secret.gguf", good_model().bytes());
        std::filesystem::permissions(secret, std::filesystem::perms::none);
        expect(outcome(GgufModel::open(secret).status()), Code::io, "opened", __LINE__);
    }
}

TEST(versions_and_byte_order) {
    for (const uint32_t version : {2u, 3u}) {
        GgufBuilder b = one_tensor();
        b.version = version;
        EXPECT_OPEN(b, Code::ok, "");
    }
    for (const uint32_t version : {0u, 1u, 4u, 0x7fffffffu}) {
        GgufBuilder b = one_tensor();
        b.version = version;
        EXPECT_OPEN(b, Code::unsupported, "version");
    }
    GgufBuilder b = one_tensor();
    b.version = 0x03000000;
    EXPECT_OPEN(b, Code::unsupported, "big-endian");
}

TEST(lying_counts) {
    for (const uint64_t lie : {uint64_t{1} << 40, UINT64_MAX, uint64_t{1} << 63, uint64_t{100000}}) {
        GgufBuilder b = one_tensor();
        b.n_tensors = lie;
        EXPECT_OPEN(b, Code::malformed, "number of tensors");
        b = one_tensor();
        b.n_pairs = lie;
        EXPECT_OPEN(b, Code::malformed, "number of keys");
        b = one_tensor();
        b.pair("long").type = GGUF_TYPE_STRING;
        b.pair("long").payload = test::raw(lie) + "x";
        EXPECT_OPEN(b, Code::malformed, "string's length");
        b.pair("long").type = GGUF_TYPE_ARRAY;
        b.pair("long").payload = test::raw<uint32_t>(GGUF_TYPE_UINT64) + test::raw(lie);
        EXPECT_OPEN(b, Code::malformed, "length of array 'long'");
        b.pair("long").payload = test::raw<uint32_t>(GGUF_TYPE_STRING) + test::raw(lie);
        EXPECT_OPEN(b, Code::malformed, "length of array 'long'");
    }
    GgufBuilder b = one_tensor();
    b.pair("tokenizer.ggml.tokens").type = GGUF_TYPE_ARRAY;
    b.pair("tokenizer.ggml.tokens").payload =
        test::raw<uint32_t>(GGUF_TYPE_STRING) + test::raw<uint64_t>(1) + test::raw(uint64_t{1} << 62);
    EXPECT_OPEN(b, Code::malformed, "string's length");
}

TEST(keys_and_their_types) {
    GgufBuilder b = one_tensor();
    b.pairs.push_back(b.pairs.front());
    EXPECT_OPEN(b, Code::malformed, "'general.architecture' occurs twice");
    b = one_tensor();
    b.pair("").type = GGUF_TYPE_UINT8;
    b.pair("").payload = "x";
    EXPECT_OPEN(b, Code::malformed, "key of 0 bytes");
    b = one_tensor();
    b.pair("k").type = 13;
    EXPECT_OPEN(b, Code::malformed, "unknown type 13");
    b.pair("k").type = GGUF_TYPE_ARRAY;
    b.pair("k").payload = test::raw<uint32_t>(GGUF_TYPE_ARRAY) + test::raw<uint64_t>(0);
    EXPECT_OPEN(b, Code::malformed, "array of arrays");
    b.pair("k").payload = test::raw<uint32_t>(99) + test::raw<uint64_t>(0);
    EXPECT_OPEN(b, Code::malformed, "unknown type 99");
    b = one_tensor();
    b.set<uint8_t>(std::string("a\0b", 3), GGUF_TYPE_UINT8, 1);
    EXPECT_OPEN(b, Code::malformed, "valid name");
}

TEST(alignment) {
    for (const uint32_t good : {8u, 32u, 4096u}) {
        GgufBuilder b = one_tensor();
        b.alignment = good;
        b.u32("general.alignment", good);
        EXPECT_OPEN(b, Code::ok, "");
    }
    for (const uint32_t bad : {0u, 1u, 4u, 24u, 1u << 21, 0x80000000u}) {
        GgufBuilder b = one_tensor();
        b.u32("general.alignment", bad);
        EXPECT_OPEN(b, Code::malformed, "general.alignment");
    }
    GgufBuilder b = one_tensor();
    b.set<uint64_t>("general.alignment", GGUF_TYPE_UINT64, 32);
    EXPECT_OPEN(b, Code::malformed, "general.alignment");
}

TEST(tensor_names) {
    GgufBuilder b = one_tensor();
    b.tensors[1].name = "a.weight";
    EXPECT_OPEN(b, Code::malformed, "'a.weight' occurs twice");
    b.tensors[1].name = std::string(63, 'n');
    EXPECT_OPEN(b, Code::ok, "");
    b.tensors[1].name = std::string(64, 'n');
    EXPECT_OPEN(b, Code::malformed, "name of 64 bytes");
    b.tensors[1].name = "";
    EXPECT_OPEN(b, Code::malformed, "name of 0 bytes");
    b.tensors[1].name = std::string("a.weight\0x", 10);
    EXPECT_OPEN(b, Code::malformed, "name of 10 bytes");
}

TEST(tensor_shapes_and_types) {
    const auto with = [](auto change) {
        GgufBuilder b = one_tensor();
        change(b.tensors[1]);
        return b;
    };
    EXPECT_OPEN(with([](auto &t) { t.n_dims = 0; }), Code::malformed, "0 dimensions");
    EXPECT_OPEN(with([](auto &t) { t.n_dims = 5; }), Code::malformed, "5 dimensions");
    EXPECT_OPEN(with([](auto &t) { t.shape = {32, 0}, t.bytes = 0; }), Code::malformed, "dimension 0");
    EXPECT_OPEN(with([](auto &t) { t.shape = {32, -1}, t.bytes = 0; }), Code::malformed, "dimension -1");
    const auto huge = [](auto &t) { t.shape = {1 << 30, 1 << 30, 1 << 30, 1 << 30}, t.bytes = 32; };
    EXPECT_OPEN(with(huge), Code::malformed, "address space");
    const auto wraps = [](auto &t) { t.shape = {int64_t{1} << 62, 1}, t.bytes = 32; }; // times 4 bytes is 0
    EXPECT_OPEN(with(wraps), Code::malformed, "address space");
    EXPECT_OPEN(with([](auto &t) { t.type = GGML_TYPE_COUNT; }), Code::unsupported, "does not know");
    EXPECT_OPEN(with([](auto &t) { t.type = -1; }), Code::unsupported, "does not know");
    EXPECT_OPEN(with([](auto &t) { t.type = 4; }), Code::unsupported, "does not know"); // Q4_2, removed
    const auto odd = [](auto &t) { t.shape = {33, 2}, t.type = GGML_TYPE_Q8_0, t.bytes = 128; };
    EXPECT_OPEN(with(odd), Code::malformed, "multiple of the block");
}

TEST(tensor_places) {
    GgufBuilder b = one_tensor();
    b.tensors[1].offset = 260;
    EXPECT_OPEN(b, Code::malformed, "alignment");
    b.tensors[1].offset = 224; // 32 bytes before the end of the first
    EXPECT_OPEN(b, Code::malformed, "overlap");
    b.tensors[1].offset = 0;
    EXPECT_OPEN(b, Code::malformed, "overlap");
    b.tensors[1].offset = 288;
    EXPECT_OPEN(b, Code::truncated, "ends after the file");
    b.tensors[1].offset = UINT64_MAX - 31;
    EXPECT_OPEN(b, Code::truncated, "ends after the file");
    b.tensors[1].offset = 256;
    EXPECT_OPEN(b, Code::ok, "");
    const std::string whole = one_tensor().bytes();
    for (size_t size = 1; size < whole.size(); ++size) {
        const Outcome got = open_bytes(whole.substr(0, size));
        CHECK(got.code == Code::truncated || got.code == Code::malformed ||
              (size < 4 && got.code == Code::not_gguf));
    }
    GgufBuilder none = one_tensor(); // as the vocabulary files of llama.cpp
    none.tensors.clear();
    EXPECT_OPEN(none, Code::ok, "");
}

TEST(big_vocabulary_is_quick_and_long_strings_are_read) {
    GgufBuilder b = one_tensor();
    std::vector<std::string> tokens;
    for (int i = 0; i < 262144; ++i) tokens.push_back("token-number-with-a-long-name-" + std::to_string(i));
    tokens.push_back(std::string(3u << 20, 'x')); // longer than the window
    b.texts("tokenizer.ggml.tokens", tokens);
    b.text("tokenizer.chat_template", std::string(5u << 20, 'y'));
    const test::TempDir dir;
    const auto path = dir.write("m.gguf", b.bytes());
    const auto start = std::chrono::steady_clock::now();
    const auto opened = GgufModel::open(path);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    std::cerr << "     " << b.bytes().size() << " bytes of header in " << took.count() << " ms\n";
    CHECK(opened.ok());
    if (!opened.ok()) return;
    CHECK_EQ(std::get<spice::GgufArray>(opened.value().metadata().at("tokenizer.ggml.tokens")).has_twins,
             false);
    CHECK_EQ(opened.value().get_string("tokenizer.chat_template")->size(), size_t{5} << 20);
    CHECK(took.count() < 1000); // about 30 without sanitizers; a stalled disk must not fail the test
}

TEST(split_files) {
    const test::TempDir dir;
    const GgufBuilder whole = good_model();
    const size_t cut = 11; // between gate_exps and down_exps of layer 0
    const auto [first, second] = test::split_model(whole, cut);
    const auto path = dir.write("m-00001-of-00002.gguf", first.bytes());
    expect(outcome(GgufModel::open(path).status()), Code::not_found, "m-00002-of-00002.gguf", __LINE__);
    const auto path2 = dir.write("m-00002-of-00002.gguf", second.bytes());
    const auto opened = GgufModel::open(path);
    CHECK_EQ(outcome(opened.status()).message, "");
    if (!opened.ok()) return;
    const GgufModel &model = opened.value();
    CHECK_EQ(model.files().size(), 2u);
    CHECK_EQ(model.files()[1].path, path2);
    CHECK_EQ(model.tensors().size(), whole.tensors.size());
    CHECK_EQ(model.tensors()[cut - 1].file, 0u);
    CHECK_EQ(model.tensors()[cut].file, 1u);
    CHECK_EQ(model.tensors()[cut].offset, second.data_offset());
    CHECK_EQ(outcome(spice::check_model(model)).message, "");

    expect(outcome(GgufModel::open(path2).status()), Code::malformed, "open m-00001-of-00002.gguf", __LINE__);
    const auto renamed = dir.write("other.gguf", first.bytes());
    expect(outcome(GgufModel::open(renamed).status()), Code::malformed, "-00001-of-00002.gguf", __LINE__);

    const auto retry = [&](auto change, Code code, const char *part, int line) {
        auto [a, b] = test::split_model(whole, cut);
        change(a, b);
        dir.write("m-00001-of-00002.gguf", a.bytes());
        dir.write("m-00002-of-00002.gguf", b.bytes());
        expect(outcome(GgufModel::open(path).status()), code, part, line);
    };
    retry([](auto &, auto &b) { b.u16("split.no", 0); }, Code::malformed, "another model", __LINE__);
    retry([](auto &, auto &b) { b.u32("split.no", 1); }, Code::malformed, "another model", __LINE__);
    retry([](auto &, auto &b) { b.erase("split.no"); }, Code::malformed, "another model", __LINE__);
    retry([](auto &, auto &b) { b.u16("split.count", 3); }, Code::malformed, "another model", __LINE__);
    retry([](auto &, auto &b) { b.tensors.pop_back(); }, Code::malformed, "split.tensors.count", __LINE__);
    retry([](auto &a, auto &) { a.erase("split.tensors.count"); }, Code::malformed, "split.tensors.count",
          __LINE__);
    retry([](auto &, auto &b) { b.tensors[0].name = "output.weight"; }, Code::malformed, "occurs twice",
          __LINE__);
    retry([](auto &a, auto &) { a.erase("split.no"); }, Code::malformed, "impossible", __LINE__);
    retry([](GgufBuilder &a, auto &) { a.set<uint64_t>("split.count", GGUF_TYPE_UINT64, 1ull << 40); },
          Code::malformed, "impossible", __LINE__);
    retry([](auto &, auto &b) { b.version = 9; }, Code::unsupported, "m-00002-of-00002.gguf", __LINE__);
}

TEST(check_sizes) {
    EXPECT_CHANGED(b.u32("llama.block_count", 0), Code::malformed, "block_count is 0");
    EXPECT_CHANGED(b.i32("llama.block_count", -1), Code::malformed, "block_count is -1");
    EXPECT_CHANGED(b.u32("llama.block_count", 513), Code::malformed, "block_count is 513");
    EXPECT_CHANGED(b.u32("llama.block_count", 1), Code::malformed, "belongs to no layer");
    EXPECT_CHANGED(b.u32("llama.nextn_predict_layers", 3), Code::malformed, "nextn_predict_layers is 3");
    EXPECT_CHANGED(b.u32("llama.embedding_length", 0), Code::malformed, "embedding_length is 0");
    EXPECT_CHANGED(b.u32("llama.context_length", 0), Code::malformed, "context_length is 0");
    EXPECT_CHANGED(b.u32("llama.feed_forward_length", 0);
                   b.tensor("blk.0.ffn_down.weight", {64, 32}), Code::malformed, "feed_forward_length is 0");
}

TEST(check_types) {
    EXPECT_CHANGED(b.at("blk.1.ffn_gate_inp.weight").type = GGML_TYPE_F64, Code::unsupported, "f64");
    EXPECT_CHANGED(b.at("blk.1.ffn_gate_inp.weight").type = GGML_TYPE_BF16, Code::ok, "");
    EXPECT_CHANGED(b.at("blk.0.attn_q.weight").type = GGML_TYPE_I32, Code::unsupported, "i32");
    EXPECT_CHANGED(b.at("token_embd.weight").type = GGML_TYPE_I8, Code::unsupported, "i8");
    EXPECT_CHANGED(b.at("output.weight").type = GGML_TYPE_Q8_1, Code::unsupported, "q8_1");
    EXPECT_CHANGED(b.at("output.weight").type = GGML_TYPE_Q4_0, Code::ok, "");
    EXPECT_CHANGED(b.at("blk.0.ffn_norm.weight").type = GGML_TYPE_F16, Code::unsupported, "f16");
    EXPECT_CHANGED(b.tensor("blk.0.attn_q_norm.weight", {16, 2}, GGML_TYPE_F16), Code::unsupported, "f16");
    EXPECT_CHANGED(b.tensor("blk.0.attn_q.bias", {32}, GGML_TYPE_BF16), Code::unsupported, "bf16");
    EXPECT_CHANGED(b.tensor("blk.0.exp_probs_b", {4}, GGML_TYPE_F16), Code::unsupported, "f16");
    EXPECT_CHANGED(b.tensor("blk.0.ssm_conv1d.weight", {4, 32}, GGML_TYPE_F16), Code::unsupported, "f16");
    EXPECT_CHANGED(b.tensor("rope_freqs.weight", {8}, GGML_TYPE_F16), Code::unsupported, "f16");
    EXPECT_CHANGED(b.at("blk.0.ffn_up_exps.weight").type = GGML_TYPE_I16, Code::unsupported, "i16");
    // What is legitimate: the vector that is multiplied, and tables of ids.
    EXPECT_CHANGED(b.tensor("blk.0.ffn_gate_inp_shexp.weight", {32}, GGML_TYPE_F16), Code::ok, "");
    EXPECT_CHANGED(b.tensor("blk.0.ffn_gate_tid2eid.weight", {4, 259}, GGML_TYPE_I32), Code::ok, "");
    EXPECT_CHANGED(b.tensor("d2t", {32}, GGML_TYPE_I64), Code::ok, "");
}

TEST(check_experts) {
    EXPECT_CHANGED(b.u32("llama.expert_count", 0), Code::malformed, "by llama.expert_count 0");
    EXPECT_CHANGED(b.erase("llama.expert_count"), Code::malformed, "by llama.expert_count 0");
    EXPECT_CHANGED(b.u32("llama.expert_count", 5), Code::malformed, "by llama.expert_count 5");
    EXPECT_CHANGED(b.u32("llama.expert_count", 1025), Code::malformed, "expert_count is 1025");
    EXPECT_CHANGED(b.u32("llama.expert_used_count", 0), Code::malformed, "expert_used_count is 0");
    EXPECT_CHANGED(b.erase("llama.expert_used_count"), Code::malformed, "expert_used_count is 0");
    EXPECT_CHANGED(b.u32("llama.expert_used_count", 5), Code::malformed, "expert_used_count is 5");
    EXPECT_CHANGED(b.array<uint32_t>("llama.expert_used_count", GGUF_TYPE_UINT32, {2, 1}), Code::ok, "");
    EXPECT_CHANGED(b.array<uint32_t>("llama.expert_used_count", GGUF_TYPE_UINT32, {2, 0}), Code::malformed,
                   "layer 1");
    const auto same = [](GgufBuilder &) {};
    expect(check_changed(same, 4), Code::ok, "", __LINE__);
    expect(check_changed(same, 5), Code::malformed, "asked to be 5", __LINE__);
    expect(check_changed(same, -1), Code::malformed, "asked to be -1", __LINE__);
    EXPECT_CHANGED(b.u32("llama.expert_group_count", 4), Code::malformed, "expert_group_count is 4");
    EXPECT_CHANGED(b.u32("llama.expert_group_count", 3), Code::malformed, "expert_group_count is 3");
    EXPECT_CHANGED(b.u32("llama.expert_group_count", 2), Code::malformed, "expert_group_used_count is 0");
    EXPECT_CHANGED(b.u32("llama.expert_group_count", 2); b.u32("llama.expert_group_used_count", 2),
                                                         Code::malformed, "expert_group_used_count is 2");
    EXPECT_CHANGED(b.u32("llama.expert_group_count", 2);
                   b.u32("llama.expert_group_used_count", 1), Code::ok, "");
    EXPECT_CHANGED(b.u32("llama.expert_gating_func", 5), Code::malformed, "expert_gating_func is 5");
    EXPECT_CHANGED(b.tensor("blk.0.ffn_up_chexps.weight", {32, 32, 2});
                   b.tensor("blk.0.ffn_down_chexps.weight", {32, 32, 2}), Code::malformed,
                   "experts_per_group is 0");
    EXPECT_CHANGED(b.tensor("blk.0.ffn_up_chexps.weight", {32, 32, 2}); b.u32("llama.experts_per_group", 2);
                   b.tensor("blk.0.ffn_down_chexps.weight", {32, 32, 2}), Code::ok, "");
}

TEST(check_heads_and_rope) {
    EXPECT_CHANGED(b.u32("llama.attention.head_count", 0), Code::malformed, "head_count is 0");
    EXPECT_CHANGED(b.erase("llama.attention.head_count"), Code::malformed, "head_count is 0");
    EXPECT_CHANGED(b.u32("llama.attention.head_count_kv", 0), Code::malformed, "head_count_kv is 0");
    EXPECT_CHANGED(b.u32("llama.attention.head_count", 3);
                   b.u32("llama.attention.head_count_kv", 2), Code::malformed, "multiple of head_count_kv");
    EXPECT_CHANGED(b.u32("llama.attention.head_count", 5), Code::malformed, "divisor of embedding_length");
    EXPECT_CHANGED(b.u32("llama.attention.key_length", 0), Code::malformed, "key_length is 0");
    EXPECT_CHANGED(b.u32("llama.rope.dimension_count", 8), Code::malformed, "dimension_count is 8");
    EXPECT_CHANGED(b.u32("llama.rope.dimension_count", 15), Code::malformed, "dimension_count is 15");
    EXPECT_CHANGED(b.u32("llama.rope.dimension_count", 64), Code::malformed, "dimension_count is 64");
    EXPECT_CHANGED(b.text("llama.rope.scaling.type", "linaer"), Code::malformed, "rope.scaling.type");
    EXPECT_CHANGED(b.text("llama.rope.scaling.type", "yarn"), Code::ok, "");
    EXPECT_CHANGED(b.u32("llama.wkv.head_size", 0), Code::malformed, "wkv.head_size is 0");
    EXPECT_CHANGED(b.tensor("blk.0.ssm_in.weight", {32, 4});
                   b.u32("llama.ssm.state_size", 0), Code::malformed, "ssm.state_size is 0");
    EXPECT_CHANGED(b.f32("llama.attention.layer_norm_rms_epsilon", -1e-5f), Code::malformed, "rms_epsilon");
    EXPECT_CHANGED(b.f32("llama.attention.layer_norm_rms_epsilon", NAN), Code::malformed, "rms_epsilon");
    EXPECT_CHANGED(b.u32("llama.pooling_type", 5), Code::malformed, "pooling_type is 5");
}

TEST(check_tokens) {
    EXPECT_CHANGED(b.texts("tokenizer.ggml.tokens", {"a", "b"}), Code::malformed, "259 rows for 2 tokens");
    const auto retokenize = [](GgufBuilder &b, size_t at, const std::string &text) {
        std::vector<std::string> tokens;
        for (int i = 0; i < test::k_vocabulary; ++i) tokens.push_back("t" + std::to_string(i));
        tokens[at] = text;
        b.texts("tokenizer.ggml.tokens", tokens);
    };
    expect(check_changed([&](auto &b) { retokenize(b, 7, "t9"); }), Code::malformed, "twice", __LINE__);
    expect(check_changed([&](auto &b) { retokenize(b, 7, std::string("t9\0z", 4)); }), Code::malformed,
           "twice", __LINE__);
    expect(check_changed([&](auto &b) { retokenize(b, 7, "u"); }), Code::ok, "", __LINE__);
    EXPECT_CHANGED(b.array("tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, std::vector<float>(258)),
                   Code::malformed, "scores has 258");
    EXPECT_CHANGED(b.array("tokenizer.ggml.token_type", GGUF_TYPE_INT32, std::vector<int32_t>(3)),
                   Code::malformed, "token_type has 3");
    EXPECT_CHANGED(b.text("tokenizer.ggml.model", "none");
                   b.u32("llama.vocab_size", 0x80000103), Code::malformed, "vocab_size");
    // An id out of range falls back to the tokenizer's default; gpt2's is 11, of which there is none in 4
    // tokens.
    EXPECT_CHANGED(b.u32("tokenizer.ggml.bos_token_id", 0xffffffff), Code::ok, "");
    GgufBuilder small = good_model();
    small.tensors.clear();
    small.texts("tokenizer.ggml.tokens", {"a", "b", "c", "d"});
    small.text("tokenizer.ggml.model", "gpt2");
    EXPECT_CHECK(small, Code::ok, "");
    small.u32("tokenizer.ggml.bos_token_id", 4);
    EXPECT_CHECK(small, Code::malformed, "bos_token_id is 4");
    small.flag("tokenizer.ggml.add_bos_token", 0);
    EXPECT_CHECK(small, Code::ok, "");
    small.flag("tokenizer.ggml.add_eos_token", 1);
    small.u32("tokenizer.ggml.eos_token_id", 9);
    EXPECT_CHECK(small, Code::malformed, "eos_token_id is 9");
}

RUN_TESTS()

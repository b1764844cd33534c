// The parser: a good file gives the expected table; for each rule, a file that breaks it.
#include "gguf_expect.h"

#include <chrono>
#include <sys/stat.h>

using namespace test;

namespace {

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

TEST(a_sparse_file_makes_no_huge_string) {
    const test::TempDir dir;
    const uint64_t length = uint64_t{1} << 30;
    const auto path = dir.write("m.gguf", "GGUF" + test::raw<uint32_t>(3) + test::raw<uint64_t>(0) +
                                              test::raw<uint64_t>(1) + test::raw(length));
    std::filesystem::resize_file(path, 4 * length); // takes no room on the disk
    expect(outcome(GgufModel::open(path).status()), Code::malformed, "1073741824", __LINE__);
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

RUN_TESTS()

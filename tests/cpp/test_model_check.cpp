// check_model: the good model passes; for each rule, a model that breaks it.
#include "gguf_expect.h"

#include <cmath>

using namespace test;

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
    expect(check_changed(same, 5), Code::unsupported, "asked to be 5", __LINE__);
    expect(check_changed(same, -1), Code::unsupported, "asked to be -1", __LINE__);
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

TEST(check_experts_of_a_dense_model) {
    GgufBuilder b = good_model();
    std::erase_if(b.tensors, [](const auto &t) { return t.name.find("_exps") != std::string::npos; });
    b.erase("llama.expert_used_count");
    b.erase("llama.expert_count");
    EXPECT_CHECK(b, Code::ok, "");
    b.u32("llama.expert_group_count", 1);
    EXPECT_CHECK(b, Code::malformed, "expert_group_count is 1");
    b.erase("llama.expert_group_count");
    b.u32("llama.expert_used_count", 1);
    EXPECT_CHECK(b, Code::malformed, "expert_used_count is 1");
    b.u32("llama.expert_count", 4); // without stacked tensors: llama.cpp asserts all the same
    b.u32("llama.expert_used_count", 0);
    EXPECT_CHECK(b, Code::malformed, "expert_used_count is 0");
}

TEST(check_heads_and_rope) {
    EXPECT_CHANGED(b.u32("llama.attention.head_count", 0), Code::malformed, "head_count is 0");
    EXPECT_CHANGED(b.i32("llama.attention.head_count", -2), Code::malformed, "head_count is -2");
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

namespace {

/// The good model with the keys of another architecture; whether its tensors fit that one is not
/// check_model's matter.
GgufBuilder as_architecture(const std::string &name) {
    GgufBuilder b = good_model();
    b.text("general.architecture", name);
    for (test::Pair &pair : b.pairs) {
        if (pair.key.starts_with("llama.")) pair.key = name + pair.key.substr(5);
    }
    return b;
}

} // namespace

TEST(check_latent_attention) {
    GgufBuilder b = as_architecture("deepseek2");
    b.u32("deepseek2.attention.kv_lora_rank", 32);
    b.u32("deepseek2.attention.key_length_mla", 32);
    b.u32("deepseek2.attention.key_length", 48);
    EXPECT_CHECK(b, Code::ok, "");
    b.u32("deepseek2.attention.key_length", 50);
    EXPECT_CHECK(b, Code::malformed, "attention.key_length is 50");
    b.set("deepseek2.attention.kv_lora_rank", GGUF_TYPE_UINT64, UINT64_MAX); // its sum with 16 overflows
    EXPECT_CHECK(b, Code::malformed, "9223372036854775807 + 16");
    b.u32("deepseek2.attention.kv_lora_rank", 32);
    b.u32("deepseek2.attention.key_length", 48);
    b.u32("deepseek2.attention.key_length_mla", 16);
    EXPECT_CHECK(b, Code::malformed, "dimension_count is 16");
}

TEST(check_other_architectures) {
    GgufBuilder phi = as_architecture("phi3"); // turns a part of the head
    phi.u32("phi3.rope.dimension_count", 8);
    EXPECT_CHECK(phi, Code::ok, "");
    for (const uint32_t turned : {7u, 18u, 0xffffffffu}) {
        phi.u32("phi3.rope.dimension_count", turned);
        EXPECT_CHECK(phi, Code::malformed, "dimension_count");
    }
    GgufBuilder ernie = as_architecture("ernie4_5-moe");
    ernie.u32("ernie4_5-moe.interleave_moe_layer_step", 1);
    EXPECT_CHECK(ernie, Code::ok, "");
    ernie.u32("ernie4_5-moe.interleave_moe_layer_step", 0);
    EXPECT_CHECK(ernie, Code::malformed, "interleave_moe_layer_step is 0");
    GgufBuilder jamba = as_architecture("jamba");
    jamba.tensor("blk.0.ssm_in.weight", {32, 4});
    jamba.u32("jamba.ssm.inner_size", 64);
    EXPECT_CHECK(jamba, Code::ok, "");
    jamba.u32("jamba.ssm.inner_size", 65);
    EXPECT_CHECK(jamba, Code::malformed, "ssm.inner_size is 65");
    GgufBuilder lfm = as_architecture("lfm2moe");
    lfm.u32("lfm2moe.expert_gating_func", 2);
    EXPECT_CHECK(lfm, Code::ok, "");
    lfm.u32("lfm2moe.expert_gating_func", 0);
    EXPECT_CHECK(lfm, Code::malformed, "expert_gating_func is 0");
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
    const auto rename_byte = [](GgufBuilder &b, const std::string &other) {
        std::string &bytes = b.pair("tokenizer.ggml.tokens").payload;
        bytes.replace(bytes.find("<0x41>"), 6, other);
    };
    expect(check_changed([&](auto &b) { rename_byte(b, "<0x4z>"); }), Code::malformed, "the byte 65",
           __LINE__);
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
    GgufBuilder none = small;
    none.texts("tokenizer.ggml.tokens", {});
    EXPECT_CHECK(none, Code::malformed, "at least one text");
    small.u32("tokenizer.ggml.bos_token_id", 4);
    EXPECT_CHECK(small, Code::malformed, "bos_token_id is 4");
    small.flag("tokenizer.ggml.add_bos_token", 0);
    EXPECT_CHECK(small, Code::ok, "");
    small.flag("tokenizer.ggml.add_eos_token", 1);
    small.u32("tokenizer.ggml.eos_token_id", 9);
    EXPECT_CHECK(small, Code::malformed, "eos_token_id is 9");
}

RUN_TESTS()

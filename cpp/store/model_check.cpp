// check_model: the values that llama.cpp 0.3.36 (the pinned version) does not survive. Each rule stands for
// an assertion, a division by zero or an unchecked pointer that was found by reading its loader, graph
// builders and ggml-cpu; values that llama.cpp itself refuses with an exception are left to it, unless a
// clearer message costs nothing.
#include "store/expert_index.h"
#include "store/model_rules.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <new>
#include <set>

namespace spice {

namespace {

constexpr int64_t k_max_layers = 512;   // LLAMA_MAX_LAYERS
constexpr int64_t k_max_experts = 1024; // LLAMA_MAX_EXPERTS

using Names = std::set<std::string_view>;

/// Architectures whose graph asserts that RoPE turns the whole head.
const Names &whole_head_rope() {
    static const Names names = {
        "apertus",        "arcee",      "arctic",      "baichuan", "chameleon",    "codeshell",
        "cogvlm",         "cohere2moe", "dbrx",        "deci",     "deepseek",     "dots1",
        "dream",          "ernie4_5",   "exaone",      "exaone4",  "exaone-moe",   "falcon",
        "granite",        "granitemoe", "granite_swa", "grok",     "grovemoe",     "hunyuan-moe",
        "hunyuan-dense",  "hunyuan_vl", "internlm2",   "jais2",    "llada",        "llada-moe",
        "llama",          "llama4",     "maincoder",   "mellum",   "mistral3",     "minicpm",
        "llama-embed",    "olmo",       "olmo2",       "olmoe",    "orion",        "paddleocr",
        "pangu-embedded", "plamo",      "qwen2",       "qwen2moe", "qwen2vl",      "qwen3",
        "qwen3moe",       "qwen3vl",    "qwen3vlmoe",  "rnd1",     "seed_oss",     "smallthinker",
        "smollm3",        "starcoder2", "talkie",      "xverse",   "ernie4_5-moe",
    };
    return names;
}

/// Architectures that hand `expert_gating_func` 0 on to a switch that aborts on it; others replace it or
/// ignore it.
const Names &needs_gating_func() {
    static const Names names = {"bailingmoe2", "bailingmoe3",  "deepseek32", "dots1",   "dots3note",
                                "exaone-moe",  "kimi-linear",  "kimi-k3",    "lfm2moe", "minimax-m2",
                                "minimax-m3",  "smallthinker", "hy_v4"};
    return names;
}

bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

bool multipliable(int32_t type) {
    return ggml_get_type_traits_cpu(static_cast<ggml_type>(type))->vec_dot != nullptr;
}

/// N of "blk.N.", or -1.
int64_t layer_of(std::string_view name) {
    if (!name.starts_with("blk.")) return -1;
    int64_t layer = -1;
    const auto [end, error] = std::from_chars(name.data() + 4, name.data() + name.size(), layer);
    return error == std::errc{} && end != name.data() + name.size() && *end == '.' ? layer : -1;
}

class Check : CheckedModel {
  public:
    Check(const GgufModel &model, int64_t expert_used) : CheckedModel(model), override_(expert_used) {}

    Status run() {
        Status (Check::*const rules[])() = {&Check::sizes,        &Check::types, &Check::experts,
                                            &Check::used_experts, &Check::heads, &Check::rope,
                                            &Check::divisors,     &Check::floats};
        for (const auto rule : rules) {
            Status status = (this->*rule)();
            if (!status.ok()) return status;
        }
        return check_vocabulary(*this);
    }

  private:
    [[nodiscard]] bool any_tensor(std::string_view part) const {
        return std::any_of(model().tensors().begin(), model().tensors().end(),
                           [&](const GgufTensor &t) { return contains(t.name, part); });
    }
    [[nodiscard]] const GgufTensor *in_layer(int32_t layer, std::string_view rest) const {
        return model().find("blk." + std::to_string(layer) + "." + std::string(rest));
    }
    [[nodiscard]] int32_t n_layers() const {
        return static_cast<int32_t>(std::clamp<int64_t>(number("block_count").value_or(0), 0, k_max_layers));
    }

    Status sizes() {
        if (!has_tensors()) return {};
        const std::optional<int64_t> blocks = number("block_count");
        if (blocks && (*blocks < 1 || *blocks > k_max_layers)) {
            return refuse_key("block_count", *blocks, "1 to " + std::to_string(k_max_layers));
        }
        const int64_t nextn = number("nextn_predict_layers").value_or(0);
        if (blocks && (nextn < 0 || nextn > *blocks)) {
            return refuse_key("nextn_predict_layers", nextn,
                              "0 to block_count, which is " + std::to_string(*blocks));
        }
        for (const char *name : {"context_length", "embedding_length"}) {
            const std::optional<int64_t> value = number(name);
            if (value && (*value < 1 || *value > INT32_MAX))
                return refuse_key(name, *value, "1 to 2147483647");
        }
        if (blocks) {
            for (const GgufTensor &tensor : model().tensors()) {
                // The speech models and the adapters of granite-switch number more than blocks with it.
                const bool other =
                    contains(arch(), "tts") || contains(arch(), "wavtokenizer") || contains(arch(), "switch");
                if (layer_of(tensor.name) >= *blocks && !other) {
                    return refuse("tensor '" + tensor.name + "' belongs to no layer, block_count is " +
                                  std::to_string(*blocks));
                }
            }
        }
        for (int32_t layer = 0; layer < n_layers(); ++layer) {
            const GgufTensor *down = in_layer(layer, "ffn_down.weight");
            const std::optional<int64_t> width = number("feed_forward_length", layer);
            if (down != nullptr && width && *width < 1) {
                return refuse_key("feed_forward_length", *width,
                                  std::to_string(down->shape[0]) + " by the tensors");
            }
        }
        return {};
    }

    /// What ggml-cpu does with a tensor follows from its name in llama.cpp.
    [[nodiscard]] bool type_is_possible(const GgufTensor &tensor) const {
        const std::string_view name = tensor.name;
        const bool f32 = tensor.ggml_type == GGML_TYPE_F32;
        if (contains(name, "tid2eid") || contains(name, "embd_ordering")) {
            return tensor.ggml_type == GGML_TYPE_I32 || multipliable(tensor.ggml_type);
        }
        if (name == "d2t" || name.starts_with("d2t.")) return true; // eagle3: a table of 64-bit token ids
        // MUL, ADD and ADD_ID of ggml-cpu take a second operand of F32 only, and abort otherwise.
        if (name.ends_with(".bias") || name.ends_with("scale")) return f32;
        if (name.ends_with("norm.weight") || contains(name, ".exp_probs_b")) return f32;
        // SSM_CONV asserts floats.
        if (contains(name, "ssm_conv1d") || contains(name, "shortconv.conv.")) return f32;
        if (name.starts_with("rope_freqs.") || name.starts_with("rope_factors_")) return f32;
        // The one vector that is multiplied as a matrix; all others are norms in disguise.
        if (tensor.n_dims == 1 && name.ends_with(".weight") && !contains(name, "ffn_gate_inp_shexp")) {
            return f32 || contains(arch(), "wavtokenizer") || contains(arch(), "tts");
        }
        // Everything else is multiplied or looked up: MUL_MAT calls vec_dot without looking whether there is
        // one.
        if (tensor.ggml_type == GGML_TYPE_I32) return !name.ends_with(".weight");
        return multipliable(tensor.ggml_type);
    }

    Status types() {
        for (const GgufTensor &tensor : model().tensors()) {
            if (!type_is_possible(tensor)) {
                return refuse("tensor '" + tensor.name + "' has the type " +
                                  ggml_type_name(static_cast<ggml_type>(tensor.ggml_type)) +
                                  ", which ggml-cpu cannot use there",
                              Code::unsupported);
            }
        }
        return {};
    }

    Status experts() {
        Result<ExpertIndex> built = ExpertIndex::build(model());
        if (!built.ok()) return built.status();
        const ExpertIndex &index = built.value();
        const int64_t count = number("expert_count").value_or(0);
        if (count < 0 || count > k_max_experts) return refuse_key("expert_count", count, "0 to 1024");
        const int64_t group = number("experts_per_group").value_or(0);
        for (const LayerExperts &layer : index.layers()) {
            for (const ExpertPart &part : layer.parts) {
                if (part.kind != PartKind::weight) continue;
                if (part.bank == Bank::adjugate && group < 1) {
                    return refuse_key("experts_per_group", group,
                                      "1 or more, since " + part.name + " exists");
                }
                const int64_t expected = part.bank == Bank::adjugate ? count / group : count;
                if (part.n_expert != expected) {
                    return refuse(part.name + " has " + std::to_string(part.n_expert) + " experts, but by " +
                                  key("expert_count") + " " + std::to_string(expected) + " are possible");
                }
            }
        }
        return groups(count);
    }

    Status groups(int64_t count) {
        if (!has_tensors()) return {};
        const int64_t n_groups = number("expert_group_count").value_or(0);
        if (n_groups < 0 || n_groups >= std::max<int64_t>(count, 1)) {
            return refuse_key("expert_group_count", n_groups,
                              "less than expert_count, " + std::to_string(count));
        }
        if (n_groups > 1) {
            // Groups are ranked by the sum of their best two experts.
            if (count % n_groups != 0 || count / n_groups < 2) {
                return refuse_key("expert_group_count", n_groups,
                                  "a divisor of expert_count (" + std::to_string(count) +
                                      ") with 2 experts a group");
            }
            const int64_t used = number("expert_group_used_count").value_or(0);
            if (used < 1 || used >= n_groups) {
                return refuse_key("expert_group_used_count", used,
                                  "1 to less than " + std::to_string(n_groups));
            }
        }
        const std::optional<int64_t> gating = number("expert_gating_func");
        const bool none = needs_gating_func().contains(arch());
        if (count > 0 && gating && (*gating < (none ? 1 : 0) || *gating > 4)) {
            return refuse_key("expert_gating_func", *gating, "1 to 4");
        }
        return {};
    }

    Status used_experts() {
        if (!has_tensors()) return {};
        const int64_t count = number("expert_count").value_or(0);
        const bool dense_hunyuan = (arch() == "hunyuan-dense" || arch() == "hunyuan_vl") && count <= 1;
        if (dense_hunyuan) return {}; // llama.cpp sets both to zero
        if (override_ < 0 || override_ > count) {
            return {Code::unsupported, model().files().front().path.string() +
                                           ": expert_used_count is asked to be " + std::to_string(override_) +
                                           ", but the model has " + std::to_string(count) +
                                           " experts; ask for at most as many"};
        }
        int64_t most = 0;
        for (int32_t layer = 0; layer < n_layers(); ++layer) {
            const int64_t used = override_ > 0 ? override_ : number("expert_used_count", layer).value_or(0);
            if (used < 0 || used > count) {
                return refuse_key("expert_used_count", used, "1 to expert_count, " + std::to_string(count));
            }
            const bool routed = in_layer(layer, "ffn_down_exps.weight") != nullptr;
            if (used == 0 && routed) {
                return refuse_key("expert_used_count", used,
                                  "1 or more, since layer " + std::to_string(layer) + " has experts");
            }
            most = std::max(most, used);
        }
        if (count > 0 && most == 0) return refuse_key("expert_used_count", 0, "1 or more with experts");
        return {};
    }

    Status heads() {
        if (!has_tensors()) return {};
        bool any_kv = false;
        bool any_head = false;
        for (int32_t layer = 0; layer < n_layers(); ++layer) {
            const int64_t n_head = number("attention.head_count", layer).value_or(0);
            const int64_t n_kv = number("attention.head_count_kv", layer).value_or(n_head);
            any_kv = any_kv || n_kv > 0;
            any_head = any_head || n_head > 0;
            if (n_head < 0 || n_kv < 0 || n_head > INT32_MAX || n_kv > INT32_MAX) {
                return refuse_key("attention.head_count", n_head, "1 to the width of the model");
            }
            if (n_kv > 0 && n_head % n_kv != 0) {
                return refuse_key("attention.head_count", n_head,
                                  "a multiple of head_count_kv, " + std::to_string(n_kv));
            }
            const bool attends = in_layer(layer, "attn_q.weight") != nullptr ||
                                 in_layer(layer, "attn_qkv.weight") != nullptr ||
                                 in_layer(layer, "attn_q_b.weight") != nullptr;
            if (n_head == 0 && attends) {
                return refuse_key("attention.head_count", 0,
                                  "1 or more, since layer " + std::to_string(layer) + " has attention");
            }
        }
        if (any_head && !any_kv && any_tensor(".attn_k.weight")) {
            return refuse_key("attention.head_count_kv", 0, "1 or more, since the model has attention");
        }
        const int64_t n_head = number("attention.head_count").value_or(0);
        const int64_t width = number("embedding_length").value_or(0);
        if (n_head > 0 && width > 0 && !number("attention.key_length") && width % n_head != 0) {
            return refuse_key("attention.head_count", n_head,
                              "a divisor of embedding_length, " + std::to_string(width));
        }
        for (const char *name : {"attention.key_length", "attention.value_length"}) {
            const std::optional<int64_t> length = number(name);
            if (length && any_head && (*length < 1 || *length > INT32_MAX)) {
                return refuse_key(name, *length, "1 or more");
            }
        }
        return {};
    }

    Status rope() {
        if (!has_tensors()) return {};
        const std::optional<std::string> scaling = model().get_string(key("rope.scaling.type"));
        if (scaling && *scaling != "none" && *scaling != "linear" && *scaling != "yarn" &&
            *scaling != "longrope") {
            return refuse(key("rope.scaling.type") + " is none of none, linear, yarn and longrope");
        }
        const int64_t n_head = number("attention.head_count").value_or(0);
        const std::optional<int64_t> turned = number("rope.dimension_count");
        if (!turned || n_head < 1) return {};
        const int64_t head =
            number("attention.key_length").value_or(number("embedding_length").value_or(0) / n_head);
        if (*turned < 0 || *turned % 2 != 0 || *turned > head) {
            return refuse_key("rope.dimension_count", *turned,
                              "an even number up to " + std::to_string(head));
        }
        if (*turned != head && whole_head_rope().contains(arch()) && !number("attention.key_length_swa")) {
            return refuse_key("rope.dimension_count", *turned, "the head's length, " + std::to_string(head));
        }
        const int64_t latent = number("attention.kv_lora_rank").value_or(0);
        const int64_t whole = number("attention.key_length_mla").value_or(head);
        if (latent > 0 && *turned >= whole) {
            return refuse_key("rope.dimension_count", *turned,
                              "less than the head's length, " + std::to_string(whole));
        }
        // With MLA in its absorbed form the cache holds the latent vector and the turned part, one behind the
        // other.
        const bool absorbed = latent > 0 && number("attention.key_length_mla").value_or(0) > 0;
        const bool as_deepseek =
            arch() == "deepseek2" || arch() == "deepseek32" || arch() == "glm-dsa" || arch() == "mistral4";
        if (absorbed && as_deepseek && head - *turned != latent) { // not their sum: a lying rank overflows it
            return refuse_key("attention.key_length", head,
                              "kv_lora_rank + rope.dimension_count, " + std::to_string(latent) + " + " +
                                  std::to_string(*turned));
        }
        return {};
    }

    /// Numbers that llama.cpp divides by.
    Status divisors() {
        if (!has_tensors()) return {};
        for (const char *name : {"wkv.head_size", "attention.group_norm_groups", "experts_per_group",
                                 "attention.output_group_count", "conv_group_size"}) {
            if (number(name).value_or(1) < 1) return refuse_key(name, *number(name), "1 or more");
        }
        if (contains(arch(), "ernie") && number("interleave_moe_layer_step").value_or(1) < 1) {
            return refuse_key("interleave_moe_layer_step", *number("interleave_moe_layer_step"), "1 or more");
        }
        if (!any_tensor(".ssm_")) return {};
        for (const char *name : {"ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank",
                                 "ssm.group_count"}) {
            if (number(name).value_or(1) < 1) return refuse_key(name, *number(name), "1 or more");
        }
        const std::optional<int64_t> inner = number("ssm.inner_size");
        const int64_t width = number("embedding_length").value_or(0);
        if ((arch() == "jamba" || arch() == "granitehybrid") && inner && *inner != 2 * width) {
            return refuse_key("ssm.inner_size", *inner,
                              "twice embedding_length, " + std::to_string(2 * width));
        }
        return {};
    }

    Status floats() {
        for (const char *name : {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
                                 "attention.group_norm_epsilon"}) {
            const auto at = model().metadata().find(key(name));
            if (at == model().metadata().end()) continue;
            const auto *value = std::get_if<double>(&at->second);
            if (value != nullptr && !(*value >= 0.0)) { // NaN too
                return refuse(key(name) + " is " + std::to_string(*value) + "; possible is 0 or more");
            }
        }
        const std::optional<int64_t> pooling = number("pooling_type");
        if (pooling && *pooling > 4) return refuse_key("pooling_type", *pooling, "0 to 4");
        return {};
    }

    int64_t override_;
};

} // namespace

Status check_model(const GgufModel &model, int64_t expert_used) {
    try {
        return Check(model, expert_used).run();
    } catch (const std::bad_alloc &) {
        return {Code::out_of_memory, "not enough memory to check the model"};
    } catch (const std::exception &error) {
        return {Code::internal, std::string("the check of the model: ") + error.what()};
    }
}

} // namespace spice

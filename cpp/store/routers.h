// The routers of a model: which tensors make the router scores of each group, and how the experts are chosen
// from them. Headers only, until read_router() is called for one group.
//
// A group is one routed bank of one layer, numbered as the Engine numbers them (layers ascending, the routed
// bank before the adjugate one). Routers that cannot be evaluated from what the experts of an earlier layer
// read have no entry here, and `reason` says why: such layers are predicted from history alone, and no model
// fails to load because of its routers.
//
// The scores of a group are   logits = W (x * router_scale + router_shift) + b,   with x the normalised
// residual stream; the routed experts' input, which is what SPICE sees, is h = x * input_scale + input_shift.
// In nearly all architectures both scales are the same FFN norm. Exceptions: gemma4 (the router has a scale
// of its own), smallthinker (reads the stream without a norm, before attention: its scores have an unknown
// positive factor, only their order is meaningful), the bert family and minimax-01 (they normalise after the
// addition: no rescaling is known to be right). No router: grovemoe (two banks), kimi-k3 and nemotron_h_moe
// with latent experts (the router reads what the experts do not), llama4 (the experts read their input times
// the gate weight), layers of deepseek4 that choose by the token's number, layers for a second token.
//
// Thread: any. read_router blocks on disk. Errors: those of read_floats.
#pragma once

#include "store/expert_index.h"
#include "store/gguf_model.h"
#include "store/status.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace spice {

/// What turns logits into the values that the choice and the gate weights start from.
enum class GatingKind : uint8_t {
    softmax,        ///< softmax over all experts
    sigmoid,        ///< each expert by itself
    softmax_chosen, ///< the choice by logits, softmax over the chosen ones
    sqrt_softplus,  ///< sqrt(log(1 + e^x))
};

/// How a model chooses `top_k` experts: value = kind(logits) + selection bias; with groups of experts, the
/// n_groups_used groups with the largest sum of their two best values stay, the others are out.
struct RouterGating {
    GatingKind kind = GatingKind::softmax;
    int32_t top_k = 0;
    int32_t n_groups = 1;
    int32_t n_groups_used = 1;
};

struct RouterInfo {
    int32_t layer = 0;
    int32_t n_expert = 0;
    int64_t n_embd = 0;                         ///< width of the experts' input
    const GgufTensor *weight = nullptr;         ///< [n_expert][n_embd]; null: no head can target this group
    const GgufTensor *bias = nullptr;           ///< added to the logits
    const GgufTensor *selection_bias = nullptr; ///< added to the gating values before the choice
    const GgufTensor *input_scale = nullptr;
    const GgufTensor *input_shift = nullptr;
    const GgufTensor *router_scale = nullptr; ///< null while input_scale is not: all ones
    const GgufTensor *router_shift = nullptr;
    float router_factor = 1.0f; ///< on router_scale
};

struct RouterSet {
    RouterGating gating;
    std::vector<RouterInfo> groups; ///< one for each group of the Engine
    std::string reason;             ///< why some or all groups have no router; empty: all have one
};

/// The data of one group's router.
struct RouterData {
    std::vector<float> weight;                                               ///< [n_expert][n_embd]
    std::vector<float> bias;                                                 ///< [n_expert] or empty
    std::vector<float> selection_bias;                                       ///< [n_expert] or empty
    std::vector<float> input_scale, input_shift, router_scale, router_shift; ///< [n_embd] or empty
};

/// `expert_used`: the user's override of expert_used_count, 0 for none. The pointers in the result live as
/// long as the model does.
[[nodiscard]] RouterSet find_routers(const GgufModel &model, const ExpertIndex &index, int64_t expert_used);

[[nodiscard]] Result<RouterData> read_router(const GgufModel &model, const RouterInfo &info);

} // namespace spice

// How a model chooses its experts from raw router scores: the order that its top-k follows.
//
// Who calls: whoever has scores of a router (or of a head that stands in for it) and needs to know which
// experts they select: the runtime before Predictor::predict(), the fit, the benches. Thread: any; no state,
// no allocation, nothing blocks. Errors: none; sizes that do not agree are bugs of the caller (assert).
// Scores that are not finite rank last.
//
// What stock llama.cpp does, by architecture (llm_graph_context::build_moe_ffn and the callers of it):
//   softmax         most; deepseek2 with up to 256 experts without a declared gating function
//   sigmoid         llama4, deepseek3-like (deepseek2 files that say so), glm4-moe, afmoe, mimo2, and
//                   nemotron-h-moe
//   none            gpt-oss: top-k of the logits; softmax only over the chosen ones' weights
//   sqrt_softplus   deepseek4
//   router_bias     added to the logits before the activation: gpt-oss (`ffn_gate_inp.bias`)
//   selection_bias  added after the activation, for the choice only: `exp_probs_b` of deepseek3-like models
//   expert groups   when the file says `expert_group_count` > 1 (deepseek3-like, bailingmoe2): the score of a
//                   group is the sum of its two best selection scores; only the best `n_groups_used` groups
//                   remain
// All of it is decided by the model's file, not by its architecture's name, but for the activation's default.
#pragma once

#include <cstdint>
#include <span>

namespace spice::policy {

enum class Activation : uint8_t { softmax, sigmoid, none, sqrt_softplus };

struct Gating {
    Activation activation = Activation::softmax;
    int32_t n_expert_groups = 1; ///< parts that the experts are divided into, in order; 0 or 1: not divided
    int32_t n_groups_used = 1;   ///< parts that a token may choose from
};

/// Whether the numbers fit together: the groups divide n_experts into parts of two or more, and some but not
/// more than all are used.
[[nodiscard]] bool possible(const Gating &gating, int32_t n_experts);

/// out[e]: a score whose order is the order of the model's choice; -infinity for experts of excluded groups
/// and for scores that are not finite. Where nothing but the order of the raw scores decides (no selection
/// bias), `out` holds the biased raw scores themselves, whose distances are the better feature; otherwise the
/// activation plus the selection bias.
/// raw, out: [n_experts], may be the same memory. Biases: [n_experts], or empty where the model has none.
void ranking_scores(const Gating &gating, std::span<const float> raw, std::span<const float> router_bias,
                    std::span<const float> selection_bias, std::span<float> out);

} // namespace spice::policy

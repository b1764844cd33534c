#include "backend/moe_block.h"

#include "backend/expert_buffer.h"

namespace spice {

namespace {

// The longest chain is the weighted sum, one ADD per routed expert.
constexpr int max_depth = 1024;

/// The weighted sum over routed experts ends the block; what llama.cpp does with it is not ours.
bool is_sum(const ggml_tensor *t) {
    return t->op == GGML_OP_ADD || t->op == GGML_OP_CONT;
}

bool from_block(const ggml_tensor *t, int depth) {
    if (depth > max_depth) return false;
    const auto from_inside = [&](const ggml_tensor *source) {
        return source != nullptr && !is_sum(source) && from_block(source, depth + 1);
    };
    const auto is_view_inside = [&](const ggml_tensor *source) {
        return source != nullptr && source->op == GGML_OP_VIEW && from_inside(source);
    };
    switch (t->op) {
    case GGML_OP_MUL_MAT_ID:
        return expert_tensor(t->src[0]) != nullptr;
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_SQR:
    case GGML_OP_SCALE:
    case GGML_OP_CLAMP:
    case GGML_OP_ADD_ID: // the bias of each expert
    case GGML_OP_MUL:    // times the gate weights, a scale of each expert, or the other projection
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
        return from_inside(t->src[0]);
    case GGML_OP_ADD: // view + view, then sum + view
        return is_view_inside(t->src[1]) && from_block(t->src[0], depth + 1);
    case GGML_OP_CONT: // with one routed expert the sum is a copy of the only view
        return is_view_inside(t->src[0]);
    default:
        return false;
    }
}

/// The scales of the chosen experts: GET_ROWS(REPEAT(RESHAPE(scales)), ids), or its inner part. They lie
/// between the projections: a block that left them to others would fall into a piece for each projection.
bool is_scale(const ggml_tensor *t) {
    if (t->op == GGML_OP_GET_ROWS) t = t->src[0];
    if (t->op != GGML_OP_REPEAT || t->ne[0] != 1) return false;
    const ggml_tensor *column = t->src[0];
    return column->op == GGML_OP_RESHAPE && column->ne[0] == 1 && column->src[0]->op == GGML_OP_NONE &&
           ggml_n_dims(column->src[0]) == 1;
}

} // namespace

bool is_block_node(const ggml_tensor *node) {
    return is_scale(node) || from_block(node, 0);
}

} // namespace spice

// Makes the prediction heads of a model: the training-free ones from its own routers, and the fitted ones of
// a sidecar where there is one.
//
// Thread: one at a time; blocks on disk. The heads are const afterwards. Errors: without a sidecar none: a
// model whose routers cannot be used or read has no heads, and `reason` says so for the plan. A sidecar that
// cannot be used is an error, since it was asked for.
#pragma once

#include "compute/router_heads.h"
#include "store/expert_index.h"
#include "store/gguf_model.h"
#include "store/routers.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace spice {

/// Heads of the three kinds. adapter and draft are null without a sidecar that has them; where a sidecar has
/// no head for a (group, horizon), theirs is the training-free one.
struct HeadSet {
    std::shared_ptr<const compute::FrozenRouters> routers; ///< null: no group has a usable router
    std::shared_ptr<const compute::RouterHeads> frozen;    ///< null with `routers`
    std::shared_ptr<const compute::RouterHeads> adapter;
    std::shared_ptr<const compute::RouterHeads> draft;
    RouterGating gating;
    std::vector<std::vector<float>> selection_bias; ///< of each group; empty where it has none
    std::string reason;                             ///< why groups have no heads, for the plan
    [[nodiscard]] uint64_t bytes() const;           ///< memory of all of them
};

struct HeadOptions {
    int64_t expert_used = 0; ///< the user's override, 0 for none
    int32_t max_horizon = 6;
    std::filesystem::path sidecar; ///< empty: none
};

[[nodiscard]] Result<HeadSet> make_heads(const GgufModel &model, const ExpertIndex &index,
                                         const HeadOptions &options);

} // namespace spice

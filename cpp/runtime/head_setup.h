// Makes the prediction heads of a model: the training-free ones from its own routers, and the fitted ones of
// a sidecar where there is one.
//
// Thread: one at a time; blocks on disk. The heads are const afterwards. Errors: a sidecar that was asked for
// and cannot be used. Else none: a model whose routers cannot be used or read has no heads, and `reason` says
// so for the plan; a sidecar that merely lies there is left out, and `sidecar_problem` says why.
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
    std::vector<std::vector<float>> selection_bias;   ///< of each group; empty where it has none
    std::string reason;                               ///< why groups have no heads, for the plan
    std::string sidecar_problem;                      ///< why the sidecar is not used; empty: it is
    [[nodiscard]] uint64_t bytes() const;             ///< memory of all of them
    void keep_only(const compute::RouterHeads *used); ///< lets go of all others; null: of the routers, too
};

struct HeadOptions {
    int64_t expert_used = 0; ///< the user's override, 0 for none
    int32_t max_horizon = 6;
    std::filesystem::path sidecar = {}; ///< empty: none
    bool sidecar_required = true;       ///< false: go on without one that cannot be used
};

[[nodiscard]] Result<HeadSet> make_heads(const GgufModel &model, const ExpertIndex &index,
                                         const HeadOptions &options);

} // namespace spice

// `least-stale`: what this pass has left behind without using it goes first; then what is needed last.
//
// Source: SpecMD (arXiv 2602.03921), as summarised: entries that were last used in an earlier pass and whose
// layer this pass has already gone by leave first; then by layer order. What the summary leaves open is
// settled here:
//   stale (a group below the present one, last use in an earlier pass): the one not used for longest first;
//   all others: the one whose group is visited last from now on (the present group itself, then the one
//   before it, ...), the one not used for longest within a group.
// A load counts as a use, so that a prefetched slab is not stale. No constants.
// Known weakness: at the start of a pass nothing is stale, and the layers at the end of the last one pay.
#include "policy/group_min.h"
#include "policy/strategies.h"

namespace spice::policy {

namespace {

class LeastStale final : public Eviction {
  public:
    explicit LeastStale(const PoolShape &shape) : n_groups_(shape.n_groups), residents_(shape) {}

    [[nodiscard]] std::string_view name() const override { return "least-stale"; }

    void begin_call(int32_t group, std::span<const int32_t> experts, std::span<const float>) override {
        if (group <= group_) pass_start_ = stamp_;
        group_ = group;
        for (const int32_t expert : experts) residents_.update({group, expert}, ++stamp_);
    }

    void on_load(SlabId id) override { residents_.insert(id, ++stamp_); }
    void on_evict(SlabId id) override { residents_.erase(id); }

    [[nodiscard]] std::optional<SlabId> victim(Evictable evictable) override {
        const auto value = [this](int32_t group, uint64_t last) {
            if (group < group_ && last <= pass_start_) return Value{-1, last};
            const int32_t wait = group > group_ ? group - group_ : group - group_ + n_groups_;
            return Value{n_groups_ - wait, last};
        };
        return residents_.victim(value, evictable);
    }

  private:
    struct Value {
        int32_t rank = 0; ///< -1: stale
        uint64_t last = 0;
        auto operator<=>(const Value &) const = default;
    };
    int32_t n_groups_;
    int32_t group_ = -1; ///< of the present call
    uint64_t stamp_ = 0;
    uint64_t pass_start_ = 0;      ///< the last stamp of the pass before
    GroupMin<uint64_t> residents_; ///< key: the stamp of the last use
};

} // namespace

std::unique_ptr<Eviction> make_least_stale(const PoolShape &shape) {
    return std::make_unique<LeastStale>(shape);
}

} // namespace spice::policy

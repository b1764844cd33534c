#include "sim/replay.h"

#include "policy/eviction.h"
#include "sim/check.h"
#include "sim/steps.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace spice::sim {

namespace {

using policy::SlabId;

struct Call {
    int32_t group = 0;
    bool prefill = false;
    size_t begin = 0; ///< its experts: [begin, end) of CallList::experts
    size_t end = 0;
};

/// The layer calls of the sequences that share a pool, in order of execution.
struct CallList {
    std::vector<Call> calls;
    std::vector<int32_t> experts;
    std::vector<float> weights; ///< parallel to experts
};

Status check(const Routing &r, const ReplayOptions &o) {
    const auto bad = [](const std::string &what) { return Status(Code::unsupported, what); };
    if (const Status status = check_routing(r); !status.ok()) return status;
    if (o.n_slots < 1) return bad("n_slots must be at least 1");
    if (o.batch < 1) return bad("batch must be at least 1");
    if (o.prefill < -1) return bad("prefill must be -1 or more");
    if (o.wave < 0) return bad("wave must be 0 or more");
    return {};
}

/// Tokens [from, to) as one batch, through all layers.
void add_calls(CallList &list, BatchBuilder &batch, int32_t n_layers, int32_t from, int32_t to,
               bool prefill) {
    for (int32_t layer = 0; layer < n_layers; ++layer) {
        const policy::StrategyCall call = batch.call(layer, from, to);
        const size_t begin = list.experts.size();
        list.experts.insert(list.experts.end(), call.experts.begin(), call.experts.end());
        list.weights.insert(list.weights.end(), call.weights.begin(), call.weights.end());
        list.calls.push_back({layer, prefill, begin, list.experts.size()});
    }
}

/// Calls `use` with the calls of each pool's life: one sequence, or all of them.
template <class Use>
void for_each_life(const Routing &r, const ReplayOptions &o, const Use &use) {
    BatchBuilder batch(r);
    CallList list;
    int32_t at = 0;
    for (size_t s = 0; s < r.lens.size(); ++s) {
        const int32_t end = at + r.lens[s];
        if (o.prefill != 0 && at < end) {
            const int32_t to = o.prefill < 0 || o.prefill > end - at ? end : at + o.prefill;
            add_calls(list, batch, r.n_layers, at, to, true);
            at = to;
        }
        while (at < end) {
            const int32_t to = o.batch > end - at ? end : at + o.batch;
            add_calls(list, batch, r.n_layers, at, to, false);
            at = to;
        }
        if (!o.keep || s + 1 == r.lens.size()) {
            use(std::as_const(list));
            list = {};
        }
    }
}

/// The pool during a replay: who is resident, and the way a call is served. The two kinds of user say which
/// slab leaves.
class Pool {
  public:
    Pool(int32_t n_groups, int32_t n_experts, int32_t n_slots, int32_t wave)
        : n_experts_(n_experts), n_slots_(n_slots), wave_(wave == 0 ? n_slots : std::min(wave, n_slots)),
          resident_(static_cast<size_t>(n_groups) * static_cast<size_t>(n_experts), 0),
          pinned_(resident_.size(), 0) {}

    [[nodiscard]] bool resident(SlabId id) const { return resident_[flat(id)] != 0; }
    [[nodiscard]] bool evictable(SlabId id) const { return resident(id) && pinned_[flat(id)] == 0; }

    /// Serves a call; counts it. `order(misses)` may sort them; `evict()` names a victim; `loaded(id)`.
    template <class Order, class Evict, class Loaded>
    void serve(const Call &call, std::span<const int32_t> experts, LayerHits &count, const Order &order,
               const Evict &evict, const Loaded &loaded) {
        misses_.clear();
        for (const int32_t expert : experts) {
            if (!resident({call.group, expert})) misses_.push_back(expert);
        }
        (call.prefill ? count.prefill_hits : count.hits) += experts.size() - misses_.size();
        (call.prefill ? count.prefill_misses : count.misses) += misses_.size();
        if (n_slots_ == 0) return;
        const bool small = experts.size() <= static_cast<size_t>(wave_);
        if (small)
            pin(call.group, experts, 1);
        else
            order(misses_);
        const std::span<const int32_t> misses(misses_);
        for (size_t at = 0; at < misses.size(); at += static_cast<size_t>(wave_)) {
            const auto wave =
                misses.subspan(at, std::min<size_t>(static_cast<size_t>(wave_), misses.size() - at));
            if (!small) pin(call.group, wave, 1);
            for (const int32_t expert : wave) {
                if (n_resident_ == n_slots_) {
                    resident_[flat(evict())] = 0;
                    --n_resident_;
                }
                resident_[flat({call.group, expert})] = 1;
                ++n_resident_;
                loaded(SlabId{call.group, expert});
            }
            if (!small) pin(call.group, wave, 0);
        }
        if (small) pin(call.group, experts, 0);
    }

  private:
    [[nodiscard]] size_t flat(SlabId id) const {
        return static_cast<size_t>(id.group) * static_cast<size_t>(n_experts_) +
               static_cast<size_t>(id.expert);
    }
    void pin(int32_t group, std::span<const int32_t> experts, uint8_t pinned) {
        for (const int32_t expert : experts) pinned_[flat({group, expert})] = pinned;
    }

    int32_t n_experts_;
    int32_t n_slots_;
    int32_t wave_;
    int32_t n_resident_ = 0;
    std::vector<uint8_t> resident_;
    std::vector<uint8_t> pinned_;
    std::vector<int32_t> misses_;
};

/// Belady's MIN over the calls of one life for which `mine(group)`.
template <class Mine>
void belady_life(const CallList &list, const Routing &r, int32_t n_slots, int32_t wave, const Mine &mine,
                 ReplayResult &result) {
    constexpr int64_t never = std::numeric_limits<int64_t>::max();
    const auto flat = [&](int32_t group, int32_t expert) {
        return static_cast<size_t>(group) * static_cast<size_t>(r.n_experts) + static_cast<size_t>(expert);
    };
    // For each use, the number of the call of the next use of the same slab.
    std::vector<int64_t> next(static_cast<size_t>(r.n_layers) * static_cast<size_t>(r.n_experts), never);
    std::vector<int64_t> next_use(list.experts.size());
    for (size_t c = list.calls.size(); c-- > 0;) {
        const Call &call = list.calls[c];
        for (size_t i = call.begin; i < call.end; ++i) {
            next_use[i] = std::exchange(next[flat(call.group, list.experts[i])], static_cast<int64_t>(c));
        }
    }
    std::set<std::pair<int64_t, size_t>> farthest; // of the residents: (next use, slab); the last one leaves
    Pool pool(r.n_layers, r.n_experts, n_slots, wave);
    const auto id_of = [&](size_t slab) {
        return SlabId{static_cast<int32_t>(slab / static_cast<size_t>(r.n_experts)),
                      static_cast<int32_t>(slab % static_cast<size_t>(r.n_experts))};
    };
    for (size_t c = 0; c < list.calls.size(); ++c) {
        const Call &call = list.calls[c];
        if (!mine(call.group)) continue;
        const auto experts = std::span(list.experts).subspan(call.begin, call.end - call.begin);
        for (size_t i = call.begin; i < call.end; ++i) {
            const size_t slab = flat(call.group, list.experts[i]);
            if (pool.resident(id_of(slab))) {
                farthest.erase({static_cast<int64_t>(c), slab});
                farthest.emplace(next_use[i], slab);
            }
            next[slab] = next_use[i];
        }
        pool.serve(
            call, experts, result.layers[static_cast<size_t>(call.group)],
            [&](std::vector<int32_t> &misses) { // what is needed soonest comes last, so that it can stay
                std::sort(misses.begin(), misses.end(), [&](int32_t a, int32_t b) {
                    return std::pair(next[flat(call.group, a)], a) > std::pair(next[flat(call.group, b)], b);
                });
            },
            [&] {
                auto it = std::prev(farthest.end());
                while (!pool.evictable(id_of(it->second))) --it;
                const SlabId id = id_of(it->second);
                farthest.erase(it);
                return id;
            },
            [&](SlabId id) {
                const size_t slab = flat(id.group, id.expert);
                farthest.emplace(next[slab], slab);
            });
        ++result.n_calls;
    }
}

} // namespace

Result<ReplayResult> replay(const Routing &r, const ReplayOptions &o, std::string_view strategy) {
    if (const Status status = check(r, o); !status.ok()) return status;
    const policy::PoolShape shape{r.n_layers, r.n_experts, o.n_slots, r.top_k};
    if (policy::make_eviction(strategy, {1, 1, 1, 1}) == nullptr) {
        std::string message = "no eviction strategy is called '" + std::string(strategy) + "'; there are";
        for (const std::string_view name : policy::eviction_names()) message.append(" ").append(name);
        return Status(Code::unsupported, message);
    }
    ReplayResult result;
    result.layers.resize(static_cast<size_t>(r.n_layers));
    std::optional<Status> failure;
    for_each_life(r, o, [&](const CallList &list) {
        const std::unique_ptr<policy::Eviction> eviction = policy::make_eviction(strategy, shape);
        Pool pool(r.n_layers, r.n_experts, o.n_slots, o.wave);
        for (const Call &call : list.calls) {
            const auto experts = std::span(list.experts).subspan(call.begin, call.end - call.begin);
            eviction->begin_call(call.group, experts,
                                 std::span(list.weights).subspan(call.begin, experts.size()));
            pool.serve(
                call, experts, result.layers[static_cast<size_t>(call.group)], [](std::vector<int32_t> &) {},
                [&] {
                    const auto id = eviction->victim([&](SlabId slab) { return pool.evictable(slab); });
                    // A wave is never wider than the pool, so one of the residents can always go.
                    if (!id || !pool.evictable(*id))
                        failure = Status(Code::internal, "a victim that cannot leave");
                    if (failure) return SlabId{};
                    eviction->on_evict(*id);
                    return *id;
                },
                [&](SlabId id) { eviction->on_load(id); });
            if (failure) return;
            ++result.n_calls;
        }
    });
    if (failure) return *failure;
    return result;
}

Result<ReplayResult> belady(const Routing &r, const ReplayOptions &o, bool per_layer) {
    if (const Status status = check(r, o); !status.ok()) return status;
    ReplayResult result;
    result.layers.resize(static_cast<size_t>(r.n_layers));
    for_each_life(r, o, [&](const CallList &list) {
        if (!per_layer) {
            belady_life(list, r, o.n_slots, o.wave, [](int32_t) { return true; }, result);
            return;
        }
        for (int32_t layer = 0; layer < r.n_layers; ++layer) {
            const int32_t slots = o.n_slots / r.n_layers + (layer < o.n_slots % r.n_layers ? 1 : 0);
            belady_life(list, r, slots, o.wave, [layer](int32_t group) { return group == layer; }, result);
        }
    });
    return result;
}

} // namespace spice::sim

#include "sim/simulator.h"

#include "policy/strategy.h"
#include "sim/belady_strategy.h"
#include "sim/check.h"
#include "sim/recorded_predictor.h"
#include "sim/steps.h"
#include "sim/tiers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <utility>

namespace spice::sim {

namespace {

using policy::Place;
using policy::SlabId;

class Simulator {
  public:
    Simulator(const Routing &routing, const Machine &machine, const Model &model, const SimOptions &options)
        : r_(routing), machine_(machine), model_(model), o_(options),
          pool_{r_.n_layers, r_.n_experts, o_.slots, r_.top_k},
          tiers_(machine, model, pool_, o_.memory_slots, o_.memory_eviction), batch_(routing),
          steps_(routing, options) {}

    SimResult run() {
        int32_t from = 0;
        for (size_t s = 0; s < r_.lens.size(); ++s) {
            const int32_t to = from + r_.lens[s];
            if (s == 0 || !o_.keep) begin_life(from, o_.keep ? r_.n_tokens : to);
            tiers_.strategy().begin_sequence();
            sequence(from, to);
            from = to;
        }
        tiers_.count_into(result_);
        result_.total_seconds = now_;
        return result_;
    }

  private:
    /// A life of the pools, for the sequences of tokens [from, to).
    void begin_life(int32_t from, int32_t to) {
        auto strategy = o_.strategy.starts_with("belady")
                            ? make_belady(o_.strategy == belady_names()[1], pool_, future(from, to))
                            : policy::make_strategy(o_.strategy, pool_);
        predictor_ = make_predictor(*strategy);
        tiers_.begin_life(std::move(strategy));
        if (o_.profile.empty()) return;
        std::vector<SlabId> start;
        tiers_.strategy().start_with(o_.profile, start);
        tiers_.start_with(start);
    }

    std::unique_ptr<policy::Predictor> make_predictor(const policy::Strategy &strategy) {
        if (strategy.horizon() == 0 || o_.predictor == "none") return nullptr;
        if (o_.predictor == "recorded") {
            auto recorded = std::make_unique<RecordedPredictor>(r_, strategy.horizon());
            recorded_ = recorded.get();
            return recorded;
        }
        const policy::RoutingShape shape{r_.n_layers, r_.n_experts, r_.top_k, strategy.horizon()};
        recall_ = o_.recall;
        if (o_.predictor.empty() && recall_.empty()) {
            recall_.assign(strategy.published_recall().begin(), strategy.published_recall().end());
        }
        return policy::make_predictor(o_.predictor.empty() ? "replay" : o_.predictor, shape);
    }

    void sequence(int32_t from, int32_t to) {
        const double start = now_;
        const double joules_before = joules();
        const int32_t decoded =
            steps_.for_each_prefill(from, to, [&](int32_t begin, int32_t end) { pass(begin, end, true); });
        result_.prefill_seconds += now_ - start;
        result_.prefill_tokens += decoded - from;
        const double joules_between = joules();
        result_.prefill_joules += joules_between - joules_before;
        tell_future(decoded, to);
        for (int32_t at = decoded; at < to;) {
            const double step_start = now_;
            at = step(at, to);
            result_.seconds += now_ - step_start;
            ++result_.steps;
        }
        result_.joules += joules() - joules_between;
    }

    /// Energy up to now. A transfer counts when it is begun.
    [[nodiscard]] double joules() const {
        const PowerSpec &watts = machine_.power;
        const bool device = machine_.has_device;
        return watts.idle * now_ + (device ? watts.device : watts.host) * beside_experts_ +
               watts.device * result_.device_busy + watts.host * result_.host_busy +
               (device ? watts.link : watts.disk) * tiers_.link().busy() + watts.disk * tiers_.disk().busy();
    }

    /// One decode step from token `at`; returns the token after it.
    int32_t step(int32_t at, int32_t to) {
        const int32_t drafted = draft(at, to);
        if (drafted == 0) {
            const int32_t end = std::min(at + o_.batch, to);
            pass(at, end, false);
            result_.tokens += end - at;
            return end;
        }
        const int32_t accepted = steps_.accepted(at, drafted);
        pass(at, at + 1 + drafted, false);
        tiers_.strategy().verified(drafted, accepted);
        acceptance_ += 0.1 * (static_cast<double>(accepted) / static_cast<double>(drafted) - acceptance_);
        result_.tokens += accepted + 1;
        return at + 1 + accepted;
    }

    /// Drafts the tokens after `at`; returns how many.
    int32_t draft(int32_t at, int32_t to) {
        policy::Strategy &strategy = tiers_.strategy();
        const double bytes = model_.slab_bytes[0];
        const EngineSpec &engine = machine_.has_device ? machine_.device : machine_.host;
        const policy::ExpertCost one = engine.cost(bytes);
        const policy::DraftCosts costs{o_.draft_seconds, tiers_.link().seconds(bytes),
                                       other(1) + engine.call + one.at(1) * r_.top_k, one.per_row * r_.top_k,
                                       acceptance_};
        int32_t wanted = o_.draft_seconds > 0.0 ? strategy.draft_length(costs) : 0;
        if (wanted == 0) wanted = o_.draft;
        const int32_t drafted = std::max(0, std::min(wanted, to - at - 1));
        const double start = now_;
        for (int32_t j = 1; j <= drafted; ++j) {
            now_ += o_.draft_seconds;
            beside_experts_ += o_.draft_seconds;
            tiers_.advance(now_);
            strategy.draft_token(steps_.guessed(at + j), r_.top_k);
            plan(r_.n_layers - 1, 1 + drafted, o_.draft_seconds * (drafted - j), nullptr);
        }
        result_.draft_seconds += now_ - start;
        return drafted;
    }

    /// The steps of a sequence to come, for the predictor that is told them.
    void tell_future(int32_t from, int32_t to) {
        if (predictor_ == nullptr || predictor_->name() != "replay") return;
        std::vector<policy::FutureCall> calls;
        steps_.for_each_step(from, to, [&](int32_t begin, int32_t end) {
            for (int32_t layer = 0; layer < r_.n_layers; ++layer) {
                const auto ids = ids_of(layer, begin, end);
                calls.push_back({layer, end - begin, {ids.begin(), ids.end()}});
            }
        });
        predictor_->set_future(std::move(calls), recall_, o_.seed + static_cast<uint64_t>(from));
    }

    /// All calls of the sequences within tokens [from, to), for Belady.
    FutureUses future(int32_t from, int32_t to) {
        FutureUses uses;
        const auto add = [&](int32_t begin, int32_t end) {
            for (int32_t layer = 0; layer < r_.n_layers; ++layer) {
                const policy::StrategyCall call = batch_.call(layer, begin, end);
                uses.groups.push_back(layer);
                uses.experts.insert(uses.experts.end(), call.experts.begin(), call.experts.end());
                uses.ends.push_back(uses.experts.size());
            }
        };
        int32_t start = 0;
        for (const int32_t length : r_.lens) {
            const int32_t end = start + length;
            if (start >= from && end <= to) {
                steps_.for_each_step(steps_.for_each_prefill(start, end, add), end, add);
            }
            start = end;
        }
        return uses;
    }

    [[nodiscard]] std::span<const int32_t> ids_of(int32_t layer, int32_t from, int32_t to) const {
        const size_t k = static_cast<size_t>(r_.top_k);
        const size_t row = static_cast<size_t>(layer) * static_cast<size_t>(r_.n_tokens);
        return r_.ids.subspan((row + static_cast<size_t>(from)) * k, static_cast<size_t>(to - from) * k);
    }

    /// Tokens [from, to) through all layers.
    void pass(int32_t from, int32_t to, bool prefill) {
        for (int32_t layer = 0; layer < r_.n_layers; ++layer) {
            const double start = now_;
            waited_ = 0.0;
            const double takes = other(to - from);
            const double shared = shared_in_call(to - from);
            now_ += takes - shared;
            beside_experts_ += takes;
            if (!prefill) result_.other_seconds += takes;
            tiers_.advance(now_);
            const policy::StrategyCall call = batch_.call(layer, from, to);
            if (recorded_ != nullptr) recorded_->at(from, to);
            layer_call(call, ids_of(layer, from, to), prefill);
            if (now_ > start) idle_share_ += 0.02 * (waited_ / (now_ - start) - idle_share_);
            if (!prefill) layer_seconds_ += 0.05 * (now_ - start - layer_seconds_);
        }
    }

    /// Seconds of one layer beside its routed experts.
    [[nodiscard]] double other(int32_t rows) const {
        const EngineSpec &engine = machine_.has_device ? machine_.device : machine_.host;
        return machine_.layer_call + engine.cost(model_.other_bytes / r_.n_layers).at(rows) * drowsy();
    }

    /// What of it is computed within the layer call: a shared expert, while reads run. On a device it comes
    /// before.
    [[nodiscard]] double shared_in_call(int32_t rows) const {
        if (machine_.has_device) return 0.0;
        return machine_.host.cost(model_.shared_bytes / r_.n_layers).at(rows) * drowsy();
    }

    /// By how much the host is slower for having idled, without a device: else it is the device that waits.
    [[nodiscard]] double drowsy() const {
        return machine_.has_device ? 1.0 : 1.0 + machine_.drowsiness * idle_share_;
    }

    void layer_call(const policy::StrategyCall &call, std::span<const int32_t> ids, bool prefill) {
        policy::Strategy &strategy = tiers_.strategy();
        strategy.begin_call(call);
        if (predictor_ != nullptr) predictor_->begin_call(call.group, ids, call.n_rows);
        tiers_.begin_call(call, now_);
        const size_t n = call.experts.size();
        const double bytes = model_.slab_bytes[static_cast<size_t>(call.group)];
        on_device_.resize(n);
        in_memory_.resize(n);
        places_.resize(n);
        int32_t reads = 0;
        for (size_t i = 0; i < n; ++i) {
            const SlabId id{call.group, call.experts[i]};
            const double arrives = tiers_.fast().arrives(id);
            on_device_[i] =
                arrives == Tier::absent ? policy::PlacementCall::absent : std::max(0.0, arrives - now_);
            in_memory_[i] = tiers_.memory_estimate(id, now_, reads) - now_;
            if (prefill) continue;
            ++(arrives <= now_ ? result_.hits : arrives == Tier::absent ? result_.misses : result_.late);
        }
        choose_places(call, bytes, strategy);
        if (!prefill) {
            for (const Place place : places_) {
                result_.fetched += place == Place::fetch ? 1 : 0;
                result_.hosted += place == Place::host || place == Place::host_fill ? 1 : 0;
            }
        }
        const bool in_parts = !machine_.has_device && !strategy.split() && n <= static_cast<size_t>(o_.slots);
        const double end = in_parts ? compute_in_parts(call, bytes) : compute(call, bytes);
        plan(call.group, call.n_rows, 0.0,
             call.n_rows <= policy::Predictor::max_rows ? predictor_.get() : nullptr);
        now_ = end;
        tiers_.advance(now_);
        tiers_.end_call(call);
    }

    void choose_places(const policy::StrategyCall &call, double bytes, policy::Strategy &strategy) {
        if (!machine_.has_device) {
            for (size_t i = 0; i < places_.size(); ++i) {
                places_[i] = on_device_[i] == policy::PlacementCall::absent ? Place::fetch : Place::device;
            }
            return;
        }
        costs_.device = machine_.device.cost(bytes);
        costs_.host = machine_.host.cost(bytes);
        costs_.device_call = machine_.device.call;
        costs_.host_call = machine_.host.call;
        costs_.link_latency = machine_.link.latency;
        costs_.link_bandwidth = machine_.link.bandwidth;
        const policy::PlacementCall where{.rows = call.rows,
                                          .on_device = on_device_,
                                          .in_memory = tiers_.bounded_memory()
                                                           ? std::span<const double>(in_memory_)
                                                           : std::span<const double>(),
                                          .slab_bytes = static_cast<uint64_t>(bytes),
                                          .link_queued = tiers_.link_free(now_) - now_,
                                          .prefetch_queued = tiers_.link().waiting()};
        strategy.placement().place(where, costs_, places_);
    }

    /// Transfers and arithmetic of one call; returns when it is done. See finish_time() in
    /// policy/placement.h: the same order, with slots that may have to be waited for.
    double compute(const policy::StrategyCall &call, double bytes) {
        const EngineSpec &main = machine_.has_device ? machine_.device : machine_.host;
        const policy::ExpertCost main_cost = main.cost(bytes);
        double &main_busy = machine_.has_device ? result_.device_busy : result_.host_busy;
        double at = now_ + shared_in_call(call.n_rows);
        const double launch = machine_.has_device ? main.call : 0.0;
        if (!machine_.has_device) at += main.call;
        bool any = false;
        const auto on_main = [&](size_t i) {
            double takes = main_cost.at(call.rows[i]);
            if (!machine_.has_device) takes *= slowed(at);
            at += takes;
            main_busy += takes;
            any = true;
            tiers_.done_in_fast({call.group, call.experts[i]}, at);
        };
        late_.clear();
        bool resident = false;
        for (size_t i = 0; i < places_.size(); ++i) {
            if (places_[i] != Place::device) continue;
            const double arrives = tiers_.fast().arrives({call.group, call.experts[i]});
            if (arrives > now_) {
                late_.push_back({arrives, i});
                continue;
            }
            if (!std::exchange(resident, true)) at += launch;
            on_main(i);
        }
        const policy::PlacementCall order{.rows = call.rows,
                                          .on_device = on_device_,
                                          .in_memory = in_memory_,
                                          .slab_bytes = static_cast<uint64_t>(bytes)};
        policy::fetch_order(order, places_, fetches_);
        policy::host_order(order, places_, hosts_);
        std::sort(late_.begin(), late_.end());
        if (machine_.has_device && !late_.empty()) at = std::max(at, late_.back().first) + launch;
        for (const auto &[arrives, i] : late_) {
            at = std::max(at, arrives);
            on_main(i);
        }
        size_t per_launch = 1;
        if (machine_.has_device) { // and not more of a small pool than the runtime takes
            const int32_t pool = tiers_.strategy().split() ? o_.slots / r_.n_layers : o_.slots;
            const auto most = std::min(static_cast<int32_t>(fetches_.size()), std::max(pool / 4, 1));
            per_launch = static_cast<size_t>(policy::fetches_per_launch(costs_, order.slab_bytes, most));
        }
        landed_.clear(); // of the launch that is being filled
        // Reads from the file serve both sides in turn.
        double host = now_ + (hosts_.empty() ? 0.0 : machine_.host.call);
        for (size_t n = 0; n < std::max(fetches_.size(), hosts_.size()); ++n) {
            if (n < fetches_.size()) {
                const size_t i = static_cast<size_t>(fetches_[n]);
                const SlabId id{call.group, call.experts[i]};
                const double in_memory = tiers_.to_memory(id, now_);
                const double arrives = tiers_.to_fast(id, now_, in_memory);
                if (tiers_.bounded_memory()) tiers_.done_in_memory(id, arrives);
                landed_.push_back(i);
                if (landed_.size() == per_launch || n + 1 == fetches_.size()) {
                    at = std::max(at, arrives) + launch;
                    std::ranges::for_each(landed_, on_main);
                    landed_.clear();
                }
            }
            if (n < hosts_.size()) {
                const size_t i = static_cast<size_t>(hosts_[n]);
                const SlabId id{call.group, call.experts[i]};
                const double in_memory = tiers_.to_memory(id, now_);
                host = std::max(host, in_memory);
                const double takes = costs_.host.at(call.rows[i]) * slowed(host);
                host += takes;
                result_.host_busy += takes;
                if (tiers_.bounded_memory()) tiers_.done_in_memory(id, host);
                if (places_[i] == Place::host_fill) tiers_.fill(id, in_memory);
            }
        }
        return std::max(any ? at : now_, hosts_.empty() ? now_ : host);
    }

    /// Without a device, and with a slot for every expert of the call: as the runtime does it. Projection by
    /// projection (gate, up, down, a third of the bytes each), each expert's part as it arrives, those that
    /// are there first. Reads are made in that order, too, the first parts of all, then the second ones; as
    /// many as are in flight share the bandwidth, and so end together.
    double compute_in_parts(const policy::StrategyCall &call, double bytes) {
        const policy::ExpertCost cost = machine_.host.cost(bytes);
        const LinkSpec &disk = tiers_.link().spec();
        const double part_seconds = bytes / n_parts / disk.bandwidth;
        fetches_.clear();
        late_.clear();
        arriving_.clear();
        for (size_t i = 0; i < places_.size(); ++i) {
            const double arrives = tiers_.fast().arrives({call.group, call.experts[i]});
            if (places_[i] == Place::fetch) {
                fetches_.push_back(static_cast<int32_t>(i));
            } else if (arrives > now_) {
                late_.push_back({arrives, i});
            } else {
                arriving_.push_back({i, {now_, now_, now_}});
            }
        }
        std::sort(late_.begin(), late_.end());
        for (const auto &[arrives, i] : late_) {
            arriving_.push_back({i, {arrives - 2.0 * part_seconds, arrives - part_seconds, arrives}});
        }
        double end = now_;
        for (const int32_t i : fetches_) {
            end = tiers_.to_fast({call.group, call.experts[static_cast<size_t>(i)]}, now_, now_);
        }
        const size_t n = fetches_.size();
        const auto together = static_cast<size_t>(disk.in_flight);
        for (size_t j = 0; j < n; ++j) {
            Arriving it{static_cast<size_t>(fetches_[j]), {}};
            for (size_t part = 0; part < n_parts; ++part) {
                const size_t turn = part * n + j;
                const size_t done = std::min((turn / together + 1) * together, n_parts * n);
                it.parts[part] = end - static_cast<double>(n_parts * n - done) * part_seconds;
            }
            arriving_.push_back(it);
        }
        double worked = machine_.host.call + shared_in_call(call.n_rows);
        double at = now_ + worked;
        for (size_t part = 0; part < n_parts; ++part) {
            for (const Arriving &it : arriving_) {
                at = std::max(at, it.parts[part]);
                const double takes = cost.at(call.rows[it.expert]) / n_parts * slowed(at) * drowsy();
                at += takes;
                worked += takes;
                result_.host_busy += takes;
            }
        }
        waited_ = at - now_ - worked;
        return at;
    }

    [[nodiscard]] double slowed(double at) const {
        return tiers_.busy_until() > at ? 1.0 + machine_.contention : 1.0;
    }

    void plan(int32_t group, int32_t rows, double draft_left, policy::Predictor *predictor) {
        wanted_.clear();
        const double bytes = model_.slab_bytes[static_cast<size_t>(group)];
        const auto present = [this](SlabId id) { return tiers_.fast().present(id); };
        const policy::PlanContext context{.group = group,
                                          .rows = rows,
                                          .transfer = tiers_.link().seconds(bytes),
                                          .layer = layer_seconds_,
                                          .link_queued = std::max(0.0, tiers_.link().free_at() - now_),
                                          .link_bandwidth =
                                              (machine_.has_device ? machine_.link : machine_.disk).bandwidth,
                                          .slab_bytes = bytes,
                                          .draft_left = draft_left,
                                          .costs = machine_.has_device ? &costs_ : nullptr,
                                          .present = present,
                                          .predictor = predictor};
        tiers_.strategy().plan(context, wanted_);
        tiers_.plan(wanted_, now_);
    }

    const Routing &r_;
    const Machine &machine_;
    const Model &model_;
    const SimOptions &o_;
    policy::PoolShape pool_;
    Tiers tiers_;
    BatchBuilder batch_;
    Steps steps_;
    std::unique_ptr<policy::Predictor> predictor_;
    RecordedPredictor *recorded_ = nullptr; ///< predictor_, if it is that one
    std::vector<float> recall_;
    double now_ = 0.0;
    double layer_seconds_ = 0.0;
    double waited_ = 0.0;     ///< seconds of the present layer call in which the host had nothing to compute
    double idle_share_ = 0.0; ///< of the time, lately
    double beside_experts_ = 0.0; ///< seconds of the main engine beside routed experts
    double acceptance_ = 0.75;
    policy::PlacementCosts costs_;
    std::vector<double> on_device_;
    std::vector<double> in_memory_;
    std::vector<Place> places_;
    std::vector<std::pair<double, size_t>> late_;
    std::vector<size_t> landed_;
    static constexpr size_t n_parts = 3; ///< of an expert: gate, up, down
    struct Arriving {
        size_t expert = 0; ///< of the call
        std::array<double, n_parts> parts = {};
    };
    std::vector<Arriving> arriving_; ///< in the order in which they are computed
    std::vector<int32_t> fetches_;
    std::vector<int32_t> hosts_;
    std::vector<SlabId> wanted_;
    SimResult result_;
};

} // namespace

Result<SimResult> simulate(const Routing &routing, const Machine &machine, const Model &model,
                           const SimOptions &options) {
    if (const Status status = check_simulation(routing, machine, model, options); !status.ok()) return status;
    return Simulator(routing, machine, model, options).run();
}

} // namespace spice::sim

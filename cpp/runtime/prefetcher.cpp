#include "runtime/prefetcher.h"

#include "runtime/device_tier.h"
#include "runtime/engine.h"
#include "store/clock.h"

#include <algorithm>

namespace spice {

namespace {

/// What leaves a full pool for a prefetch is missed again with about this chance: the eviction strategy
/// gives up the slabs that it expects the least of.
constexpr float victim_chance = 0.05F;

/// How much a total has grown; totals start anew when the user resets them.
template <class T>
T since(T &seen, T total) {
    const T before = std::exchange(seen, total);
    return total >= before ? total - before : total;
}

bool distinct(std::span<const int32_t> ids) {
    for (size_t i = 1; i < ids.size(); ++i) {
        if (std::ranges::find(ids.first(i), ids[i]) != ids.first(i).end()) return false;
    }
    return true;
}

policy::Gating to_policy(const RouterGating &gating) {
    policy::Gating out{.n_expert_groups = gating.n_groups, .n_groups_used = gating.n_groups_used};
    switch (gating.kind) {
    case GatingKind::softmax:
        out.activation = policy::Activation::softmax;
        break;
    case GatingKind::sigmoid:
        out.activation = policy::Activation::sigmoid;
        break;
    case GatingKind::softmax_chosen:
        out.activation = policy::Activation::none;
        break;
    case GatingKind::sqrt_softplus:
        out.activation = policy::Activation::sqrt_softplus;
        break;
    }
    return out;
}

} // namespace

Result<std::unique_ptr<Prefetcher>> Prefetcher::make(Engine &engine, HeadSet heads,
                                                     const PrefetchOptions &options) {
    std::unique_ptr<Prefetcher> made(new Prefetcher(engine));
    made->heads_ = std::move(heads);
    made->always_ = options.always;
    made->n_groups_ = static_cast<int32_t>(engine.groups_.size());
    for (const Engine::Group &group : engine.groups_)
        made->n_experts_ = std::max(made->n_experts_, group.n_expert);
    for (const Engine::SizeClass &cls : engine.classes_) made->top_k_ = std::max(made->top_k_, cls.top_k);

    const auto names = policy::predictor_names();
    const std::string name = options.predictor.empty() ? std::string(names.front()) : options.predictor;
    if (std::ranges::find(names, name) == names.end()) {
        std::string known;
        for (const std::string_view one : names) known += " " + std::string(one);
        return Status(Code::unsupported, "no predictor is called '" + name + "'; choose one of:" + known);
    }
    made->predictor_ = policy::make_predictor(
        name, {made->n_groups_, made->n_experts_, made->top_k_, made->lookahead_.l_max});
    if (made->predictor_ == nullptr) {
        return Status(Code::unsupported, "predictor '" + name + "' cannot serve " +
                                             std::to_string(made->n_groups_) + " layers of " +
                                             std::to_string(made->n_experts_) + " experts");
    }
    HeadSet &set = made->heads_;
    switch (made->predictor_->scores()) {
    case policy::ScoreSource::none:
        break;
    case policy::ScoreSource::frozen:
        made->used_heads_ = set.frozen;
        break;
    case policy::ScoreSource::fitted:
        made->used_heads_ = name == "adapter" ? set.adapter : set.draft;
        if (made->used_heads_ == nullptr) {
            return Status(Code::unsupported, "predictor '" + name +
                                                 "' needs fitted heads; make them with spice-fit and give "
                                                 "the file as sidecar");
        }
        break;
    case policy::ScoreSource::best:
        made->used_heads_ = set.draft != nullptr     ? set.draft
                            : set.adapter != nullptr ? set.adapter
                                                     : set.frozen;
        break;
    }
    set.keep_only(made->used_heads_.get());
    if (made->used_heads_ != nullptr) made->head_call_.emplace(*made->used_heads_);
    made->gating_ = to_policy(set.gating);
    if (!policy::possible(made->gating_, made->n_experts_)) made->gating_ = {made->gating_.activation, 1, 1};

    made->planner_.emplace(made->n_experts_, made->lookahead_.l_max, made->plan_options_);
    made->clock_ = PrefetchClock(made->n_groups_);
    made->forecasts_.resize(static_cast<size_t>(made->n_groups_));
    for (Forecast &forecast : made->forecasts_)
        forecast.chances.resize(static_cast<size_t>(made->n_experts_));
    made->last_.resize(static_cast<size_t>(made->n_groups_));
    made->scores_.resize(static_cast<size_t>(policy::Predictor::max_rows) *
                         static_cast<size_t>(made->n_experts_));
    return made;
}

void Prefetcher::on_call(int32_t group, const RouterInput &input, std::span<const int32_t> ids) {
    const std::lock_guard lock(mutex_);
    const double started = steady_now();
    const int64_t rows = input.n_tokens;
    if (clock_.begin_call(group, rows, started)) end_pass();
    if (rows <= 0) return;
    const auto k = static_cast<int32_t>(static_cast<int64_t>(ids.size()) / rows);
    // Routers may be odd (a file that lies); the predictor must not be told what it cannot hold.
    if (k < 1 || k > top_k_ || ids.size() != static_cast<size_t>(k) * static_cast<size_t>(rows)) return;
    for (int64_t t = 0; t < rows; ++t) {
        if (!distinct(ids.subspan(static_cast<size_t>(t * k), static_cast<size_t>(k)))) return;
    }
    check_forecast(group, ids);
    predictor_->begin_call(group, ids, static_cast<int32_t>(rows));
    const Reach look = looks(rows);
    const bool any = look.memory + look.devices > 0;
    const Reach reach = any ? predict(group, input, ids, look) : Reach{};
    double moving = 0.0;
    if (look.memory > 0 || !queued_.empty()) moving += act(group, reach.memory);
    if (look.devices > 0 || devices_planned_) moving += act_on_devices(group, reach.devices);
    counters_.calls += any ? 1 : 0;
    const std::span<const int32_t> last_row = ids.last(static_cast<size_t>(k));
    last_[static_cast<size_t>(group)].assign(last_row.begin(), last_row.end());
    const double seconds = steady_now() - started - moving;
    counters_.seconds += seconds;
    pass_predicting_ += any ? seconds : 0.0; // learning goes on where nothing is predicted
}

/// Whether to predict, and for whom.
Prefetcher::Reach Prefetcher::looks(int64_t rows) const {
    if (rows > policy::Predictor::max_rows) return {};
    Reach look;
    look.memory = (always_ || meter_.on()) && engine_.some_missing() ? 1 : 0;
    if ((always_ || device_meter_.on()) && !engine_.devices_.empty()) {
        const std::lock_guard lock(engine_.mutex_);
        const bool sends =
            std::ranges::any_of(engine_.devices_, [](const auto &it) { return it->sends_ahead(); });
        look.devices = sends ? 1 : 0;
    }
    return look;
}

std::vector<float> Prefetcher::forecast(int32_t group) const {
    const std::lock_guard lock(mutex_);
    const Forecast &forecast = forecasts_[static_cast<size_t>(group)];
    return forecast.made ? forecast.chances : std::vector<float>();
}

/// How good the forecast of this call was, counted over the next-layer ones.
void Prefetcher::check_forecast(int32_t group, std::span<const int32_t> ids) {
    Forecast &forecast = forecasts_[static_cast<size_t>(group)];
    if (!std::exchange(forecast.made, false) || forecast.horizon != 1) return;
    scratch_.assign(forecast.chances.begin(), forecast.chances.end());
    std::vector<int32_t> routed(ids.begin(), ids.end());
    std::ranges::sort(routed);
    const auto repeated = std::ranges::unique(routed);
    routed.erase(repeated.begin(), repeated.end());
    if (routed.size() >= scratch_.size()) return;
    std::ranges::nth_element(scratch_, scratch_.begin() + static_cast<ptrdiff_t>(routed.size()),
                             std::greater{});
    const float threshold = scratch_[routed.size()]; // the first that is not among the top
    counters_.expected += routed.size();
    for (const int32_t id : routed)
        counters_.correct += forecast.chances[static_cast<size_t>(id)] > threshold;
}

/// Reports the pass that has ended to the meters.
void Prefetcher::end_pass() {
    const double stalled = since(seen_stalled_, engine_.stalls_.seconds());
    report_memory(stalled);
    report_devices(stalled);
}

/// What is compared is not the whole time of the pass, whose noise (other processes, frequencies) hides
/// savings of a few percent, but the part that reading ahead changes: waiting, predicting, and the processor
/// time of reading; for each byte that the pass needed and did not find in memory, because how many that are
/// differs from token to token.
void Prefetcher::report_memory(double stalled) {
    const Counters now = engine_.prefetch_bytes();
    const auto bytes = [&](uint64_t &seen, uint64_t total) {
        return static_cast<int64_t>(since(seen, total));
    };
    constexpr double seconds_per_byte = 11e-12; // 0.022 s/GB of one core for direct reads, here two of them
    const double waited =
        stalled + std::exchange(pass_predicting_, 0.0) +
        seconds_per_byte * static_cast<double>(since(seen_read_, engine_.reader_->counters().bytes));
    policy::PassReport report = {.missed_bytes = bytes(seen_missed_, now.missed_bytes),
                                 .useful_bytes = bytes(seen_ready_, now.ready_bytes),
                                 .late_bytes = bytes(seen_late_, now.late_bytes),
                                 .wasted_bytes = bytes(seen_wasted_, now.wasted_bytes)};
    const int64_t needed = report.missed_bytes + report.useful_bytes + report.late_bytes;
    if (needed > 0 && clock_.pass_seconds() > 0.0) report.seconds = waited / static_cast<double>(needed);
    if (report.seconds > 0.0) {
        meter_.end_pass(report);
    } else {
        meter_.skip_pass();
    }
}

std::span<const float> Prefetcher::scores(int32_t group, int32_t horizon, const RouterInput &input,
                                          std::span<const int32_t> ids) {
    const int32_t to = target(group, horizon);
    if (used_heads_ == nullptr || input.data == nullptr || to <= group || !used_heads_->has(group, horizon) ||
        used_heads_->n_embd(group) != input.n_embd) {
        return {};
    }
    const auto n = static_cast<size_t>(n_experts_);
    const auto n_out = static_cast<size_t>(used_heads_->n_out(group, horizon));
    const size_t k = ids.size() / static_cast<size_t>(input.n_tokens);
    for (int64_t t = 0; t < input.n_tokens; ++t) {
        const std::span<float> out = std::span(scores_).subspan(static_cast<size_t>(t) * n, n);
        std::ranges::fill(out.subspan(n_out), -std::numeric_limits<float>::infinity());
        if (input.n_tokens > 1) head_call_->start(input.row(t)); // one row: predict() did, for all horizons
        const std::span<const int32_t> present = ids.subspan(static_cast<size_t>(t) * k, k);
        if (!used_heads_->scores(group, horizon, present, last_[static_cast<size_t>(to)], *head_call_,
                                 out.first(n_out))) {
            return {};
        }
        const auto &bias = heads_.selection_bias[static_cast<size_t>(to)];
        policy::ranking_scores(n_out == n ? gating_ : policy::Gating{gating_.activation, 1, 1},
                               out.first(n_out), {}, bias, out.first(n_out));
    }
    return std::span(scores_).first(static_cast<size_t>(input.n_tokens) * n);
}

/// Fills forecasts_ of the next groups; returns how far it looked, for whoever `look` names.
Prefetcher::Reach Prefetcher::predict(int32_t group, const RouterInput &input, std::span<const int32_t> ids,
                                      Reach look) {
    const Engine::LinkSize link = engine_.link_size(group);
    const int32_t l_max = std::min(lookahead_.l_max, n_groups_ - 1);
    Reach least; // what is to be known in time
    least.memory = policy::least_depth(link.loads_per_call, link.slab_bytes, engine_.reader_->bandwidth(),
                                       clock_.layer_seconds(), l_max);
    if (look.devices > 0) {
        const std::lock_guard lock(engine_.mutex_);
        for (const auto &tier : engine_.devices_)
            least.devices = std::max(least.devices, tier->ahead_depth(clock_.layer_seconds(), l_max));
    }
    if (head_call_ && input.data != nullptr && input.n_tokens == 1) head_call_->start(input.row(0));
    Reach reach;
    bool memory = look.memory > 0;
    bool devices = look.devices > 0;
    int32_t wanted = 0; // reads in sight: looking further than the queue reaches would be for nothing
    int32_t depth = 0;
    while (depth < l_max && (memory || devices)) {
        const int32_t horizon = depth + 1;
        Forecast &forecast = forecasts_[static_cast<size_t>(target(group, horizon))];
        if (!predictor_->predict(group, horizon, scores(group, horizon, input, ids), forecast.chances)) break;
        forecast.made = true;
        forecast.horizon = horizon;
        depth = horizon;
        const float confidence = policy::confidence(forecast.chances, scratch_);
        if (memory) {
            reach.memory = depth;
            wanted += engine_.n_absent(target(group, horizon), forecast.chances, plan_options_.p_min);
            memory = wanted < plan_options_.max_queue &&
                     policy::look_further(lookahead_, depth, least.memory, confidence);
        }
        if (devices) {
            reach.devices = depth;
            devices = policy::look_further(lookahead_, depth, least.devices, confidence);
        }
    }
    counters_.horizons += static_cast<uint64_t>(depth);
    return reach;
}

/// Withdraws what was queued by earlier calls and has not begun: the new plan knows better, what is still
/// wanted is in it, and what is needed first is read first. Under the Engine's lock.
void Prefetcher::take_back() {
    taken_back_.clear();
    std::erase_if(queued_, [&](const Queued &load) {
        Engine::Group &owner = engine_.groups_[static_cast<size_t>(load.group)];
        const Slab &slab = owner.slabs[static_cast<size_t>(load.expert)];
        if (!slab.ahead || !slab.busy(owner.parts.size())) return true; // used, gone, or there
        if (!engine_.withdraw(owner, load.expert)) return false;
        taken_back_.push_back(load);
        return true;
    });
    engine_.counters_.prefetched -= taken_back_.size(); // it counts what is queued for good
    engine_.counters_.prefetch_dropped += taken_back_.size();
}

/// Queues what is worth it. Returns the seconds that queueing took: an I/O thread that wakes runs here first
/// where cores are few, and starting a read costs the same on demand.
double Prefetcher::act(int32_t group, int32_t depth) {
    const double layer_seconds = clock_.layer_seconds();
    const std::lock_guard lock(engine_.mutex_);
    take_back();
    planner_->begin();
    const auto present = [&](policy::SlabId id) {
        const Engine::Group &owner = engine_.groups_[static_cast<size_t>(id.group)];
        return id.expert >= owner.n_expert || engine_.is_placed(id.group, id.expert);
    };
    for (int32_t horizon = 1; horizon <= depth; ++horizon) {
        const int32_t to = target(group, horizon);
        planner_->add(to, horizon, horizon * layer_seconds, forecasts_[static_cast<size_t>(to)].chances,
                      present);
    }
    const policy::LinkState link = {.bytes_per_second = engine_.reader_->bandwidth(),
                                    .queued_bytes = static_cast<double>(engine_.reader_->bytes_waiting()),
                                    .n_queued = static_cast<int32_t>(queued_.size())};
    const auto bytes = [&](int32_t to) { return static_cast<double>(engine_.slab_bytes(to)); };
    const auto value = [&](int32_t n) { return n < engine_.n_free_slots() ? 0.0F : victim_chance; };
    const std::span<const policy::PrefetchLoad> loads = planner_->plan(link, bytes, value);
    const double begun = steady_now();
    for (const policy::PrefetchLoad &load : loads) {
        Engine::Group &owner = engine_.groups_[static_cast<size_t>(load.id.group)];
        const Engine::SizeClass &cls = engine_.classes_[static_cast<size_t>(owner.size_class)];
        if (static_cast<int32_t>(queued_.size()) >= std::max(1, cls.pool.n_slots() / 4)) break;
        // What a layer that comes no later is expected to use stays.
        const auto may_leave = [&](policy::SlabId id) {
            const int32_t victim = cls.groups[static_cast<size_t>(id.group)];
            const int32_t ahead = (victim - group + n_groups_) % n_groups_;
            if (ahead == 0 || ahead > load.horizon) return true;
            const Forecast &forecast = forecasts_[static_cast<size_t>(victim)];
            return !forecast.made || forecast.chances[static_cast<size_t>(id.expert)] < load.chance;
        };
        if (engine_.prefetch(owner, load.id.expert, may_leave)) {
            const Queued queued{load.id.group, load.id.expert};
            queued_.push_back(queued);
            engine_.counters_.prefetched += 1;
            if (std::ranges::find(taken_back_, queued) != taken_back_.end()) {
                engine_.counters_.prefetch_dropped -= 1; // queued again, only in another order
            }
        }
    }
    return steady_now() - begun;
}

Status Prefetcher::set_future(std::vector<policy::FutureCall> calls, std::span<const float> recall,
                              uint64_t seed) {
    for (const policy::FutureCall &call : calls) {
        if (call.group < 0 || call.group >= n_groups_) {
            return {Code::malformed, "a future call of layer group " + std::to_string(call.group) + " of " +
                                         std::to_string(n_groups_)};
        }
        const Engine::Group &group = engine_.groups_[static_cast<size_t>(call.group)];
        for (const int32_t expert : call.ids) {
            if (expert >= 0 && expert < group.n_expert) continue;
            return {Code::malformed, "layer " + std::to_string(group.layer) + ": a future call of expert " +
                                         std::to_string(expert) + " of " + std::to_string(group.n_expert)};
        }
    }
    const std::lock_guard lock(mutex_);
    predictor_->set_future(std::move(calls), recall, seed);
    return {};
}

PrefetchCounters Prefetcher::counters() const {
    const std::lock_guard lock(mutex_);
    PrefetchCounters counters = counters_;
    counters.on = always_ || meter_.settled_on();
    counters.saving = meter_.saving();
    counters.switches = static_cast<uint64_t>(meter_.n_switches());
    counters.device_on = always_ || device_meter_.settled_on();
    counters.device_saving = device_meter_.saving();
    counters.device_switches = static_cast<uint64_t>(device_meter_.n_switches());
    return counters;
}

void Prefetcher::reset_counters() {
    const std::lock_guard lock(mutex_);
    counters_ = {};
}

} // namespace spice

#include "planner/candidates.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "accounting/distinct_ranks.h"
#include "accounting/memory.h"
#include "base/rules.h"
#include "planner/closed_form.h"
#include "planner/segments.h"

namespace usp {

namespace {

using Sizes = std::vector<int64_t>;

/// Sorts out one layout after the other.
class Sorter {
 public:
  Sorter(const TrainConfig& base, const Cluster& cluster, const Candidates* known)
      : base_(base),
        cluster_(cluster),
        ranks_(base.search.nodes * static_cast<int64_t>(cluster.ranks_per_node.value)),
        samples_(
            std::max<int64_t>(1, std::llround(double(base.planning.plan) / double(base.seq_len)))),
        size_(base) {
    if (known == nullptr) return;
    for (const auto* all : {&known->fit, &known->too_large}) {
      for (const Candidate& candidate : *all) {
        known_.emplace(layout_flags(candidate.config), &candidate);
      }
    }
  }

  Candidates take() {
    each_layout([&](int64_t tp, int64_t cp, int64_t pp, int64_t ep) { lay_out(tp, cp, pp, ep); });
    return std::move(found_);
  }

  // [reached]
  /// The batch that is asked for if any layout reaches it; else the nearest that all of them reach,
  /// or, where that has more samples than asked, that any of them reaches.
  ReachedBatch reached() const {
    std::set<int64_t> at_once;  // samples that a layout's ranks take at once, at least
    const int64_t smallest = base_.search.decides("micro_batch_size") ? base_.micro_batch_size : 1;
    each_layout([&](int64_t tp, int64_t cp, int64_t pp, int64_t) {
      at_once.insert(ranks_ / (tp * cp * pp) * smallest);
    });
    const double asked = double(base_.planning.plan) / double(base_.seq_len);
    ReachedBatch batch{samples_, ""};
    const auto reaches = [&](int64_t each) { return batch.samples % each == 0; };
    if (double(samples_) != asked) batch.why = "are no whole number of samples";
    if (!at_once.empty() && std::ranges::none_of(at_once, reaches)) {
      batch.why = fmt::format("no layout of {} ranks reaches", ranks_);
      int64_t all = 1;
      for (int64_t each : at_once) all = std::lcm(all, each);
      if (all <= samples_) at_once = {all};
      const auto nearest = [&](int64_t each) {
        return each * std::max<int64_t>(1, std::llround(asked / double(each)));
      };
      const auto off = [&](int64_t each) { return std::abs(double(nearest(each)) - asked); };
      batch.samples = nearest(*std::ranges::min_element(at_once, {}, off));
    }
    if (std::abs(double(batch.samples) - asked) > asked / 2) {
      usage_error(
          "plan={}: the nearest batch that {} ranks reach with samples of {} tokens is off by more "
          "than half; try {}",
          base_.planning.plan, ranks_, base_.seq_len, batch.samples * base_.seq_len);
    }
    return batch;
  }
  // [reached]

 private:
  static constexpr int64_t kLong = 32768;  ///< tokens from which samples may be cut

  /// Powers of two up to a limit; or what the command line says.
  Sizes of(const char* flag, int64_t value, int64_t limit) const {
    if (base_.search.decides(flag)) return {value};
    Sizes all;
    for (int64_t size = 1; size <= limit; size *= 2) all.push_back(size);
    return all;
  }

  /// Calls visit(tp, cp, pp, ep) for each way to lay out the ranks that is left open.
  template <class Visit>
  void each_layout(const Visit& visit) const {
    const auto node = static_cast<int64_t>(cluster_.ranks_per_node.value);
    const bool long_samples = base_.seq_len >= kLong;
    const int64_t experts = base_.model.experts.num_experts;
    for (int64_t tp : of("tp_size", base_.tensor_parallel.tp_size, node)) {
      for (int64_t cp : of("cp_size", base_.context_parallel.cp_size, long_samples ? ranks_ : 1)) {
        for (int64_t pp : of("pp_size", base_.pipeline.pp_size, base_.model.num_layers)) {
          const int64_t copy = tp * cp * pp;
          if (ranks_ % copy != 0) continue;
          if (base_.search.decides("dp_size") && base_.data_parallel.dp_size != ranks_ / copy) {
            continue;
          }
          for (int64_t ep :
               of("ep_size", base_.expert_parallel.ep_size, std::max<int64_t>(1, experts))) {
            visit(tp, cp, pp, ep);
          }
        }
      }
    }
  }

  // [layout]
  void lay_out(int64_t tp, int64_t cp, int64_t pp, int64_t ep) {
    TrainConfig config = base_;
    config.tensor_parallel.tp_size = tp;
    if (!base_.search.decides("sequence_parallel"))
      config.tensor_parallel.sequence_parallel = tp > 1;
    config.context_parallel.cp_size = cp;
    config.pipeline.pp_size = pp;
    config.expert_parallel.ep_size = ep;
    config.data_parallel.dp_size = ranks_ / (tp * cp * pp);
    config.communication->ranks = ranks_;
    config.communication->node_size =
        std::min(ranks_, static_cast<int64_t>(cluster_.ranks_per_node.value));
    ++found_.of_ranks;
    const Sizes stages = base_.search.decides("zero_stage") ? Sizes{base_.data_parallel.zero_stage}
                         : config.mesh().dp_cp() > 1        ? Sizes{0, 1, 2, 3}
                                                            : Sizes{0};
    const std::vector<std::string> recomputes = base_.search.decides("recompute")
                                                    ? std::vector{base_.recompute}
                                                    : std::vector<std::string>{"none", "full"};
    for (int64_t stage : stages) {
      config.data_parallel.zero_stage = stage;
      for (const std::string& recompute : recomputes) {
        config.recompute = recompute;
        micro_batches(config);
      }
    }
  }
  // [layout]

  /// From the smallest micro-batch to the first that does not fit.
  void micro_batches(TrainConfig config) {
    const int64_t dp = config.data_parallel.dp_size;
    for (int64_t size :
         of("micro_batch_size", base_.micro_batch_size, std::max<int64_t>(1, samples_ / dp))) {
      if (size * config.seq_len > RunConfig::kMaxTokensAtOnce) return;
      if (samples_ % (size * dp) != 0) {
        ++found_.uneven;
        return;
      }
      config.micro_batch_size = size;
      config.grad_acc_steps = samples_ / (size * dp);
      if (!add(config)) return;
    }
  }

  bool add(const TrainConfig& config) {
    try {
      TrainConfig checked = config;
      checked.each_part([&](const auto& part) { part.check(checked); });
      check_mesh(checked.mesh(), ranks_);
    } catch (const Refusal& refusal) {
      const std::string_view otherwise = name(refusal.otherwise());
      ++found_.refused[fmt::format("{} (without the rule: {})", refusal.rule(), otherwise)];
      if (found_.refusal.empty()) found_.refusal = refusal.what();
      return true;
    } catch (const UsageError& error) {
      ++found_.refused["others"];
      if (found_.refusal.empty()) found_.refusal = error.what();
      return true;
    }
    Candidate candidate = counted(config);
    candidate.closed_form = closed_form(config, cluster_, size_).step();
    const bool fits = candidate.gib <= cluster_.memory_gib.value;
    (fits ? found_.fit : found_.too_large).push_back(std::move(candidate));
    return fits;
  }

  /// With its memory.
  Candidate counted(const TrainConfig& config) const {
    const auto found = known_.find(layout_flags(config));
    if (found != known_.end()) {
      Candidate candidate = *found->second;
      candidate.config = config;
      return candidate;
    }
    const Prediction needs = fullest_of(config);
    return {config, double(needs.needed()) / kBytesOfGiB, needs.rank, most_of(needs), 0};
  }

  static std::string most_of(const Prediction& needs) {
    int64_t buffers = 0;
    for (const LiveBytes& buffer : needs.buffers) buffers += buffer.bytes;
    const std::vector<std::pair<int64_t, const char*>> categories = {
        {needs.states.weights, "weights"},
        {needs.states.gradients, "gradients"},
        {needs.states.optimizer, "optimizer"},
        {needs.peak_activations, "activations"},
        {buffers, "communication"}};
    return std::ranges::max_element(categories)->second;
  }

  const TrainConfig& base_;
  const Cluster& cluster_;
  const int64_t ranks_, samples_;
  const ModelSize size_;
  std::map<std::string, const Candidate*> known_;  ///< by their flags
  Candidates found_;
};

}  // namespace

// [fullest]
/// The first of the stages that do the same work keeps most micro-batches' activations under
/// these schedules, if there are enough of them for all stages to be at work at a time. So it is
/// the only one to ask about; and a stage keeps no more in a longer step.
Prediction fullest_of(const TrainConfig& config) {
  const std::string& schedule = config.pipeline.pp_schedule;
  const bool is_known = schedule == "1f1b" || schedule == "interleaved" || schedule == "afab";
  const bool is_full = config.grad_acc_steps >= config.pipeline.pp_size;
  if (!is_known || !is_full || config.pipeline.overlap_dispatch) return predict_fullest(config);
  TrainConfig shorter = config;
  const int64_t enough = std::max<int64_t>(4, steady_micro_batches(config));
  if (schedule != "afab") shorter.grad_acc_steps = std::min(config.grad_acc_steps, enough);
  Prediction fullest;
  std::set<std::vector<int64_t>> known;
  for (const RankClass& of : distinct_ranks(shorter)) {
    if (!known.insert(stage_work(shorter, static_cast<int>(of.rank))).second) continue;
    Prediction prediction = predict(shorter, of.rank);
    if (prediction.needed() > fullest.needed()) fullest = std::move(prediction);
  }
  return fullest;
}
// [fullest]

Candidates make_candidates(const TrainConfig& config, const Cluster& cluster,
                           const Candidates* known) {
  return Sorter(config, cluster, known).take();
}

ReachedBatch reached_batch(const TrainConfig& config, const Cluster& cluster) {
  return Sorter(config, cluster, nullptr).reached();
}

std::string layout_flags(const TrainConfig& config) {
  const MeshSizes mesh = config.mesh();
  std::string flags = fmt::format("--dp_size {}", mesh.dp);
  const auto add = [&](const char* flag, int64_t value) {
    if (value > 1) flags += fmt::format(" --{} {}", flag, value);
  };
  add("tp_size", mesh.tp);
  if (mesh.tp > 1 && config.tensor_parallel.sequence_parallel) flags += " --sequence_parallel";
  add("cp_size", mesh.cp);
  add("pp_size", mesh.pp);
  add("ep_size", mesh.ep);
  if (config.data_parallel.zero_stage > 0) {
    flags += fmt::format(" --zero_stage {}", config.data_parallel.zero_stage);
  }
  flags += fmt::format(" --micro_batch_size {} --grad_acc_steps {}", config.micro_batch_size,
                       config.grad_acc_steps);
  if (config.recompute != "none") flags += " --recompute " + config.recompute;
  return flags;
}

}  // namespace usp

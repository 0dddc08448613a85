#include "accounting/pipeline_accountant.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>

#include "pipeline_parallel/simulate_schedule.h"

namespace usp {

namespace {

/// Who sends a rank's messages and whom it sends to, action by action.
struct Letters {
  int rank;
  std::map<int64_t, StageMessage> sent, used;     ///< by this rank's action
  std::map<int, std::vector<StageMessage>> from;  ///< by sender, in its order
  std::map<int, size_t> posted;                   ///< by sender: receives

  Letters(const Schedule& schedule, int rank) : rank(rank) {
    for (const StageMessage& message : messages(schedule)) {
      if (message.from == rank) sent.emplace(message.sent_by, message);
      if (message.to != rank) continue;
      used.emplace(message.used_by, message);
      if (message.from != rank) from[message.from].push_back(message);
    }
  }

  /// Posts what Mail posts for an action: its receive, and those that come before. How many.
  int64_t post(int64_t action) {
    const auto needed = used.find(action);
    if (needed == used.end() || needed->second.from == rank) return 0;
    const std::vector<StageMessage>& sender = from[needed->second.from];
    size_t& next = posted[needed->second.from];
    const size_t before = next;
    while (next < sender.size() && sender[next].sent_by <= needed->second.sent_by) ++next;
    return static_cast<int64_t>(next - before);
  }
};

}  // namespace

int64_t peak_bytes_of_schedule(const Schedule& schedule, int rank,
                               const std::vector<PassBytes>& chunks, const StageBytes& bytes) {
  const std::vector<Action>& actions = schedule.actions[rank];
  Letters letters(schedule, rank);
  std::map<int, std::deque<int64_t>> under_way;  // by receiver: its actions that use what was sent
  int64_t live = 0, peak = 0;
  const auto post = [&](int64_t action) { live += letters.post(action) * bytes.boundary; };
  // What an action adds to those that are alive, if both passes of a turn are at their worst.
  const auto at_most = [&](const Action& action) {
    const PassBytes& chunk = chunks[action.chunk];
    if (action.work == Work::F) return bytes.pass + chunk.forward_peak;
    return (action.work == Work::B ? chunk.split_peak : chunk.backward_peak) - chunk.kept;
  };
  for (int64_t i = 0; i < std::ssize(actions); ++i) {
    const Action& action = actions[i];
    const PassBytes& chunk = chunks[action.chunk];
    if (action.work == Work::F) live += bytes.pass;
    post(i);
    if (const auto arrived = letters.used.find(i); arrived != letters.used.end()) {
      std::deque<int64_t>& sent = under_way[arrived->second.from];
      while (!sent.empty() && sent.front() <= arrived->second.sent_by) {
        live -= bytes.boundary;
        sent.pop_front();
      }
    }
    post(i + 1);
    if (action.with_next) post(i + 2);
    peak = std::max(peak, live);  // where W follows, all that it reads is still there
    const int64_t beside = action.with_next ? at_most(actions[i + 1]) : 0;
    if (action.work == Work::F) {
      peak = std::max(peak, live + chunk.forward_peak + beside);
      live += chunk.kept;  // with y
    } else if (action.work == Work::W) {
      live -= chunk.held + bytes.pass;
    } else {
      const bool split = action.work == Work::B;
      live -= chunk.kept;  // in which dy, which has arrived, is counted at y's place
      peak = std::max(peak, live + (split ? chunk.split_peak : chunk.backward_peak) + beside);
      live += split ? chunk.held : -bytes.pass;  // in x's place there is dx now
    }
    if (const auto sent = letters.sent.find(i); sent != letters.sent.end()) {
      if (sent->second.to != rank) under_way[sent->second.to].push_back(sent->second.used_by);
    }
    peak = std::max(peak, live);
  }
  return peak;
}

void add_bytes_from_stages(const Schedule& schedule, int rank, const StageBytes& bytes,
                           std::vector<LiveBytes>& saved) {
  Letters letters(schedule, rank);
  const int64_t read = letters.post(0), posted_ahead = letters.post(1);
  const int64_t received = (read + posted_ahead) * bytes.boundary;
  if (received > 0) saved.push_back({-1, "from another stage", received});
}

std::vector<ChunkPass> passes_of_schedule(const TrainConfig& config, int stage_rank) {
  const Schedule schedule = config.pipeline.schedule(config.grad_acc_steps);
  std::vector<ChunkPass> passes;
  for (const auto& [work, micro_batch, chunk, with_next] : schedule.actions[stage_rank]) {
    const bool both = work == Work::BW;
    passes.push_back({chunk, work == Work::F, work == Work::B || both, work == Work::W || both});
  }
  return passes;
}

std::vector<ModelConfig> chunk_models(const TrainConfig& config, int stage_rank) {
  std::vector<ModelConfig> models;
  const int64_t head = config.model.num_layers + 1;
  for (const auto& [begin, end] : blocks_of_rank(config, stage_rank).chunks) {
    ModelConfig& model = models.emplace_back(config.model);
    model.num_layers = end - begin - (begin == 0) - (end == head + 1);
    if (end != head + 1) model.vocab_size = 0;
  }
  return models;
}

RankTrait stage_trait() {
  return {[](const MeshPlace& at) { return at.pp; },
          [](int64_t stage) { return fmt::format("stage {}", stage); }};
}

RankTrait at_ends(const TrainConfig& config, RankTrait trait) {
  std::vector<bool> has_end;
  for (int stage = 0; stage < config.pipeline.pp_size; ++stage) {
    has_end.push_back(
        std::ranges::any_of(blocks_of_rank(config, stage).chunks, [&](const BlockRange& chunk) {
          return chunk.contains(0) || chunk.contains(config.model.num_layers + 1);
        }));
  }
  const auto value = [has_end, of = std::move(trait.value)](const MeshPlace& at) {
    return has_end[at.pp] ? of(at) : 0;
  };
  return {value, std::move(trait.text)};
}

double tokens_of_a_chunk(const TrainConfig& config) {
  const Stages stages = config.pipeline.schedule(config.grad_acc_steps).stages;
  const int64_t passes = stages.share_of(config.grad_acc_steps);
  return double(config.micro_batch_size * passes) * double(config.seq_len) /
         double(config.context_parallel.cp_size * config.tensor_parallel.tp_size);
}

/// Bytes that a rank hands to the next stage for a micro-batch.
static int64_t boundary_bytes(const TrainConfig& config) {
  const int64_t rows = config.micro_batch_size * config.seq_len /
                       (config.context_parallel.cp_size * config.tensor_parallel.row_shares());
  return rows * config.model.hidden_size * bytes_of(parse_dtype(config.dtype));
}

int64_t predict_pipeline_traffic(const TrainConfig& config) {
  const Schedule schedule = config.pipeline.schedule(config.grad_acc_steps);
  const int64_t between_ranks = std::ranges::count_if(
      messages(schedule), [](const StageMessage& message) { return message.from != message.to; });
  const int64_t pipelines = config.mesh().dp_cp() * config.tensor_parallel.tp_size;
  return pipelines * between_ranks * boundary_bytes(config);
}

Traffic traffic_of(const PipelineConfig& part, const TrainConfig& config, const DryRank& dry) {
  const Schedule schedule = part.schedule(config.grad_acc_steps);
  const auto leaves = [stage = dry.stage_rank()](const StageMessage& message) {
    return message.from == stage && message.to != stage;
  };
  const int64_t sent = std::ranges::count_if(messages(schedule), leaves);
  return {.what = "activations sent over pp",
          .counted = Operations(dry.mesh().pp(), CommKind::send),
          .formula = double(sent * boundary_bytes(config))};
}

std::pair<std::string, std::string> measured_work_row(const TrainConfig& config,
                                                      const MeasuredWork& measured) {
  PipelineConfig pipeline = config.pipeline;
  if (!measured.times.empty()) pipeline.pp_times = measured.times;
  const Schedule schedule = pipeline.schedule(config.grad_acc_steps);
  const double both = measured.mean(Work::BW);
  // Where a backward pass is in one piece, half of it is for the weights.
  const double b = measured.mean(Work::B) > 0 ? measured.mean(Work::B) : both / 2;
  const double w = measured.mean(Work::W) > 0 ? measured.mean(Work::W) : both / 2;
  const WorkTimes times{1e3 * measured.mean(Work::F), 1e3 * b, 1e3 * w, 0};
  const SimulatedSchedule simulated = simulate_schedule(schedule, times);
  const std::string learned =
      !config.pipeline.measures_times() ? ""
      : measured.times.empty()
          ? fmt::format("; pp_times takes {} steps", PipelineConfig::kMeasuredUntil)
          : fmt::format("; scheduled with --pp_times {}", measured.times);
  return {
      "work of a stage",
      fmt::format("F {:.3g}, B {:.3g}, W {:.3g} ms; rank 0 idles {:.0f} % of its step, with "
                  "these times everywhere {:.0f} %{}",
                  times.forward, times.input_gradient, times.weight_gradient, 100 * measured.idle(),
                  100 * (1 - simulated.busy[0] / simulated.makespan), learned)};
}

}  // namespace usp

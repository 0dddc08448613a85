#include "pipeline_parallel/stages.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/rules.h"
#include "config.h"
#include "pipeline_parallel/generators.h"

namespace usp {

void PipelineConfig::bind(Args& args) {
  args.group("Pipeline parallelism");
  args.bind("pp_size", pp_size, "ranks that split the layers").may_differ_on_resume();
  args.bind("pp_schedule", pp_schedule, "schedule: a name, or a file with its table")
      .may_differ_on_resume();
  args.bind("pp_chunks", pp_chunks, "model chunks (stages) of each rank").may_differ_on_resume();
  args.bind("pp_run_length", pp_run_length, "llama3: micro-batches in a row; 0: pp_size")
      .may_differ_on_resume();
  args.bind("pp_layers", pp_layers, "layers of each stage, such as 3,5,4; default: evenly")
      .may_differ_on_resume();
  args.bind("pp_in_flight", pp_in_flight, "auto: micro-batches on a rank at most; 0: pp_size")
      .may_differ_on_resume();
  args.bind("pp_times", pp_times,
            "of F, B, W and a message, for auto and pp_show, in any unit; measured: by the first "
            "steps, for auto")
      .may_differ_on_resume();
  args.bind("overlap_dispatch", overlap_dispatch,
            "run a forward and a backward pass in turns: one computes while the other waits")
      .may_differ_on_resume();
  args.bind("pp_show", pp_show, {"", "table", "json"}, "print the schedule and end").is_question();
}

void PipelineConfig::validate(const Args&) const {
  check_range("pp_size", double(pp_size), 1, 1 << 12);
  check_range("pp_chunks", double(pp_chunks), 1, 1 << 12);
  check_range("pp_run_length", double(pp_run_length), 0, 1 << 20);
  check_range("pp_in_flight", double(pp_in_flight), 0, 1 << 20);
  times();
}

namespace {

bool is_file(const std::string& name) {
  return name.find('/') != std::string::npos || name.find('.') != std::string::npos;
}

Schedule read_schedule(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) usage_error("pp_schedule={}: cannot read this file", path);
  return parse_schedule(text.str(), path);
}

}  // namespace

WorkTimes PipelineConfig::times() const {
  if (measures_times()) return {};
  WorkTimes times;
  char rest = 0;
  const int found =
      std::sscanf(pp_times.c_str(), "%lf,%lf,%lf,%lf%c", &times.forward, &times.input_gradient,
                  &times.weight_gradient, &times.message, &rest);
  const auto is_time = [](double time) { return time >= 0 && time < 1e12; };
  if (found != 4 || !is_time(times.forward) || !is_time(times.input_gradient) ||
      !is_time(times.weight_gradient) || !is_time(times.message) || times.forward == 0) {
    usage_error("pp_times={} must be the times of F, B, W and a message; try 1,1,1,0 or measured",
                pp_times);
  }
  return times;
}

std::string PipelineConfig::show(int64_t micro_batches) const {
  const Schedule shown = schedule(micro_batches);
  return pp_show == "json" ? to_json(shown, times()) : to_report(shown, times());
}

Schedule PipelineConfig::schedule(int64_t micro_batches) const {
  Schedule schedule = one_after_the_other(micro_batches);
  return overlap_dispatch ? in_turns(std::move(schedule), times()) : schedule;
}

Schedule PipelineConfig::one_after_the_other(int64_t micro_batches) const {
  if (!is_file(pp_schedule)) {
    return make_schedule(pp_schedule, {.ranks = pp_size,
                                       .micro_batches = micro_batches,
                                       .chunks = pp_chunks,
                                       .run_length = pp_run_length,
                                       .times = times(),
                                       .most_in_flight = pp_in_flight});
  }
  Schedule schedule = read_schedule(pp_schedule);
  if (schedule.stages.ranks != pp_size) {
    refuse("ranks_of_file", values_of("pp_size", {schedule.stages.ranks}),
           "{} is for {} ranks, pp_size is {}", pp_schedule, schedule.stages.ranks, pp_size);
  }
  if (schedule.micro_batches != micro_batches) {
    refuse("micro_batches_of_file", values_of("grad_acc_steps", {schedule.micro_batches}),
           "{} is for {} micro-batches, grad_acc_steps is {}", pp_schedule, schedule.micro_batches,
           micro_batches);
  }
  return schedule;
}

void PipelineConfig::check(const TrainConfig& run) const {
  const auto needs_schedule = [&](const char* flag, bool is_set, const char* name) {
    if (!is_set || pp_schedule == name) return;
    refuse_silent("schedule_of_flag", {fmt::format("leave out --{}", flag)},
                  "{} is for pp_schedule={}, not {}", flag, name, pp_schedule);
  };
  needs_schedule("pp_in_flight", pp_in_flight != 0, "auto");
  needs_schedule("pp_times", measures_times(), "auto");
  needs_schedule("pp_run_length", pp_run_length != 0, "llama3");
  if (overlap_dispatch && run.data_parallel.zero_stage == 3) {
    refuse("turns_of_whole_weights", {"--zero_stage 2"},
           "overlap_dispatch runs two blocks at a time, and zero_stage=3 gathers the weights of "
           "one after the other");
  }
  if (pp_size > 1 && run.tensor_parallel.halves() > 1) {
    refuse("halves_outside_schedules", {"--tp_overlap chunks"},
           "tp_overlap=batch_halves runs forward and backward in turns, which a schedule over "
           "pp_size={} orders",
           pp_size);
  }
  if (overlap_dispatch && run.tensor_parallel.halves() > 1) {
    refuse_silent("turns_of_halves", {"leave out --overlap_dispatch"},
                  "tp_overlap=batch_halves runs the halves of a micro-batch in turns, which "
                  "overlap_dispatch does with two micro-batches");
  }
  if (measures_times() && !pp_show.empty()) {
    refuse("times_before_steps", {"--pp_times 1,1,1,0"},
           "pp_show={} prints a schedule before pp_times=measured has any", pp_show);
  }
  const Schedule checked = schedule(run.grad_acc_steps);
  check_schedule(checked, "pp_schedule=" + pp_schedule);
  const bool has_turns = std::ranges::any_of(checked.actions, [](const std::vector<Action>& of) {
    return std::ranges::any_of(of, &Action::with_next);
  });
  if (run.data_parallel.zero_stage == 3 && has_turns) {
    refuse("turns_of_file", {"--zero_stage 2"},
           "pp_schedule={} has passes in turns (&), two blocks at a time, and zero_stage=3 gathers "
           "the weights of one after the other",
           pp_schedule);
  }
  blocks_of_stages(*this, run.model, checked.stages.count());
}

namespace {

std::vector<int64_t> parse_layers(const std::string& text) {
  std::vector<int64_t> layers;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    int64_t count = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), count);
    if (error != std::errc() || end != word.data() + word.size() || count < 0) {
      usage_error("pp_layers={}: \"{}\" is no number of layers; try such as 3,5,4", text, word);
    }
    layers.push_back(count);
  }
  return layers;
}

/// Layers of each stage. The head multiplies as much as several layers of a small model, and the
/// embedding nothing; a layer goes to the stage that has least to multiply.
std::vector<int64_t> share_out_layers(const ModelConfig& model, int64_t stages) {
  const int64_t layer = model.layer_weights(model.num_layers - 1, /*active=*/true);
  std::vector<int64_t> layers(stages, 1), work(stages, layer);
  work.back() += model.hidden_size * model.vocab_size;
  for (int64_t left = model.num_layers - stages; left > 0; --left) {
    const auto least = std::ranges::min_element(work) - work.begin();
    ++layers[least];
    work[least] += layer;
  }
  return layers;
}

Remedies layers_that_work(const ModelConfig& model, int64_t stages) {
  if (model.num_layers < stages) return {"leave out --pp_layers"};
  return {fmt::format("--pp_layers {}", fmt::join(share_out_layers(model, stages), ","))};
}

}  // namespace

std::vector<BlockRange> blocks_of_stages(const PipelineConfig& config, const ModelConfig& model,
                                         int64_t stages) {
  if (model.num_layers < stages && config.pp_layers.empty()) {
    Remedies remedies = values_of("num_layers", {stages});
    for (int64_t fewer = model.num_layers * config.pp_size / stages; fewer > 0; --fewer) {
      remedies.push_back(fmt::format("--pp_size {}", fewer));
    }
    refuse("layers_of_stages", remedies,
           "pp_size={} needs a layer for each of {} stages, num_layers is {}", config.pp_size,
           stages, model.num_layers);
  }
  const std::vector<int64_t> layers =
      config.pp_layers.empty() ? share_out_layers(model, stages) : parse_layers(config.pp_layers);
  int64_t sum = 0;
  for (int64_t count : layers) sum += count;
  if (std::ssize(layers) != stages || sum != model.num_layers) {
    refuse("layers_in_list", layers_that_work(model, stages),
           "pp_layers={} has {} layers in {} stages, the model {} in {}", config.pp_layers, sum,
           layers.size(), model.num_layers, stages);
  }
  std::vector<BlockRange> blocks;
  int64_t next = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    const int64_t ends = (stage == 0) + (stage == stages - 1);  // embedding, head
    blocks.push_back({next, next + layers[stage] + ends});
    next = blocks.back().end;
    if (layers[stage] + ends == 0) {
      refuse("work_of_stages", layers_that_work(model, stages),
             "pp_layers={} leaves nothing to stage {}", config.pp_layers, stage);
    }
  }
  return blocks;
}

RankBlocks blocks_of_rank(const TrainConfig& config, int stage_rank) {
  const Stages stages = config.pipeline.schedule(config.grad_acc_steps).stages;
  const auto all = blocks_of_stages(config.pipeline, config.model, stages.count());
  RankBlocks own;
  bool has_first = false, has_last = false;
  for (int64_t chunk = 0; chunk < stages.chunks; ++chunk) {
    const int64_t stage = stages.stage_of({stage_rank, chunk});
    own.chunks.push_back(all[stage]);
    has_first = has_first || stage == 0;
    has_last = has_last || stage == stages.count() - 1;
  }
  own.ends_apart = !(has_first && has_last);
  return own;
}

void share_copies(ParameterList& parameters, const Stages& stages, const Mesh& mesh) {
  for (Parameter* parameter : parameters.by_name()) {
    std::vector<std::string>& groups = parameter->grad_groups;
    if (stages.placement == Placement::mirror) groups.push_back("mirror");
    for (const char* group : {"embedding", "mirror"}) {
      const bool has_copies = std::ranges::find(groups, group) != groups.end();
      if (has_copies && mesh.group(group).rank() > 0) parameter->counted = false;
    }
  }
}

}  // namespace usp

#include <cmath>
#include <fstream>
#include <optional>

#include "console.h"
#include "machine.h"
#include "memory_profile.h"
#include "progress.h"
#include "report.h"
#include "runtime.h"
#include "sample.h"
#include "train_step.h"

namespace usp {
namespace {

/// The model's own linear layers as matrix products, which set the rate that MFU refers to.
std::vector<MatmulShape> matmul_shapes(const TrainConfig& config) {
  const ModelConfig& m = config.model;
  const int64_t tokens = config.micro_batch_size * config.seq_len;
  const int64_t qkv = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim();
  return {{tokens, qkv, m.hidden_size},
          {tokens, m.hidden_size, m.num_heads * m.head_dim()},
          {tokens, 2 * m.ffn_hidden_size, m.hidden_size},
          {tokens, m.hidden_size, m.ffn_hidden_size},
          {tokens, m.vocab_size, m.hidden_size}};
}

/// What the sample continues: --prompt_ids, the prompt's bytes, or the first token of a
/// pre-tokenised file.
std::vector<int32_t> encode_prompt(const TrainConfig& config, const TokenFile& file) {
  if (!config.sample.prompt_ids.empty()) {
    return parse_token_ids("prompt_ids", config.sample.prompt_ids, config.model.vocab_size);
  }
  if (!file.is_text()) return {file[0]};
  std::vector<int32_t> tokens;
  for (char character : config.sample.prompt) tokens.push_back(static_cast<uint8_t>(character));
  return tokens;
}

/// --estimate: what a step would need, found by running it on shapes without data.
void estimate(const TrainConfig& config, const std::string& config_json) {
  const Simulation simulation = simulate(config);
  print("{}", estimate_text(config, simulation));
  if (config.estimate_file.empty() || !speaks_for_all()) return;
  std::ofstream file(config.estimate_file);
  file << estimate_json(config, simulation, config_json) << std::flush;
  if (!file) fail("cannot write {}", config.estimate_file);
}

/// The sample for people to read: text, or the ids where those are what was asked for, or all that
/// there is.
std::string sample_text(const std::vector<int32_t>& tokens, const TrainConfig& config,
                        const TokenFile& file) {
  if (file.is_text() && config.sample.prompt_ids.empty()) return tokens_to_text(tokens, true);
  return fmt::format("token ids: {}", tokens_to_text(tokens, false));
}

// [train]
/// Runs the steps; returns what the last one measured.
StepMetrics train(const TrainConfig& config, const Dataset& dataset, Trainer& trainer,
                  const RunDir& run_dir, double peak_gflops, Checkpoints& checkpoints,
                  std::optional<double>& val_loss) {
  Runtime& runtime = Runtime::current();
  const int64_t first = checkpoints.resumed_at();
  MetricsWriter file(run_dir.file("metrics.jsonl"), parse_dtype(config.dtype), first);
  Progress progress(config.steps, first);
  StepMetrics metrics = file.last();
  if (metrics.has_val_loss) val_loss = metrics.val_loss;
  for (int64_t step = first; step < config.steps && !stop_requested(); ++step) {
    runtime.tracer().set_step(step);
    runtime.tracer().record(step < first + config.trace_steps);
    runtime.allocator().record_events(step < first + config.trace_steps);
    trainer.train_step(step);
    metrics = trainer.report(step, peak_gflops);
    const bool last = step + 1 == config.steps;
    const bool due = config.eval_interval > 0 && (last || (step + 1) % config.eval_interval == 0);
    if (due && dataset.val_samples() > 0) {
      val_loss = metrics.val_loss = trainer.evaluate();
      metrics.has_val_loss = true;
    }
    file.write(metrics, runtime);
    if (!std::isfinite(metrics.grad_norm)) {
      progress.say(fmt::format("step {}: gradient norm is {}; this update is left out", step + 1,
                               metrics.grad_norm));
    }
    progress.show(metrics);
    checkpoints.after_step(step + 1, trainer.state());
  }
  checkpoints.at_end(metrics.step + 1, trainer.state());
  runtime.tracer().record(false);
  runtime.allocator().record_events(false);
  return metrics;
}
// [train]

// [run]
int run(int argc, char** argv) {
  TrainConfig config;
  Args args("Trains a Llama.");
  config.bind(args);
  if (!args.parse(argc, argv)) return 0;
  config.validate(args);

  install_stop_handlers();
  Runtime runtime(Device::cpu);
  const Runtime::Use use(runtime);
  if (config.estimate) {
    estimate(config, args.to_json());
    return 0;
  }
  const TokenFile file(config.data.empty() ? USP_CORPUS : config.data,
                       config.token_dtype == "uint16" ? 2 : 4, config.model.vocab_size);
  const Dataset dataset(
      file, config.seq_len, config.val_fraction,
      config.data_order == "shuffled" ? DataOrder::shuffled : DataOrder::sequential, config.seed);
  const RunDir run_dir(config.run_dir, config.overwrite, config.checkpoints.resume);

  RunFacts facts = gather_facts(file, dataset, config);
  facts.command.assign(argv, argv + argc);
  facts.config_json = args.to_json();
  facts.matmul_gflops = measure_matmul_gflops(parse_dtype(config.dtype), matmul_shapes(config));
  Trainer trainer(config, &dataset);
  facts.parameters = trainer.model().parameters().numel();
  Checkpoints checkpoints(run_dir, config.checkpoints,
                          {facts.config_json, config.global_batch_size(), facts.data_sha256});
  if (run_dir.resumes()) checkpoints.resume(trainer.state(), config.steps);
  write_record(run_dir, facts);
  print("{}\n", headline(facts, config));

  std::optional<double> val_loss;
  const StepMetrics last =
      train(config, dataset, trainer, run_dir, facts.matmul_gflops, checkpoints, val_loss);
  bool stopped = last.step + 1 < config.steps;
  std::string sample;
  if (config.sample.sample_tokens > 0 && !stopped) {
    const std::vector<int32_t> tokens =
        sample_tokens(trainer.model(), config.sample, config.seq_len, encode_prompt(config, file),
                      config.seed, stop_requested);
    sample = sample_text(tokens, config, file);
    stopped = stop_requested();
  }
  const Report report = make_report(facts, config, last, val_loss, std::move(sample));
  run_dir.write("report.md", report.markdown());
  run_dir.write("memory.json", memory_json(runtime.allocator(), runtime.tracer()));
  runtime.tracer().write(run_dir.file("trace.json"), USP_CHAPTER);
  run_dir.finish(stopped ? fmt::format("interrupted after step {}", last.step + 1) : "finished");
  print("\n{}{}", stopped ? "Stopped on request.\n\n" : "", report.text());
  return 0;
}
// [run]

}  // namespace
}  // namespace usp

// [main]
int main(int argc, char** argv) { return usp::run_main(usp::run, argc, argv); }
// [main]

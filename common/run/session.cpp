#include "run/session.h"

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "run/matmul_rate.h"
#include "run/progress.h"
#include "run/sample.h"
#include "run/timeline.h"
#include "tensor/console.h"
#include "tensor/memory_profile.h"

namespace usp {

namespace {

/// The model's own linear layers as matrix products, which set the rate that MFU refers to.
std::vector<MatmulShape> matmul_shapes(const RunConfig& config) {
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
std::vector<int32_t> encode_prompt(const RunConfig& config, const TokenFile& file) {
  if (!config.sample.prompt_ids.empty()) {
    return parse_token_ids("prompt_ids", config.sample.prompt_ids, config.model.vocab_size);
  }
  if (!file.is_text()) return {file[0]};
  std::vector<int32_t> tokens;
  for (char character : config.sample.prompt) tokens.push_back(static_cast<uint8_t>(character));
  return tokens;
}

}  // namespace

Session::Session(RunConfig& config, const Communicator& world)
    : config_(config), world_(world), args_("Trains a Llama.") {}

bool Session::parse(int argc, char** argv) {
  command_.assign(argv, argv + argc);
  runtime_.emplace(Device::cpu, world_.rank(), world_.size());
  use_.emplace(*runtime_);
  config_.bind(args_);
  bool goes_on = true;
  refuse_together(world_, [&] {
    goes_on = args_.parse(argc, argv);
    if (!goes_on) return;
    config_.spread_over(world_.size(), args_);
    config_.validate(args_);
  });
  if (goes_on) install_stop_handlers();
  return goes_on;
}

int Session::estimate(const Prediction& prediction, const Simulation& simulation) const {
  print("{}", estimate_text(config_, prediction, simulation));
  if (config_.estimate_file.empty() || !speaks_for_all()) return 0;
  std::ofstream file(config_.estimate_file);
  file << estimate_json(args_.to_json(), prediction, simulation) << std::flush;
  if (!file) fail("cannot write {}", config_.estimate_file);
  return 0;
}

int Session::answer(const std::string& text) const {
  print("{}", text);
  return 0;
}

/// From here on tensors lie where --device says.
void Session::move_to_device() {
  if (config_.device != name(Device::cuda)) return;
  runtime_->move_to(Device::cuda);
}

void Session::open(const Predict& predict) {
  refuse_together(world_, [&] {
    move_to_device();
    file_.emplace(config_.data.empty() ? USP_CORPUS : config_.data,
                  config_.token_dtype == "uint16" ? 2 : 4, config_.model.vocab_size);
    dataset_.emplace(*file_, config_.seq_len, config_.val_fraction,
                     config_.data_order == "shuffled" ? DataOrder::shuffled : DataOrder::sequential,
                     config_.seed);
  });
  if (config_.engine() == EngineKind::nccl) use_nccl(world_);
  check_memory(config_, predict, world_);
  refuse_together(world_, [&] {
    run_dir_.emplace(config_.run_dir, config_.overwrite, config_.checkpoints.resume);
  });
  if (config_.communication) {
    watch(world_, *config_.communication, *run_dir_);
    connection_ = connect(world_, *config_.communication, config_.trace_steps > 0);
  }
  facts_ = gather_facts(*file_, *dataset_, config_);
  facts_.command = command_;
  facts_.config_json = args_.to_json();
  facts_.matmul_gflops = matmul_gflops();
}

/// The environment variable USP_MATMUL_SECONDS is for tests of many short runs: to measure for so
/// long, and no longer.
double Session::matmul_gflops() const {
  const char* given = std::getenv("USP_MATMUL_SECONDS");
  const double seconds = given != nullptr ? std::atof(given) : 0.25;
  return measure_matmul_gflops(world_, parse_dtype(config_.dtype), matmul_shapes(config_), seconds);
}

int Session::train(TrainerBase& trainer) {
  facts_.parameters = static_cast<int64_t>(world_.sum(double(trainer.parameters().counted())));
  Checkpoints checkpoints(*run_dir_, config_.checkpoints,
                          {facts_.config_json, config_.global_batch_size(), facts_.data_sha256,
                           args_.may_differ_on_resume(), args_.decisive()},
                          world_);
  if (run_dir_->resumes()) checkpoints.resume(trainer.state(), config_.steps);
  write_record(*run_dir_, facts_);
  print("{}\n", headline(facts_, config_));

  const RunSummary summary = run_steps(trainer, checkpoints);
  bool stopped = summary.last.step < config_.steps && !summary.diverged;
  std::string text;
  if (config_.sample.sample_tokens > 0 && !stopped && !summary.diverged) {
    text = sample(trainer);
    stopped = stop_requested_anywhere();
  }
  ReportRows rows = trainer.report_rows(summary.last.step - checkpoints.resumed_at());
  write_records(rows);
  // Once more, as it may have been measured at a busy moment; after the records of memory.
  const double peak_gflops = std::max(facts_.matmul_gflops, matmul_gflops());
  const Report report = make_report(facts_, summary, peak_gflops, rows, std::move(text));
  run_dir_->write("report.md", report.markdown());
  world_.barrier();
  print("\n{}{}", stopped ? "Stopped on request.\n\n" : "", report.text());
  return end(summary, stopped);
}

/// Marks the run as over when all ranks have ended it well; returns the exit code.
int Session::end(const RunSummary& summary, bool stopped) {
  const StepMetrics& last = summary.last;
  if (summary.diverged) {
    run_dir_->finish(fmt::format("diverged after step {}", last.step));
    if (speaks_for_all()) {
      fmt::print(stderr,
                 "error: the last {} updates were left out, as no gradient was finite: training "
                 "has diverged; try a lower --lr (it was {:.3g}), or --max_skipped_steps 0 to go "
                 "on regardless\n",
                 summary.skipped_in_a_row, last.lr);
    }
    return 1;
  }
  run_dir_->finish(stopped ? fmt::format("interrupted after step {}", last.step) : "finished");
  if (!stopped) return 0;
  // One rank may have been asked for all of them.
  return 128 + (world_.any(stop_signal_number() == SIGTERM) ? SIGTERM : SIGINT);
}

bool Session::stop_requested_anywhere() const { return world_.any(stop_requested()); }

RunSummary Session::run_steps(TrainerBase& trainer, Checkpoints& checkpoints) {
  const int64_t first = checkpoints.resumed_at();
  MetricsWriter file(run_dir_->file("metrics.jsonl"), parse_dtype(config_.dtype), first);
  Progress progress(config_.steps, first);
  RunSummary summary;
  StepMetrics& metrics = summary.last = file.last();
  if (metrics.has_val_loss) summary.val_loss = metrics.val_loss;
  int64_t& skipped_in_a_row = summary.skipped_in_a_row;
  const auto record = [&](bool on) {
    runtime_->tracer().record(on);
    runtime_->allocator().record_events(on);
  };
  // One rank that was asked to stop stops them all, after the same step.
  for (int64_t step = first; step < config_.steps && !stop_requested_anywhere(); ++step) {
    if (summary.diverged) break;
    world_.engine().flight().set_step(step + 1);
    runtime_->tracer().set_step(step + 1);
    record(step < first + config_.trace_steps);
    trainer.train_step(step);
    metrics = trainer.report(step, facts_.matmul_gflops);
    const bool last = step + 1 == config_.steps;
    const bool due = config_.eval_interval > 0 && (last || (step + 1) % config_.eval_interval == 0);
    if (due && std::min(config_.eval_samples, dataset_->val_samples()) > 0) {
      summary.val_loss = metrics.val_loss = trainer.evaluate();
      metrics.has_val_loss = true;
    }
    file.write(metrics, *runtime_);
    summary.step_ms.push_back(metrics.step_ms);
    skipped_in_a_row = metrics.skipped() ? skipped_in_a_row + 1 : 0;
    summary.diverged = skipped_in_a_row > 0 && skipped_in_a_row == config_.max_skipped_steps;
    if (metrics.skipped()) {
      progress.say(fmt::format("step {}: gradient norm is {}; this update is left out",
                               metrics.step, metrics.grad_norm));
    }
    progress.show(metrics);
    checkpoints.after_step(step + 1, trainer.state());
  }
  // A run that is shorter than that has diverged where it has made no update at all.
  if (metrics.step == config_.steps && config_.max_skipped_steps > 0) {
    summary.diverged |= skipped_in_a_row > 0 && skipped_in_a_row == std::ssize(summary.step_ms);
  }
  checkpoints.at_end(metrics.step, trainer.state());
  record(false);
  summary.skipped = file.skipped();
  return summary;
}

/// Text for people to read, or token ids where those are what was asked for, or all that there is.
std::string Session::sample(TrainerBase& trainer) const {
  const std::vector<int32_t> tokens = sample_tokens(
      [&](const Pass& pass) { return trainer.logits(pass); }, config_.sample, config_.seq_len,
      encode_prompt(config_, *file_), config_.seed, [&] { return stop_requested_anywhere(); });
  if (file_->is_text() && config_.sample.prompt_ids.empty()) return tokens_to_text(tokens, true);
  return fmt::format("token ids: {}", tokens_to_text(tokens, false));
}

/// What was recorded on the way; adds the rows that tell of it.
void Session::write_records(ReportRows& rows) {
  if (config_.communication) {
    rows.push_back(waiting_row(write_timeline(world_, connection_, *run_dir_, config_.chapter,
                                              config_.tokens_per_step())));
    run_dir_->write("ledger.json", runtime_->ledger().to_json());
  } else {
    runtime_->tracer().write(run_dir_->file("trace.json"), config_.chapter);
  }
  run_dir_->write("memory.json", memory_json(runtime_->allocator(), runtime_->tracer()));
}

}  // namespace usp

#include "run/session.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/file_writer.h"
#include "base/machine.h"
#include "base/output.h"
#include "run/attention_choice.h"
#include "run/command_line.h"
#include "run/matmul_rate.h"
#include "run/progress.h"
#include "run/sample.h"
#include "run/timeline.h"
#include "tensor/backend.h"
#include "tensor/console.h"
#include "tensor/memory_profile.h"
#include "train/pretrained.h"

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

bool may_fuse(const RunConfig& config) {
  return asks_for_fused_kernels != nullptr && asks_for_fused_kernels(config);
}

/// A model of fewer steps says nothing that is worth reading, unless somebody asks for it.
constexpr int64_t kStepsToLearn = 50;

/// What the sample continues: --prompt_ids, the prompt's bytes, or the first token of a
/// pre-tokenized file.
std::vector<int32_t> encode_prompt(const RunConfig& config, const TokenFile& file) {
  if (!config.sample.prompt_ids.empty()) {
    return parse_token_ids("prompt_ids", config.sample.prompt_ids, config.model.vocab_size);
  }
  if (!file.is_text()) return {file[0]};
  std::vector<int32_t> tokens;
  for (char character : config.sample.prompt) tokens.push_back(static_cast<uint8_t>(character));
  return tokens;
}

/// What begins the command line of a run like this one. ./book says what its own is.
std::string how_to_start(int ranks, const std::string& program) {
  if (const char* by_book = std::getenv("USP_STARTED_BY")) return by_book;
  return (ranks > 1 ? fmt::format("mpiexec -n {} ", ranks) : "") + shell_quoted(program);
}

}  // namespace

Session::Session(RunConfig& config, const Communicator& world)
    : config_(config), world_(world), args_("Trains a Llama.") {}

bool Session::parse(int argc, char** argv) {
  command_.assign(argv, argv + argc);
  runtime_.emplace(Device::cpu, world_.rank(), world_.size());
  use_.emplace(*runtime_);
  bool goes_on = true;
  refuse_together(world_, [&] {
    goes_on = read_command_line(config_, args_, command_, ranks(), check_data);
    // An estimate or a layout would be that of the defaults.
    const bool resumes = config_.checkpoints.resume && !config_.overwrite;
    if (goes_on && resumes && speaks_for_all()) require_run(config_.run_dir);
  });
  // A question has nothing to save, and no step after which it could stop.
  if (goes_on && args_.questions().empty()) install_stop_handlers();
  if (goes_on) check_same_run();
  start_.ended("command line");
  return goes_on;
}

/// Ranks that were started one by one may have got other flags, and may compute with other
/// instructions, which moves the last bits.
void Session::check_same_run() const {
  if (world_.size() == 1) return;
  using Flags = std::map<std::string, nlohmann::ordered_json>;
  auto flags = nlohmann::ordered_json::parse(args_.to_json());
  // Places, which hosts may call differently.
  for (const char* place : {"data", "run_dir", "model", "estimate_file"}) flags.erase(place);
  const std::vector<std::string> all = world_.all_gather_text(flags.dump());
  const auto first = nlohmann::ordered_json::parse(all.front()).get<Flags>();
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    const auto other = nlohmann::ordered_json::parse(all[rank]).get<Flags>();
    for (const auto& [flag, value] : other) {
      if (value == first.at(flag)) continue;
      throw RefusedTogether(fmt::format(
          "rank {} was given {}={}, and rank 0 {}={}; start all ranks with the same flags", rank,
          flag, value.dump(), flag, first.at(flag).dump()));
    }
  }
  const std::string own = fmt::format("{}, built for {}", matmul_library(), build_architecture());
  const std::vector<std::string> computing = world_.all_gather_text(own);
  const auto other = std::ranges::find_if(computing, [&](const auto& of) { return of != own; });
  if (other == computing.end()) return;
  print(
      "rank {} computes with {}, and rank 0 with {}: the last bits depend on who computes what.\n",
      other - computing.begin(), *other, own);
}

/// Files of one name may differ from host to host.
void Session::check_same_data() const {
  const auto check = [&](const char* what, const std::string& digest) {
    const std::vector<std::string> digests = world_.all_gather_text(digest);
    const auto other =
        std::ranges::find_if(digests, [&](const auto& of) { return of != digests[0]; });
    if (other == digests.end()) return;
    throw RefusedTogether(
        fmt::format("{} of rank {} has the SHA-256 {}, and rank 0's {}; give all ranks the same",
                    what, other - digests.begin(), *other, digests[0]));
  };
  check("the data", data_->file.sha256());
  if (config_.model.pretrained) {
    check("a sample of the model's weights", digest_of_pretrained(config_.model.model));
  }
}

int Session::estimate(const std::vector<RankEstimate>& ranks) const {
  if (!config_.estimate_file.empty() && speaks_for_all()) {
    try {
      write_file(config_.estimate_file, estimate_json(args_.to_json(), config_.mesh(), ranks));
    } catch (const Error& error) {
      usage_error("estimate_file={} cannot be written: {}", config_.estimate_file, error.what());
    }
  }
  print("{}", estimate_text(config_, ranks));
  if (config_.device == name(Device::cuda) && !args_.typed("attention")) {
    print(
        "A run takes naive attention where it is estimated to be faster on its GPU and fits "
        "there{}; --attention says which.\n",
        may_fuse(config_) ? ", and where the GPU has no fused kernels for blockwise attention"
                          : "");
  }
  return 0;
}

int Session::answer(const std::string& text) const {
  print("{}", text);
  return 0;
}

/// From here on tensors lie where --device says.
void Session::move_to_device() {
  if (config_.device != name(Device::cuda)) return;
  if (config_.communication && config_.communication->comm == "nccl") {
    // CUDA loads a kernel when it is first started, and may wait for the device to do so, which may
    // wait for another rank. Streams of several communicators get queues of their own.
    setenv("CUDA_MODULE_LOADING", "EAGER", /*replace=*/0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*replace=*/0);
  }
  runtime_->move_to(Device::cuda);
  runtime_->accelerator()->require(parse_dtype(config_.dtype));
}

/// Where nothing says by what attention a GPU computes, it is blockwise attention if there are
/// fused kernels for it, else the one that is estimated to be faster, if all ranks have the memory.
/// A resumed run keeps that of its checkpoint.
void Session::choose_attention(const Predict& predict) {
  const bool has_flag = !args_.group_of("attention").empty();
  if (runtime_->accelerator() == nullptr || config_.checkpoints.resume) return;
  if (!has_flag || args_.typed("attention") || !accepts_naive_attention()) return;
  const auto take = [&](const std::string& value) {
    args_.take("attention", nlohmann::ordered_json(value).dump(), /*always=*/false);
  };
  AttentionShape shape = attention_shape(config_);
  const ModelConfig& model = config_.model;
  const int64_t value_dim = model.mla.on() ? model.mla.v_head_dim : 0;
  shape.fused = may_fuse(config_) &&
                runtime_->backend().fuses_attention(shape.dtype, model.head_dim(), value_dim);
  take("naive");
  const SharedMemory memory = shared_memory(config_, predict, world_);
  const AttentionChoice own = usp::choose_attention(shape, memory.needed(), memory.available);
  // The first rank that wants blockwise attention decides for all.
  const std::vector<std::string> wanted = world_.all_gather_text(own.attention);
  const std::vector<std::string> reasons = world_.all_gather_text(own.why);
  const auto decides = std::ranges::find(wanted, "blockwise");
  const auto rank = decides == wanted.end() ? 0 : decides - wanted.begin();
  take(wanted[rank]);
  attention_line_ = fmt::format("On this GPU attention={}: {}; --attention takes either.\n",
                                wanted[rank], reasons[rank]);
}

/// Whether no other flag asks for blockwise attention.
bool Session::accepts_naive_attention() const {
  std::vector<std::string> words = command_;
  words.insert(words.end(), {"--attention", "naive"});
  const std::unique_ptr<RunConfig> config = config_.fresh();
  Args args("");
  try {
    return read_without_advice(*config, args, words, ranks());
  } catch (const UsageError&) {
    return false;
  }
}

void Session::open(const Predict& predict) {
  mesh_.emplace(world_, config_.mesh());
  refuse_together(world_, [&] { move_to_device(); });
  start_.ended("device");
  refuse_together(world_, [&] { data_ = open_data(config_, args_, command_, ranks()); });
  check_same_data();
  start_.ended("data");
  if (config_.engine() == EngineKind::nccl) use_nccl(world_);
  choose_attention(predict);
  check_memory(config_, predict, world_);
  start_.ended("check of memory");
  // Its kernels are a GPU's first: where there are none for it, that shows here.
  refuse_together(world_,
                  [&] { check_matmul(parse_dtype(config_.dtype), matmul_shapes(config_)); });
  start_.ended("check of a product");
  refuse_together(world_, [&] {
    run_dir_.emplace(config_.run_dir, config_.overwrite, config_.checkpoints.resume);
  });
  unless_refused([&] {
    if (!config_.communication) return;
    watch(world_, *config_.communication, *run_dir_);
    connection_ = connect(world_, *config_.communication, config_.trace_steps > 0);
  });
  facts_ = gather_facts(data_->file, data_->dataset, config_);
  facts_.command = command_;
  facts_.config_json = args_.to_json();
  start_.ended("run directory and connections");
  facts_.matmul_gflops = matmul_gflops();
  start_.ended("rate of products");
}

/// The environment variable USP_MATMUL_SECONDS is for tests of many short runs: to measure for so
/// long, and no longer.
double Session::matmul_gflops() const {
  const char* given = std::getenv("USP_MATMUL_SECONDS");
  const double seconds = given != nullptr ? std::atof(given) : 0.25;
  return measure_matmul_gflops(world_, parse_dtype(config_.dtype), matmul_shapes(config_), seconds);
}

/// What is refused leaves nothing behind.
void Session::unless_refused(const std::function<void()>& start) {
  try {
    start();
  } catch (const UsageError&) {
    run_dir_->withdraw();
    throw;
  }
}

int Session::train(const std::function<std::unique_ptr<TrainerBase>(const RunContext&)>& make) {
  std::unique_ptr<TrainerBase> trainer;
  unless_refused([&] {
    refuse_together(world_, [&] { trainer = make({&data_->dataset, *mesh_}); });
  });
  start_.ended("model");
  facts_.parameters = static_cast<int64_t>(world_.sum(double(trainer->parameters().counted())));
  Checkpoints checkpoints(*run_dir_, config_.checkpoints,
                          {facts_.config_json, config_.global_batch_size(), facts_.data_sha256,
                           args_.may_differ_on_resume(), args_.decisive(), facts_.data_is_text},
                          world_);
  std::optional<MetricsWriter> metrics;
  unless_refused([&] {
    if (run_dir_->resumes()) checkpoints.resume(trainer->state(), config_.steps);
    refuse_together(world_, [&] {
      run_dir_->begin();
      write_record(*run_dir_, facts_);
      metrics.emplace(run_dir_->file("metrics.jsonl"), parse_dtype(config_.dtype),
                      checkpoints.resumed_at());
    });
  });
  const std::string& note = data_->file.note();
  print("{}{}{}{}\n", note, note.empty() ? "" : ".\n", attention_line_, headline(facts_, config_));
  start_.ended("checkpoint and records");
  run_dir_->write("start.json", start_.to_json());  // once more after the first step

  const RunSummary summary = run_steps(*trainer, checkpoints, *metrics);
  bool stopped = summary.last.step < config_.steps && !summary.diverged;
  std::string text;
  const bool learnt = summary.last.step >= kStepsToLearn || args_.given("sample_tokens");
  if (learnt && config_.sample.sample_tokens > 0 && !stopped && !summary.diverged) {
    text = sample(*trainer);
    stopped = stop_requested_anywhere();
  }
  ReportRows rows = trainer->report_rows();
  if (const Accelerator* device = runtime_->accelerator()) {
    for (const std::string& remark : device->remarks()) rows.emplace_back("device", remark);
  }
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
      print_error(
          fmt::format("the last {} updates were left out, as no gradient was finite: training has "
                      "diverged; try a lower --lr (it was {:.3g}), or --max_skipped_steps 0 to go "
                      "on regardless",
                      summary.skipped_in_a_row, last.lr));
    }
    return 1;
  }
  run_dir_->finish(stopped ? fmt::format("interrupted after step {}", last.step) : "finished");
  if (!stopped) return 0;
  if (!newest_checkpoint(config_.run_dir).empty() && !run_dir_->has_earlier_run()) {
    print("\nTo go on from here:\n  {} --run_dir {} --resume\n",
          how_to_start(world_.size(), command_[0]), shell_quoted(config_.run_dir));
  }
  if (run_dir_->has_earlier_run()) {
    print("{} holds the run that it held before.\n", config_.run_dir);
  }
  if (world_.any(output_is_lost())) return 1;  // finish_output() says so
  // One rank may have been asked for all of them.
  for (const int number : kStopSignals) {
    if (world_.any(stop_signal_number() == number)) return 128 + number;
  }
  return 128 + SIGINT;
}

bool Session::stop_requested_anywhere() const { return world_.any(stop_requested()); }

RunSummary Session::run_steps(TrainerBase& trainer, Checkpoints& checkpoints, MetricsWriter& file) {
  const int64_t first = checkpoints.resumed_at();
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
    if (step == first) start_.ended("first step");
    const bool last = step + 1 == config_.steps;
    const bool due = config_.eval_interval > 0 && (last || (step + 1) % config_.eval_interval == 0);
    if (due && std::min(config_.eval_samples, data_->dataset.val_samples()) > 0) {
      summary.val_loss = metrics.val_loss = trainer.evaluate();
      metrics.has_val_loss = true;
    }
    file.write(metrics, *runtime_);
    if (step == first) {
      run_dir_->first_step_is_done();
      run_dir_->write("start.json", start_.to_json());
    }
    summary.step_ms.add(metrics.step_ms);
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
    summary.diverged |= skipped_in_a_row > 0 && skipped_in_a_row == summary.step_ms.steps();
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
      encode_prompt(config_, data_->file), config_.seed, [&] { return stop_requested_anywhere(); });
  if (data_->file.is_text() && config_.sample.prompt_ids.empty())
    return tokens_to_text(tokens, true);
  return fmt::format("token ids: {}", tokens_to_text(tokens, false));
}

/// What was recorded on the way; adds the rows that tell of it.
void Session::write_records(ReportRows& rows) {
  if (config_.communication) {
    const WaitingTime waiting =
        write_timeline(world_, connection_, *run_dir_, config_.chapter, config_.tokens_per_step());
    rows.push_back(waiting_row(waiting, world_.size()));
    run_dir_->write("ledger.json", runtime_->ledger().to_json());
  } else {
    runtime_->tracer().write(run_dir_->file("trace.json"), config_.chapter);
  }
  run_dir_->write("memory.json", memory_json(runtime_->allocator(), runtime_->tracer()));
}

}  // namespace usp

#include "run/run_config.h"

#include <cmath>

#include "base/output.h"
#include "files/data.h"

namespace usp {

void SampleConfig::bind(Args& args) {
  args.group("Sampling");
  args.bind("sample_tokens", sample_tokens, "tokens to sample from the trained model; 0: none")
      .may_differ_on_resume();
  args.bind("temperature", temperature, "0: always the likeliest token").may_differ_on_resume();
  args.bind("top_k", top_k, "sample among this many likeliest tokens; 0: all")
      .may_differ_on_resume();
  args.bind("prompt", prompt, "text that the sample continues (byte vocabularies)")
      .may_differ_on_resume();
  args.bind("no_kv_cache", no_kv_cache, "run the whole text again for every token")
      .may_differ_on_resume();
  args.bind("prompt_ids", prompt_ids, "token ids instead, such as '1 15043'; the sample is ids too")
      .may_differ_on_resume();
}

void SampleConfig::validate(const Args&) const {
  check_range("sample_tokens", double(sample_tokens), 0, HUGE_VAL);
  check_range("temperature", temperature, 0, HUGE_VAL);
  check_range("top_k", double(top_k), 0, HUGE_VAL);
}

void SampleConfig::check(const RunConfig& run) const {
  if (!prompt_ids.empty()) parse_token_ids("prompt_ids", prompt_ids, run.model.vocab_size);
}

EngineKind RunConfig::engine() const {
  if (device != "cuda") return EngineKind::host;
  return communication && communication->comm == "nccl" ? EngineKind::nccl : EngineKind::staged;
}

void RunConfig::bind_training(Args& args) {
  args.group("Training");
  args.bind("steps", steps, "optimizer steps").may_differ_on_resume();
  args.bind("seq_len", seq_len, "tokens per sample");
  args.bind("micro_batch_size", micro_batch_size, "samples per forward pass")
      .may_differ_on_resume();
  args.bind("grad_acc_steps", grad_acc_steps, "micro-batches per optimizer step")
      .may_differ_on_resume();
  args.bind("max_skipped_steps", max_skipped_steps,
            "end the run after this many skipped updates in a row; 0: never")
      .may_differ_on_resume();
  args.bind("seed", seed, "of weights, data order and sampling");
  args.bind("dtype", dtype, {"f32", "bf16", "f64"}, "of weights and activations");
}

void RunConfig::bind_data(Args& args) {
  args.group("Data");
  args.bind("data", data,
            "text, lines of JSON, or token ids (docs/models.md); default: this project's own text")
      .may_differ_on_resume();  // its digest may not
  args.bind("token_dtype", token_dtype, {"uint16", "uint32"},
            "of token ids in a file that does not say it");
  args.bind("data_order", data_order, {"sequential", "shuffled"}, "order of the samples");
  args.bind("val_fraction", val_fraction, "tail of the data held out for validation");
  args.bind("eval_interval", eval_interval, "steps between validations; 0: none")
      .may_differ_on_resume();
  args.bind("eval_samples", eval_samples, "validation samples each time; 0: none")
      .may_differ_on_resume();
}

void RunConfig::bind_execution(Args& args) {
  args.group("Execution");
  args.bind("device", device, {"auto", "cpu", "cuda"}, "where tensors live; auto: cpu")
      .may_differ_on_resume();
  args.bind("allow_oversize", allow_oversize,
            "start even where the estimate exceeds the memory that is available")
      .may_differ_on_resume();
}

void RunConfig::bind_output(Args& args) {
  args.group("Output");
  args.bind("run_dir", run_dir, "directory for the run's files").may_differ_on_resume();
  args.bind("overwrite", overwrite, "replace the run that run_dir holds").may_differ_on_resume();
  args.bind("trace_steps", trace_steps, "steps to record in trace.json; 0: none")
      .may_differ_on_resume();
  args.bind("estimate", estimate, "dry run: say what a step would need, without data, and end")
      .is_question();
  args.bind("estimate_file", estimate_file, "JSON file for what --estimate finds")
      .may_differ_on_resume();
  args.bind("device_memory", device_memory,
            "GiB of memory that a rank has, for --estimate and plans; what is sold as 80 GB has 80")
      .may_differ_on_resume();
}

void RunConfig::validate_text() const {
  if (!model.byte_tokens) {
    usage_error(
        "data={} is text, but the tokens of model={} are no bytes; write a .bin of them with "
        "./book tokenize {} FILE --output FILE.bin, and give that as data",
        data.empty() ? "the project's own" : data, model.model, shell_quoted(model.model));
  }
  if (!sample.prompt_ids.empty() || sample.sample_tokens == 0) return;
  for (char character : sample.prompt) {
    const auto byte = static_cast<uint8_t>(character);
    if (byte < model.vocab_size) continue;
    refuse("prompt_of_tokens", {"--prompt_ids 0", "--vocab_size 256"},
           "prompt holds the byte {}, which is no token below vocab_size={}", byte,
           model.vocab_size);
  }
}

/// Refuses what could not even be counted.
void RunConfig::validate_sizes() const {
  check_positive("micro_batch_size", micro_batch_size);
  check_range("grad_acc_steps", double(grad_acc_steps), 1, 1e6);
  const double tokens = double(micro_batch_size) * double(seq_len);
  if (tokens > double(kMaxTokensAtOnce)) {
    const bool long_sequence = seq_len > kMaxTokensAtOnce;
    const Remedies fewer = long_sequence
                               ? Remedies{"--seq_len 4096", "--micro_batch_size 1 --seq_len 4096"}
                               : values_of("micro_batch_size", {kMaxTokensAtOnce / seq_len});
    refuse("tokens_at_once", fewer,
           "micro_batch_size={} times seq_len={} must be at most {} tokens", micro_batch_size,
           seq_len, kMaxTokensAtOnce);
  }
  // At most 64 bytes for each channel of a layer, at most 32 for each attention probability.
  const double heads = double(model.num_heads) * double(model.head_dim());
  const double latents = model.mla.on() ? double(model.mla.norm_weights()) : 0;
  const auto bytes_of = [&](double samples, double length) {
    const double channels = 4.0 * double(model.hidden_size) + 3 * heads + 2 * latents +
                            3.0 * double(model.ffn_hidden_size) +
                            double(model.num_heads) * length / 2;
    return 64 * samples * length * (double(model.num_layers) * channels + double(model.vocab_size));
  };
  constexpr double kMaxBytes = 0x1p62;
  const double bytes = bytes_of(double(micro_batch_size), double(seq_len));
  if (bytes > kMaxBytes) {
    int64_t length = 256;
    while (length > 1 && bytes_of(1, double(length)) > kMaxBytes) length /= 2;
    refuse("bytes_at_once", {fmt::format("--micro_batch_size 1 --seq_len {}", length)},
           "micro_batch_size={} times seq_len={} must have activations of at most 2^62 bytes, not "
           "{:.1g}",
           micro_batch_size, seq_len, bytes);
  }
}

void RunConfig::validate_run() const {
  if (communication && communication->comm == "nccl" && device != "cuda") {
    usage_error("comm=nccl is for tensors on GPUs, and device={}; try --device cuda, or --comm mpi",
                device);
  }
  check_positive("steps", steps);
  check_positive("seq_len", seq_len);
  if (model.max_position_embeddings > 0 && seq_len > model.max_position_embeddings) {
    refuse("positions_of_model", values_of("seq_len", {model.max_position_embeddings}),
           "seq_len={} is above max_position_embeddings={}{}", seq_len,
           model.max_position_embeddings,
           model.pretrained ? " of " + model.model + "/config.json" : "");
  }
  validate_sizes();
  check_range("max_skipped_steps", double(max_skipped_steps), 0, HUGE_VAL);
  check_range("seed", double(seed), 0, HUGE_VAL);
  check_range("eval_interval", double(eval_interval), 0, HUGE_VAL);
  check_range("eval_samples", double(eval_samples), 0, HUGE_VAL);
  check_range("trace_steps", double(trace_steps), 0, HUGE_VAL);
  if (!(val_fraction >= 0 && val_fraction < 1)) {
    usage_error("val_fraction={} must lie in [0, 1); try 0.1", val_fraction);
  }
  if (!estimate && !estimate_file.empty()) {
    usage_error("estimate_file={} is written by --estimate; add that flag", estimate_file);
  }
  if (!(device_memory > 0)) usage_error("device_memory={} must be above 0; try 80", device_memory);
}

}  // namespace usp

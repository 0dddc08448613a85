#include "fusion/fused_head.h"

#include <mutex>
#include <sstream>

#include "accounting/memory.h"
#include "comm/launch.h"
#include "proof/prove.h"
#include "proof/shrink.h"
#include "run/command_line.h"
#include "technique/fusion/fused_calls.h"
#include "technique/layout_of_flags.h"
#include "technique/tiny_llama.h"

/// Fused operations beside those that they are made of.
namespace usp::test {
namespace {

/// A vocabulary of which several chunks are made, the last one shorter.
TrainConfig several_chunks(const std::string& kernels) {
  TrainConfig config = tiny_training();
  config.model.vocab_size = 61;
  config.seq_len = 17;
  config.grad_acc_steps = 2;
  config.fusion.kernels = kernels;
  config.fusion.loss_rows = 5;
  return config;
}

/// Trains a step, which calls what is fused as often as it should, or none of it.
void train_step(Trainer& trainer, const TrainConfig& config, int64_t step) {
  CallCounter counter;
  trainer.train_step(step);
  if (config.fusion.fused()) {
    REQUIRE(differences(counter.calls, fused_calls(config, /*summing=*/1)) == "");
  } else {
    for (const char* name : {"linear_cross_entropy", "linear_forward_add", "unpermute_add"}) {
      REQUIRE(counter.calls[name] == 0);
    }
  }
}

TEST_CASE("fused operations train as their parts do") {
  const OnDevice cpu;
  for (const bool tied : {false, true}) {
    for (const char* recompute : {"none", "full"}) {
      CAPTURE(tied, recompute);
      const auto trained = [&](const char* kernels) {
        TrainConfig config = several_chunks(kernels);
        config.model.tie_word_embeddings = tied;
        config.recompute = recompute;
        const RandomText text(config, 800);
        SoloTrainer trainer(config, &text.dataset);
        randomize(trainer.parameters(), 3);
        std::vector<std::pair<std::string, Values>> found;
        for (int64_t step = 0; step < 2; ++step) {
          train_step(trainer, config, step);
          found.emplace_back("loss", Values{trainer.report(step, 0).loss});
          for (auto& gradient : gradients_of(trainer.parameters())) found.push_back(gradient);
        }
        found.emplace_back("evaluated", Values{trainer.evaluate()});
        return found;
      };
      const auto parts = trained("reference"), fused = trained("fused");
      REQUIRE(parts.size() == fused.size());
      for (size_t i = 0; i < parts.size(); ++i) {
        check_close(fused[i].second, parts[i].second, 1e-12, parts[i].first);
      }
    }
  }
}

TEST_CASE("in bf16, too, fused operations train as their parts do") {
  const OnDevice cpu;
  Values parts;
  for (const char* kernels : {"reference", "fused"}) {
    TrainConfig config = several_chunks(kernels);
    config.dtype = "bf16";
    const RandomText text(config, 800);
    SoloTrainer trainer(config, &text.dataset);
    Values found;
    for (int64_t step = 0; step < 2; ++step) {
      train_step(trainer, config, step);
      found.push_back(trainer.report(step, 0).loss);
    }
    found.push_back(trainer.evaluate());
    if (parts.empty()) parts = found;
    check_close(found, parts, tolerance_of(DType::bf16, kLossTolerance), "losses");
  }
}

/// Layouts in which the head, its weight or its rows are not where one process has them.
const std::vector<std::string> kLayouts = {
    "--tp_size 3 --num_heads 6 --num_kv_heads 3 --hidden_size 12 --ffn_hidden_size 12",
    "--tp_size 2 --sequence_parallel --tp_overlap chunks --zero_stage 3 --dp_size 2",
    "--tp_size 2 --sequence_parallel --gathered_input kept --tp_overlap batch_halves "
    "--tie_word_embeddings",
    "--pp_size 2 --pp_schedule zb_h1 --tp_size 2 --tp_overlap chunks",
    "--pp_size 2 --pp_schedule dualpipe --num_layers 4 --tie_word_embeddings",
    "--cp_size 2 --document_mask --zero_stage 1 --dp_size 2",
    "--num_experts 4 --num_shared_experts 1 --ep_size 2 --dp_size 2 --recompute full",
    "--num_experts 4 --ep_size 2 --dp_size 2",
    "--num_experts 4 --tp_size 2 --sequence_parallel --expert_tp",
};

Twin twin_of(const std::string& flags) {
  std::istringstream stream(
      "--hidden_size 8 --num_layers 2 --num_heads 2 --ffn_hidden_size 10 --vocab_size 59 --seq_len "
      "12 --micro_batch_size 2 --grad_acc_steps 4 --dtype f64 --device cpu --kernels fused "
      "--loss_rows 5");
  std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  std::istringstream own(flags);
  for (std::string word; own >> word;) {
    const auto given = std::ranges::find(words, word);
    if (given != words.end()) words.erase(given, given + 2);
    words.push_back(word);
    while (own.peek() == ' ') own.get();
    if (own.peek() != '-' && own >> word) words.push_back(word);
  }
  const std::optional<Twin> twin = read_twin(words);
  if (!twin) fail("a rule refuses {}", flags);
  return *twin;
}

TEST_CASE("fused operations of several ranks train as the parts of one process do") {
  for (const std::string& flags : kLayouts) {
    if (kSanitized && &flags != &kLayouts[1]) continue;
    INFO(flags);
    const TwinResult result = run_twin(twin_of(flags));
    REQUIRE(result.failure == "");
    REQUIRE(result.compared == 2);
  }
}

TEST_CASE("a twin's loss has several chunks where the layout's has, and one where it has one") {
  const std::string layout =
      "--hidden_size 1024 --num_layers 4 --num_heads 8 --ffn_hidden_size 4096 --vocab_size 32000 "
      "--seq_len 2048 --micro_batch_size 2 --tp_size 2 --dp_size 2 --kernels fused --loss_rows ";
  for (const int64_t rows : {512, 4096}) {
    const TwinFamily family = shrink(layout_of_flags(layout + std::to_string(rows)), 4);
    REQUIRE(!family.twins.empty());
    for (const Twin& twin : family.twins) {
      CAPTURE(rows, twin.flags);
      REQUIRE(twin.config.fusion.fused());
      const CallCounts calls = fused_calls(twin.config, /*summing=*/1);
      const int64_t passes = calls.at("cross_entropy_loss");
      REQUIRE((calls.at("cross_entropy_forward") > passes) == (rows == 512));
    }
  }
}

TEST_CASE("of several ranks, too, a step has as many fused calls as the layout asks for") {
  for (const std::string& flags : kLayouts) {
    INFO(flags);
    const TrainConfig config = twin_of(flags).config;
    const RandomText text(config, 40 * config.tokens_per_step());
    CallCounts all;
    int64_t summing = 0;
    std::mutex one_at_a_time;
    run_threads(int(config.mesh().ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const CallCounts calls = count_calls(trainer);
      const std::lock_guard lock(one_at_a_time);
      for (const auto& [name, count] : calls) all[name] += count;
      summing += sums_squares(trainer);
    });
    REQUIRE(summing > 0);
    REQUIRE(differences(all, fused_calls(config, summing)) == "");
  }
}

TEST_CASE("fused operations send what their parts do, message by message") {
  for (const std::string& flags : kLayouts) {
    INFO(flags);
    TrainConfig config = twin_of(flags).config;
    for (int rank = 0; rank < int(config.mesh().ranks()); ++rank) {
      const auto sent = [&](const char* kernels) {
        config.fusion.kernels = kernels;
        std::string text;
        const Simulation found = simulate<Trainer>(config, rank);
        for (const auto& [of, all] : found.sent.entries()) {
          text += fmt::format("{} {}: {} calls, {} bytes handed over, {} sent\n", of.first,
                              name(of.second), all.calls, all.payload_bytes, all.wire_bytes);
        }
        return text;
      };
      const std::string parts = sent("reference"), fused = sent("fused");
      REQUIRE(parts != "");
      REQUIRE(fused == parts);
    }
  }
}

TEST_CASE("what fused operations keep, their peak and their work are those of the formulas") {
  for (const std::string& flags : kLayouts) {
    INFO(flags);
    const TrainConfig config = twin_of(flags).config;
    if (config.tensor_parallel.halves() == 2) continue;  // half of a micro-batch is kept at a time
    Prediction all;  // work: a rank may have a word more than the formula's mean
    double needed = 0, again = 0;
    for (int rank = 0; rank < int(config.mesh().ranks()); ++rank) {
      const Prediction formula = predict(config, rank);
      const Simulation found = simulate<Trainer>(config, rank);
      CHECK(formula.saved_bytes() == found.saved_bytes());
      CHECK(formula.peak_activations == found.peak_activations);
      all.flops += formula.flops;
      all.recomputed_flops += formula.recomputed_flops;
      needed += found.flops - found.recomputed_flops;
      again += found.recomputed_flops;
    }
    // Tokens choose how many rows an expert has, documents how many keys a query.
    if (config.model.experts.num_experts > 0 || config.context_parallel.document_mask) continue;
    CHECK(all.flops == Approx(needed).epsilon(1e-12));
    CHECK(all.recomputed_flops == Approx(again).epsilon(1e-12));
  }
}

TEST_CASE("neither logits nor the product in the MLP are kept, on the CPU or in a dry run") {
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    OnDevice cpu;
    TrainConfig config = several_chunks("fused");
    config.dtype = dtype;
    const RandomText text(config, 800);
    SoloTrainer trainer(config, &text.dataset);
    cpu.allocator().record_events(true);
    cpu.runtime.tracer().record(true);
    for (int64_t step = 0; step < 2; ++step) {
      cpu.runtime.tracer().set_step(step);
      trainer.train_step(step);
    }
    const Simulation found = make_simulation(2);
    CHECK(found.peak_activations == simulate<Trainer>(config).peak_activations);
    CHECK(found.saved_bytes() == predict(config).saved_bytes());
    for (const LiveBytes& part : found.saved) {
      CHECK(part.name != "logits");
      CHECK(part.name != "swiglu");
    }
    const int64_t fused = predict(config).saved_bytes();
    config.fusion.kernels = "reference";
    const int64_t tokens = config.micro_batch_size * config.seq_len;
    const int64_t no_longer =
        tokens * (config.model.vocab_size + config.model.num_layers * config.model.ffn_hidden_size);
    CHECK(predict(config).saved_bytes() - fused == no_longer * bytes_of(parse_dtype(dtype)));
  }
}

TEST_CASE("a fused step has calls that its parts make one by one, and those of its chunks") {
  const auto counted = [](const std::string& kernels) {
    OnDevice meta(Device::meta);
    SoloTrainer trainer(several_chunks(kernels), nullptr);
    CallCounts calls = count_calls(trainer);
    calls["parameters"] = int64_t(trainer.parameters().size());
    return calls;
  };
  auto parts = counted("reference"), fused = counted("fused");
  const TrainConfig config = several_chunks("fused");
  const int64_t micro_batches = config.grad_acc_steps, layers = config.model.num_layers;
  const int64_t T = config.micro_batch_size * config.seq_len;
  const int64_t rows = config.fusion.loss_rows;
  const int64_t chunks = (T + rows - 1) / rows;
  REQUIRE(chunks > 3);
  REQUIRE(T % rows != 0);
  CHECK(differences(fused, fused_calls(config, /*summing=*/1)) == "");
  CHECK(parts["linear_cross_entropy"] == 0);
  CHECK(parts["cross_entropy_forward"] == micro_batches);
  CHECK(fused["cross_entropy_backward"] == chunks * micro_batches);
  const int64_t residuals = 2 * layers * micro_batches;
  CHECK(parts["add"] == residuals);
  CHECK(fused["add"] == 0);
  CHECK(parts["linear_forward_add"] == 0);
  // The logits twice for each chunk, once as a whole.
  CHECK(fused["linear_forward"] - parts["linear_forward"] ==
        (2 * chunks - 1) * micro_batches - residuals);
  CHECK(parts["sum_squares"] == parts["parameters"]);
  CHECK(parts["swiglu_forward"] == layers * micro_batches);
  CHECK(parts["adamw"] == parts["parameters"]);
}

TEST_CASE("rows of the loss are refused where they are not at least one, or nobody reads them") {
  const auto refused = [](std::vector<std::string> words, const std::vector<std::string>& parts) {
    TrainConfig config;
    Args args("");
    words.insert(words.begin(), "program");
    check_throws<UsageError>([&] { read_command_line(config, args, words, 1); }, parts);
  };
  refused({"--kernels", "fused", "--loss_rows", "0"}, {"loss_rows=0 must be at least 1"});
  refused({"--loss_rows", "64"}, {"loss_rows=64 is for kernels=fused", "--kernels fused"});
}

}  // namespace
}  // namespace usp::test

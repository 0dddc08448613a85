#include "latent_attention/mla.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "accounting/memory.h"
#include "run/sample.h"
#include "technique/accounting/kept.h"
#include "technique/context_parallel/context_parity.h"
#include "technique/pipeline_parallel/pipeline_parity.h"
#include "technique/window.h"

/// Multi-head latent attention: its gradient, its layouts over ranks, its cache, its memory.
namespace usp::test {
namespace {

constexpr int64_t kLatentSteps = 2;

/// Shape with widths that differ from each other, so that none stands in for another.
MlaShape latent_shape(int64_t q_lora_rank) {
  MlaShape mla;
  mla.attention_kind = "mla";
  mla.q_lora_rank = q_lora_rank;
  mla.kv_lora_rank = 7;
  mla.qk_nope_head_dim = 3;
  mla.qk_rope_head_dim = 4;
  mla.v_head_dim = 5;
  return mla;
}

ModelConfig tiny_latent(int64_t q_lora_rank) {
  ModelConfig config = tiny_model();
  config.num_kv_heads = config.num_heads;
  config.mla = latent_shape(q_lora_rank);
  return config;
}

TEST_CASE("latent attention: the gradient agrees with finite differences in every parameter",
          "[not_sanitized]") {
  const OnDevice cpu;
  ModelConfig whole_values = tiny_latent(9), no_query_latent = tiny_latent(0);
  whole_values.mla.v_head_dim = whole_values.mla.head_dim();
  for (const ModelConfig& config : {tiny_latent(9), whole_values, no_query_latent}) {
    for (bool naive : {true, false}) {
      for (int64_t micro_batches : {1, 2}) {
        if (naive == (micro_batches == 2) && config.mla.q_lora_rank > 0) continue;
        CAPTURE(config.mla.q_lora_rank, config.mla.v_head_dim, naive, micro_batches);
        Window window(config, naive, micro_batches);
        window.backward();
        for (size_t i = 0; i < window.parameters().size(); ++i) {
          const Parameter& parameter = window.parameters()[i];
          check_gradient(
              parameter.grad, parameter.value, [&] { return window.loss(); }, parameter.name,
              /*samples=*/6, /*tolerance=*/1e-8);
        }
      }
    }
  }
}

/// softmax(q k / sqrt(nope + rope)) v of one sample, from the weights of layer 0 and the input of
/// the block, by the formulas of the paper and by nothing else: sums over indices.
class ByHand {
 public:
  ByHand(Model& model, const ModelConfig& config) : model_(model), config_(config) {}

  /// x [S][H] -> x + attention
  std::vector<Values> attention(const std::vector<Values>& x) const {
    const MlaShape& m = config_.mla;
    const int64_t S = std::ssize(x), N = config_.num_heads, C = m.kv_lora_rank;
    const int64_t nope = m.qk_nope_head_dim, rope = m.qk_rope_head_dim, V = m.v_head_dim;
    std::vector<Values> q, kv, k_rope, y;
    for (int64_t s = 0; s < S; ++s) {
      const Values h = norm(x[s], "input_layernorm");
      q.push_back(m.q_lora_rank == 0
                      ? times("self_attn.q_proj", h)
                      : times("self_attn.q_b_proj",
                              norm(times("self_attn.q_a_proj", h), "self_attn.q_a_layernorm")));
      const Values both = times("self_attn.kv_a_proj_with_mqa", h);
      const Values c(both.begin(), both.begin() + C);
      kv.push_back(times("self_attn.kv_b_proj", norm(c, "self_attn.kv_a_layernorm")));
      k_rope.push_back(turn({both.begin() + C, both.end()}, s));
    }
    for (int64_t s = 0; s < S; ++s) {
      Values heads;
      for (int64_t n = 0; n < N; ++n) {
        const auto first = q[s].begin() + n * (nope + rope);
        const Values q_rope = turn({first + nope, first + nope + rope}, s);
        Values weights;
        for (int64_t key = 0; key <= s; ++key) {
          const auto k = kv[key].begin() + n * (nope + V);
          const double score =
              std::inner_product(first, first + nope, k, 0.0) +
              std::inner_product(q_rope.begin(), q_rope.end(), k_rope[key].begin(), 0.0);
          weights.push_back(std::exp(score / std::sqrt(double(nope + rope))));
        }
        const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (int64_t v = 0; v < V; ++v) {
          double value = 0;
          for (int64_t key = 0; key <= s; ++key) {
            value += weights[key] / sum * kv[key][n * (nope + V) + nope + v];
          }
          heads.push_back(value);
        }
      }
      y.push_back(times("self_attn.o_proj", heads));
      for (size_t h = 0; h < y[s].size(); ++h) y[s][h] += x[s][h];
    }
    return y;
  }

 private:
  Tensor weight(const std::string& name) const {
    return model_.parameters().find("model.layers.0." + name + ".weight").value;
  }
  Values times(const std::string& name, const Values& x) const {
    const Tensor w = weight(name);
    const Values values = w.items();
    Values y(w.size(0));
    for (size_t o = 0; o < y.size(); ++o) {
      y[o] = std::inner_product(x.begin(), x.end(), values.begin() + o * x.size(), 0.0);
    }
    return y;
  }
  Values norm(Values x, const std::string& name) const {
    const Values w = weight(name).items();
    const double square = std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] *= w[i] / std::sqrt(square / double(w.size()) + config_.rms_norm_eps);
    }
    return x;
  }
  Values turn(Values x, int64_t position) const {
    const size_t pairs = x.size() / 2;
    for (size_t c = 0; c < pairs; ++c) {
      const double angle =
          double(position) * std::pow(config_.rope_theta, -double(c) / double(pairs));
      const double a = x[c], b = x[c + pairs];
      x[c] = a * std::cos(angle) - b * std::sin(angle);
      x[c + pairs] = a * std::sin(angle) + b * std::cos(angle);
    }
    return x;
  }

  Model& model_;
  ModelConfig config_;
};

TEST_CASE("latent attention is what the formulas of the paper say") {
  const OnDevice cpu;
  for (int64_t q_lora_rank : {0, 9}) {
    for (bool naive : {true, false}) {
      CAPTURE(q_lora_rank, naive);
      const ModelConfig config = tiny_latent(q_lora_rank);
      Model model = allocated_model(config, kSeqLen, DType::f64, probabilities_of(naive), 1);
      randomize(model.parameters(), 2);
      Random random(3);
      std::vector<Values> x;
      Values all;
      for (int64_t s = 0; s < kSeqLen; ++s) {
        x.push_back(random.normals(config.hidden_size, 1));
        all.insert(all.end(), x[s].begin(), x[s].end());
      }
      Pass pass;
      pass.num_samples = 1;
      pass.positions = Positions(0, kSeqLen);
      BlockSaved saved;
      const Tensor y = model.chunk(0)[1][0]->forward(
          Tensor::from_host(all, {kSeqLen, config.hidden_size}, DType::f64), saved, pass);
      Values expected;
      for (const Values& row : ByHand(model, config).attention(x)) {
        expected.insert(expected.end(), row.begin(), row.end());
      }
      check_close(y, expected, 1e-12);
    }
  }
}

// ---- layouts

/// A layout of the pipeline's kind, and how tokens are sharded over cp.
struct LatentCase : PipelineCase {
  int64_t q_lora_rank = 9;
  const char *method = "ring", *layout = "zigzag";
  const char *cp_recompute = "exchange", *cp_overlap = "compute";
  bool document_mask = false;

  bool halves() const { return overlap == std::string_view("batch_halves"); }
  int64_t samples() const { return (halves() ? 2 : 1) * grad_acc_steps * dp; }  ///< of a step
  std::string name() const {
    return fmt::format("q_lora_rank {} {} {} {} overlap {} documents {} {}", q_lora_rank, method,
                       layout, cp_recompute, cp_overlap, document_mask, PipelineCase::name());
  }
};

constexpr int64_t kTokens = 24;  // of a sample: three and four ranks split them into two pieces

TrainConfig latent_config(const LatentCase& c) {
  TrainConfig config = pipeline_config(c);
  config.model.num_kv_heads = config.model.num_heads;
  config.model.mla = latent_shape(c.q_lora_rank);
  config.seq_len = kTokens;
  config.micro_batch_size = c.halves() ? 2 : 1;
  ContextParallelConfig& cp = config.context_parallel;
  cp.cp_method = c.method;
  cp.cp_layout = c.layout;
  cp.cp_recompute = c.cp_recompute;
  cp.cp_overlap = c.cp_overlap;
  cp.document_mask = c.document_mask;
  if (c.document_mask) cp.document_separator = 7;
  return config;
}

TrainConfig latent_alone(const LatentCase& c) {
  TrainConfig config = alone_config(c);
  config.model.num_kv_heads = config.model.num_heads;
  config.model.mla = latent_shape(c.q_lora_rank);
  config.seq_len = kTokens;
  config.micro_batch_size = c.samples();
  config.context_parallel.document_mask = c.document_mask;
  config.context_parallel.document_separator = 7;
  return config;
}

bool has_meaning(const LatentCase& c) { return c.ranks() <= 8 && goes_together(latent_config(c)); }

std::vector<LatentCase> latent_cases(size_t random) {
  const std::vector<const char*> sequence = {"off", "again", "kept"};
  const std::vector<const char*> recompute = {"none", "selective", "full"};
  const std::vector<const char*> overlap = {"none", "weight_grad", "chunks"};
  const std::vector<const char*> method = {"ring", "all_gather", "ulysses"};
  const auto at = [&](const Point& p) {
    LatentCase c{
        {{int64_t(1) << p[0], int64_t(1 + p[1]), 4, sequence[p[2]], false, int64_t(p[3]),
          recompute[p[4]], p[5] == 0 ? "naive" : "blockwise", overlap[p[6]], p[7] == 0 ? 2 : 4}}};
    c.pp = int64_t(1 + p[8]);
    c.cp = int64_t(1 + p[9]);
    c.layout = p[14] == 0 ? "zigzag" : "contiguous";
    c.cp_overlap = p[15] == 0 ? "compute" : "none";
    c.document_mask = p[16] == 1;
    c.method = method[p[10]];
    c.cp_recompute = p[11] == 0 ? "exchange" : "keep";
    c.q_lora_rank = p[12] == 0 ? 0 : 9;
    c.schedule = p[13] == 0 ? "1f1b" : "zb_h1";
    return c;
  };
  std::vector<LatentCase> cases;
  for (const Point& point : cover_pairs({3, 2, 3, 4, 3, 2, 3, 2, 2, 4, 3, 2, 2, 2, 2, 2, 2}, random,
                                        [&](const Point& p) { return has_meaning(at(p)); })) {
    cases.push_back(at(point));
  }
  return cases;
}

/// Layouts beside training on one rank.
class LatentParity {
 public:
  LatentParity() : tokens_(61), file_(tokens_.path(), 2, 61) {}

  /// Trains the case over its ranks: what one rank computes, and the bytes of the formulas.
  void check(const LatentCase& c) {
    CAPTURE(c.name());
    const TrainedState& expected = reference(c);
    const TrainConfig config = latent_config(c);
    run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&dataset_, mesh});
      const ContextTraffic over_cp = sent_over_cp(world);
      const TensorTraffic over_tp = sent_over_tp(world);
      const TrainedState found = train(trainer, kLatentSteps, nullptr);
      expect_close(found.losses, expected.losses, 1e-10, c.name() + ": loss");
      expect_close(found.grad_norms, expected.grad_norms, 1e-10, c.name() + ": gradient norm");
      expect_same_parameters(trainer, expected, 1e-10, c.name());
      if (c.pp == 1) {  // the formulas are of a whole model
        check_tensor_traffic(world, config, over_tp, kLatentSteps, c.name());
        check_context_traffic(world, config, over_cp, kLatentSteps, c.name());
      }
      const double counted = world.sum(double(trainer.model().parameters().counted()));
      USP_CHECK(counted == double(num_parameters(config.model)),
                "{}: {} elements counted, the model has {}", c.name(), counted,
                num_parameters(config.model));
    });
  }

 private:
  const TrainedState& reference(const LatentCase& c) {
    TrainedState& expected =
        references_[{c.num_layers(), c.samples(), c.q_lora_rank, c.document_mask}];
    if (expected.losses.empty()) {
      const OnDevice cpu;
      SoloTrainer solo(latent_alone(c), &dataset_);
      expected = train(solo, kLatentSteps);
    }
    return expected;
  }

  RandomTokens tokens_;
  TokenFile file_;
  Dataset dataset_{file_, kTokens, 0.1, DataOrder::shuffled, 0};
  std::map<std::tuple<int64_t, int64_t, int64_t, bool>, TrainedState> references_;
};

TEST_CASE("latent attention over tp, cp and pp is training on one rank") {
  LatentParity parity;
  for (const LatentCase& c : latent_cases(0)) parity.check(c);
}

/// Two halves of each micro-batch in turns, with latents that tp and cp shard in every way.
std::vector<LatentCase> cases_of_halves() {
  const std::vector<const char*> sequence = {"off", "again", "kept"};
  const std::vector<const char*> recompute = {"none", "selective", "full"};
  const std::vector<std::pair<int64_t, const char*>> context = {
      {1, "ring"}, {2, "ring"}, {2, "all_gather"}, {2, "ulysses"}};
  const std::vector<int64_t> zero_stages = {0, 2, 3};
  const auto at = [&](const Point& p) {
    LatentCase c{
        {{int64_t(2) << p[0], int64_t(1 + p[1]), 4, sequence[p[2]], false, zero_stages[p[3]],
          recompute[p[4]], p[5] == 0 ? "naive" : "blockwise", "batch_halves", int64_t(1 + p[6])}}};
    std::tie(c.cp, c.method) = context[p[7]];
    c.q_lora_rank = p[8] == 0 ? 0 : 9;
    return c;
  };
  std::vector<LatentCase> cases;
  for (const Point& point : cover_pairs({2, 2, 3, 3, 3, 2, 2, 4, 2}, 0,
                                        [&](const Point& p) { return has_meaning(at(p)); })) {
    cases.push_back(at(point));
  }
  return cases;
}

TEST_CASE("latent attention on halves of a micro-batch in turns is training on one rank") {
  LatentParity parity;
  for (const LatentCase& c : cases_of_halves()) parity.check(c);
}

TEST_CASE("halves of latent attention in turns hold no more than a whole micro-batch",
          "[no_races]") {
  for (const LatentCase& c : cases_of_halves()) {
    for (const char* dtype : {"f64", "bf16"}) {
      CAPTURE(c.name(), dtype);
      TrainConfig config = latent_config(c);
      config.dtype = dtype;
      const Prediction prediction = predict(config);
      const Simulation simulation = simulate<Trainer>(config);
      check_states(prediction, simulation);
      // One half runs backward while the other runs forward.
      CHECK(simulation.peak_activations <= prediction.peak_activations);
      CHECK(2 * simulation.peak_activations > prediction.peak_activations);
    }
    if (c.ranks() > 4) continue;
    const TrainConfig config = latent_config(c);
    const RandomText text(config, 2000);
    int64_t measured = 0;
    run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const int64_t of_rank = simulate_steps(trainer).peak_activations;
      if (world.rank() == 0) measured = of_rank;
    });
    CHECK(measured == simulate<Trainer>(config).peak_activations);
  }
}

TEST_CASE("a ring of latents in bf16 is near one rank, in whatever dtype gradients are summed") {
  const RandomTokens tokens(61);
  const TokenFile file(tokens.path(), 2, 61);
  const Dataset dataset(file, kTokens, 0.1, DataOrder::shuffled, 0);
  for (const char* accumulation : {"f32", "bf16", "both"}) {
    LatentCase c{{{2, 1, 4, "again", false, 0, "none", "blockwise", "weight_grad", 3}}};
    c.cp = 2;
    CAPTURE(accumulation);
    TrainConfig config = latent_config(c), alone = latent_alone(c);
    for (TrainConfig* each : {&config, &alone}) {
      each->dtype = "bf16";
      each->grad_accumulation = accumulation;
    }
    alone.micro_batch_size = 1;
    alone.grad_acc_steps = c.grad_acc_steps;
    TrainedState expected;
    {
      const OnDevice cpu;
      SoloTrainer solo(alone, &dataset);
      expected = train(solo, kLatentSteps);
    }
    run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&dataset, mesh});
      const TrainedState found = train(trainer, kLatentSteps, nullptr);
      expect_close(found.losses, expected.losses, 5e-3, "loss");
      expect_close(found.grad_norms, expected.grad_norms, 2e-2, "gradient norm");
    });
  }
}

TEST_CASE("a ring carries C + rope numbers of a position, whatever the heads") {
  for (const char* method : {"ring", "all_gather"}) {
    for (int64_t cp : {2, 4}) {
      LatentCase c{{{1, 1, 4, "off", false, 0, "none", "blockwise", "weight_grad", 1}}};
      c.cp = cp;
      c.method = method;
      TrainConfig config = latent_config(c);
      config.dtype = "bf16";
      config.model.num_layers = 61;  // DeepSeek-V3
      config.model.num_heads = config.model.num_kv_heads = 128;
      config.model.mla.kv_lora_rank = 512;
      config.model.mla.qk_nope_head_dim = config.model.mla.v_head_dim = 128;
      config.model.mla.qk_rope_head_dim = 64;
      const int64_t positions = config.seq_len * config.micro_batch_size * config.grad_acc_steps;
      const auto a_pass = [&](int64_t numbers) {  // there, back, and home in four bytes
        return 61 * positions * (cp - 1) * numbers * (2 + 2 + 4);
      };
      CHECK(predict_context_traffic(config).total() == a_pass(576));
      config.model.num_heads = config.model.num_kv_heads = 256;
      CHECK(predict_context_traffic(config).total() == a_pass(576));
      config.model.num_heads = config.model.num_kv_heads = 128;
      config.model.mla.attention_kind = "gqa";
      config.model.given_head_dim = 192;
      CHECK(predict_context_traffic(config).total() == a_pass(49152));
    }
  }
}

// ---- decoding

constexpr int64_t kDecodedSamples = 2, kDecodedPositions = 9;

/// Positions [begin, end) of every sample.
Pass decoding_pass(const std::vector<Values>& samples, int64_t begin, int64_t end) {
  std::vector<int32_t> tokens;
  for (const Values& sample : samples) {
    tokens.insert(tokens.end(), sample.begin() + begin, sample.begin() + end);
  }
  Pass pass;
  pass.num_samples = std::ssize(samples);
  pass.positions = Positions(begin, end - begin);
  pass.tokens = Tensor::from_host(tokens, {std::ssize(tokens)});
  return pass;
}

std::vector<Values> random_samples() {
  Random random(3);
  std::vector<Values> samples;
  for (int64_t i = 0; i < kDecodedSamples; ++i) {
    const std::vector<int32_t> tokens = random.tokens(kDecodedPositions, tiny_model().vocab_size);
    samples.emplace_back(tokens.begin(), tokens.end());
  }
  return samples;
}

Tensor decode(Model& model, KvCache& cache, int64_t begin, int64_t end) {
  Pass pass = decoding_pass(random_samples(), begin, end);
  pass.mode = Pass::Mode::decode;
  pass.kv_cache = &cache;
  return model.logits(pass);
}

TEST_CASE("logits from cached latents are those of a pass over the whole text") {
  const OnDevice cpu;
  struct Case {
    DType dtype;
    double tolerance;
  };
  for (const Case& c : {Case{DType::f64, 1e-12}, {DType::f32, 1e-5}, {DType::bf16, 0.1}}) {
    for (int64_t q_lora_rank : {0, 9}) {
      for (int64_t prompt : {1, 4}) {
        CAPTURE(name(c.dtype), q_lora_rank, prompt);
        Model model = allocated_model(tiny_latent(q_lora_rank), kDecodedPositions, c.dtype,
                                      Probabilities::never_whole, 1);
        randomize(model.parameters(), 2);
        KvCache cache(kDecodedPositions);
        for (int64_t begin = 0, end = prompt; end <= kDecodedPositions; begin = end, ++end) {
          CAPTURE(begin, end);
          const Tensor logits = decode(model, cache, begin, end);
          const Tensor all = model.logits(decoding_pass(random_samples(), 0, end));
          for (int64_t i = 0; i < kDecodedSamples; ++i) {
            check_close(logits.narrow(0, i, 1), all.narrow(0, (i + 1) * end - 1, 1).items(),
                        c.tolerance);
          }
        }
      }
    }
  }
}

/// Bytes of a cache for `capacity` positions, of which a few are there.
int64_t cache_bytes(const ModelConfig& config, DType dtype, int64_t capacity) {
  OnDevice meta(Device::meta);
  Model model = allocated_model(config, kDecodedPositions, dtype, Probabilities::never_whole, 1);
  const int64_t before = meta.allocator().live_bytes(Category::activations);
  KvCache cache(capacity);
  decode(model, cache, 0, 5);
  return meta.allocator().live_bytes(Category::activations) - before;
}

TEST_CASE("the cache has C + rope numbers of a position, whatever the heads, and not 2 G D") {
  const int64_t capacity = 100;
  for (DType dtype : {DType::bf16, DType::f64}) {
    for (int64_t num_heads : {2, 6}) {
      ModelConfig latent = tiny_latent(9), grouped = tiny_model();
      latent.num_heads = latent.num_kv_heads = num_heads;
      grouped.num_heads = grouped.num_kv_heads = num_heads;
      grouped.given_head_dim = 8;
      const int64_t of_number = latent.num_layers * kDecodedSamples * capacity * bytes_of(dtype);
      REQUIRE(latent.mla.cached() == 7 + 4);
      REQUIRE(cache_bytes(latent, dtype, capacity) == of_number * (7 + 4));
      REQUIRE(cache_bytes(grouped, dtype, capacity) == of_number * 2 * num_heads * 8);
    }
  }
}

TEST_CASE("a text is continued from cached latents that ranks share out, or from none") {
  struct Layout {
    int64_t tp, cp, zero, pp = 1;
    const char *schedule = "1f1b", *method = "ring";
  };
  for (const auto& [tp, cp, zero, pp, schedule, method] : {Layout{1, 4, 0},
                                                           {2, 2, 0},
                                                           {4, 1, 0},
                                                           {2, 1, 3},
                                                           {2, 1, 0, 2},
                                                           {1, 2, 0, 2, "zb_v"},
                                                           {1, 2, 0, 1, "1f1b", "ulysses"}}) {
    LatentCase c{{{tp, zero > 0 ? 2 : 1, 4, tp > 1 ? "again" : "off", false, zero, "none",
                   "blockwise", "weight_grad", pp}}};
    c.cp = cp;
    c.pp = pp;
    c.schedule = schedule;
    c.method = method;
    CAPTURE(c.name());
    TrainConfig config = latent_config(c), alone = latent_alone(c);
    config.seq_len = alone.seq_len = 16;            // which the text outgrows
    RopeScaling& yarn = config.model.rope_scaling;  // makes scores larger
    yarn.rope_type = "yarn";
    yarn.rope_mscale = yarn.rope_mscale_all_dim = 1;
    yarn.rope_original_max_position_embeddings = 8;
    alone.model.rope_scaling = yarn;
    const RandomText text(config, 2000);
    const auto continue_text = [&](Trainer& trainer, bool no_cache) {
      Values logits;
      SampleConfig sample;
      sample.sample_tokens = 20;
      sample.no_kv_cache = no_cache;
      const auto keep = [&](const Pass& pass) {
        const Tensor found = trainer.logits(pass);
        const Values values = found.items();
        logits.insert(logits.end(), values.begin(), values.end());
        return found;
      };
      sample_tokens(keep, sample, config.seq_len, {1, 2, 3}, 5, [] { return false; });
      return logits;
    };
    Values expected;
    {
      const OnDevice cpu;
      SoloTrainer solo(alone, &text.dataset);
      train(solo, kLatentSteps);
      expected = continue_text(solo, /*no_cache=*/true);
    }
    for (bool no_cache : {false, true}) {
      if (kSanitized && no_cache) continue;
      run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&text.dataset, mesh});
        train(trainer, kLatentSteps, nullptr);
        expect_close(continue_text(trainer, no_cache), expected, 1e-10, c.name() + ": logits");
      });
    }
  }
}

// ---- memory and operations

/// Runs attention forward on meta.
void check_footprint(const ModelConfig& config, const PassShape& shape,
                     Probabilities probabilities) {
  OnDevice meta(Device::meta);
  const Llama llama(config, {shape.seq_len, shape.dtype, probabilities});
  Model model([&](int64_t block, ParameterList& list) { return llama.build(block, list); },
              {{1, 2}});
  model.parameters().allocate(shape.dtype, 1);
  Pass pass;
  pass.num_samples = shape.num_samples;
  pass.positions = Positions(0, shape.seq_len);
  Segment& attention = *model.chunk(0)[0][0];
  const Tensor x = Tensor::empty({shape.tokens(), config.hidden_size}, shape.dtype);
  meta.allocator().record_events(true);
  BlockSaved saved;
  const Tensor y = attention.forward(x, saved, pass);
  REQUIRE(live_by_name(meta.allocator()) == kept_by_name({attention.footprint(shape)}));
}

TEST_CASE("latent attention keeps what its footprint says, by name and to the byte") {
  ModelConfig whole_values = tiny_latent(9), wide = tiny_latent(9), wide_latent = tiny_latent(60);
  whole_values.mla.v_head_dim = whole_values.mla.head_dim();
  wide.mla.qk_nope_head_dim = 30;
  wide_latent.mla.kv_lora_rank = 90;
  for (DType dtype : kFloatDTypes) {
    for (Probabilities probabilities :
         {Probabilities::never_whole, Probabilities::stored, Probabilities::recomputed}) {
      for (const ModelConfig& m :
           {tiny_latent(0), tiny_latent(9), whole_values, wide, wide_latent}) {
        for (int64_t seq_len : {1, 5, 40}) {
          CAPTURE(name(dtype), int(probabilities), m.mla.q_lora_rank, m.mla.kv_lora_rank,
                  m.mla.qk_nope_head_dim, m.mla.v_head_dim, seq_len);
          check_footprint(m, {3, seq_len, dtype}, probabilities);
        }
      }
    }
  }
}

TEST_CASE("states and activations of a rank with latent attention are those of the formulas",
          "[no_races]") {
  for (const LatentCase& c : latent_cases(20)) {
    // Where heads or latents are wide, attention asks for most.
    for (const auto& [dtype, heads, latents] :
         {std::tuple{"f64", 1, 1}, {"f64", 8, 1}, {"bf16", 8, 1}, {"bf16", 1, 16}}) {
      CAPTURE(c.name(), dtype, heads, latents);
      TrainConfig config = latent_config(c);
      config.dtype = dtype;
      MlaShape& mla = config.model.mla;
      for (int64_t* width : {&mla.qk_nope_head_dim, &mla.qk_rope_head_dim, &mla.v_head_dim}) {
        *width *= heads;
      }
      for (int64_t* width : {&mla.q_lora_rank, &mla.kv_lora_rank}) *width *= latents;
      const Prediction prediction = predict(config);
      const Simulation simulation = simulate<Trainer>(config);
      CHECK(prediction.parameters == num_parameters(config.model));
      check_states(prediction, simulation);
      CHECK(prediction.saved_bytes() == simulation.saved_bytes());
      CHECK(prediction.peak_activations == simulation.peak_activations);
    }
  }
}

TEST_CASE("with one micro-batch, too, stages of latent attention save the bytes of the formulas") {
  const RandomTokens tokens(61);
  const TokenFile file(tokens.path(), 2, 61);
  const Dataset dataset(file, kTokens, 0.1, DataOrder::shuffled, 0);
  for (int64_t pp : {2, 3}) {
    for (const auto& [schedule, recompute, q_lora_rank] :
         {std::tuple{"1f1b", "none", 9}, {"1f1b", "full", 0}, {"zb_h1", "none", 0}}) {
      LatentCase c{{{1, 1, 4, "off", false, 0, recompute, "blockwise", "weight_grad", 1}}};
      c.pp = pp;
      c.schedule = schedule;
      c.q_lora_rank = q_lora_rank;
      CAPTURE(c.name());
      check_saved_bytes(latent_config(c), dataset);
    }
  }
}

TEST_CASE("the operations of a rank with latent attention are its share of the model's") {
  for (const auto& [attention, recompute] :
       {std::pair{"naive", "none"}, {"naive", "selective"}, {"blockwise", "full"}}) {
    for (const auto& [tp, cp, method, layout, keeps] : {std::tuple{1, 1, "ring", "zigzag", false},
                                                        {1, 2, "ring", "zigzag", false},
                                                        {2, 1, "ring", "zigzag", false},
                                                        {2, 3, "ring", "zigzag", false},
                                                        {1, 4, "ring", "contiguous", false},
                                                        {2, 2, "all_gather", "zigzag", false},
                                                        {1, 2, "ring", "zigzag", true},
                                                        {1, 2, "ulysses", "zigzag", false}}) {
      LatentCase c{
          {{tp, 1, 4, tp > 1 ? "again" : "off", false, 0, recompute, attention, "weight_grad", 2}}};
      c.cp = cp;
      c.method = method;
      c.layout = layout;
      if (keeps) c.cp_recompute = "keep";
      if (!has_meaning(c)) continue;
      CAPTURE(c.name());
      TrainConfig config = latent_config(c);
      config.model.vocab_size = 64;  // equal shards
      const Prediction prediction = predict(config);
      const Simulation simulation = simulate<Trainer>(config);
      CHECK(simulation.flops == Approx(prediction.flops + prediction.recomputed_flops));
      CHECK(simulation.recomputed_flops == Approx(prediction.recomputed_flops));
      // Other places' blocks, both their gradients, and all once more in backward: in a contiguous
      // layout the first place reads none but its own.
      const bool travels = cp > 1 && c.method != std::string_view("ulysses");
      const int64_t others = c.layout == std::string_view("contiguous") ? 0 : cp - 1;
      int64_t products = travels ? 4 * others + 1 : 0;
      if (travels && c.recompute == std::string_view("full")) products += keeps ? -1 : others;
      const double weights = 4 * (3 + 5) * 7;
      CHECK(expansion_flops_again(config) == 2 * double(products) * weights);
      if (tp == 1) continue;
      config.tensor_parallel.sequence_parallel = false;  // every rank makes the latents of all rows
      CHECK(simulate<Trainer>(config).flops > prediction.flops + prediction.recomputed_flops);
    }
  }
}

// ---- what is refused

/// Parses and checks the flags, for a model of four heads of 8 channels.
TrainConfig parsed(std::vector<std::string> flags) {
  flags.insert(flags.begin(),
               {"program", "--hidden_size", "32", "--num_heads", "4", "--attention_kind"});
  std::vector<const char*> words;
  for (const std::string& flag : flags) words.push_back(flag.c_str());
  TrainConfig config;
  Args args("A test.");
  config.bind(args);
  REQUIRE(args.parse(static_cast<int>(words.size()), words.data()));
  config.validate(args);
  return config;
}

TEST_CASE("widths that are left out have DeepSeek-V2's ratios to hidden_size / num_heads") {
  const ModelConfig model = parsed({"mla"}).model;
  REQUIRE(model.mla.q_lora_rank == 0);
  REQUIRE(model.mla.kv_lora_rank == 32);
  REQUIRE(model.mla.qk_nope_head_dim == 8);
  REQUIRE(model.mla.qk_rope_head_dim == 4);
  REQUIRE(model.mla.v_head_dim == 8);
  REQUIRE(model.num_kv_heads == 4);
  REQUIRE(model.head_dim() == 12);
  MlaShape odd;
  odd.fill(/*width=*/6);  // whose half is no whole number of pairs
  REQUIRE(odd.qk_rope_head_dim == 2);
  REQUIRE(parsed({"mla", "--model", "8B", "--kv_lora_rank", "512"}).model.mla.kv_lora_rank == 512);
}

TEST_CASE("latent attention refuses widths that do not go together, with what does") {
  const auto refused = [](const std::vector<std::string>& flags,
                          const std::vector<std::string>& parts) {
    CAPTURE(flags);
    check_throws<UsageError>([&] { parsed(flags); }, parts);
  };
  refused({"mla", "--v_head_dim", "13"}, {"v_head_dim=13", "12", "pads"});
  refused({"mla", "--qk_rope_head_dim", "5"}, {"qk_rope_head_dim=5", "even", "try 6"});
  refused({"mla", "--qk_rope_head_dim", "-2"}, {"qk_rope_head_dim=-2"});
  refused({"mla", "--kv_lora_rank", "-1"}, {"kv_lora_rank=-1"});
  refused({"mla", "--num_kv_heads", "2"},
          {"num_heads=4", "num_kv_heads=2", "leave out --num_kv_heads"});
  refused({"mla", "--head_dim", "8"}, {"head_dim", "qk_nope_head_dim"});
  refused({"mla", "--q_lora_rank", "99999999"}, {"q_lora_rank"});
  refused({"mla", "--tp_size", "3"}, {"tp_size=3", "num_heads=4"});
  refused({"mla", "--kv_lora_rank", "16777216", "--qk_nope_head_dim", "16777216", "--num_layers",
           "4096"},
          {"can be counted"});
  for (const char* flag : {"--q_lora_rank", "--kv_lora_rank", "--qk_nope_head_dim",
                           "--qk_rope_head_dim", "--v_head_dim"}) {
    refused({"gqa", flag, "4"}, {std::string(flag).substr(2), "--attention_kind mla"});
  }
}

}  // namespace
}  // namespace usp::test

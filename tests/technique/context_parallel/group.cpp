#include "context_parallel/group.h"

#include "technique/context_parallel/context_parity.h"
#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

constexpr int64_t kContextSteps = 3;

struct Method {
  const char* method;
  int64_t ulysses_size = 1;
};
constexpr Method kMethods[] = {{"ring"}, {"all_gather"}, {"ulysses"}, {"ring_ulysses", 2}};
constexpr const char* kLayouts[] = {"zigzag", "contiguous"};
constexpr Probabilities kProbabilities[] = {Probabilities::never_whole, Probabilities::stored,
                                            Probabilities::recomputed};

ContextParallelConfig over(int64_t ranks, const Method& method = kMethods[0],
                           const char* layout = "zigzag") {
  ContextParallelConfig config;
  config.cp_size = ranks;
  config.cp_layout = layout;
  config.cp_method = method.method;
  config.ulysses_size = method.ulysses_size;
  return config;
}

/// Eight heads, blockwise attention, nothing else.
ContextCase plain_case(int64_t ranks, const Method& method = kMethods[0],
                       const char* layout = "zigzag") {
  ContextCase c{{1, 1, 2, "off", false, 0, "none", "blockwise", "weight_grad", 1}};
  c.cp = ranks;
  c.layout = layout;
  c.method = method.method;
  c.ulysses_size = method.ulysses_size;
  return c;
}

const bool kContextIsCarried = is_carried("context_parallel/group");

TEST_CASE("training with shared-out tokens is training on one rank, and sends what it should") {
  const TrainConfig config = alone_config(plain_case(1));
  const RandomTokens tokens(config.model.vocab_size);
  const TokenFile file(tokens.path(), 2, config.model.vocab_size);
  const Dataset dataset(file, config.seq_len, 0.1, DataOrder::shuffled, config.seed);
  ContextReferences references(dataset, kContextSteps);
  const bool full = is_full();
  const std::vector<ContextCase> cases = full_cases(context_cases, kContextIsCarried ? 0
                                                                   : full            ? 100
                                                                                     : 10);
  const size_t step = kContextIsCarried && !kSanitized && !full ? 3 : 1;
  for (size_t i = 0; i < cases.size(); i += step) {
    const ContextCase& c = cases[i];
    CAPTURE(c.name());
    const TrainedState& expected = references.of(c);
    run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
      check_context_parity(world, c, dataset, expected);
    });
  }
}

TEST_CASE("attention over ranks is attention, forward and backward") {
  for (const auto& [N, G] : {std::pair<int64_t, int64_t>{8, 8}, {8, 2}, {8, 1}}) {
    if (kContextIsCarried && G != 2) continue;
    for (bool documents : {false, true}) {
      const AttentionInput input(N, G, documents);
      const AttentionResult expected =
          attention_over(over(1), input, Probabilities::never_whole, DType::f64);
      for (int64_t ranks : {2, 4, 8}) {
        if (kSanitized && ranks != 4) continue;
        for (const Method& method : kMethods) {
          if (method.ulysses_size >= ranks && method.ulysses_size > 1) continue;
          for (const char* layout : kLayouts) {
            for (Probabilities probabilities : kProbabilities) {
              CAPTURE(N, G, documents, ranks, method.method, layout, int(probabilities));
              const AttentionResult found =
                  attention_over(over(ranks, method, layout), input, probabilities, DType::f64);
              check_close(found.out, expected.out, 1e-13, "out");
              check_close(found.dqkv, expected.dqkv, 1e-13, "dqkv");
            }
          }
        }
      }
    }
  }
}

/// sqrt of the mean of (a - b)².
double rms_error(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum / double(a.size()));
}

TEST_CASE("in bf16 attention over eight ranks errs no more than attention on one",
          "[not_sanitized]") {
  // Blockwise attention rounds as on one rank. Whole probabilities are rounded twice, of a block's
  // keys and of all keys, which adds a few percent; how many depends on the numbers. So the limit
  // is for the mean over seeds.
  constexpr uint64_t kSeeds = 8;
  struct Errors {
    double out = 0, dqkv = 0;  // over those on one rank
  };
  std::map<std::tuple<int, std::string, std::string>, Errors> sums;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    AttentionInput input(8, 2, /*documents=*/false, seed);
    for (Values* values : {&input.qkv, &input.dout}) {
      const OnDevice cpu;
      *values = Tensor::from_host(*values, {std::ssize(*values)}, DType::bf16).items();
    }
    for (Probabilities probabilities : kProbabilities) {
      const AttentionResult exact = attention_over(over(1), input, probabilities, DType::f64);
      const AttentionResult one = attention_over(over(1), input, probabilities, DType::bf16);
      for (const Method& method : kMethods) {
        if (kContextIsCarried && &method != &kMethods[0]) continue;
        for (const char* layout : kLayouts) {
          const AttentionResult eight =
              attention_over(over(8, method, layout), input, probabilities, DType::bf16);
          Errors& sum = sums[{int(probabilities), method.method, layout}];
          sum.out += rms_error(eight.out, exact.out) / rms_error(one.out, exact.out);
          sum.dqkv += rms_error(eight.dqkv, exact.dqkv) / rms_error(one.dqkv, exact.dqkv);
        }
      }
    }
  }
  for (const auto& [way, sum] : sums) {
    const auto& [probabilities, method, layout] = way;
    CAPTURE(probabilities, method, layout);
    CHECK(sum.out / kSeeds <= 1.1);
    CHECK(sum.dqkv / kSeeds <= 1.1);
  }
}

TEST_CASE("blocks that positions or documents empty are not computed") {
  constexpr int64_t B = AttentionInput::B, S = AttentionInput::S, kRanks = 4;
  for (int64_t length : {int64_t{2}, int64_t{3}, S / 4, S / 2, S}) {  // of a document
    AttentionInput input(8, 2, /*documents=*/false);
    for (int64_t i = 0; i < B * S; ++i) {
      // Those of the second sample begin elsewhere.
      const int64_t position = i % S, shift = i < S ? 0 : length / 2;
      const int64_t begin = (position + shift) / length * length - shift;
      input.begins.push_back(static_cast<int32_t>(std::max<int64_t>(0, begin)));
    }
    for (const char* layout : kLayouts) {
      CAPTURE(length, layout);
      const ContextParallelConfig config = over(kRanks, kMethods[0], layout);
      std::vector<int64_t> expected(kRanks);
      for (int64_t rank = 0; rank < kRanks; ++rank) {
        for (int64_t place = 0; place < kRanks; ++place) {
          const Positions queries = config.of_rank(S, rank), keys = config.of_rank(S, place);
          bool seen = false;
          for (int64_t i = 0; i < B * queries.count(); ++i) {
            const int64_t query = queries[i % queries.count()];
            const int64_t begin = input.begins[i / queries.count() * S + query];
            for (int64_t j = 0; j < keys.count(); ++j) {
              seen = seen || (begin <= keys[j] && keys[j] <= query);
            }
          }
          expected[rank] += seen;
        }
      }
      const AttentionResult found =
          attention_over(config, input, Probabilities::never_whole, DType::f64);
      CHECK(found.forwards == expected);
      CHECK(found.backwards == expected);
    }
  }
}

/// Distance of the gradients of a bf16 model's first step from those of f64 with the same weights.
double gradient_error(const TrainConfig& config, const Dataset& dataset,
                      const std::vector<std::pair<std::string, Values>>& exact) {
  double squares = 0, scale = 0;
  run_threads(static_cast<int>(config.context_parallel.cp_size), [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&dataset, mesh});
    randomize(trainer.model().parameters(), 1);
    trainer.train_step(0);
    if (world.rank() > 0) return;
    const auto found = gradients_of(trainer.model().parameters());
    for (size_t i = 0; i < exact.size(); ++i) {
      for (size_t j = 0; j < exact[i].second.size(); ++j) {
        squares += std::pow(found[i].second[j] - exact[i].second[j], 2);
        scale += std::pow(exact[i].second[j], 2);
      }
    }
  });
  return std::sqrt(squares / scale);
}

TEST_CASE("in bf16 a model over eight ranks errs no more than one on one", "[not_sanitized]") {
  TrainConfig config = alone_config(plain_case(1));
  config.dtype = "bf16";
  const RandomText text(config, 2000);
  const auto exact = [&] {  // of the same weights, rounded to bf16
    const OnDevice cpu;
    SoloTrainer rounded(config, &text.dataset);
    randomize(rounded.model().parameters(), 1);
    TrainConfig f64 = config;
    f64.dtype = "f64";
    SoloTrainer trainer(f64, &text.dataset);
    for (size_t i = 0; i < trainer.model().parameters().size(); ++i) {
      Parameter& parameter = trainer.model().parameters()[i];
      parameter.value.assign(rounded.model().parameters()[i].value.items());
    }
    trainer.train_step(0);
    return gradients_of(trainer.model().parameters());
  }();
  const double one = gradient_error(config, text.dataset, exact);
  for (const Method& method : kMethods) {
    for (const char* layout : kLayouts) {
      CAPTURE(method.method, layout);
      config.context_parallel = over(8, method, layout);
      CHECK(gradient_error(config, text.dataset, exact) <= 1.1 * one);
    }
  }
}

/// The most bytes of received keys and values that are alive at a time, on any rank, in a step and
/// an evaluation.
int64_t most_keys(const ContextCase& c) {
  const TrainConfig config = context_config(c);
  const RandomText text(config, 2000);
  std::vector<int64_t> most(c.ranks());
  run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    Allocator& allocator = Runtime::current().allocator();
    allocator.record_events(true);
    trainer.train_step(0);
    trainer.evaluate();
    int64_t live = 0;
    for (const Allocator::Event& event : allocator.events()) {
      if (event.tag.name != "keys") continue;
      live += event.bytes;
      most[world.rank()] = std::max(most[world.rank()], live);
    }
  });
  REQUIRE(std::ranges::count(most, most[0]) == std::ssize(most));
  return most[0];
}

TEST_CASE("a ring holds two blocks of keys and values at a time, an all-gather every one",
          "[not_sanitized]") {
  for (const Method& method : {Method{"ring"}, {"all_gather"}, {"ring_ulysses", 2}}) {
    for (const char* recompute : {"none", "full"}) {
      for (const int64_t kv_heads : {1, 2, 8}) {
        if (kContextIsCarried && kv_heads != 2) continue;
        for (const int64_t ranks : {3, 4, 8}) {
          ContextCase c = plain_case(ranks, method);
          c.num_kv_heads = ranks == 3 && kv_heads > 1 ? kv_heads * 3 / 2 : kv_heads;
          c.recompute = recompute;
          c.document_mask = kv_heads == 2;
          if (!has_meaning(c)) continue;
          CAPTURE(c.name());
          const TrainConfig config = context_config(c);
          // Of the rows that meet at a place of the ring, a member's share of the kv heads.
          const int64_t u = method.ulysses_size, places = ranks / u;
          const int64_t rows = config.micro_batch_size * config.seq_len / places;
          const int64_t heads = std::max<int64_t>(1, c.num_kv_heads / u);
          const int64_t block = rows * 2 * heads * config.model.head_dim() * 8;
          const int64_t most = most_keys(c);
          const bool gathers = method.method == std::string_view("all_gather");
          CHECK(most == (gathers ? places : std::min<int64_t>(2, places - 1)) * block);
          // With its own, a rank of a ring never has all that its heads will meet.
          if (!gathers && places > 3) CHECK(block + most < places * block);
        }
      }
    }
  }
}

TEST_CASE("states and activations over cp are those of the formulas, to the byte",
          "[not_sanitized]") {
  for (const ContextCase& c : context_cases(60)) {
    for (const char* dtype : {"f64", "bf16"}) {
      CAPTURE(c.name(), dtype);
      TrainConfig config = context_config(c);
      config.dtype = dtype;
      const Prediction prediction = predict(config);
      const Simulation simulation = simulate<Trainer>(config);
      check_states(prediction, simulation);
      // One half of a micro-batch runs backward while the other runs forward.
      if (c.overlap == std::string_view("batch_halves")) continue;
      CHECK(prediction.saved_bytes() == simulation.saved_bytes());
      CHECK(prediction.peak_activations == simulation.peak_activations);
    }
  }
}

/// The ways of attention and recomputation that differ.
struct Way {
  const char *attention, *recompute, *cp_recompute = "exchange";
};
constexpr Way kWays[] = {{"naive", "none"},     {"naive", "selective"},
                         {"naive", "full"},     {"blockwise", "none"},
                         {"blockwise", "full"}, {"blockwise", "full", "keep"}};

TEST_CASE("activations over cp are those of the formulas in every way of attention",
          "[not_sanitized]") {
  for (int64_t ranks : {2, 3, 4, 8}) {
    if (kContextIsCarried && ranks != 4) continue;
    for (const Method& method : kMethods) {
      if (method.ulysses_size >= ranks && method.ulysses_size > 1) continue;
      for (const char* layout : kLayouts) {
        for (int64_t kv_heads : {1, 2, 8}) {
          for (const Way& way : kWays) {
            ContextCase c = plain_case(ranks, method, layout);
            c.num_kv_heads = ranks == 3 && kv_heads > 1 ? kv_heads * 3 / 2 : kv_heads;
            if (!has_meaning(c)) continue;
            c.attention = way.attention;
            c.recompute = way.recompute;
            c.cp_recompute = way.cp_recompute;
            // Where heads are wide, messages are larger than the probabilities.
            for (const auto& [dtype, width] : {std::pair{"f64", 4}, {"f32", 32}, {"bf16", 32}}) {
              CAPTURE(c.name(), dtype, width);
              TrainConfig config = context_config(c);
              config.dtype = dtype;
              config.model.hidden_size = width * config.model.num_heads;
              const Prediction prediction = predict(config);
              const Simulation simulation = simulate<Trainer>(config);
              CHECK(prediction.saved_bytes() == simulation.saved_bytes());
              CHECK(prediction.peak_activations == simulation.peak_activations);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("the memory of a rank of cp is that of a dry run", "[not_sanitized]") {
  for (const Method& method : kMethods) {
    for (const char* recompute : {"none", "full"}) {
      ContextCase c = plain_case(4, method);
      c.recompute = recompute;
      CAPTURE(c.name());
      const TrainConfig config = context_config(c);
      const RandomText text(config, 2000);
      Simulation measured{};
      run_threads(4, [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&text.dataset, mesh});
        const Simulation of_rank = simulate_steps(trainer);
        if (world.rank() == 0) measured = of_rank;
      });
      const Simulation simulated = simulate<Trainer>(config);
      CHECK(measured.peak_activations == simulated.peak_activations);
      CHECK(measured.saved_bytes() == simulated.saved_bytes());
    }
  }
}

/// Operations of a step of one sample on the rank, which is alone with its shapes.
double flops_of_rank(const TrainConfig& config, int rank) {
  Runtime meta(Device::meta);
  const Runtime::Use use(meta);
  const MeshSizes sizes = config.mesh();
  DryEngine engine(rank, static_cast<int>(sizes.dp * sizes.cp * sizes.tp));
  const Mesh mesh(Communicator::world(engine), sizes);
  Trainer trainer(config, {nullptr, mesh});
  const double before = meta.flops();
  trainer.train_step(0);
  return meta.flops() - before;
}

TEST_CASE("zig-zag pieces give every rank as many pairs of query and key, one piece does not") {
  const auto pairs = [](const char* layout) {
    std::vector<int64_t> found;
    for (int64_t rank = 0; rank < 4; ++rank) {
      found.push_back(causal_pairs(over(4, kMethods[0], layout).of_rank(16, rank), {0, 16}));
    }
    return found;
  };
  REQUIRE(pairs("contiguous") == std::vector<int64_t>{10, 26, 42, 58});
  REQUIRE(pairs("zigzag") == std::vector<int64_t>{34, 34, 34, 34});
}

TEST_CASE("the operations of each rank are those of its pairs, and of all ranks the model's") {
  for (const Method& method : kMethods) {
    for (const char* layout : kLayouts) {
      ContextCase c = plain_case(4, method, layout);
      c.attention = "naive";  // without anything done again
      TrainConfig config = context_config(c);
      config.seq_len = 16;
      CAPTURE(c.name());
      const ModelConfig& m = config.model;
      const ContextParallelConfig& cp = config.context_parallel;
      const double samples = double(config.micro_batch_size);
      const double weights = double(num_parameters(m) - m.vocab_size * m.hidden_size -
                                    (2 * m.num_layers + 1) * m.hidden_size);
      double sum = 0;
      for (int rank = 0; rank < 4; ++rank) {
        // Of the rows that meet in the rank's attention, for its share of the heads.
        const int64_t u = cp.head_ranks();
        const Positions rows = cp.of_ring_place(16, rank / u);
        const double pairs = double(causal_pairs(rows, {0, 16})) / double(u);
        const double expected =
            samples * (6 * weights * 4 + 12 * double(m.num_layers * m.hidden_size) * pairs);
        const double found = flops_of_rank(config, rank);
        CHECK(found == expected);
        sum += found;
      }
      TrainConfig one = config;
      one.context_parallel = {};
      CHECK(sum == flops_of_rank(one, 0));
    }
  }
}

TEST_CASE("the formula for operations counts what a rank of cp does, and does again") {
  for (const Method& method : kMethods) {
    for (const char* layout : kLayouts) {
      for (const Way& way : kWays) {
        ContextCase c = plain_case(8, method, layout);
        c.attention = way.attention;
        c.recompute = way.recompute;
        c.cp_recompute = way.cp_recompute;
        CAPTURE(c.name());
        const TrainConfig config = context_config(c);
        const Prediction prediction = predict(config);
        const Simulation simulation = simulate<Trainer>(config);
        CHECK(simulation.flops == Approx(prediction.flops + prediction.recomputed_flops));
        CHECK(simulation.recomputed_flops == Approx(prediction.recomputed_flops));
      }
    }
  }
}

TEST_CASE("ranks and places of a ring share out the positions of a sample") {
  for (int64_t ranks : {1, 2, 3, 4, 8}) {
    for (const Method& method : kMethods) {
      if (ranks % method.ulysses_size != 0) continue;
      for (const char* layout : kLayouts) {
        CAPTURE(ranks, method.method, layout);
        const ContextParallelConfig config = over(ranks, method, layout);
        const int64_t S = 48, u = config.head_ranks();
        std::vector<int> holders(S);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const Positions own = config.of_rank(S, rank);
          const Positions group = config.of_ring_place(S, rank / u);
          REQUIRE(own.count() == S / ranks);
          REQUIRE(group.count() == u * S / ranks);
          for (int64_t row = 0; row < own.count(); ++row) {
            ++holders[own[row]];
            bool among = false;
            for (int64_t i = 0; i < group.count(); ++i) among = among || group[i] == own[row];
            REQUIRE(among);
          }
        }
        REQUIRE(holders == std::vector<int>(S, 1));
      }
    }
  }
}

TEST_CASE("a document begins behind a separator, and with every sample") {
  const std::vector<int32_t> samples = {5, 0, 3, 0, /**/ 4, 4, 0, 1, /**/ 0, 0, 2, 2};
  REQUIRE(document_begins(samples, 4, 0) ==
          std::vector<int32_t>{0, 0, 2, 2, 0, 0, 0, 3, 0, 1, 2, 2});
}

TEST_CASE("documents in one sample train as they do apart") {
  // Two samples of 12 tokens, packed into one of 24; rotations depend on distances alone.
  constexpr int64_t S = 12;
  Random random(8);
  const ModelConfig m = tiny_model();
  std::vector<int32_t> tokens = random.tokens(2 * S, m.vocab_size);
  const std::vector<int32_t> targets = random.tokens(2 * S, m.vocab_size);
  for (int32_t& token : tokens) token = std::max(token, 1);
  tokens[S - 1] = 0;
  for (bool naive : {false, true}) {
    CAPTURE(naive);
    const auto gradients = [&](bool packed) {
      const OnDevice cpu;
      Model model = allocated_model(m, 2 * S, DType::f64, probabilities_of(naive), 1);
      randomize(model.parameters(), 2);
      Pass pass;
      pass.num_samples = packed ? 1 : 2;
      pass.seq_len = packed ? 2 * S : S;
      pass.positions = Positions(0, pass.seq_len);
      if (packed) {
        pass.documents = Documents(document_begins(tokens, 2 * S, 0), {1, 2 * S});
      }
      pass.tokens = Tensor::from_host(tokens, {2 * S});
      pass.targets = Tensor::from_host(targets, {2 * S});
      pass.loss_scale = 1.0 / (2 * S);
      pass.loss = Tensor::zeros({1}, DType::f64);
      Grads grads(model.parameters());
      grads.begin_window(1);
      model.backward(model.forward(pass), grads, pass);
      grads.end_window();
      auto result = gradients_of(model.parameters());
      result.emplace_back("loss", pass.loss.items());
      return result;
    };
    const auto packed = gradients(true), apart = gradients(false);
    for (size_t i = 0; i < apart.size(); ++i) {
      check_close(packed[i].second, apart[i].second, 1e-11, apart[i].first);
    }
  }
}

TEST_CASE("evaluation over cp is evaluation on one rank") {
  for (const Method& method : kMethods) {
    for (const char* layout : kLayouts) {
      ContextCase c = plain_case(4, method, layout);
      c.dp = 2;
      c.document_mask = true;
      CAPTURE(c.name());
      TrainConfig config = context_config(c), solo_config = alone_config(c);
      config.eval_samples = solo_config.eval_samples = 7;  // no multiple of what runs at once
      const RandomText text(config, 2000);
      const double expected = [&] {
        const OnDevice cpu;
        return SoloTrainer(solo_config, &text.dataset).evaluate();
      }();
      run_threads(8, [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&text.dataset, mesh});
        expect_close({trainer.evaluate()}, {expected}, 1e-12, c.name());
      });
    }
  }
}

TEST_CASE("a text is continued from a cache that ranks share out, or from none") {
  for (const Method& method : kMethods) {
    for (int64_t tp : {1, 2}) {
      if (kSanitized && tp == 1) continue;
      ContextCase c = plain_case(4, method);
      c.tp = tp;
      c.num_kv_heads = 8;
      CAPTURE(c.name());
      TrainConfig config = context_config(c), solo_config = alone_config(c);
      config.seq_len = solo_config.seq_len = 16;  // which the text outgrows
      const RandomText text(config, 2000);
      struct Text {
        std::vector<int32_t> tokens;
        std::vector<Values> logits;
      };
      const auto continue_text = [&](Trainer& trainer, bool no_cache) {
        Text result;
        SampleConfig sample;
        sample.sample_tokens = 20;
        sample.no_kv_cache = no_cache;
        const auto logits = [&](const Pass& pass) {
          const Tensor found = trainer.logits(pass);
          result.logits.push_back(found.items());
          return found;
        };
        result.tokens =
            sample_tokens(logits, sample, config.seq_len, {1, 2, 3}, 5, [] { return false; });
        return result;
      };
      const auto solo_text = [&](bool no_cache) {
        const OnDevice cpu;
        SoloTrainer solo(solo_config, &text.dataset);
        train(solo, kContextSteps);
        return continue_text(solo, no_cache);
      };
      for (bool no_cache : {false, true}) {
        if (kSanitized && no_cache) continue;
        const Text expected = solo_text(no_cache);
        run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
          const Mesh mesh(world, config.mesh());
          Trainer trainer(config, {&text.dataset, mesh});
          train(trainer, kContextSteps, &world);
          const Text found = continue_text(trainer, no_cache);
          USP_CHECK(found.tokens == expected.tokens, "{}: another text", c.name());
          USP_CHECK(found.logits.size() == expected.logits.size(), "{}", c.name());
          for (size_t i = 0; i < expected.logits.size(); ++i) {
            expect_close(found.logits[i], expected.logits[i], 1e-10, c.name() + ": logits");
          }
        });
      }
    }
  }
}

TEST_CASE("what comes late is waited for, whether it travels under attention or not") {
  const AttentionInput input(8, 2, /*documents=*/false);
  for (const Method& method : kMethods) {
    for (Probabilities probabilities : {Probabilities::never_whole, Probabilities::stored}) {
      CAPTURE(method.method, int(probabilities));
      ContextParallelConfig config = over(4, method);
      const AttentionResult expected = attention_over(config, input, probabilities, DType::f64);
      for (const char* overlap : {"compute", "none"}) {
        config.cp_overlap = overlap;
        const AttentionResult found =
            attention_over(config, input, probabilities, DType::f64, {0, {2000, 1}, {}, {}});
        const bool same = found.out == expected.out && found.dqkv == expected.dqkv;
        CHECK(same);
      }
    }
  }
}

TEST_CASE("keys go to the next rank while attention to those that are here is computed") {
  for (const char* overlap : {"compute", "none"}) {
    ContextCase c = plain_case(4);
    c.cp_overlap = overlap;
    const TrainConfig config = context_config(c);
    const RandomText text(config, 2000);
    run_threads(4, [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const Tracer& tracer = traced_steps(trainer);
      std::map<std::string, int64_t> hidden;
      for (const Tracer::Exchange& exchange : tracer.exchanges()) {
        if (exchange.kind != "recv") continue;
        for (const Tracer::Span& span : tracer.spans()) {
          const bool attends =
              span.name == "attention_forward" || span.name == "attention_backward";
          hidden[exchange.group] += attends && hides(span, exchange);
        }
      }
      const int64_t layers = config.model.num_layers;
      const bool overlaps = overlap == std::string_view("compute");
      const int64_t keys = overlaps ? layers * 2 * 3 : 0, gradients = overlaps ? layers * 2 : 0;
      USP_CHECK(hidden["cp_ring"] == keys, "{} blocks of attention under keys, not {}",
                hidden["cp_ring"], keys);
      USP_CHECK(hidden["cp_ring_gradients"] == gradients, "{} under gradients, not {}",
                hidden["cp_ring_gradients"], gradients);
    });
  }
}

/// Checks the message with which the flags are refused, for a model of so many heads.
void refused(std::vector<std::string> flags, const std::vector<std::string>& parts,
             int64_t num_heads = 8, int64_t num_kv_heads = 2) {
  CAPTURE(flags);
  flags.insert(flags.begin(), {"program", "--hidden_size", std::to_string(4 * num_heads),
                               "--num_heads", std::to_string(num_heads), "--num_kv_heads",
                               std::to_string(num_kv_heads), "--seq_len", "48"});
  std::vector<const char*> words;
  for (const std::string& flag : flags) words.push_back(flag.c_str());
  check_throws<UsageError>(
      [&] {
        TrainConfig config;
        Args args("A test.");
        config.bind(args);
        REQUIRE(args.parse(static_cast<int>(words.size()), words.data()));
        config.validate(args);
      },
      parts);
}

TEST_CASE("what does not divide over cp is refused, with what does") {
  refused({"--cp_size", "5"}, {"seq_len=48", "10 pieces", "cp_size=5", "zigzag", "40 or 50"});
  refused({"--cp_size", "5", "--cp_layout", "contiguous"}, {"seq_len=48", "45 or 50"});
  refused({"--cp_size", "32"}, {"seq_len=48", "64 pieces", "try 64"});
  refused({"--cp_size", "3", "--cp_method", "ulysses"}, {"cp_size=3", "8 heads", "1, 2, 4 or 8"});
  refused({"--cp_size", "12", "--cp_method", "ring_ulysses", "--ulysses_size", "3", "--cp_layout",
           "contiguous"},
          {"ulysses_size=3", "8 heads", "1, 2, 4 or 8"});
  refused({"--cp_size", "4", "--cp_method", "ulysses"}, {"cp_size=4", "6 kv heads", "1, 2, 3 or 6"},
          /*num_heads=*/12, /*num_kv_heads=*/6);
  refused({"--cp_size", "4", "--cp_method", "ring_ulysses", "--ulysses_size", "3"},
          {"ulysses_size=3", "cp_size=4", "1, 2 or 4"});
  refused({"--cp_size", "8", "--tp_size", "4", "--sequence_parallel"},
          {"tp_size=4", "seq_len/cp_size=6", "1, 2, 3 or 6"});
  refused({"--cp_size", "0"}, {"cp_size=0"});
}

TEST_CASE("flags of context parallelism that would do nothing are refused") {
  refused({"--cp_size", "2", "--cp_recompute", "keep"},
          {"cp_recompute=keep", "recompute=full", "attention=blockwise"});
  refused(
      {"--cp_size", "2", "--cp_recompute", "keep", "--recompute", "full", "--attention", "naive"},
      {"cp_recompute=keep", "attention=blockwise"});
  refused({"--cp_size", "4", "--ulysses_size", "2"}, {"ulysses_size", "ring_ulysses"});
  refused({"--document_separator", "3"}, {"document_separator", "document_mask"});
  refused({"--cp_size", "2", "--cp_method", "ulysses", "--cp_overlap", "none"},
          {"cp_overlap", "ulysses"});
  for (const char* flag : {"--cp_layout", "--cp_method", "--cp_overlap"}) {
    const std::string value = flag == std::string_view("--cp_layout")   ? "contiguous"
                              : flag == std::string_view("--cp_method") ? "ulysses"
                                                                        : "none";
    refused({flag, value}, {std::string(flag).substr(2), "cp_size"});
  }
}

}  // namespace
}  // namespace usp::test

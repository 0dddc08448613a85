#include "tensor_parallel/linears.h"

#include "accounting/distinct_ranks.h"
#include "comm/launch.h"
#include "run/sample.h"
#include "technique/tensor_parallel/tensor_parity.h"
#include "technique/tiny_llama.h"

#if __has_include("examples/tensor_2d.h")
#include "technique/tensor_parallel/tensor_2d_parity.h"
#endif

namespace usp::test {
namespace {

constexpr int64_t kTensorSteps = 3;

TEST_CASE("training with shared-out weights is training on one rank, and sends what it should") {
  const TensorCase any{2, 1, 8, "off", false, 0, "none", "blockwise", "none", 1};
  const TrainConfig config = tensor_config(any);
  const RandomTokens tokens(config.model.vocab_size);
  const TokenFile file(tokens.path(), 2, config.model.vocab_size);
  const Dataset dataset(file, config.seq_len, 0.1, DataOrder::shuffled, config.seed);
  TensorReferences references(dataset, kTensorSteps);
  const bool carried = is_carried("tensor_parallel/linears"), full = is_full();
  const std::vector<TensorCase> cases = full_cases(tensor_cases, carried ? 0 : full ? 100 : 20);
  const size_t step = carried && !kSanitized && !full ? 2 : 1;
  for (size_t i = 0; i < cases.size(); i += step) {
    const TensorCase& c = cases[i];
    CAPTURE(c.name());
    const TrainedState expected = [&] {
      const OnDevice cpu;
      return references.of(c);
    }();
    run_threads(static_cast<int>(c.tp * c.dp), [&](const Communicator& world) {
      check_tensor_parity(world, c, dataset, expected);
    });
  }
}

/// Runs `body` with a region of so many ranks, and a mesh to which it belongs.
template <class Body>
void on_region(int ranks, bool sequence_parallel, const Body& body,
               const char* overlap = "weight_grad", const char* input = "again") {
  run_threads(ranks, [&](const Communicator& world) {
    const Mesh mesh(world, {.tp = ranks});
    TensorParallelConfig config;
    config.tp_size = ranks;
    config.sequence_parallel = sequence_parallel;
    config.tp_overlap = overlap;
    config.gathered_input = input;
    body(TensorRegion(config, mesh.tp()));
  });
}

Tensor matrix(const Values& values, int64_t rows) {
  return Tensor::from_host(values, {rows, std::ssize(values) / rows}, DType::f64);
}

void assign(Parameter& weight, const Values& whole) {
  weight.value.assign(shard_of(whole, weight));
}

// The book's figures of column-linear and row-linear: X W with W = [10 30; 20 40]. A Linear's
// weight is the transpose.
const Values kX = {0, 1, 2, 3, 4, 5, 6, 7}, kW = {10, 20, 30, 40};
const Values kY = {20, 40, 80, 180, 140, 320, 200, 460};

TEST_CASE("the book's numbers: columns of W give columns of Y, rows of W give terms of Y") {
  on_region(2, false, [](const TensorRegion& region) {
    ParameterList columns, rows;
    Parameter& by_columns = columns.add("w", {2, 2}, 1);
    Parameter& by_rows = rows.add("w", {2, 2}, 1);
    const auto column = make_column_parallel({&by_columns}, "y", region);
    const auto row = make_row_parallel(by_rows, region);
    columns.allocate(DType::f64, 1);
    rows.allocate(DType::f64, 1);
    assign(by_columns, kW);
    assign(by_rows, kW);
    Linear::Saved saved;
    const Pass pass;
    const int r = region.rank();
    const Values own = column->forward(matrix(kX, 4), saved, pass).items();
    USP_CHECK(own == Values({kY[r], kY[2 + r], kY[4 + r], kY[6 + r]}), "columns of rank {}", r);
    const Values own_x = {kX[r], kX[2 + r], kX[4 + r], kX[6 + r]};
    USP_CHECK(row->forward(matrix(own_x, 4), saved, pass).items() == kY, "the sum of the terms");
  });
}

TEST_CASE("rows that travel in chunks are those that travel at once") {
  constexpr int64_t T = 60, I = 48,
                    O = 40;  // not so few that they arrive before they are asked for
  Random random(4);
  const Values x = random.normals(T * I, 1), dy = random.normals(T * O, 1);
  const Values w = random.normals(O * I, 1);
  for (bool sequence : {false, true}) {
    for (const char* input : {"again", "kept"}) {
      const auto results = [&](const char* overlap) {
        std::vector<Values> all(2);
        on_region(
            2, sequence,
            [&](const TensorRegion& region) {
              ParameterList list;
              Parameter& weight = list.add("w", {O, I}, 1);
              const auto column = make_column_parallel({&weight}, "y", region);
              list.allocate(DType::f64, 1);
              assign(weight, w);
              Grads grads(list);
              grads.begin_window(1);
              Linear::Saved saved;
              const int64_t rows = sequence ? T / 2 : T, r = region.rank();
              const Tensor own_x =
                  matrix(x, T).narrow(0, sequence ? r * rows : 0, rows).to_contiguous();
              const Tensor own_dy = matrix(dy, T).narrow(1, r * O / 2, O / 2).to_contiguous();
              Values& found = all[r];
              found = column->forward(own_x, saved, {}).items();
              const Values dx = column->backward(own_dy, saved, grads, {}).items();
              const Values dw = weight.grad.items();
              found.insert(found.end(), dx.begin(), dx.end());
              found.insert(found.end(), dw.begin(), dw.end());
            },
            overlap, input);
        return all;
      };
      CAPTURE(sequence, input);
      const std::vector<Values> at_once = results("none"), in_chunks = results("chunks");
      for (int r : {0, 1}) check_close(in_chunks[r], at_once[r], 1e-13, "y, dx and dw");
      if (!sequence) break;  // there is no other input to keep
    }
  }
}

TEST_CASE("f, f*, g, g*: what crosses the ranks at the two edges of a region") {
  for (bool sequence : {false, true}) {
    on_region(2, sequence, [&](const TensorRegion& region) {
      const double r = region.rank();
      const Pass pass;
      const Ledger before = Runtime::current().ledger();
      const auto sent = [&](CommKind kind) {
        return (Runtime::current().ledger().get("tp", kind) - before.get("tp", kind)).calls;
      };
      const Tensor rows = matrix({1 + r, 2 + r}, 1), whole = matrix({r, 1, 2, 3 + r}, 2);
      Tensor entered = region.enter(sequence ? rows : whole, pass).wait();
      USP_CHECK(entered.items() == (sequence ? Values{1, 2, 2, 3} : whole.items()), "entry");
      USP_CHECK(sent(CommKind::all_gather) == (sequence ? 1 : 0), "entry");
      // Both ranks' terms add up to {1, 2, 4, 7}.
      const Values sum = {1, 2, 4, 7}, own = r == 0 ? Values{1, 2} : Values{4, 7};
      Tensor left = region.leave(whole.to_contiguous(), pass).wait();
      USP_CHECK(left.items() == (sequence ? own : sum), "exit");
      const Tensor term = matrix({r, 1, 2, 3 + r}, 2);
      USP_CHECK(region.enter_backward(term).wait().items() == (sequence ? own : sum),
                "backward of the entry");
      const int64_t gathers = sent(CommKind::all_gather);
      region.leave_backward(sequence ? rows : whole).wait();
      USP_CHECK(sent(CommKind::all_gather) == gathers + (sequence ? 1 : 0), "backward of the exit");
      USP_CHECK(sent(CommKind::all_reduce) == (sequence ? 0 : 2), "sums");
      USP_CHECK(sent(CommKind::reduce_scatter) == (sequence ? 2 : 0), "sums of shards");
    });
  }
}

TEST_CASE("a block communicates four times forward and backward, two of them in each direction") {
  for (const char* sequence : {"off", "kept"}) {
    const auto calls = [&](int64_t layers) {
      TensorCase c{2, 1, 8, sequence, false, 0, "none", "blockwise", "weight_grad", 1};
      TrainConfig config = tensor_config(c);
      config.model.num_layers = layers;
      Runtime meta(Device::meta);
      const Runtime::Use use(meta);
      const DryMesh dry(config.mesh());
      Trainer trainer(config, {nullptr, dry.mesh});
      trainer.train_step(0);
      std::map<CommKind, int64_t> found;
      for (CommKind kind : {CommKind::all_reduce, CommKind::all_gather, CommKind::reduce_scatter}) {
        found[kind] = meta.ledger().get("tp", kind).calls;
      }
      return found;
    };
    auto one = calls(1), two = calls(2);
    const bool plain = sequence == std::string_view("off");
    CAPTURE(sequence);
    // Under sequence parallelism the gradients of the block's two norms are summed as well.
    CHECK(two[CommKind::all_reduce] - one[CommKind::all_reduce] == (plain ? 4 : 2));
    CHECK(two[CommKind::all_gather] - one[CommKind::all_gather] == (plain ? 0 : 4));
    CHECK(two[CommKind::reduce_scatter] - one[CommKind::reduce_scatter] == (plain ? 0 : 4));
  }
}

/// "gathered weights 10, scratch of reductions 4, "
std::string text_of(const std::vector<LiveBytes>& buffers) {
  std::string text;
  for (const auto& [name, bytes] : by_name(buffers)) text += fmt::format("{} {}, ", name, bytes);
  return text;
}

TEST_CASE("states and activations of a rank are those of the formulas, to the byte") {
  for (const TensorCase& c : tensor_cases(30)) {
    CAPTURE(c.name());
    const TrainConfig config = tensor_config(c);
    const Prediction prediction = predict(config);
    const Simulation simulation = simulate<Trainer>(config);
    check_states(prediction, simulation);
    auto simulated = by_name(simulation.buffers);
    for (const auto& [name, bytes] : by_name(prediction.buffers)) {
      CAPTURE(name);
      // Scratch of dp and of tp is added up, and not in every run there at once.
      if (name != "scratch of reductions") CHECK(simulated[name] == bytes);
    }
    // One half of a micro-batch runs backward while the other runs forward.
    if (c.overlap == std::string_view("batch_halves")) continue;
    CHECK(prediction.saved_bytes() == simulation.saved_bytes());
    CHECK(prediction.peak_activations == simulation.peak_activations);
  }
}

TEST_CASE("where the vocabulary leaves a remainder, the fullest rank is not the first") {
  TrainConfig config =
      tensor_config({4, 1, 8, "off", false, 0, "none", "blockwise", "weight_grad", 1});
  config.model.vocab_size = 4099;
  const std::vector<RankClass> distinct = distinct_ranks(config);
  REQUIRE(distinct.size() == 2);
  CHECK(distinct[0].ranks == 1);
  CHECK(distinct[1].rank == 1);
  CHECK(distinct[1].ranks == 3);
  const int64_t second = simulate<Trainer>(config, 1).peak;
  CHECK(second > simulate<Trainer>(config, 0).peak);
  for (int rank : {2, 3}) CHECK(simulate<Trainer>(config, rank).peak <= second);
  CHECK(simulate_fullest(config).peak == second);
  CHECK(predict_fullest(config).rank == 1);
  const std::string text = estimate_text(config, estimate_ranks(config));
  CAPTURE(text);
  CHECK(text.find("rank 1 of 4, the fullest: tp 4") != std::string::npos);
  CHECK(text.find("1025 of the vocabulary") != std::string::npos);
}

TEST_CASE("dropout is for training: validation is what it is without") {
  const OnDevice cpu;
  TrainConfig config = tiny_training();
  config.eval_samples = 4;
  const RandomText text(config, 400);
  std::vector<double> losses, validations;
  for (double rate : {0.0, 0.5}) {
    config.tensor_parallel.dropout = rate;
    SoloTrainer trainer(config, &text.dataset);
    randomize(trainer.model().parameters(), 1);
    validations.push_back(trainer.evaluate());
    trainer.train_step(0);
    losses.push_back(trainer.report(0, 0).loss);
  }
  REQUIRE(validations[0] == validations[1]);
  REQUIRE(losses[0] != losses[1]);
}

TEST_CASE("every layer drops other elements, of the same rows") {
  const OnDevice cpu;
  const int64_t H = 64;
  TensorParallelConfig config;
  config.dropout = 0.5;
  const OneRank one;
  const TensorRegion region(config, one.mesh.tp());
  Random random(1);
  Pass pass = random_pass(random, tiny_model(), /*num_samples=*/1, /*seq_len=*/4, 1, {});
  pass.seq_len = 4;
  std::map<std::string, Values> dropped;
  for (const char* name :
       {"model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"}) {
    Parameter weight;
    weight.name = name;
    weight.global_shape = {H, 1};
    weight.value = Tensor::from_host(Values(H, 1.0), {H, 1}, DType::f64);
    const auto layer = make_row_parallel(weight, region);
    Linear::Saved saved;
    const Tensor x = Tensor::from_host(Values(4, 1.0), {4, 1}, DType::f64);
    dropped[name] = layer->forward(x, saved, pass).items();
    for (double value : dropped[name]) REQUIRE((value == 0 || value == 2));
    REQUIRE(layer->forward(x, saved, pass).items() == dropped[name]);
  }
  int64_t alike = 0;  // half of them by chance
  const Values &first = dropped.begin()->second, &second = dropped.rbegin()->second;
  for (size_t i = 0; i < first.size(); ++i) alike += first[i] == second[i];
  REQUIRE(alike > 4 * H / 3);
  REQUIRE(alike < 4 * H * 2 / 3);
}

TEST_CASE("halves that run in turns hold the units of ZeRO as one pass does", "[not_sanitized]") {
  for (int64_t stage : {2, 3}) {
    for (const char* sequence : {"off", "again"}) {
      for (const char* recompute : {"none", "full"}) {
        for (bool tied : {false, true}) {
          CAPTURE(stage, sequence, recompute, tied);
          TrainConfig config = tensor_config(
              {2, 2, 2, sequence, tied, stage, recompute, "blockwise", "batch_halves", 3});
          config.model.num_layers = 4;
          const RandomText text(config, 2000);
          Simulation measured{};
          run_threads(4, [&](const Communicator& world) {
            const Mesh mesh(world, config.mesh());
            Trainer trainer(config, {&text.dataset, mesh});
            const Simulation of_rank = simulate_steps(trainer);
            if (world.rank() == 0) measured = of_rank;
          });
          const Simulation simulated = simulate<Trainer>(config);
          CHECK(text_of(measured.buffers) == text_of(predict(config).buffers));
          CHECK(text_of(simulated.buffers) == text_of(predict(config).buffers));
          CHECK(measured.peak_activations == simulated.peak_activations);
        }
      }
    }
  }
}

TEST_CASE("where halves run in turns evaluation needs no more scratch than they do") {
  const TrainConfig config =
      tensor_config({2, 1, 2, "off", false, 0, "none", "blockwise", "batch_halves", 3});
  const RandomText text(config, 2000);
  run_threads(2, [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    simulate_steps(trainer);
    trainer.evaluate();
    const std::string found = text_of(make_simulation(/*steps=*/2).buffers);
    const std::string expected = text_of(predict(config, world.rank()).buffers);
    USP_CHECK(found == expected, "{}by formula {}", found, expected);
  });
}

TEST_CASE("halves that run in turns gather a unit once for both, while they compute") {
  TrainConfig config =
      tensor_config({2, 2, 2, "off", false, 3, "none", "blockwise", "batch_halves", 1});
  config.model.num_layers = 4;
  const RandomText text(config, 2000);
  run_threads(4, [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    const Tracer& tracer = traced_steps(trainer);
    int64_t gathers = 0, hidden = 0;
    for (const Tracer::Exchange& exchange : tracer.exchanges()) {
      if (exchange.kind != "all_gather" || exchange.group != "dp") continue;
      ++gathers;
      hidden += std::ranges::any_of(tracer.spans(), [&](const Tracer::Span& span) {
        return (span.name == "attention" || span.name == "mlp") && hides(span, exchange);
      });
    }
    // All ten, two of them the head's, whose table is cut unevenly; but neither the embedding's nor
    // the first block's, which hides under the embedding.
    USP_CHECK(gathers == 10 && hidden == 8, "{} of {} gathers are prefetched", hidden, gathers);
  });
}

TEST_CASE("the operations of a rank are 1/t of the model's, unless it has a copy of a kv head") {
  for (const char* recompute : {"none", "selective", "full"}) {
    TensorCase c{4, 2, 8, "again", false, 0, recompute, "naive", "none", 3};
    CAPTURE(recompute);
    TrainConfig config = tensor_config(c);
    config.model.vocab_size = 64;  // equal shards
    const Prediction prediction = predict(config);
    const Simulation simulation = simulate<Trainer>(config);
    CHECK(prediction.flops + prediction.recomputed_flops == Approx(simulation.flops));
    CHECK(prediction.recomputed_flops == Approx(simulation.recomputed_flops));
    c.num_kv_heads = 2;  // two ranks to a head
    CHECK(simulate<Trainer>(tensor_config(c)).flops > predict(tensor_config(c)).flops);
  }
}

TEST_CASE("in f32 and bf16 a layout changes roundings, and nothing else", "[no_races]") {
  struct Case {
    const char* dtype;
    double tolerance;
  };
  // Found: the losses of three steps differ by 4e-9 and 5e-5 of themselves.
  for (const Case& rounding : {Case{"f32", 4e-8}, Case{"bf16", 5e-4}}) {
    for (const char* sequence : {"off", "again"}) {
      TensorCase c{4, 2, 2, sequence, true, 2, "none", "blockwise", "weight_grad", 1};
      CAPTURE(rounding.dtype, sequence);
      TrainConfig config = tensor_config(c);
      config.dtype = rounding.dtype;
      const RandomText text(config, 2000);
      TensorCase alone{1, 1, 2, "off", true, 0, "none", "blockwise", "none", 1};
      TrainConfig solo_config = tensor_config(alone);
      solo_config.dtype = rounding.dtype;
      const OnDevice cpu;
      SoloTrainer solo(solo_config, &text.dataset);
      const std::vector<double> expected = train(solo, kTensorSteps).losses;
      run_threads(8, [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&text.dataset, mesh});
        expect_close(train(trainer, kTensorSteps, &world).losses, expected, rounding.tolerance,
                     rounding.dtype);
      });
    }
  }
}

TEST_CASE("a text is continued from logits of all shards of the vocabulary, cached or not") {
  TensorCase c{4, 1, 2, "again", false, 0, "none", "blockwise", "none", 1};
  TensorCase alone{1, 1, 2, "off", false, 0, "none", "blockwise", "none", 1};
  TrainConfig config = tensor_config(c), solo_config = tensor_config(alone);
  config.model.vocab_size = solo_config.model.vocab_size = 63;  // shards begin at 0, 15, 31 and 47
  const RandomText text(config, 2000);
  const auto continue_text = [&](Trainer& trainer, bool no_cache) {
    SampleConfig sample;
    sample.sample_tokens = 20;
    sample.no_kv_cache = no_cache;
    return sample_tokens([&](const Pass& pass) { return trainer.logits(pass); }, sample,
                         config.seq_len, {1, 2, 3}, 5, [] { return false; });
  };
  const std::vector<int32_t> expected = [&] {
    const OnDevice cpu;
    SoloTrainer solo(solo_config, &text.dataset);
    train(solo, kTensorSteps);
    return continue_text(solo, false);
  }();
  run_threads(4, [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    train(trainer, kTensorSteps, &world);
    USP_CHECK(continue_text(trainer, false) == expected, "with a cache");
    USP_CHECK(continue_text(trainer, true) == expected, "without a cache");
  });
}

TEST_CASE("what is computed while a gradient's terms are summed: the weight gradient") {
  for (const char* overlap : {"none", "weight_grad"}) {
    TensorCase c{2, 1, 8, "off", false, 0, "none", "blockwise", overlap, 1};
    const TrainConfig config = tensor_config(c);
    const RandomText text(config, 2000);
    run_threads(2, [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const Tracer& tracer = traced_steps(trainer);
      int64_t hidden = 0;
      for (const Tracer::Exchange& exchange : tracer.exchanges()) {
        for (const Tracer::Span& span : tracer.spans()) {
          hidden += exchange.group == "tp" && span.name == "linear_backward_weight" &&
                    hides(span, exchange);
        }
      }
      const int64_t columns = 2 * config.model.num_layers + 1;  // of the blocks, and the head
      const int64_t expected = overlap == std::string_view("none") ? 0 : columns;
      USP_CHECK(hidden == expected, "{}: {} weight gradients meanwhile, not {}", overlap, hidden,
                expected);
    });
  }
}

TEST_CASE("sizes that do not divide are refused, with some that do") {
  const auto refused = [](auto change, const std::vector<std::string>& words) {
    TensorCase c{2, 1, 2, "again", false, 0, "none", "blockwise", "none", 1};
    TrainConfig config = tensor_config(c);
    change(config);
    check_throws<UsageError>([&] { config.tensor_parallel.check(config); }, words);
  };
  refused([](TrainConfig& c) { c.tensor_parallel.tp_size = 3; },
          {"tp_size=3", "num_heads=8", "1, 2, 4 or 8"});
  refused([](TrainConfig& c) { c.model.ffn_hidden_size = 1; },
          {"tp_size=2 must be at most ffn_hidden_size=1; try 1"});
  refused([](TrainConfig& c) { c.seq_len = 9; }, {"seq_len=9"});
  refused(
      [](TrainConfig& c) {
        c.model.num_heads = 12;
        c.model.num_kv_heads = 3;
      },
      {"num_kv_heads=3", "1 or 3"});
  refused([](TrainConfig& c) { c.model.vocab_size = 1; }, {"vocab_size=1; try 1"});
}

#if __has_include("examples/tensor_2d.h")
TEST_CASE("a linear layer on a square of ranks is the serial layer") {
  for (int ranks : {1, 4, 9}) {
    for (Moves moves : {Moves::input, Moves::output}) {
      run_threads(ranks, [&](const Communicator& world) { check_linear_2d(world, moves); });
    }
  }
}

TEST_CASE("an MLP on a square of ranks is the serial MLP") {
  for (int ranks : {1, 4, 9}) run_threads(ranks, check_mlp_2d);
}

TEST_CASE("an MLP on a square of ranks sends what the formula says, on every rank") {
  for (int side : {2, 3}) {
    run_threads(side * side, [&](const Communicator& world) {
      for (const auto& moves : kAllMoves) {
        const int64_t T = 5 * side, H = 3 * side, F = 7 * side;
        const double sent = sent_by_mlp(world, moves, T, H, F);
        const double formula = MlpTraffic::in_2d(H, F, side, moves).elements(T);
        USP_CHECK(std::abs(sent - formula) < 1e-6, "{} elements, by formula {}", sent, formula);
      }
    });
  }
}

TEST_CASE("the ledger says from how many tokens on a square of ranks sends less than a line") {
  constexpr int64_t H = 64, F = 192;  // the squares divide both
  for (int side : {2, 4, 8}) {
    for (const auto& moves : kAllMoves) {
      CAPTURE(side, static_cast<int>(moves.first), static_cast<int>(moves.second));
      const OnDevice meta(Device::meta);
      DryEngine engine(side * side - 2, side * side);
      const Communicator world = Communicator::world(engine);
      const TensorRegion region({.tp_size = side * side}, world);
      const auto sends_less = [&](int64_t T) {
        const Ledger::Entry before = Runtime::current().ledger().total();
        const Tensor y = Tensor::empty({T, H}, DType::f64);
        region.leave(y, Pass{}).wait();
        region.enter_backward(y).wait();  // dx
        const auto line = double((Runtime::current().ledger().total() - before).wire_bytes) / 8;
        REQUIRE(line == MlpTraffic::in_1d(H, side * side).elements(T));
        return sent_by_mlp(world, moves, T, H, F) < line;
      };
      const double more_than = tokens_until_less(MlpTraffic::in_2d(H, F, side, moves),
                                                 MlpTraffic::in_1d(H, side * side));
      if (std::isinf(more_than)) {
        REQUIRE(!sends_less(side << 20));
      } else {
        const auto multiple = static_cast<int64_t>(more_than) / side;
        REQUIRE(!sends_less(multiple * side));
        REQUIRE(sends_less((multiple + 1) * side));
      }
    }
  }
}

TEST_CASE("a square of ranks sends what sequence parallelism and ZeRO-3 do over rows and columns") {
  constexpr int64_t Q = 8, T = 512, H = 64, F = 192;
  const OnDevice meta(Device::meta);
  DryEngine engine(10, Q * Q);
  const Communicator world = Communicator::world(engine);
  sent_by_mlp(world, kWideStays, T, H, F);
  const Communicator tp = world.split("tp", [](int rank) { return rank / static_cast<int>(Q); });
  const Communicator dp = world.split("dp", [](int rank) { return rank % static_cast<int>(Q); });
  const auto empty = [](const Shape& shape) { return Tensor::empty(shape, DType::f64); };
  const TensorRegion region({.tp_size = Q, .sequence_parallel = true}, tp);  // input gathered again
  const Tensor x = empty({T / Q / Q, H});
  const Tensor whole = region.enter(x, Pass{}).wait();
  region.leave(whole, Pass{}).wait();
  region.leave_backward(x).wait();
  region.gather(x).wait();
  region.enter_backward(whole).wait();
  REQUIRE(sent_over("tp") == sent_over("row"));
  const Tensor weights = empty({3 * F * H / Q}), shard = empty({3 * F * H / Q / Q});
  dp.all_gather(weights, shard);
  dp.all_gather(weights, shard);
  dp.reduce_scatter(shard, weights);
  REQUIRE(sent_over("dp") == sent_over("column"));
}

TEST_CASE("a rank of a square holds one block of another rank at a time, of x and of W") {
  OnDevice meta(Device::meta);
  DryEngine engine(0, 64);
  const Grid grid(Communicator::world(engine));
  constexpr int64_t T = 5 * 8, I = 3 * 8, O = 7 * 8;
  constexpr int64_t x_bytes = T * I / 8, y_bytes = T * O / 8, weight_bytes = O * I / 8;  // a block
  const Tensor x = grid.block(Tensor::empty({T, I}, DType::f64));
  for (Moves moves : {Moves::input, Moves::output}) {
    const Linear2D layer(grid, moves, Tensor::empty({O, I}, DType::f64));
    Allocator& allocator = meta.runtime.allocator();
    allocator.reset_peaks();
    const int64_t before = allocator.live_bytes();
    Linear2D::Saved saved;
    layer.forward(x, saved);
    const int64_t of_others = moves == Moves::input ? weight_bytes + x_bytes : 2 * y_bytes;
    REQUIRE(allocator.peak_bytes() - before == y_bytes + of_others);
  }
}

TEST_CASE("a square of ranks refuses what does not divide") {
  const OnDevice meta(Device::meta);
  DryEngine six(0, 6), nine(0, 9);
  check_throws<UsageError>([&] { Grid grid(Communicator::world(six)); },
                           {"tp_size=6 must be a square; try 4 or 9"});
  const Grid grid(Communicator::world(nine));
  check_throws<UsageError>(
      [&] {
        grid.block(Tensor::empty({6, 10}, DType::f64));
      },
      {"3 x 3 ranks cannot split an axis of 10; try 12"});
}
#endif

}  // namespace
}  // namespace usp::test

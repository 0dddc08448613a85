#include "accounting/expert_accountant.h"

#include "accounting/distinct_ranks.h"
#include "expert_parallel/moe.h"
#include "technique/accounting/kept.h"
#include "technique/layout_of_flags.h"
#include "technique/pipeline_parallel/pipeline_parity.h"

/// What a mixture of experts asks of memory: formulas beside a dry run.
namespace usp::test {
namespace {

/// Experts for the n-th layout, every kind of them in turn.
TrainConfig with_experts(const PipelineCase& c, int64_t n) {
  TrainConfig config = pipeline_config(c);
  ExpertShape& shape = config.model.experts;
  shape.num_experts = 4 << (n % 2);
  shape.num_experts_per_tok = 1 + n % 3;
  shape.num_shared_experts = n / 2 % 2;
  shape.first_dense_layers = n / 3 % 2;
  shape.moe_ffn_hidden_size = n % 5 == 0 ? 8 : 0;
  shape.router_score = n % 3 == 0 ? "sigmoid" : "softmax";
  ExpertConfig& experts = config.expert_parallel;
  experts.expert_tp = n / 4 % 2 == 1;
  const int64_t ranks = config.mesh().expert_ranks();
  experts.ep_size = n / 8 % 2 == 0 ? 1 : std::gcd(ranks, int64_t{4});
  const char* kinds[] = {"none", "sample", "batch", "bias"};
  experts.balance = kinds[n % 4];
  experts.capacity_factor = n % 7 == 0 ? 1.25 : 0;
  return config;
}

/// The same experts, whose tokens go by node.
TrainConfig with_nodes(TrainConfig config, int64_t node_size) {
  ExpertConfig& experts = config.expert_parallel;
  experts.ep_size = std::gcd(config.mesh().expert_ranks(), int64_t{8});
  config.model.experts.num_experts = 8;
  experts.dispatch = "by_node";
  config.communication->node_size = node_size * (experts.expert_tp ? config.mesh().tp : 1);
  return config;
}

/// In f64 all tensors of a pass have as many bytes an element; in bf16 sums have twice as many.
std::vector<std::pair<const char*, int>> dtypes_and_ranks(const MeshSizes& mesh) {
  std::vector<std::pair<const char*, int>> both;
  for (const char* dtype : {"f64", "bf16"}) {
    for (int stage = 0; stage < mesh.pp; ++stage) {
      both.emplace_back(dtype, mesh.first_of_stage(stage));
    }
  }
  return both;
}

TEST_CASE("the activations of a stage with experts are those of the formula, to the byte",
          "[no_races]") {
  int compared = 0;
  int64_t n = 0;
  for (PipelineCase c : pipeline_cases(20)) {
    ++n;
    if (c.tp > 1 && c.sequence == std::string_view("off")) c.sequence = "again";
    TrainConfig config = with_experts(c, n);
    const int64_t T = 8 / c.cp, R = T * config.model.experts.num_experts_per_tok;
    for (const auto& [dtype, rank] : dtypes_and_ranks(config.mesh())) {
      config.dtype = dtype;
      CAPTURE(n, c.name(), dtype, rank, config.expert_parallel.ep_size,
              config.expert_parallel.expert_tp, config.expert_parallel.balance,
              config.model.experts.num_shared_experts, config.model.experts.num_experts, R);
      const int64_t predicted = predict(config, rank).peak_activations;
      const int64_t made = simulate<Trainer>(config, rank).peak_activations;
      if (c.in_turns) {
        CHECK(made <= predicted);
      } else {
        CHECK(made == predicted);
      }
      ++compared;
    }
  }
  REQUIRE(compared > (kSanitized ? 10 : 400));
}

TEST_CASE("the activations of tokens that go by node are those of the formula, to the byte",
          "[no_races]") {
  int compared = 0, between_nodes = 0;
  int64_t n = 0;
  for (PipelineCase c : pipeline_cases(20)) {
    ++n;
    if (c.tp > 1 && c.sequence == std::string_view("off")) c.sequence = "again";
    TrainConfig config = with_nodes(with_experts(c, n), 1 << n % 3);
    const ExpertConfig& experts = config.expert_parallel;
    if (experts.ep_size == 1) continue;
    const int64_t in_node = experts.ranks_in_node(config);
    between_nodes += in_node < experts.ep_size;
    for (const auto& [dtype, rank] : dtypes_and_ranks(config.mesh())) {
      config.dtype = dtype;
      CAPTURE(n, c.name(), dtype, rank, experts.ep_size, in_node, experts.expert_tp,
              experts.balance, config.model.experts.num_shared_experts,
              config.model.experts.num_experts_per_tok);
      const int64_t predicted = predict(config, rank).peak_activations;
      const int64_t made = simulate<Trainer>(config, rank).peak_activations;
      if (c.in_turns) {
        CHECK(made <= predicted);
      } else {
        CHECK(made == predicted);
      }
      ++compared;
    }
  }
  REQUIRE(compared > (kSanitized ? 0 : 120));
  REQUIRE(between_nodes > (kSanitized ? 0 : 20));
}

/// Layouts at random, of every kind of parallelism, in which few numbers divide.
TrainConfig random_composition(Random& random) {
  const auto any_of = [&]<class T>(std::initializer_list<T> values) {
    return values.begin()[random.integer(0, std::ssize(values) - 1)];
  };
  for (;;) {
    PipelineCase c{{any_of({1, 2, 4}), any_of({1, 2, 3}), any_of({1, 2}),
                    any_of({"off", "again", "kept"}), any_of({true, false}), random.integer(0, 3),
                    any_of({"none", "selective", "full"}), any_of({"naive", "blockwise"}),
                    any_of({"none", "weight_grad", "chunks"}), random.integer(1, 8)}};
    c.pp = random.integer(1, 4);
    c.schedule = any_of({"afab", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe"});
    c.chunks = any_of({1, 2});
    c.uneven = any_of({true, false});
    c.cp = any_of({1, 2});
    if (c.zero_stage >= 2) c.reduce_after = any_of({"micro_batch", "step"});
    if (c.zero_stage == 3) c.reshard_after = any_of({"block", "chunk", "step"});
    if (c.ranks() > 16 || !goes_together(pipeline_config(c))) continue;
    TrainConfig config = with_experts(c, random.integer(0, 63));
    // Logits of the larger ones are more than all that a layer keeps.
    config.model.vocab_size = random.integer(61, 66) * any_of({1, 1, 20});
    config.model.tie_word_embeddings = any_of({true, false});
    config.model.ffn_hidden_size = random.integer(12, 15);
    config.micro_batch_size = random.integer(1, 2);
    config.dtype = any_of({"f64", "bf16"});
    if (c.zero_stage == 0) {
      config.data_parallel.grad_sync = any_of({"naive", "bucketed", "overlapped"});
      config.data_parallel.bucket_mb = 0.01;
    }
    if (c.cp > 1) {
      config.context_parallel.cp_layout = any_of({"zigzag", "contiguous"});
      config.context_parallel.cp_method = any_of({"ring", "all_gather", "ulysses"});
    }
    if (random.integer(0, 3) == 0) config.model.experts = {}, config.expert_parallel = {};
    if (random.integer(0, 3) == 0) config = with_nodes(config, any_of({1, 2}));
    if (goes_together(config)) return config;
  }
}

/// Bytes of all that a rank holds but the scratch of reductions, which other sums share.
using HeldBytes = std::map<std::string, int64_t>;
template <class Found>
HeldBytes held_bytes(const Found& found) {
  HeldBytes held{{"weights", found.states.weights},
                 {"gradients", found.states.gradients},
                 {"optimizer states", found.states.optimizer},
                 {"peak activations", found.peak_activations}};
  for (const LiveBytes& part : found.saved) {
    held[fmt::format("saved by block {}: {}", part.block, part.name)] += part.bytes;
  }
  for (const LiveBytes& buffer : found.buffers) held[std::string(buffer.name)] += buffer.bytes;
  held.erase("scratch of reductions");
  std::erase_if(held, [](const auto& part) { return part.second == 0; });
  return held;
}

TEST_CASE("on every rank of any layout, formulas and shapes say the same, to the byte",
          "[no_races]") {
  const uint64_t seed = 1 + turn();
  Random random(seed);
  int64_t compared = 0, unlike_first = 0, of_stage[4] = {};
  int64_t with_stages = 0, tied = 0, last_is_fullest = 0;  // of those with several stages
  for (int layout = 0; with_stages < (kSanitized ? 4 : 50); ++layout) {
    const TrainConfig config = random_composition(random);
    const MeshSizes mesh = config.mesh();
    ++of_stage[config.data_parallel.zero_stage];
    with_stages += mesh.pp > 1;
    tied += mesh.pp > 1 && config.model.tie_word_embeddings;
    HeldBytes first;
    std::pair<int64_t, int64_t> fullest;  // bytes, stage
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      const HeldBytes predicted = held_bytes(predict(config, rank));
      const Simulation simulation = simulate<Trainer>(config, rank);
      const HeldBytes simulated = held_bytes(simulation);
      fullest = std::max(fullest, {simulation.peak, mesh.place_of(rank).pp});
      INFO(fmt::format("seed {} layout {}: {}, rank {}\npredicted {}\nsimulated {}", seed, layout,
                       describe(config.mesh()), rank, predicted, simulated));
      CHECK(predicted == simulated);
      if (rank == 0) first = simulated;
      unlike_first += simulated != first;
      ++compared;
    }
    last_is_fullest += mesh.pp > 1 && fullest.second == mesh.pp - 1;
  }
  REQUIRE(compared > (kSanitized ? 4 : 200));
  if (!kSanitized) {  // a value that some rule always refuses would be tested nowhere
    for (int64_t stage = 0; stage < 4; ++stage) REQUIRE(of_stage[stage] > 3);
    REQUIRE(tied > 10);
    REQUIRE(with_stages - tied > 10);
    REQUIRE(last_is_fullest > 5);
  }
  REQUIRE(unlike_first > (kSanitized ? 0 : 100));
}

TEST_CASE("shared experts' gradients are written first, in the formula too") {
  // In a unit with the block's dense weights; and in one of their own, where tp cuts them unevenly.
  for (const char* tp : {"", "--tp_size 2 --sequence_parallel --moe_ffn_hidden_size 7"}) {
    for (const char* rounds : {"micro_batch", "step"}) {
      const TrainConfig config = layout_of_flags(fmt::format(
          "--hidden_size 16 --num_heads 4 --num_kv_heads 2 --ffn_hidden_size 12 --num_layers 3 "
          "--vocab_size 33 --seq_len 8 --micro_batch_size 1 --grad_acc_steps 2 --dp_size 2 "
          "--zero_stage 3 --num_experts 4 --num_shared_experts 1 --ep_size 2 --reduce_after {} {}",
          rounds, tp));
      CAPTURE(rounds, tp);
      for (int rank = 0; rank < config.mesh().ranks(); ++rank) {
        const HeldBytes predicted = held_bytes(predict(config, rank));
        CHECK(predicted == held_bytes(simulate<Trainer>(config, rank)));
        CHECK(predicted.at("gradients to reduce") > 0);
      }
    }
  }
}

TEST_CASE("an estimate counts the rows that a pass brings to a rank's experts, be it of halves") {
  // Of 32 tokens a rank of tp routes 16, each to two experts; each rank has half of all experts.
  for (const auto& [overlap, rows] : {std::pair{"none", 32}, {"batch_halves", 16}}) {
    const TrainConfig config = layout_of_flags(fmt::format(
        "--hidden_size 16 --num_heads 4 --num_kv_heads 2 --ffn_hidden_size 12 --num_layers 1 "
        "--vocab_size 33 --seq_len 8 --micro_batch_size 4 --tp_size 2 --sequence_parallel "
        "--num_experts 4 --num_experts_per_tok 2 --ep_size 2 --tp_overlap {}",
        overlap));
    CAPTURE(overlap);
    const std::string what = estimate_ranks(config)[0].what;
    CAPTURE(what);
    CHECK(what.find(fmt::format("{} rows for its experts", rows)) != std::string::npos);
  }
}

TEST_CASE("ranks of a class are alike, and the fullest of all is the first of one", "[no_races]") {
  const uint64_t seed = 101 + turn();
  Random random(seed);
  for (int layout = 0; layout < (kSanitized ? 2 : 50); ++layout) {
    const TrainConfig config = random_composition(random);
    CAPTURE(seed, layout, describe(config.mesh()));
    std::map<HeldBytes, int64_t> of_all, of_classes;
    int64_t peak = 0, found = 0;
    for (int rank = 0; rank < config.mesh().ranks(); ++rank) {
      const Simulation simulation = simulate<Trainer>(config, rank);
      ++of_all[held_bytes(simulation)];
      peak = std::max(peak, simulation.peak);
    }
    for (const auto& [prediction, simulation, ranks, what] : estimate_ranks(config)) {
      of_classes[held_bytes(simulation)] += ranks;
      found = std::max(found, simulation.peak);
    }
    INFO(fmt::format("classes {}\nall {}", of_classes, of_all));
    CHECK(of_classes == of_all);
    CHECK(found == peak);
    CHECK(simulate_fullest(config).peak == peak);
  }
}

/// Runs a block forward on meta.
void check_block_kept(const TrainConfig& config) {
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  const DryMesh dry(config.mesh());
  dry.mesh.world().engine().set_node_size(config.communication->node_size);
  Trainer trainer(config, {nullptr, dry.mesh});
  const DType dtype = parse_dtype(config.dtype);
  const PassShape shape{config.micro_batch_size, config.seq_len, dtype,
                        config.tensor_parallel.row_shares()};
  Pass pass;
  pass.num_samples = shape.num_samples;
  pass.seq_len = shape.seq_len;
  pass.positions = Positions(0, shape.seq_len);
  pass.loss_scale = 1;
  const Block& block = trainer.model().chunk(0)[1];
  Tensor x = Tensor::empty({shape.rows(), config.model.hidden_size}, dtype);
  runtime.allocator().record_events(true);
  BlockSaved saved;
  for (const auto& segment : block) x = segment->forward(x, saved, pass);
  CHECK(live_by_name(runtime.allocator()) == kept_by_name(footprints_of(block, shape)));
}

TEST_CASE("a block with experts keeps what its segments say, by name and to the byte") {
  for (int64_t n = 0; n < 64; ++n) {
    PipelineCase c{};
    c.dp = 1 + n % 2;
    c.tp = 1 + n / 32 % 2;
    c.sequence = c.tp == 1 ? "off" : n / 2 % 2 == 0 ? "again" : "kept";
    c.num_kv_heads = 2;
    c.recompute = "none";
    c.attention = "blockwise";
    c.overlap = "weight_grad";
    c.grad_acc_steps = 1;
    TrainConfig config = with_experts(c, n);
    config.model.experts.first_dense_layers = 0;
    config.expert_parallel.ep_size = std::gcd(config.mesh().expert_ranks(), int64_t{1 + n / 4 % 4});
    for (const char* dtype : {"f64", "bf16"}) {
      config.dtype = dtype;
      CAPTURE(n, dtype, c.tp, c.sequence, config.expert_parallel.ep_size,
              config.expert_parallel.expert_tp, config.expert_parallel.balance,
              config.model.experts.num_shared_experts);
      check_block_kept(config);
      if (n % 4 != 3 || config.mesh().expert_ranks() == 1) continue;
      for (int64_t node_size : {1, 2, 4}) {
        const TrainConfig by_node = with_nodes(config, node_size);
        if (by_node.expert_parallel.ep_size == 1) continue;
        CAPTURE(node_size, by_node.expert_parallel.ep_size);
        check_block_kept(by_node);
      }
    }
  }
}

}  // namespace
}  // namespace usp::test

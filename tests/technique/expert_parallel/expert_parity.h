#pragma once

#include "expert_parallel/router.h"
#include "technique/pipeline_parallel/pipeline_parity.h"

/// Training of a mixture of experts on a mesh of pp x dp x cp x tp ranks, of which ep shard the
/// experts, next to training on one rank.
namespace usp::test {

/// A point in the space of layouts and routers; strings and numbers as the flags have them.
struct ExpertCase : PipelineCase {
  const char *cp_method = "ring", *cp_layout = "zigzag", *attention_kind = "gqa";
  int64_t ep = 1, experts = 4, top_k = 2;
  int64_t node_size = 0;  ///< ranks of ep on a node, and dispatch by node; 0: directly
  const char* router = "softmax";
  bool norm_topk_prob = false;
  double scaling = 1, z_loss = 0;
  const char* balance = "none";
  double capacity = 0;
  int64_t shared = 0, nodes = 1, route_nodes = 0, dense_layers = 0;
  bool expert_tp = false;
  int64_t micro_batch_size = 1, shard_size = 0;
  const char* dtype = "f64";
  /// Biases of the first step's choices, by expert, in every layer; with balance bias.
  std::vector<double> biases = {};

  std::string name() const {
    return fmt::format(
        "ep {} by nodes of {} experts {} k {} {} norm {} scale {} z {} balance {} capacity {} "
        "shared {} nodes {}/{} dense {} expert_tp {} b {} biases {} {} shards {} {} {} {} {}",
        ep, node_size, experts, top_k, router, norm_topk_prob, scaling, z_loss, balance, capacity,
        shared, route_nodes, nodes, dense_layers, expert_tp, micro_batch_size, biases, dtype,
        shard_size, attention_kind, cp_method, cp_layout, PipelineCase::name());
  }
  int64_t samples() const { return micro_batch_size * grad_acc_steps * dp; }  ///< of a step
};

/// Nothing but experts, on so many ranks of dp.
inline ExpertCase plain_experts(int64_t dp, int64_t ep) {
  ExpertCase c{{{1, dp, 2, "off", false, 0, "none", "blockwise", "weight_grad", 1}}};
  c.ep = ep;
  return c;
}

/// Samples of eight tokens; an expert is narrower than a dense MLP. Factors of losses and biases
/// are large enough for two steps to show them.
inline TrainConfig expert_config(const ExpertCase& c) {
  TrainConfig config = pipeline_config(c);
  config.dtype = c.dtype;
  config.data_parallel.shard_size = c.shard_size;
  config.context_parallel.cp_method = c.cp_method;
  config.context_parallel.cp_layout = c.cp_layout;
  config.communication->node_size = c.node_size * (c.expert_tp ? c.tp : 1);
  config.micro_batch_size = c.micro_batch_size;
  config.model.mla.attention_kind = c.attention_kind;
  if (config.model.mla.on()) {
    config.model.mla = {.attention_kind = c.attention_kind,
                        .q_lora_rank = 9,
                        .kv_lora_rank = 7,
                        .qk_nope_head_dim = 3,
                        .qk_rope_head_dim = 4,
                        .v_head_dim = 5};
    config.model.num_kv_heads = config.model.num_heads;
  }
  config.model.experts = {.num_experts = c.experts,
                          .num_experts_per_tok = c.top_k,
                          .moe_ffn_hidden_size = 8,
                          .num_shared_experts = c.shared,
                          .first_dense_layers = c.dense_layers,
                          .router_score = c.router,
                          .norm_topk_prob = c.norm_topk_prob,
                          .routed_scaling_factor = c.scaling,
                          .expert_nodes = c.nodes,
                          .route_nodes = c.route_nodes};
  config.expert_parallel = {.ep_size = c.ep,
                            .dispatch = c.node_size > 0 ? "by_node" : "direct",
                            .expert_tp = c.expert_tp,
                            .balance = c.balance,
                            .router_z_loss_coef = c.z_loss,
                            .capacity_factor = c.capacity};
  if (config.expert_parallel.has_loss()) config.expert_parallel.balance_coef = 0.1;
  if (config.expert_parallel.has_bias()) config.expert_parallel.bias_update_rate = 0.02;
  return config;
}

/// The case on one rank, with all samples at once.
inline TrainConfig alone_config(const ExpertCase& c) {
  ExpertCase one = c;
  one.ep = one.pp = one.chunks = one.cp = one.tp = one.dp = one.grad_acc_steps = 1;
  one.micro_batch_size = c.samples();
  one.shard_size = one.node_size = 0;
  one.schedule = "1f1b";
  one.uneven = one.in_turns = one.expert_tp = false;
  one.cp_method = "ring";
  one.cp_layout = "zigzag";
  one.reduce_after = "micro_batch";
  one.reshard_after = "block";
  one.sequence = "off";
  one.zero_stage = 0;
  one.recompute = "none";
  one.overlap = "none";
  TrainConfig config = expert_config(one);
  config.model.num_layers = c.num_layers();
  return config;
}

/// Whether the case is one that its settings make.
inline bool has_meaning(const ExpertCase& c) {
  // Many ranks where two settings need them, and nowhere else.
  const int64_t most = c.ep == 8 || c.pp == 4 ? 16 : 8;
  if (c.ranks() > most || (c.pp == 1 && c.uneven)) return false;
  // Passes of two micro-batches take turns.
  if (c.pp == 1 && c.in_turns && c.grad_acc_steps == 1) return false;
  if (c.schedule == "interleaved" && c.chunks == 1) return false;  // 1f1b
  const int64_t reach = (c.route_nodes > 0 ? c.route_nodes : c.nodes) * (c.experts / c.nodes);
  if (reach < c.top_k) return false;
  // The gate of a single choice is 1 and has no gradient but noise.
  if (c.top_k == 1 && c.norm_topk_prob) return false;
  return goes_together(expert_config(c));
}

/// Orders of work with their number of ranks, ways to shard tokens over cp, and what ZeRO keeps
/// for how long.
struct ExpertLayouts {
  std::vector<std::pair<int64_t, const char*>> stages = {
      {1, "1f1b"},          {2, "naive"},  {2, "afab"},  {2, "1f1b"},      {2, "interleaved"},
      {2, "breadth_first"}, {2, "llama3"}, {2, "zb_h1"}, {2, "zb_h2"},     {2, "zb_v"},
      {2, "dualpipe"},      {2, "auto"},   {4, "1f1b"},  {2, "dualpipe_v"}};
  std::vector<std::tuple<int64_t, const char*, const char*>> context = {
      {1, "ring", "zigzag"},
      {2, "ring", "zigzag"},
      {2, "all_gather", "contiguous"},
      {2, "ulysses", "zigzag"}};
  std::vector<std::tuple<int64_t, const char*, const char*>> zero = {
      {0, "micro_batch", "block"}, {1, "micro_batch", "block"}, {2, "micro_batch", "block"},
      {2, "step", "block"},        {3, "micro_batch", "block"}, {3, "step", "step"}};
};

inline constexpr size_t kMostRandomCases = 50;

/// Cases among which every pair of values occurs, then so many at random.
inline std::vector<ExpertCase> expert_cases(size_t random) {
  const ExpertLayouts layouts;
  const std::vector<const char*> balance = {"none", "sample", "batch", "bias"};
  const std::vector<double> capacity = {0, 1, 0.5};
  const std::vector<std::pair<int64_t, int64_t>> nodes = {{1, 0}, {2, 1}, {4, 2}};
  const std::vector<const char*> sequence = {"off", "again", "kept"};
  const std::vector<const char*> recompute = {"none", "selective", "full"};
  const std::vector<const char*> overlap = {"none", "weight_grad", "chunks", "batch_halves"};
  const auto at = [&](const Point& p) {
    ExpertCase c{{{int64_t{1} << p[0], int64_t{1} << p[1], 2, sequence[p[2]], p[3] == 1, 0,
                   recompute[p[5]], "blockwise", overlap[p[6]], int64_t{1} << p[7]}}};
    std::tie(c.zero_stage, c.reduce_after, c.reshard_after) = layouts.zero[p[4]];
    std::tie(c.cp, c.cp_method, c.cp_layout) = layouts.context[p[8]];
    std::tie(c.pp, c.schedule) = layouts.stages[p[9]];
    for (const char* many : {"interleaved", "breadth_first", "llama3"}) {
      if (c.schedule == many) c.chunks = 2;
    }
    c.in_turns = p[10] == 1;
    c.ep = int64_t{1} << p[11];
    c.experts = int64_t{4} << p[12];
    c.top_k = int64_t{1} << p[13];
    c.router = p[14] == 0 ? "softmax" : "sigmoid";
    c.norm_topk_prob = p[15] == 1;
    c.scaling = p[16] == 0 ? 1 : 2.5;
    c.balance = balance[p[17]];
    c.capacity = capacity[p[18]];
    c.shared = int64_t(p[19]);
    std::tie(c.nodes, c.route_nodes) = nodes[p[20]];
    c.dense_layers = int64_t(p[21]);
    c.expert_tp = p[22] == 1;
    c.z_loss = p[23] == 0 ? 0 : 0.01;
    c.micro_batch_size = int64_t(1 + p[24]);
    c.node_size = int64_t(p[25]);
    c.attention_kind = p[26] == 0 ? "gqa" : "mla";
    c.uneven = p[27] == 1;
    return c;
  };
  const auto size = [](const auto& values) { return std::size(values); };
  const std::vector<size_t> sizes = {3,
                                     4,
                                     3,
                                     2,
                                     size(layouts.zero),
                                     3,
                                     4,
                                     3,
                                     size(layouts.context),
                                     size(layouts.stages),
                                     2,
                                     4,
                                     3,
                                     3,
                                     2,
                                     2,
                                     2,
                                     4,
                                     3,
                                     2,
                                     3,
                                     2,
                                     2,
                                     2,
                                     2,
                                     3,
                                     2,
                                     2};
  const auto points = [&](size_t more) {
    return cover_pairs(
        sizes, more, [&](const Point& p) { return has_meaning(at(p)); },
        /*candidates=*/20000);
  };
  // Those at random come last, and all of them are made once.
  static const std::vector<Point> all = points(kMostRandomCases);
  std::vector<ExpertCase> cases;
  const size_t count = kSanitized ? all.size() : all.size() - kMostRandomCases + random;
  for (size_t i = 0; i < count; ++i) cases.push_back(at(all[i]));
  return cases;
}

/// What a run has come to, whatever its layout: also where its tokens have gone.
struct ExpertResult {
  TrainedState trained;
  double evaluation = 0;
  std::vector<double> expert_losses;                   ///< of each step
  std::vector<std::map<int64_t, SeenLoad>> loads;      ///< of each step, by layer
  std::map<std::string, std::vector<double>> buffers;  ///< biases and the like, after the last one
};

/// Lets the routers begin with the biases of the case.
inline void set_biases(Trainer& trainer, const ExpertCase& c) {
  if (c.biases.empty()) return;
  for (Parameter* buffer : trainer.expert_load().buffers()) buffer->value.assign(c.biases);
}

/// Loads of the last step, by layer; collective, once a step.
inline std::map<int64_t, SeenLoad> seen_by_layer(Trainer& trainer, const TrainConfig& config) {
  std::map<int64_t, SeenLoad> loads;
  for (const SeenLoad& load : trainer.expert_load().seen(config.tokens_per_step())) {
    loads.emplace(load.layer, load);
  }
  return loads;
}

/// Trains the case on one rank; the steps are those of an everyday test.
inline ExpertResult expert_reference(const ExpertCase& c, const Dataset& dataset,
                                     int64_t steps = 3) {
  const OnDevice cpu;
  const TrainConfig config = alone_config(c);
  SoloTrainer solo(config, &dataset);
  set_biases(solo, c);
  ExpertResult result;
  for (int64_t step = 0; step < steps; ++step) {
    solo.train_step(step);
    const StepMetrics metrics = solo.report(step, 0);
    result.trained.losses.push_back(metrics.loss);
    result.trained.grad_norms.push_back(metrics.grad_norm);
    result.expert_losses.push_back(solo.expert_load().loss());
    result.loads.push_back(seen_by_layer(solo, config));
  }
  result.trained.tensors = train(solo, 0).tensors;
  for (const Parameter* buffer : solo.expert_load().buffers()) {
    result.buffers[buffer->name] = buffer->value.items();
  }
  result.evaluation = solo.evaluate();
  return result;
}

/// Throws Error where a layer of this rank has other counts, drops or entropy.
inline void expect_same_loads(const std::map<int64_t, SeenLoad>& found,
                              const std::map<int64_t, SeenLoad>& expected,
                              const std::string& what) {
  for (const auto& [layer, load] : found) {
    const SeenLoad& other = expected.at(layer);
    USP_CHECK(load.counts == other.counts, "{}: layer {} has counts {}, one rank {}", what, layer,
              load.counts, other.counts);
    USP_CHECK(load.dropped == other.dropped, "{}: layer {} drops {}, one rank {}", what, layer,
              load.dropped, other.dropped);
    expect_close({load.entropy}, {other.entropy}, 1e-10, what + ": entropy");
  }
}

/// Trains the case, with what `change` does to its flags, over all ranks of `world`. Throws Error
/// on the first difference from one rank.
inline void check_expert_parity(
    const Communicator& world, const ExpertCase& c, const Dataset& dataset,
    const ExpertResult& expected, const std::function<void(TrainConfig&)>& change = [](auto&) {}) {
  TrainConfig config = expert_config(c);
  change(config);
  world.engine().set_node_size(config.communication->node_size);
  const Mesh mesh(world, config.mesh());
  Trainer trainer(config, {&dataset, mesh});
  set_biases(trainer, c);
  const TrainedState& state = expected.trained;
  for (size_t i = 0; i < state.losses.size(); ++i) {
    const auto step = static_cast<int64_t>(i);
    trainer.train_step(step);
    const StepMetrics metrics = trainer.report(step, 0);
    expect_close({metrics.loss}, {state.losses[i]}, 1e-10, c.name() + ": loss");
    expect_close({metrics.grad_norm}, {state.grad_norms[i]}, 1e-10, c.name() + ": gradient norm");
    expect_close({world.sum(trainer.expert_load().loss())}, {expected.expert_losses[i]}, 1e-10,
                 c.name() + ": expert loss");
    expect_same_loads(seen_by_layer(trainer, config), expected.loads[i],
                      fmt::format("{}: step {}", c.name(), step));
  }
  expect_same_parameters(trainer, state, 1e-10, c.name());
  for (const Parameter* buffer : trainer.expert_load().buffers()) {
    expect_close(buffer->value.items(), expected.buffers.at(buffer->name), 1e-10,
                 c.name() + ": " + buffer->name);
  }
  double elements = 0;
  for (const TrainedState::Named& tensor : state.tensors) elements += double(tensor.values.size());
  const double counted = world.sum(double(trainer.model().parameters().counted()));
  USP_CHECK(counted == elements / 4, "{}: {} elements counted, the model has {}", c.name(), counted,
            elements / 4);
  expect_close({trainer.evaluate()}, {expected.evaluation}, 1e-10, c.name() + ": evaluation");
}

/// Experts over ranks of two stages, where there are four ranks or eight: those of a stage shard
/// its experts, and know nothing of the other's. Throws Error on the first difference from one
/// rank.
inline void check_experts_in_stages(const Communicator& world) {
  if (world.size() != 4 && world.size() != 8) return;
  ExpertCase c = plain_experts(/*dp=*/2, /*ep=*/2);
  c.pp = 2;
  c.tp = world.size() / 4;
  c.sequence = c.tp == 1 ? "off" : "again";
  c.schedule = c.tp == 1 ? "dualpipe" : "1f1b";
  c.zero_stage = c.tp == 1 ? 0 : 3;  // over the two ranks that hold the same experts
  c.grad_acc_steps = 4;
  c.balance = c.tp == 1 ? "batch" : "bias";
  c.capacity = 1;
  c.shared = 1;
  const Text text;
  check_expert_parity(world, c, text.dataset, expert_reference(c, text.dataset));
}

/// A model with experts and what its routers count, outside of a Trainer: one forward and backward
/// pass after the other, of which a test sees what is kept in between.
class ExpertModel {
 public:
  ExpertModel(const TrainConfig& config, const Mesh& mesh)
      : config_(config),
        mesh_(mesh),
        view_(config, mesh),
        model_(config, view_),
        grads_(model_.parameters()),
        loss_(Tensor::zeros({1}, DType::f64)) {
    model_.parameters().allocate(parse_dtype(config.dtype), /*seed=*/1);
    view_.load->allocate(config.model.experts.num_experts, parse_dtype(config.dtype));
    view_.load->begin_step();
  }

  /// This rank's micro-batches of a global batch of random tokens.
  std::vector<Pass> passes(uint64_t seed = 3) const {
    Random random(seed);
    const int64_t S = config_.seq_len, B = config_.micro_batch_size;
    const int64_t vocab_size = config_.model.vocab_size;
    const std::vector<int32_t> tokens = random.tokens(config_.tokens_per_step(), vocab_size);
    const std::vector<int32_t> targets = random.tokens(config_.tokens_per_step(), vocab_size);
    std::vector<Pass> passes;
    for (int64_t i = 0; i < config_.grad_acc_steps; ++i) {
      Pass pass;
      pass.micro_batch = i;
      pass.num_samples = B;
      pass.seq_len = S;
      pass.first_sample = (i * mesh_.dp().size() + mesh_.dp().rank()) * B;
      pass.loss_scale = 1 / double(config_.tokens_per_step());
      pass.loss = loss_;
      const auto begin = pass.first_sample * S, end = begin + B * S;
      view_.context.take_rows({tokens.begin() + begin, tokens.begin() + end},
                              {targets.begin() + begin, targets.begin() + end}, pass);
      passes.push_back(std::move(pass));
    }
    return passes;
  }

  Model& model() { return model_; }
  Grads& grads() { return grads_; }
  ParameterList& parameters() { return model_.parameters(); }
  ExpertLoad& load() { return *view_.load; }
  /// Cross entropy and what the routers add, on this rank.
  double loss() const { return loss_.item() + view_.load->loss(); }
  void forget_losses() {
    ops::fill(loss_, 0);
    view_.load->begin_step();
  }

 private:
  TrainConfig config_;
  const Mesh& mesh_;
  RankView view_;
  Model model_;
  Grads grads_;
  Tensor loss_;
};

/// Where the tokens of a forward pass have gone, layer by layer.
inline std::vector<Routing> routings_of(Model::Activations& activations) {
  std::vector<Routing> routings;
  for (BlockSaved& saved : activations) {
    if (saved.has<Routing>()) routings.push_back(saved.get<Routing>());
  }
  return routings;
}

}  // namespace usp::test

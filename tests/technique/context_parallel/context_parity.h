#pragma once

#include "accounting/context_accountant.h"
#include "comm/launch.h"
#include "context_parallel/attention.h"
#include "technique/data_parallel/zero_parity.h"
#include "technique/tensor_parallel/tensor_parity.h"
#include "technique/tiny_llama.h"
#include "testing.h"

/// Training on a mesh of dp x cp x tp ranks next to training on one rank, and attention alone over
/// ranks next to attention.
namespace usp::test {

/// A point in the space of layouts; strings and numbers as the flags have them.
struct ContextCase : TensorCase {
  int64_t cp = 1;
  const char *layout = "zigzag", *method = "ring";
  int64_t ulysses_size = 1;
  const char* cp_recompute = "exchange";
  const char* cp_overlap = "compute";
  bool document_mask = false;
  int64_t shard_size = 0;

  int64_t ranks() const { return cp * tp * dp; }
  /// Three ranks split 12 heads.
  int64_t num_heads() const { return cp == 3 ? 12 : 8; }
  ContextParallelConfig context() const {
    ContextParallelConfig config;
    config.cp_size = cp;
    config.cp_layout = layout;
    config.cp_method = method;
    config.ulysses_size = ulysses_size;
    config.cp_overlap = cp_overlap;
    config.cp_recompute = cp_recompute;
    config.document_mask = document_mask;
    if (document_mask) config.document_separator = 7;
    return config;
  }
  std::string name() const {
    return fmt::format("cp {} {} {} {} {} overlap {} documents {} shards {} {}", cp, layout, method,
                       ulysses_size, cp_recompute, cp_overlap, document_mask, shard_size,
                       TensorCase::name());
  }
};

/// Samples of 48 tokens, which 16 pieces split, and 6 of them in a step.
inline TrainConfig context_config(const ContextCase& c) {
  TrainConfig config = tensor_config(c);
  config.model.num_heads = c.num_heads();
  config.model.hidden_size = 4 * c.num_heads();
  config.seq_len = 48;
  config.micro_batch_size = 6 / c.dp / c.grad_acc_steps;
  config.data_parallel.shard_size = c.shard_size;
  config.context_parallel = c.context();
  return config;
}

/// Whether the case is one, on few ranks: ring_ulysses without a ring is ulysses.
inline bool has_meaning(const ContextCase& c) {
  const bool no_ring = c.ulysses_size >= c.cp && c.ulysses_size > 1;
  return c.ranks() <= 16 && !no_ring && goes_together(context_config(c));
}

/// Cases among which every pair of values occurs, then so many at random.
inline std::vector<ContextCase> context_cases(size_t random) {
  const std::vector<int64_t> cp = {2, 3, 4, 8}, shard_size = {0, 2};
  const std::vector<const char*> layout = {"zigzag", "contiguous"};
  const std::vector<std::pair<const char*, int64_t>> method = {
      {"ring", 1}, {"all_gather", 1}, {"ulysses", 1}, {"ring_ulysses", 2}, {"ring_ulysses", 4}};
  const std::vector<const char*> sequence = {"off", "again", "kept"};
  const std::vector<std::pair<const char*, const char*>> recompute = {
      {"none", "exchange"}, {"selective", "exchange"}, {"full", "exchange"}, {"full", "keep"}};
  const std::vector<const char*> attention = {"naive", "blockwise"};
  const std::vector<const char*> overlap = {"none", "weight_grad", "chunks", "batch_halves"};
  const auto at = [&](const Point& p) {
    const bool three = cp[p[0]] == 3;
    const std::array<int64_t, 3> kv_heads = {1, three ? 3 : 2, three ? 12 : 8};
    ContextCase c{{int64_t(1 + p[1]), int64_t(1 + p[2]), kv_heads[p[3]], sequence[p[4]], p[5] == 1,
                   int64_t(p[6]), recompute[p[7]].first, attention[p[8]], overlap[p[9]],
                   p[10] == 0 ? 1 : 3, p[11] == 0 ? 0.0 : 0.25}};
    c.cp = cp[p[0]];
    c.layout = layout[p[12]];
    std::tie(c.method, c.ulysses_size) = method[p[13]];
    c.cp_recompute = recompute[p[7]].second;
    c.cp_overlap = p[14] == 0 ? "compute" : "none";
    c.document_mask = p[15] == 1;
    c.shard_size = shard_size[p[16]];
    return c;
  };
  std::vector<ContextCase> cases;
  for (const Point& point : cover_pairs({4, 2, 2, 3, 3, 2, 4, 4, 2, 4, 2, 2, 2, 5, 2, 2, 2}, random,
                                        [&](const Point& p) { return has_meaning(at(p)); })) {
    cases.push_back(at(point));
  }
  return cases;
}

/// The case on one rank.
inline ContextCase alone(ContextCase c) {
  ContextCase one{
      {1, 1, c.num_kv_heads, "off", c.tied, 0, "none", c.attention, "none", 1, c.dropout}};
  one.document_mask = c.document_mask;
  return one;
}

inline TrainConfig alone_config(const ContextCase& c) {
  TrainConfig config = context_config(alone(c));
  config.model.num_heads = c.num_heads();
  config.model.hidden_size = 4 * c.num_heads();
  return config;
}

/// Training on one rank, by what decides its result.
class ContextReferences {
 public:
  ContextReferences(const Dataset& dataset, int64_t steps) : dataset_(dataset), steps_(steps) {}

  const TrainedState& of(const ContextCase& c) {
    const auto key = std::tuple(c.num_heads(), c.num_kv_heads, c.tied, c.dropout, c.document_mask);
    if (const auto found = states_.find(key); found != states_.end()) return found->second;
    const OnDevice cpu;
    SoloTrainer solo(alone_config(c), &dataset_);
    return states_[key] = train(solo, steps_);
  }

 private:
  const Dataset& dataset_;
  int64_t steps_;
  std::map<std::tuple<int64_t, int64_t, bool, double, bool>, TrainedState> states_;
};

/// What all ranks have sent over cp.
inline ContextTraffic sent_over_cp(const Communicator& world) {
  const auto all = [&](std::initializer_list<const char*> groups, CommKind kind) {
    double bytes = 0;
    for (const char* group : groups) {
      bytes += double(Runtime::current().ledger().get(group, kind).wire_bytes);
    }
    return static_cast<int64_t>(world.sum(bytes));
  };
  return {all({"cp_ring", "cp_ring_gradients"}, CommKind::send),
          all({"cp_ring"}, CommKind::all_gather), all({"cp_ring"}, CommKind::reduce_scatter),
          all({"cp_heads"}, CommKind::all_to_all)};
}

/// Throws Error unless the ranks have sent what predict_context_traffic() says of so many steps.
inline void check_context_traffic(const Communicator& world, const TrainConfig& config,
                                  const ContextTraffic& before, int64_t steps,
                                  const std::string& what) {
  const ContextTraffic after = sent_over_cp(world), predicted = predict_context_traffic(config);
  const auto check = [&](int64_t ContextTraffic::*kind, const char* operation) {
    const int64_t sent = after.*kind - before.*kind;
    USP_CHECK(sent == steps * predicted.*kind, "{}: {} bytes in {} over cp, {} predicted", what,
              sent, operation, steps * predicted.*kind);
  };
  check(&ContextTraffic::send, "send");
  check(&ContextTraffic::all_gather, "all_gather");
  check(&ContextTraffic::reduce_scatter, "reduce_scatter");
  check(&ContextTraffic::all_to_all, "all_to_all");
}

/// Trains the case over all ranks of `world`. Throws Error on the first difference from the
/// reference, and where a step sends other bytes than the formulas say.
inline void check_context_parity(const Communicator& world, const ContextCase& c,
                                 const Dataset& dataset, const TrainedState& expected) {
  const TrainConfig config = context_config(c);
  const Mesh mesh(world, config.mesh());
  Trainer trainer(config, {&dataset, mesh});
  const ContextTraffic over_cp = sent_over_cp(world);
  const TensorTraffic over_tp = sent_over_tp(world);
  const bool counts = mesh.tp().rank() == 0;  // the others may have a row of the vocabulary more
  const ZeroTraffic over_dp = sent_by_all(world, counts);
  expect_same_training(trainer, expected, 1e-10, world, c.name());
  const int64_t steps = std::ssize(expected.losses);
  check_context_traffic(world, config, over_cp, steps, c.name());
  check_tensor_traffic(world, config, over_tp, steps, c.name());
  check_zero_traffic(world, config, over_dp, steps, c.name(), counts);
}

/// Attention to samples [B, S], the heads of each position side by side.
struct AttentionInput {
  static constexpr int64_t B = 2, S = 48, D = 4;

  int64_t N, G;
  Values qkv, dout;             ///< [B, S, N + 2G, D], [B, S, N, D]
  std::vector<int32_t> begins;  ///< [B, S], where the documents begin; empty: no mask

  AttentionInput(int64_t heads, int64_t kv_heads, bool documents, uint64_t seed = 3)
      : N(heads), G(kv_heads) {
    Random random(seed);
    qkv = random.normals(B * S * (N + 2 * G) * D);
    dout = random.normals(B * S * N * D);
    if (!documents) return;
    std::vector<int32_t> tokens = random.tokens(B * S, 8);
    tokens[11] = tokens[23] = 0;  // documents that end with a piece
    begins = document_begins(tokens, S, /*separator=*/0);
  }
};

/// Output at all positions, and the gradients of q, k and v as the layer before reads them.
struct AttentionResult {
  Values out, dqkv;
  std::vector<int64_t> forwards, backwards;  ///< of each rank: blocks that it computed
};

/// Attention over the ranks of the config, each with its own positions; `links`: slow ones.
inline AttentionResult attention_over(const ContextParallelConfig& config,
                                      const AttentionInput& input, Probabilities probabilities,
                                      DType dtype, const Links& links = {}) {
  constexpr int64_t B = AttentionInput::B, S = AttentionInput::S, D = AttentionInput::D;
  const int64_t N = input.N, G = input.G;
  const auto ranks = static_cast<size_t>(config.cp_size);
  AttentionResult result{Values(input.dout.size(), kNaN), Values(input.qkv.size(), kNaN),
                         std::vector<int64_t>(ranks), std::vector<int64_t>(ranks)};
  run_threads(static_cast<int>(config.cp_size), [&](const Communicator& cp) {
    cp.engine().emulate(links);
    const ContextGroup group(config, cp);
    const auto core = make_core_attention(N, G, D, probabilities, group);
    Pass pass;
    pass.num_samples = B;
    pass.seq_len = S;
    pass.positions = group.positions(S);
    const Positions attended = group.attended(S);
    if (!input.begins.empty()) {
      pass.documents = Documents(take_positions(input.begins, S, attended), {B, attended.count()});
    }
    const int64_t rows = pass.positions.count();
    const auto each_row = [&](int64_t width, const auto& body) {
      for (int64_t b = 0; b < B; ++b) {
        for (int64_t row = 0; row < rows; ++row) {
          body((b * S + pass.positions[row]) * width, (b * rows + row) * width);
        }
      }
    };
    const auto take = [&](const Values& all, int64_t heads) {
      Values own(B * rows * heads * D);
      each_row(heads * D, [&](int64_t from, int64_t to) {
        std::copy_n(all.begin() + from, heads * D, own.begin() + to);
      });
      return Tensor::from_host(own, {B, rows, heads, D}, dtype);
    };
    const auto put = [&](Values& all, const Tensor& tensor, int64_t heads) {
      const Tensor rounded = Tensor::empty(tensor.shape(), dtype);
      ops::copy(rounded, tensor);
      const Values own = rounded.items();
      each_row(heads * D, [&](int64_t to, int64_t from) {  // no other rank has these rows
        std::copy_n(own.begin() + from, heads * D, all.begin() + to);
      });
    };
    Tracer& tracer = Runtime::current().tracer();
    tracer.record(true);
    CoreAttention::Saved saved;
    const Tensor out = core->forward(take(input.qkv, N + 2 * G), saved, pass);
    put(result.out, out, N);
    put(result.dqkv, core->backward(take(input.dout, N), saved, pass, dtype), N + 2 * G);
    tracer.record(false);
    for (const Tracer::Span& span : tracer.spans()) {
      result.forwards[cp.rank()] += span.name == "attention_forward";
      result.backwards[cp.rank()] += span.name == "attention_backward";
    }
  });
  return result;
}

}  // namespace usp::test

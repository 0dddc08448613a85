// What a layer of experts sends between nodes and inside of them, with tokens that may go to 1, 2,
// ... nodes, and by either way of dispatch: counted by the ledgers of ranks that are threads, next
// to the formula.

#include <atomic>

#include "base/args.h"
#include "base/rng.h"
#include "comm/launch.h"
#include "expert_parallel/add_mixture.h"
#include "expert_parallel/node_dispatch.h"
#include "tensor/console.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

struct Setting {
  int64_t ranks = 8, node_size = 2, num_experts = 64, num_experts_per_tok = 8;
  int64_t tokens = 256;  ///< of each rank

  int64_t nodes() const { return ranks / node_size; }
  void bind(Args& args) {
    args.bind("ep_size", ranks, "ranks, as threads");
    args.bind("node_size", node_size, "of them in a node");
    args.bind("num_experts", num_experts, "experts, whose nodes are groups of experts");
    args.bind("num_experts_per_tok", num_experts_per_tok, "experts of a token");
    args.bind("tokens_of_rank", tokens, "tokens of a rank");
  }
  void validate() const {
    check_range("ep_size", double(ranks), 2, 64);
    check_range("tokens_of_rank", double(tokens), 1, 1 << 16);
    for (const auto& [divisor, of, text] :
         {std::tuple(node_size, ranks, "node_size of ep_size"),
          std::tuple(ranks, num_experts, "ep_size of num_experts")}) {
      if (divisor < 1 || of % divisor != 0) {
        usage_error("{}: {} must divide {}; try {}", text, divisor, of, list_divisors(of));
      }
    }
    check_range("num_experts_per_tok", double(num_experts_per_tok), 1,
                double(num_experts / nodes()));
  }
};

constexpr int64_t kHidden = 32;

ModelConfig model_of(const Setting& s, int64_t route_nodes) {
  ModelConfig model;
  model.hidden_size = kHidden;
  model.ffn_hidden_size = 16;
  model.num_layers = 1;
  model.num_heads = model.num_kv_heads = 1;
  model.experts.num_experts = s.num_experts;
  model.experts.num_experts_per_tok = s.num_experts_per_tok;
  model.experts.expert_nodes = s.nodes();
  model.experts.route_nodes = route_nodes;
  return model;
}

Tensor random_rows(int64_t rows, int64_t rank) {
  const RandomStream stream(/*seed=*/1, fmt::format("tokens of rank {}", rank));
  std::vector<double> numbers(rows * kHidden);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = stream.normal(i);
  return Tensor::from_host(numbers, {rows, kHidden}, DType::f32);
}

/// Bytes that all ranks send.
struct Sent {
  std::atomic<int64_t> net{0}, node{0}, formula_net{0}, formula_node{0};
};

/// What one rank's tokens cause, and the counts that it sends before them.
void add_formula(const Setting& s, bool by_node, int64_t rank, const std::vector<int64_t>& choices,
                 Sent& sent) {
  const int64_t k = s.num_experts_per_tok, of_rank = s.num_experts / s.ranks;
  const DispatchRows rows =
      rows_on_their_way(choices, k, s.num_experts, rank, s.ranks, s.node_size, by_node);
  // Rows there and back, and so do the gradients.
  sent.formula_net += rows.between_nodes * 4 * 4 * kHidden;
  sent.formula_node += rows.in_nodes * 4 * 4 * kHidden;
  sent.formula_node += (s.node_size - 1) * of_rank * 4;
  if (by_node) {  // with a copy go its choices and gates; the gates' gradients come back
    sent.formula_net += rows.between_nodes * 3 * 4 * k + (s.nodes() - 1) * 4;
  } else {
    sent.formula_net += (s.ranks - s.node_size) * of_rank * 4;
  }
}

/// Forward and backward of the layer on one rank.
void run_layer(const Setting& s, const ModelConfig& model, const ExpertConfig& parallel,
               const Communicator& world, Sent& sent) {
  world.engine().set_node_size(s.node_size);
  const Mesh mesh(world, {.dp = s.ranks, .ep = s.ranks, .ep_over_tp = true});
  RankView view;
  view.experts = ExpertGroup(parallel, mesh);
  view.load = std::make_shared<ExpertLoad>(parallel);
  ParameterList parameters;
  Block layer;
  add_mixture(model, {0, "model.layers.0.", /*init_std=*/0.02, /*output_init_std=*/0.01}, view,
              parameters, layer);
  parameters.allocate(DType::f32, /*seed=*/1);
  view.load->allocate(s.num_experts, DType::f32);
  Grads grads(parameters);
  grads.begin_window(1);
  Pass pass;
  pass.num_samples = 1;
  pass.positions = Positions(0, s.tokens);
  pass.seq_len = s.tokens;
  pass.loss_scale = 1;
  const Ledger before = Runtime::current().ledger();
  BlockSaved saved;
  Tensor x = random_rows(s.tokens, world.rank());
  for (const auto& segment : layer) {
    x = segment->forward(x, saved, pass);
    if (segment->name() != "dispatch") continue;
    add_formula(s, parallel.by_node(), world.rank(), saved.get<Routing>().choices.counts(), sent);
  }
  for (auto segment = layer.rbegin(); segment != layer.rend(); ++segment) {
    x = (*segment)->backward(x, saved, grads, pass);
  }
  for (const char* group :
       {"ep", "ep_rail", "ep_node", "ep_counts", "ep_rail_counts", "ep_node_counts"}) {
    const Ledger::Entry entry = Runtime::current().ledger().get(group, CommKind::all_to_all) -
                                before.get(group, CommKind::all_to_all);
    sent.net += entry.net_bytes;
    sent.node += entry.wire_bytes - entry.net_bytes;
  }
}

int run(const Communicator&, int argc, char** argv) {
  Setting s;
  Args args("Counts what experts on several nodes are sent.");
  s.bind(args);
  if (!args.parse(argc, argv)) return 0;
  s.validate();
  print("{} nodes of {} ranks, {} experts, {} of a token; KiB of a layer, forward and backward\n",
        s.nodes(), s.node_size, s.num_experts, s.num_experts_per_tok);
  print("{:>11} {:>8} {:>14} {:>14} {:>14} {:>14}\n", "route_nodes", "dispatch", "between nodes",
        "formula", "inside nodes", "formula");
  for (int64_t route_nodes = 1; route_nodes <= s.nodes(); ++route_nodes) {
    for (const char* dispatch : {"direct", "by_node"}) {
      ExpertConfig parallel;
      parallel.ep_size = s.ranks;
      parallel.dispatch = dispatch;
      Sent sent;
      run_threads(static_cast<int>(s.ranks), [&](const Communicator& world) {
        run_layer(s, model_of(s, route_nodes), parallel, world, sent);
      });
      const auto kib = [](int64_t bytes) { return double(bytes) / 1024; };
      print("{:>11} {:>8} {:>14.1f} {:>14.1f} {:>14.1f} {:>14.1f}\n", route_nodes, dispatch,
            kib(sent.net), kib(sent.formula_net), kib(sent.node), kib(sent.formula_node));
    }
  }
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_alone_main(usp::run, argc, argv); }

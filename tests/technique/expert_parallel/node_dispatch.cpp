#include "expert_parallel/node_dispatch.h"

#include <set>

#include "accounting/expert_accountant.h"
#include "comm/launch.h"
#include "expert_parallel/add_mixture.h"
#include "technique/case_cover.h"
#include "technique/data_parallel/data_parallel_parity.h"
#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

constexpr int64_t kExperts = 16, kGroups = 4, kNodeSteps = 3;

/// A layout and a way to route; strings and numbers as the flags have them.
struct NodeCase {
  int64_t ep, node_size, k, route_nodes;
  bool drops;
  const char* recompute = "none";

  std::string name() const {
    return fmt::format("ep {} nodes of {} k {} M {} drops {} recompute {}", ep, node_size, k,
                       route_nodes, drops, recompute);
  }
  int64_t nodes() const { return std::max<int64_t>(1, ep / node_size); }
};

std::vector<NodeCase> node_cases() {
  const std::vector<int64_t> ep = {4, 8}, node_size = {2, 4, 1}, k = {1, 2, 4};
  std::vector<NodeCase> cases;
  for (const Point& p : cover_pairs({2, 3, 3, 2, 2, 2}, 4)) {
    cases.push_back({ep[p[0]], node_size[p[1]], k[p[2]], int64_t(1 + p[3]), p[4] == 1,
                     p[5] == 1 ? "full" : "none"});
  }
  return cases;
}

ExpertShape shape_of(const NodeCase& c) {
  ExpertShape shape;
  shape.num_experts = kExperts;
  shape.num_experts_per_tok = c.k;
  shape.num_shared_experts = 1;
  shape.expert_nodes = kGroups;
  shape.route_nodes = c.route_nodes;
  return shape;
}

ExpertConfig parallel_of(const NodeCase& c, const char* dispatch) {
  ExpertConfig config;
  config.ep_size = c.ep;
  config.dispatch = dispatch;
  config.capacity_factor = c.drops ? 1 : 0;
  return config;
}

// One layer.

constexpr int64_t kSampleLen = 4;

/// Number of samples of each rank: the second one has nothing to do.
int64_t samples_of(int64_t rank) { return rank == 1 ? 0 : 2 + rank % 2; }

/// What ranks have of a layer, in the order of their tokens.
struct Outcome {
  Values y, dx;
  std::vector<std::vector<int64_t>> kept;  ///< choices by rank; of dispatch=direct alone
  int64_t net = 0, wire = 0, numbers = 0;  ///< bytes; of routing's numbers, those between nodes
};

int64_t sent(const char* group, int64_t Ledger::Entry::*bytes) {
  return Runtime::current().ledger().get(group, CommKind::all_to_all).*bytes;
}

/// One rank's part: forward and backward of a layer of experts on its rows of all tokens.
class LayerOnRank {
 public:
  LayerOnRank(const NodeCase& c, const ExpertGroup& experts) : parallel_(experts.config()) {
    ModelConfig model = tiny_model();
    model.experts = shape_of(c);
    RankView view;
    view.experts = experts;
    view.load = load_ = std::make_shared<ExpertLoad>(parallel_);
    add_mixture(model, {0, "", /*init_std=*/0.02, /*output_init_std=*/0.01}, view, parameters_,
                segments_);
    parameters_.allocate(DType::f64, 1);
    load_->allocate(kExperts, DType::f64);
  }

  /// x, dy: of the rows from sample `first` on.
  Outcome run(const Tensor& x, const Tensor& dy, int64_t first) {
    Pass pass;
    pass.first_sample = first;
    pass.num_samples = x.size(0) / kSampleLen;
    pass.positions = Positions(0, kSampleLen);
    pass.seq_len = kSampleLen;
    pass.loss_scale = 1;
    load_->begin_step();
    Grads grads(parameters_);
    grads.begin_window(1);
    BlockSaved saved;
    Outcome outcome;
    Tensor y = x, dx = dy;
    for (const auto& segment : segments_) {
      y = segment->forward(y, saved, pass);
      if (segment->name() == "dispatch") outcome.kept = {kept_choices(saved.get<Routing>())};
    }
    for (size_t i = segments_.size(); i-- > 0;) {
      dx = segments_[i]->backward(dx, saved, grads, pass);
    }
    outcome.y = y.items();
    outcome.dx = dx.items();
    return outcome;
  }

 private:
  static std::vector<int64_t> kept_choices(const Routing& routing) {
    std::vector<int64_t> kept = routing.choices.counts();
    const std::vector<int64_t> slots = routing.slots.counts();
    for (size_t i = 0; i < kept.size(); ++i) {
      if (slots[i] < 0) kept[i] = -1;
    }
    return kept;
  }

  ExpertConfig parallel_;
  ParameterList parameters_;
  std::shared_ptr<ExpertLoad> load_;
  Block segments_;
};

/// The layer on so many ranks; `dispatch` nullptr: on one, which has all tokens.
Outcome run_layer(const NodeCase& c, const char* dispatch) {
  const int64_t H = tiny_model().hidden_size, ranks = dispatch == nullptr ? 1 : c.ep;
  std::vector<int64_t> begin = {0};  // in samples
  for (int64_t r = 0; r < c.ep; ++r) begin.push_back(begin.back() + samples_of(r));
  Random random(5);
  const Values x = random.normals(begin.back() * kSampleLen * H, 1);
  const Values dy = random.normals(begin.back() * kSampleLen * H, 1);
  std::vector<Outcome> parts(ranks);
  run_threads(static_cast<int>(ranks), [&](const Communicator& world) {
    world.engine().set_node_size(c.node_size);
    const int64_t r = world.rank(), first = begin[r], end = begin[ranks == 1 ? c.ep : r + 1];
    const auto own = [&](const Values& all) {
      const int64_t rows = (end - first) * kSampleLen;
      return Tensor::from_host(std::span(all).subspan(first * kSampleLen * H, rows * H), {rows, H},
                               DType::f64);
    };
    NodeCase here = c;
    here.ep = ranks;
    const Mesh mesh(world, {.dp = ranks, .ep = ranks, .ep_over_tp = true});
    LayerOnRank layer(c, ExpertGroup(parallel_of(here, ranks == 1 ? "direct" : dispatch), mesh));
    Outcome& part = parts[r];
    part = layer.run(own(x), own(dy), first);
    for (const char* group : {"ep", "ep_rail", "ep_node"}) {
      part.net += sent(group, &Ledger::Entry::net_bytes);
      part.wire += sent(group, &Ledger::Entry::wire_bytes);
    }
    part.numbers = sent("ep_rail_counts", &Ledger::Entry::net_bytes);
  });
  Outcome whole;
  for (const Outcome& part : parts) {
    whole.y.insert(whole.y.end(), part.y.begin(), part.y.end());
    whole.dx.insert(whole.dx.end(), part.dx.begin(), part.dx.end());
    whole.kept.push_back(part.kept[0]);
    whole.net += part.net;
    whole.wire += part.wire;
    whole.numbers += part.numbers;
  }
  return whole;
}

/// The most nodes that a token of such a model is sent to, where experts lie on n nodes. That is
/// route_nodes if every node has whole groups of experts.
int64_t most_nodes_of_token(const ExpertShape& shape, int64_t n) {
  const int64_t groups = shape.expert_nodes, limit = shape.nodes_of_token();
  int64_t nodes = n;
  if (groups % n == 0) nodes = limit;
  if (n % groups == 0) nodes = limit * (n / groups);  // each of them over several nodes
  return std::min({nodes, n, shape.num_experts_per_tok});
}

/// The formula, from the choices of all ranks.
DispatchRows rows_of(const NodeCase& c, const Outcome& direct, bool by_node) {
  DispatchRows rows;
  for (int64_t r = 0; r < c.ep; ++r) {
    const auto [between_nodes, in_nodes] = rows_on_their_way(direct.kept[r], c.k, kExperts, r, c.ep,
                                                             std::min(c.node_size, c.ep), by_node);
    rows.between_nodes += between_nodes;
    rows.in_nodes += in_nodes;
  }
  return rows;
}

TEST_CASE(
    "a layer whose tokens go by node is the layer, and sends one row to each of their nodes") {
  const int64_t H = tiny_model().hidden_size, row = 8 * H;
  for (const NodeCase& c : node_cases()) {
    CAPTURE(c.name());
    const Outcome alone = run_layer(c, nullptr), direct = run_layer(c, "direct"),
                  by_node = run_layer(c, "by_node");
    check_close(direct.y, alone.y, 1e-12, "y, direct");
    check_close(direct.dx, alone.dx, 1e-12, "dx, direct");
    check_close(by_node.y, alone.y, 1e-12, "y, by node");
    check_close(by_node.dx, alone.dx, 1e-12, "dx, by node");

    const DispatchRows one = rows_of(c, direct, false), two = rows_of(c, direct, true);
    REQUIRE(direct.net == 4 * one.between_nodes * row);
    REQUIRE(direct.wire == 4 * (one.between_nodes + one.in_nodes) * row);
    REQUIRE(by_node.net == two.between_nodes * (4 * row + 2 * 8 * c.k));  // gates, and back
    REQUIRE(by_node.wire - by_node.net == 4 * two.in_nodes * row);
    REQUIRE(by_node.numbers == c.ep * (c.nodes() - 1) * 4 + two.between_nodes * 4 * c.k);

    const int64_t tokens = std::ssize(alone.y) / H,
                  most = most_nodes_of_token(shape_of(c), c.nodes());
    REQUIRE(two.between_nodes <= tokens * most);
    REQUIRE(two.between_nodes <= one.between_nodes);
    REQUIRE(one.between_nodes <= tokens * c.k);
    const bool dropped = std::ranges::count(alone.kept[0], -1) > 0;
    REQUIRE(dropped == c.drops);
  }
}

TEST_CASE("no token goes to more nodes than route_nodes says") {
  for (int64_t allowed : {1, 2, 3}) {
    const NodeCase c{8, 2, 4, allowed, false};
    const Outcome direct = run_layer(c, "direct");
    size_t most = 0;
    for (const std::vector<int64_t>& choices : direct.kept) {
      for (size_t begin = 0; begin < choices.size(); begin += c.k) {
        std::set<int64_t> nodes;
        for (int64_t j = 0; j < c.k; ++j) nodes.insert(choices[begin + j] / (kExperts / c.nodes()));
        most = std::max(most, nodes.size());
      }
    }
    REQUIRE(most == static_cast<size_t>(allowed));
    REQUIRE(most_nodes_of_token(shape_of(c), c.nodes()) == allowed);
  }
}

TEST_CASE("rows on their way to experts, counted by hand") {
  // Two nodes of two ranks with two experts each; the tokens of rank 0.
  const auto count = [](std::vector<int64_t> choices, bool by_node) {
    const DispatchRows rows = rows_on_their_way(choices, 3, 8, /*rank=*/0, 4, 2, by_node);
    return std::pair(rows.between_nodes, rows.in_nodes);
  };
  REQUIRE(count({1, 4, 6}, false) == std::pair<int64_t, int64_t>(2, 0));  // to ranks 0, 2 and 3
  REQUIRE(count({1, 4, 6}, true) == std::pair<int64_t, int64_t>(1, 1));   // rank 2 hands one on
  REQUIRE(count({3, 7, 6}, false) == std::pair<int64_t, int64_t>(2, 1));
  REQUIRE(count({3, 7, 6}, true) == std::pair<int64_t, int64_t>(1, 3));
  REQUIRE(count({-1, -1, 5, 0, 1, -1}, false) == std::pair<int64_t, int64_t>(1, 0));
  REQUIRE(count({-1, -1, 5, 0, 1, -1}, true) == std::pair<int64_t, int64_t>(1, 0));
}

TEST_CASE("the nodes of a token where groups of experts and nodes are not the same") {
  const NodeCase c{8, 2, 4, 1, false};
  const ExpertShape shape = shape_of(c);  // of 4 groups, a token chooses within one
  REQUIRE(most_nodes_of_token(shape, 4) == 1);
  REQUIRE(most_nodes_of_token(shape, 2) == 1);  // two groups on each
  REQUIRE(most_nodes_of_token(shape, 8) == 2);  // half a group on each
  REQUIRE(most_nodes_of_token(shape, 3) == 3);  // no saying
  REQUIRE(most_nodes_of_token(shape, 1) == 1);
}

// Training.

TrainConfig node_config(const NodeCase& c, const char* dispatch) {
  TrainConfig config = parity_config();
  config.model.experts = shape_of(c);
  config.recompute = c.recompute;
  config.eval_samples = 3;  // fewer than ranks
  config.expert_parallel = parallel_of(c, dispatch);
  config.communication->node_size = c.node_size;
  config.data_parallel.dp_size = c.ep;
  config.micro_batch_size = 16 / c.ep;
  return config;
}

/// Throws Error at the first difference from `expected`, of the parameters that this rank has.
void expect_trained(Trainer& trainer, const TrainedState& expected, double expected_loss,
                    const std::string& what) {
  const TrainedState found = train(trainer, kNodeSteps);
  expect_close(found.losses, expected.losses, 1e-10, what + ": loss");
  expect_close(found.grad_norms, expected.grad_norms, 1e-10, what + ": gradient norm");
  for (const auto& tensor : found.tensors) {
    const auto same_name = [&](const auto& other) { return other.name == tensor.name; };
    const auto other = std::ranges::find_if(expected.tensors, same_name);
    USP_CHECK(other != expected.tensors.end(), "{}: {}", what, tensor.name);
    expect_close(tensor.values, other->values, 1e-10, what + ": " + tensor.name);
  }
  expect_close({trainer.evaluate()}, {expected_loss}, 1e-10, what + ": validation");
}

TEST_CASE("training by node is training on one rank") {
  const TrainConfig any = parity_config();
  const RandomTokens tokens(any.model.vocab_size);
  const TokenFile file(tokens.path(), 2, any.model.vocab_size);
  const Dataset dataset(file, any.seq_len, 0.1, DataOrder::shuffled, any.seed);
  for (const NodeCase& c : node_cases()) {
    NodeCase alone = c;
    alone.ep = 1;
    TrainedState expected;
    double expected_loss = 0;
    {
      const OnDevice cpu;
      SoloTrainer solo(node_config(alone, "direct"), &dataset);
      expected = train(solo, kNodeSteps);
      expected_loss = solo.evaluate();
    }
    run_threads(static_cast<int>(c.ep), [&](const Communicator& world) {
      world.engine().set_node_size(c.node_size);
      for (const char* dispatch : {"direct", "by_node"}) {
        const TrainConfig config = node_config(c, dispatch);
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&dataset, mesh});
        expect_trained(trainer, expected, expected_loss, c.name() + " " + dispatch);
      }
    });
  }
}

TEST_CASE("what crosses nodes can be told without the ranks that send it") {
  const NodeCase c{8, 2, 2, 2, false};
  const auto bytes = [&](const char* dispatch, const char* group) {
    const Ledger::Entry entry =
        simulate<Trainer>(node_config(c, dispatch), 0).sent.get(group, CommKind::all_to_all);
    return std::pair(entry.net_bytes, entry.wire_bytes);
  };
  const auto [direct_net, direct_wire] = bytes("direct", "ep");
  const auto [rail_net, rail_wire] = bytes("by_node", "ep_rail");
  const auto [node_net, node_wire] = bytes("by_node", "ep_node");
  REQUIRE((0 < direct_net && direct_net < direct_wire));
  REQUIRE((0 < rail_net && rail_net == rail_wire));
  REQUIRE((node_net == 0 && node_wire > 0));
}

TEST_CASE("the report's formula of rows by node is what a dry run sends") {
  for (int64_t node_size : {1, 2, 4, 8}) {
    for (const char* recompute : {"none", "full"}) {
      const NodeCase c{8, node_size, 2, 4, false, recompute};
      CAPTURE(c.name());
      TrainConfig config = node_config(c, "by_node");
      config.seq_len = 8;  // shares of choices without a remainder
      const Simulation made = simulate<Trainer>(config, 0);
      const int64_t sent = made.sent.get("ep_rail", CommKind::all_to_all).wire_bytes +
                           made.sent.get("ep_node", CommKind::all_to_all).wire_bytes;
      REQUIRE(predict_expert_traffic(config) > 0);
      REQUIRE(sent == made.steps * predict_expert_traffic(config));
    }
  }
}

TEST_CASE("nodes that do not have as many ranks of ep each are refused") {
  NodeCase c{8, 2, 2, 2, false};
  const auto check = [&](int64_t ep, int64_t node_size, const std::vector<std::string>& words) {
    TrainConfig config = node_config(c, "by_node");
    config.expert_parallel.ep_size = ep;
    config.communication->node_size = node_size;
    check_throws<UsageError>([&] { config.expert_parallel.check(config); }, words);
  };
  check(8, 0, {"dispatch=by_node", "--node_size 1"});
  check(8, 3, {"node_size=3", "8 ranks of ep", "--node_size 1"});
  TrainConfig config = node_config(c, "by_node");
  for (int64_t good : {1, 2, 4, 8, 16}) {
    config.communication->node_size = good;
    config.expert_parallel.check(config);
  }
}

}  // namespace
}  // namespace usp::test

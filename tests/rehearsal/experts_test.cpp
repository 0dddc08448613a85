#include "experts.h"

#include <map>
#include <set>

#include "base/rng.h"
#include "comm/launch.h"
#include "data_parallel.h"
#include "optimizer.h"
#include "tiny_llama.h"

namespace usp::rehearsal {
namespace {

using test::check_close;
using test::check_gradient;
using test::OnDevice;
using test::OneRank;
using test::Values;

constexpr int64_t kSeqLen = 6, kSamples = 8;  // of the global batch

/// A Llama whose MLPs are experts.
Model experts_model(const ExpertsConfig& experts, int64_t seq_len, DType dtype,
                    const Communicator& ep) {
  const ModelConfig config = test::tiny_model();
  const Llama llama(config, {seq_len, dtype, Probabilities::never_whole});
  const auto build = [&](int64_t block, ParameterList& parameters) {
    if (block == 0 || block == llama.num_blocks() - 1) return llama.build(block, parameters);
    Block segments = make_experts(experts, config, block - 1, parameters, ep);
    segments.insert(segments.begin(), llama.attention(block - 1, parameters));
    return segments;
  };
  Model model(build, {{0, llama.num_blocks()}});
  model.parameters().allocate(dtype, /*seed=*/1);
  return model;
}

/// As test::randomize(), but a weight's values do not depend on what else the rank holds.
void randomize_by_name(ParameterList& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool norm = parameters[i].init_std == 0;
    const RandomStream random(2, parameters[i].name);
    Values values(parameters[i].value.numel());
    for (size_t j = 0; j < values.size(); ++j) {
      values[j] = norm ? 1 + 0.3 * random.normal(j) : 0.5 * random.normal(j);
    }
    parameters[i].value.assign(values);
  }
}

/// Makes channel 0 of the router's input positive for every token, so that its weights there are
/// biases: no token chooses an expert with a low one.
void bias_routers(ParameterList& parameters, const Values& biases) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = parameters[i].name;
    const int64_t columns = parameters[i].value.size(-1);
    Values values = parameters[i].value.items();
    if (name.ends_with("embed_tokens.weight")) {
      for (size_t at = 0; at < values.size(); at += columns) values[at] = 2;
    } else if (name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight")) {
      // Little is added to the residual stream, nothing to channel 0.
      for (double& value : values) value *= 0.1;
      std::fill_n(values.begin(), columns, 0.0);
    } else if (name.ends_with("post_attention_layernorm.weight")) {
      values[0] = 1;
    } else if (name.ends_with("mlp.gate.weight")) {
      for (size_t expert = 0; expert < biases.size(); ++expert) {
        values[expert * columns] = biases[expert];
      }
    }
    parameters[i].value.assign(values);
  }
}

enum class Order {
  one_by_one,  ///< a micro-batch's backward follows its forward
  in_flight,   ///< every forward, then every backward
  deferred,    ///< one by one, weight gradients at the end
};

struct Case {
  ExpertsConfig experts;
  Values router_biases;  ///< by expert; empty: none
  int64_t micro_batches = 1;
  Order order = Order::one_by_one;
  DType dtype = DType::f64;
};

/// What one rank computes in one step, and what it sent.
struct Result {
  double loss = 0, grad_squares = 0;  ///< of all ranks
  std::map<std::string, Values> gradients;
  std::vector<std::vector<int64_t>> to_experts, rows_by_rank;  ///< by micro-batch and layer
  Ledger ledger;
};

/// This rank's share of the global batch, in micro-batches.
std::vector<Pass> passes_of(const Case& scenario, const Mesh& mesh, const Tensor& loss) {
  test::Random random(3);
  const int64_t vocab_size = test::tiny_model().vocab_size, tokens = kSamples * kSeqLen;
  const Tensor inputs = random.token_tensor(tokens, vocab_size);
  const Tensor targets = random.token_tensor(tokens, vocab_size);
  const int64_t length = tokens / (mesh.dp().size() * scenario.micro_batches);
  std::vector<Pass> passes;
  for (int64_t i = 0; i < scenario.micro_batches; ++i) {
    const int64_t begin = (mesh.dp().rank() * scenario.micro_batches + i) * length;
    passes.push_back({.micro_batch = i,
                      .num_samples = length / kSeqLen,
                      .positions = Positions(0, kSeqLen),
                      .documents = {},
                      .tokens = inputs.narrow(0, begin, length),
                      .targets = targets.narrow(0, begin, length),
                      .loss_scale = 1 / double(tokens),
                      .loss = loss});
  }
  return passes;
}

Model::Activations forward(Model& model, const Pass& pass, Result& result) {
  Model::Activations activations = model.forward(pass);
  for (size_t block = 1; block + 1 < activations.size(); ++block) {
    const Routing& routing = activations[block].get<Routing>();
    result.to_experts.push_back(routing.to_experts);
    result.rows_by_rank.push_back(routing.rows_by_rank);
  }
  return activations;
}

void forward_backward(Model& model, Grads& grads, const std::vector<Pass>& passes, Order order,
                      Result& result) {
  std::vector<Model::Activations> activations;
  Grads::Deferred deferred;
  if (order == Order::deferred) grads.defer_to(&deferred);
  for (const Pass& pass : passes) {
    activations.push_back(forward(model, pass, result));
    if (order == Order::in_flight) continue;
    model.backward(std::move(activations.back()), grads, pass);
  }
  for (size_t i = 0; i < passes.size() && order == Order::in_flight; ++i) {
    model.backward(std::move(activations[i]), grads, passes[i]);
  }
  grads.defer_to(nullptr);
  grads.run(deferred);
}

/// One step up to the finished gradients.
Result step(const Case& scenario, const Mesh& mesh) {
  Model model = experts_model(scenario.experts, kSeqLen, scenario.dtype, mesh.ep());
  ParameterList& parameters = model.parameters();
  randomize_by_name(parameters);
  if (!scenario.router_biases.empty()) bias_routers(parameters, scenario.router_biases);
  Grads grads(parameters);
  DataParallel data_parallel({mesh.sizes().dp, "bucketed", 0.0017}, parameters, grads, mesh);
  const Tensor loss = Tensor::zeros({1}, DType::f64);
  const std::vector<Pass> passes = passes_of(scenario, mesh, loss);
  ops::fill(parameters.flat_grads(), test::kNaN);
  Result result;
  {
    const NoHostReads no_host_reads;
    grads.begin_window(scenario.micro_batches);
    forward_backward(model, grads, passes, scenario.order, result);
    grads.end_window();
    data_parallel.finish();
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    // Of the ranks that hold the same part, one enters it into the norm.
    parameters[i].counted = mesh.group(parameters[i].grad_groups.front()).rank() == 0;
    result.gradients[parameters[i].name] = parameters[i].grad.items();
  }
  result.ledger = Runtime::current().ledger();
  result.loss = mesh.world().sum(loss.item());
  result.grad_squares = mesh.world().sum(Optimizer(parameters, {}).grad_squares().item());
  return result;
}

/// The whole batch at once, in a world of one.
Result single_process(Case scenario) {
  const OnDevice cpu;
  const OneRank one;
  scenario.micro_batches = 1;
  scenario.order = Order::one_by_one;
  return step(scenario, one.mesh);
}

std::vector<Result> on_ranks(const Case& scenario, const MeshSizes& sizes) {
  std::vector<Result> results(sizes.dp);
  run_threads(static_cast<int>(sizes.dp), [&](const Communicator& world) {
    results[world.rank()] = step(scenario, Mesh(world, sizes));
  });
  return results;
}

/// Ranks must compute what one process does, and hold every weight between them.
void check_equal(const std::vector<Result>& results, const Result& expected, double tolerance) {
  std::set<std::string> names;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    CAPTURE(rank);
    check_close(Values{results[rank].loss}, Values{expected.loss}, tolerance, "loss");
    check_close(Values{results[rank].grad_squares}, Values{expected.grad_squares}, tolerance,
                "squared gradient norm");
    for (const auto& [name, gradient] : results[rank].gradients) {
      names.insert(name);
      check_close(gradient, expected.gradients.at(name), tolerance, name);
    }
  }
  REQUIRE(names.size() == expected.gradients.size());
}

const MeshSizes kLayouts[] = {{.dp = 2, .ep = 2}, {.dp = 4, .ep = 4}, {.dp = 4, .ep = 2}};

/// The least distance, over all tokens and layers, between the last probability that was chosen
/// and the first that was not.
double smallest_margin(Model& model, const Pass& pass, const ExpertsConfig& config) {
  Model::Activations activations = model.forward(pass);
  double margin = 1;
  for (size_t block = 1; block + 1 < activations.size(); ++block) {
    Values probs = activations[block].get<Routing>().probs.items();
    for (auto row = probs.begin(); row != probs.end(); row += config.num_experts) {
      std::sort(row, row + config.num_experts, std::greater());
      if (config.top_k == config.num_experts) continue;
      margin = std::min(margin, row[config.top_k - 1] - row[config.top_k]);
    }
  }
  return margin;
}

TEST_CASE("experts: the model's gradient agrees with finite differences in every parameter") {
  const OnDevice cpu;
  const OneRank one;
  for (int64_t top_k : {1, 2, 4}) {
    CAPTURE(top_k);
    const ExpertsConfig config{.num_experts = 4, .top_k = top_k};
    Model model = experts_model(config, kSeqLen, DType::f64, one.mesh.ep());
    test::randomize(model.parameters(), 2);
    const Tensor loss = Tensor::zeros({1}, DType::f64);
    test::Random random(5);
    const Pass pass = test::random_pass(random, test::tiny_model(), 2, kSeqLen, 1.0 / 12, loss);
    // A finite difference must not change a choice.
    REQUIRE(smallest_margin(model, pass, config) > 5e-3);
    Grads grads(model.parameters());
    ops::fill(model.parameters().flat_grads(), test::kNaN);
    grads.begin_window(1);
    model.backward(model.forward(pass), grads, pass);
    grads.end_window();
    const auto loss_now = [&] {
      ops::fill(loss, 0);
      model.evaluate(pass);
      return loss.item();
    };
    for (size_t i = 0; i < model.parameters().size(); ++i) {
      const Parameter& parameter = model.parameters()[i];
      check_gradient(parameter.grad, parameter.value, loss_now, parameter.name, /*samples=*/6,
                     /*tolerance=*/1e-8);
    }
  }
}

TEST_CASE("experts: equal probabilities choose the lower index") {
  const OnDevice cpu;
  const OneRank one;
  const ExpertsConfig config{.num_experts = 4, .top_k = 2};
  Model model = experts_model(config, kSeqLen, DType::f64, one.mesh.ep());
  ops::fill(model.parameters().find("model.layers.0.mlp.gate.weight").value, 0);
  test::Random random(5);
  const Tensor loss = Tensor::zeros({1}, DType::f64);
  Model::Activations activations =
      model.forward(test::random_pass(random, test::tiny_model(), 1, kSeqLen, 1, loss));
  REQUIRE(activations[1].get<Routing>().to_experts == std::vector<int64_t>{6, 6, 0, 0});
}

TEST_CASE("experts: ranks compute what one process does on the same samples") {
  for (int64_t top_k : {1, 2, 3}) {
    Case scenario;
    scenario.experts.top_k = top_k;
    const Result expected = single_process(scenario);
    for (const MeshSizes& sizes : kLayouts) {
      CAPTURE(top_k, sizes.dp, sizes.ep);
      check_equal(on_ranks(scenario, sizes), expected, 1e-10);
    }
  }
}

TEST_CASE("experts: the same in f32") {
  Case scenario;
  scenario.dtype = DType::f32;
  const Result expected = single_process(scenario);
  check_equal(on_ranks(scenario, {.dp = 4, .ep = 2}), expected, 1e-4);
  scenario.dtype = DType::f64;
  check_equal({expected}, single_process(scenario), 1e-4);
}

TEST_CASE("experts: a rank holds its own experts and no others") {
  const std::vector<Result> results = on_ranks({}, {.dp = 4, .ep = 2});
  for (int rank = 0; rank < 4; ++rank) {
    for (int expert = 0; expert < 4; ++expert) {
      CAPTURE(rank, expert);
      const auto name = fmt::format("model.layers.1.mlp.experts.{}.up_proj.weight", expert);
      REQUIRE(results[rank].gradients.contains(name) == (expert / 2 == rank % 2));
    }
  }
}

/// Where each token goes is not a matter of the layout.
void check_unused(const Case& scenario, const std::set<int64_t>& unused) {
  const Result expected = single_process(scenario);
  for (const std::vector<int64_t>& counts : expected.to_experts) {
    for (int64_t expert = 0; expert < std::ssize(counts); ++expert) {
      REQUIRE((counts[expert] == 0) == unused.contains(expert));
    }
  }
  for (const MeshSizes& sizes : kLayouts) {
    CAPTURE(sizes.dp, sizes.ep);
    const std::vector<Result> results = on_ranks(scenario, sizes);
    check_equal(results, expected, 1e-10);
    const int64_t own = scenario.experts.num_experts / sizes.ep;
    for (int64_t rank = 0; rank < sizes.dp; ++rank) {
      bool idle = true;
      for (int64_t expert = 0; expert < own; ++expert) {
        idle = idle && unused.contains(rank % sizes.ep * own + expert);
      }
      for (const std::vector<int64_t>& rows : results[rank].rows_by_rank) {
        REQUIRE((rows == std::vector<int64_t>(sizes.ep)) == idle);
      }
    }
  }
}

TEST_CASE("experts: an expert, and a rank, that no token chooses") {
  check_unused({.experts = {4, 2}, .router_biases = {0, 0, 0, -5}}, {3});
  check_unused({.experts = {4, 2}, .router_biases = {0, 0, -5, -5}}, {2, 3});
  check_unused({.experts = {4, 1}, .router_biases = {-5, 0, 0, -5}}, {0, 3});
  check_unused({.experts = {4, 1}, .router_biases = {-5, -5, -5, 0}}, {0, 1, 2});
}

TEST_CASE("experts: several micro-batches in flight, or late weight gradients, change nothing") {
  for (Order order : {Order::one_by_one, Order::in_flight, Order::deferred}) {
    Case scenario;
    scenario.micro_batches = 2;
    scenario.order = order;
    const Result expected = single_process(scenario);
    for (const MeshSizes& sizes : kLayouts) {
      CAPTURE(int(order), sizes.dp, sizes.ep);
      check_equal(on_ranks(scenario, sizes), expected, 1e-10);
    }
  }
}

/// The segments of one layer on two micro-batches, in step or one micro-batch after the other.
class Layer {
 public:
  explicit Layer(const Communicator& world)
      : mesh_(world, {.dp = world.size(), .ep = world.size()}),
        model_(
            [this](int64_t, ParameterList& parameters) {
              return make_experts({}, test::tiny_model(), 0, parameters, mesh_.ep());
            },
            {{0, 1}}),
        grads_(model_.parameters()) {
    model_.parameters().allocate(DType::f64, 1);
    randomize_by_name(model_.parameters());
    Runtime::current().tracer().record(true);
    test::Random random(10 + world.rank());
    for (Tensor& x : x_) x = random.tensor({9, test::tiny_model().hidden_size});
  }

  /// Outputs, input gradients and weight gradients.
  std::vector<Values> run(bool in_step) {
    Tensor flow[2] = {x_[0], x_[1]};
    std::vector<Values> results;
    for (const bool forward : {true, false}) {
      if (!forward) grads_.begin_window(2);
      for (int i = 0; i < 6; ++i) {
        const int batch = in_step ? i % 2 : i / 3;
        const int at = in_step ? i / 2 : i % 3;
        Segment& segment = *model_.chunk(0)[0][forward ? at : 2 - at];
        flow[batch] = forward ? segment.forward(flow[batch], saved_[batch], {})
                              : segment.backward(flow[batch], saved_[batch], grads_, {});
        finished_.push_back(exchanges_finished());
      }
      for (const Tensor& tensor : flow) results.push_back(tensor.items());
    }
    grads_.end_window();
    results.push_back(model_.parameters().flat_grads().items());
    return results;
  }

  /// Exchanges of rows that were over after each segment.
  const std::vector<int64_t>& finished() const { return finished_; }

 private:
  static int64_t exchanges_finished() {
    const auto& exchanges = Runtime::current().tracer().exchanges();
    return std::ranges::count_if(exchanges, [](const auto& e) { return e.group == "ep"; });
  }

  Mesh mesh_;
  Model model_;
  Grads grads_;
  Tensor x_[2];
  BlockSaved saved_[2];
  std::vector<int64_t> finished_;
};

TEST_CASE("experts: another micro-batch's segments may run while rows are on their way") {
  run_threads(2, [](const Communicator& world) {
    Layer layer(world);
    const std::vector<Values> in_step = layer.run(true);
    // The first segment of a pass waits for nothing, each of the others for one exchange.
    const std::vector<int64_t> expected = {0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8};
    USP_CHECK(layer.finished() == expected, "finished exchanges: {}",
              fmt::join(layer.finished(), " "));
    USP_CHECK(Layer(world).run(false) == in_step, "other results than one after the other");
  });
}

/// Bytes of rows that a rank hands to exchanges in one forward and backward pass: there and back,
/// twice.
int64_t row_bytes(int64_t sent, int64_t received, int64_t row) {
  return 2 * (sent + received) * row;
}

TEST_CASE("experts: the ledger on real ranks") {
  const int64_t layers = test::tiny_model().num_layers, H = test::tiny_model().hidden_size;
  for (int64_t micro_batches : {1, 2}) {
    for (const MeshSizes& sizes : kLayouts) {
      CAPTURE(micro_batches, sizes.dp, sizes.ep);
      Case scenario;
      scenario.micro_batches = micro_batches;
      for (const Result& result : on_ranks(scenario, sizes)) {
        const Ledger::Entry rows = result.ledger.get("ep", CommKind::all_to_all);
        const Ledger::Entry counts = result.ledger.get("ep_counts", CommKind::all_to_all);
        REQUIRE(rows.calls == micro_batches * layers * (2 + 2));
        REQUIRE(counts.calls == micro_batches * layers);
        REQUIRE(counts.payload_bytes == micro_batches * layers * 4 * 4);
        int64_t expected = 0;
        for (size_t i = 0; i < result.to_experts.size(); ++i) {
          int64_t sent = 0, received = 0;
          for (int64_t n : result.to_experts[i]) sent += n;
          for (int64_t n : result.rows_by_rank[i]) received += n;
          REQUIRE(sent == kSamples * kSeqLen * 2 / sizes.dp / micro_batches);
          expected += row_bytes(sent, received, H * 8);
        }
        REQUIRE(rows.payload_bytes == expected);
      }
    }
  }
}

TEST_CASE("experts: a forward pass exchanges rows twice per layer, a backward pass twice more") {
  run_threads(2, [](const Communicator& world) {
    const Mesh mesh(world, {.dp = 2, .ep = 2});
    Model model = experts_model({}, kSeqLen, DType::f64, mesh.ep());
    Grads grads(model.parameters());
    const Pass pass = passes_of({}, mesh, Tensor::zeros({1}, DType::f64))[0];
    const auto check_calls = [](int64_t rows, int64_t counts, const char* when) {
      const Ledger& ledger = Runtime::current().ledger();
      USP_CHECK(ledger.get("ep", CommKind::all_to_all).calls == rows, "rows after {}", when);
      USP_CHECK(ledger.get("ep_counts", CommKind::all_to_all).calls == counts, "counts after {}",
                when);
    };
    const int64_t layers = test::tiny_model().num_layers;
    Model::Activations activations = model.forward(pass);
    check_calls(2 * layers, layers, "forward");
    grads.begin_window(1);
    model.backward(std::move(activations), grads, pass);
    check_calls(4 * layers, layers, "backward");
    model.evaluate(pass);
    check_calls(6 * layers, 2 * layers, "evaluate");
  });
}

TEST_CASE("experts: rank 37 of 64 on the dry engine: shapes and bytes of an even distribution") {
  OnDevice meta(Device::meta);
  DryEngine engine(37, 64);
  const Mesh mesh(Communicator::world(engine), {.dp = 64, .ep = 8});
  const ExpertsConfig config{.num_experts = 16, .top_k = 3};
  Model model = experts_model(config, 5, DType::bf16, mesh.ep());
  Grads grads(model.parameters());
  DataParallel data_parallel({64, "bucketed", 25}, model.parameters(), grads, mesh);
  test::Random random(1);
  const Tensor loss = Tensor::zeros({1}, DType::f64);
  const Pass pass = test::random_pass(random, test::tiny_model(), 5, 5, 1, loss);
  {
    const NoHostReads no_host_reads;
    grads.begin_window(1);
    model.backward(model.forward(pass), grads, pass);
    grads.end_window();
    data_parallel.finish();
  }
  // 25 tokens make 75 choices: 5 for experts 0 to 10, 4 for the others. Rank 37 is the sixth of its
  // group and holds experts 10 and 11; each of 8 ranks sends it 5 + 4 rows.
  const int64_t layers = test::tiny_model().num_layers, H = test::tiny_model().hidden_size;
  const Ledger& ledger = meta.runtime.ledger();
  const Ledger::Entry rows = ledger.get("ep", CommKind::all_to_all);
  REQUIRE(rows.calls == 4 * layers);
  REQUIRE(rows.payload_bytes == layers * row_bytes(75, 8 * (5 + 4), H * 2));
  // Nine rows go to itself each time it sends to the experts, and each time it sends back.
  REQUIRE(rows.wire_bytes == layers * row_bytes(75 - 9, 7 * (5 + 4), H * 2));
  REQUIRE(ledger.get("ep_counts", CommKind::all_to_all).payload_bytes == layers * 16 * 4);
  REQUIRE(meta.allocator().live_bytes(Category::activations) == pass.tokens.bytes() * 2 + 8);
}

TEST_CASE("experts: impossible numbers are refused") {
  const OnDevice meta(Device::meta);
  DryEngine engine(0, 4);
  const Mesh mesh(Communicator::world(engine), {.dp = 4, .ep = 4});
  ParameterList parameters;
  test::check_throws<UsageError>(
      [&] { make_experts({.num_experts = 6}, test::tiny_model(), 0, parameters, mesh.ep()); },
      {"ep_size=4 must divide num_experts=6"});
  test::check_throws<UsageError>(
      [&] {
        make_experts({4, 5}, test::tiny_model(), 0, parameters, mesh.ep());
      },
      {"top_k=5 must be from 1 to num_experts=4"});
}

}  // namespace
}  // namespace usp::rehearsal

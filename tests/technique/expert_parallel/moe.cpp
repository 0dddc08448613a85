#include "expert_parallel/moe.h"

#include "technique/expert_parallel/expert_parity.h"
#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

/// So many micro-batches of two samples on one rank.
ExpertCase small_case(int64_t micro_batches) {
  ExpertCase c = plain_experts(1, 1);
  c.grad_acc_steps = micro_batches;
  c.micro_batch_size = 2;
  return c;
}

/// Cases of everything that a router may do and that has a gradient of its own.
std::vector<ExpertCase> differentiable_cases() {
  ExpertCase softmax = small_case(1), normalised = small_case(2), dropping = small_case(1);
  ExpertCase sigmoid = small_case(1), nodes = small_case(1), biased = small_case(2);
  softmax.balance = "sample";
  softmax.shared = 1;
  softmax.z_loss = 0.3;
  normalised.norm_topk_prob = true;
  normalised.balance = "batch";
  normalised.dense_layers = 1;
  dropping.capacity = 0.75;
  dropping.balance = "sample";
  dropping.norm_topk_prob = true;
  sigmoid.router = "sigmoid";
  sigmoid.top_k = 1;
  sigmoid.balance = "sample";
  nodes.router = "sigmoid";
  nodes.norm_topk_prob = true;
  nodes.scaling = 2.5;
  nodes.experts = 8;
  nodes.nodes = 4;
  nodes.route_nodes = 2;
  nodes.z_loss = 0.1;
  biased.balance = "bias";
  biased.shared = 2;
  biased.biases = {0.1, -0.2, 0.05, 0.3};
  return {softmax, normalised, dropping, sigmoid, nodes, biased};
}

/// A global batch as a function of the weights.
class ExpertWindow {
 public:
  ExpertWindow(const TrainConfig& config, const ExpertCase& c)
      : experts_(config, one_.mesh), passes_(experts_.passes()) {
    randomize(experts_.parameters(), 2);
    if (!c.biases.empty()) {
      for (Parameter* buffer : experts_.load().buffers()) buffer->value.assign(c.biases);
    } else if (config.expert_parallel.balance == "batch") {
      for (const Pass& pass : experts_.passes(/*seed=*/17)) experts_.model().evaluate(pass);
      experts_.load().end_step();  // a batch before this one
    }
  }

  /// Throws Error where a token goes elsewhere than in the call before.
  double loss() {
    experts_.forget_losses();
    std::vector<Values> choices;
    for (const Pass& pass : passes_) {
      Model::Activations activations = experts_.model().forward(pass);
      for (const Routing& routing : routings_of(activations)) {
        choices.push_back(routing.slots.items());
        choices.push_back(routing.choices.items());
      }
    }
    USP_CHECK(choices_.empty() || choices == choices_, "a finite difference changes a choice");
    choices_ = choices;
    return experts_.loss();
  }

  void backward() {
    ops::fill(parameters().flat_grads(), kNaN);
    experts_.grads().begin_window(std::ssize(passes_));
    for (const Pass& pass : passes_) {
      experts_.model().backward(experts_.model().forward(pass), experts_.grads(), pass);
    }
    experts_.grads().end_window();
  }

  ParameterList& parameters() { return experts_.parameters(); }

 private:
  OneRank one_;
  ExpertModel experts_;
  std::vector<Pass> passes_;
  std::vector<Values> choices_;
};

TEST_CASE("the gradient of both losses agrees with finite differences in every weight",
          "[not_sanitized]") {
  const OnDevice cpu;
  for (const ExpertCase& c : differentiable_cases()) {
    CAPTURE(c.name());
    TrainConfig config = expert_config(c);
    config.expert_parallel.balance_coef = 0.5;
    ExpertWindow window(config, c);
    window.backward();
    for (size_t i = 0; i < window.parameters().size(); ++i) {
      const Parameter& parameter = window.parameters()[i];
      const bool router = parameter.name.ends_with("mlp.gate.weight");
      check_gradient(
          parameter.grad, parameter.value, [&] { return window.loss(); }, parameter.name,
          /*samples=*/router ? 12 : 3, /*tolerance=*/1e-7);
    }
  }
}

TEST_CASE("the gradient of an expert that nobody chooses is 0, not what an earlier pass has left") {
  const OnDevice cpu;
  const OneRank one;
  ExpertCase c = small_case(2);
  c.balance = "bias";
  ExpertModel experts(expert_config(c), one.mesh);
  randomize(experts.parameters(), 2);
  for (Parameter* buffer : experts.load().buffers()) buffer->value.assign(Values{0, 0, -9, 0});
  ops::fill(experts.parameters().flat_grads(), kNaN);
  experts.grads().begin_window(2);
  for (const Pass& pass : experts.passes()) {
    experts.model().backward(experts.model().forward(pass), experts.grads(), pass);
  }
  experts.grads().end_window();
  for (const auto& [name, gradient] : gradients_of(experts.parameters())) {
    CAPTURE(name);
    const bool idle = name.find(".experts.2.") != std::string::npos;
    REQUIRE((gradient == Values(gradient.size())) == idle);
    for (double element : gradient) REQUIRE(std::isfinite(element));
  }
}

TEST_CASE("a block that runs again sends every token where it went, whatever the bias is then") {
  const OnDevice cpu;
  const OneRank one;
  for (const char* balance : {"bias", "sample"}) {
    for (const double capacity : {0.0, 0.75}) {
      CAPTURE(balance, capacity);
      std::vector<Values> gradients;
      for (const char* recompute : {"none", "full"}) {
        ExpertCase c = small_case(1);
        c.balance = balance;
        c.capacity = capacity;
        c.recompute = recompute;
        c.shared = 1;
        const TrainConfig config = expert_config(c);
        ExpertModel experts(config, one.mesh);
        randomize(experts.parameters(), 2);
        const Pass pass = experts.passes()[0];
        experts.grads().begin_window(1);
        Model::Activations activations = experts.model().forward(pass);
        // As if the routers had moved on since.
        for (Parameter* buffer : experts.load().buffers()) {
          buffer->value.assign(Values{9, -9, 7, -7});
        }
        experts.model().backward(std::move(activations), experts.grads(), pass);
        experts.grads().end_window();
        gradients.push_back(experts.parameters().flat_grads().items());
        experts.load().end_step();
        for (const SeenLoad& load : experts.load().seen(16)) {
          double choices = 0;
          for (double count : load.counts) choices += count;
          REQUIRE(choices == 16 * 2);  // counted once
          REQUIRE((load.dropped > 0) == (capacity > 0));
        }
      }
      const bool same = gradients[0] == gradients[1];
      REQUIRE(same);
    }
  }
}

TEST_CASE("a token reaches no more nodes than route_nodes, and as many as it may without") {
  const OnDevice cpu;
  const OneRank one;
  for (int64_t route_nodes : {0, 1, 2, 3}) {
    ExpertCase c = small_case(1);
    c.experts = 16;
    c.top_k = 4;
    c.nodes = 4;
    c.route_nodes = route_nodes;
    ExpertModel experts(expert_config(c), one.mesh);
    randomize(experts.parameters(), 2);
    Model::Activations activations = experts.model().forward(experts.passes()[0]);
    size_t most = 0;
    for (const Routing& routing : routings_of(activations)) {
      const Values choices = routing.choices.items();
      for (size_t token = 0; token < choices.size(); token += 4) {
        std::set<int64_t> nodes;
        for (size_t j = 0; j < 4; ++j) nodes.insert(int64_t(choices[token + j]) / 4);
        most = std::max(most, nodes.size());
      }
    }
    CAPTURE(route_nodes);
    REQUIRE(most == size_t(route_nodes > 0 ? route_nodes : 4));
  }
}

/// The segments of one layer on two micro-batches, in step or one micro-batch after the other.
class TwoMicroBatches {
 public:
  TwoMicroBatches(const TrainConfig& config, const Mesh& mesh) : experts_(config, mesh) {
    Runtime::current().tracer().record(true);
    Random random(10 + mesh.world().rank());
    for (Tensor& x : x_) x = random.tensor({config.seq_len, config.model.hidden_size});
  }

  /// Outputs, input gradients and weight gradients.
  std::vector<Values> run(bool in_step) {
    const std::vector<Pass> passes = experts_.passes();
    const Block& block = experts_.model().chunk(0)[1];  // attention, dispatch, experts, combine
    Tensor flow[2] = {x_[0], x_[1]};
    std::vector<Values> results;
    ops::fill(experts_.parameters().flat_grads(), 0);  // of the weights around the three
    for (const bool forward : {true, false}) {
      if (!forward) experts_.grads().begin_window(2);
      for (int i = 0; i < 6; ++i) {
        const int batch = in_step ? i % 2 : i / 3, at = in_step ? i / 2 : i % 3;
        Segment& segment = *block[forward ? 1 + at : 3 - at];
        flow[batch] =
            forward ? segment.forward(flow[batch], saved_[batch], passes[batch])
                    : segment.backward(flow[batch], saved_[batch], experts_.grads(), passes[batch]);
        finished_.push_back(exchanges_finished());
      }
      for (const Tensor& tensor : flow) results.push_back(tensor.items());
    }
    for (size_t i = 0; i < experts_.parameters().size(); ++i) {
      const std::string& name = experts_.parameters()[i].name;
      if (name.find("layers.0.mlp.") == std::string::npos) continue;
      results.push_back(experts_.parameters()[i].grad.items());
    }
    return results;
  }

  /// Exchanges of rows that were over after each segment.
  const std::vector<int64_t>& finished() const { return finished_; }

 private:
  static int64_t exchanges_finished() {
    const auto& exchanges = Runtime::current().tracer().exchanges();
    return std::ranges::count_if(exchanges, [](const auto& e) { return e.group == "ep"; });
  }

  ExpertModel experts_;
  Tensor x_[2];
  BlockSaved saved_[2];
  std::vector<int64_t> finished_;
};

TEST_CASE("another micro-batch's segments may run while rows are on their way") {
  run_threads(2, [](const Communicator& world) {
    ExpertCase c = plain_experts(2, 2);
    c.grad_acc_steps = 2;
    c.shared = 1;
    const TrainConfig config = expert_config(c);
    const Mesh mesh(world, config.mesh());
    TwoMicroBatches together(config, mesh);
    const std::vector<Values> in_step = together.run(true);
    // The first segment of a pass waits for nothing, each of the others for one exchange.
    const std::vector<int64_t> expected = {0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8};
    USP_CHECK(together.finished() == expected, "finished exchanges: {}", together.finished());
    USP_CHECK(TwoMicroBatches(config, mesh).run(false) == in_step,
              "other results than one after the other");
  });
}

TEST_CASE("shared experts compute while rows travel to the others, forward and backward") {
  const Text text;
  for (const int64_t shared : {0, 1}) {
    for (const char* recompute : {"none", "full"}) {
      ExpertCase c = plain_experts(2, 2);
      c.shared = shared;
      c.recompute = recompute;
      run_threads(2, [&](const Communicator& world) {
        const TrainConfig config = expert_config(c);
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&text.dataset, mesh});
        const Tracer& tracer = traced_steps(trainer);
        std::map<std::string_view, int64_t> hidden;
        for (const Tracer::Exchange& exchange : tracer.exchanges()) {
          if (exchange.group != "ep") continue;
          for (const Tracer::Span& span : tracer.spans()) {
            hidden[span.name] += hides(span, exchange);
          }
        }
        // Of each layer: gate and up projection, swiglu, down projection, and again on the way
        // back.
        const int64_t layers = shared * config.model.num_layers;
        const int64_t forwards = layers * (c.recompute == std::string_view("full") ? 2 : 1);
        USP_CHECK(hidden["swiglu_forward"] == forwards && hidden["swiglu_backward"] == layers &&
                      hidden["linear_forward"] == 2 * forwards,
                  "under exchanges are {}, not {} and {}", hidden, forwards, layers);
        // Experts' weight gradients wait until the gradients of their rows are on their way: of
        // each layer down projection, gate and up projection.
        USP_CHECK(hidden["grouped_linear_backward_weight"] == 2 * config.model.num_layers,
                  "weight gradients under exchanges: {}", hidden);
      });
    }
  }
}

}  // namespace
}  // namespace usp::test

#include "memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "dtype.h"
#include "model.h"
#include "runtime.h"

namespace usp {

namespace {

int64_t sum_of(const std::vector<LiveBytes>& parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0},
                         [](int64_t sum, const LiveBytes& part) { return sum + part.bytes; });
}

/// Weights of one layer that multiply activations.
int64_t layer_matmul_weights(const ModelConfig& m) {
  const int64_t qkv = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim();
  return m.hidden_size * (qkv + m.num_heads * m.head_dim() + 3 * m.ffn_hidden_size);
}

/// Those of the part with the same name in the same block; 0: there is none.
int64_t bytes_of(const std::vector<LiveBytes>& parts, const LiveBytes& wanted) {
  const auto found = std::ranges::find_if(parts, [&](const LiveBytes& part) {
    return part.block == wanted.block && part.name == wanted.name;
  });
  return found == parts.end() ? 0 : found->bytes;
}

std::string in_mib(double bytes) { return fmt::format("{:.2f} MiB", bytes / (1 << 20)); }

}  // namespace

// [states]
int64_t num_parameters(const ModelConfig& m) {
  const int64_t embeddings = (m.tie_word_embeddings ? 1 : 2) * m.vocab_size * m.hidden_size;
  const int64_t norms = (2 * m.num_layers + 1) * m.hidden_size;
  return embeddings + norms + m.num_layers * layer_matmul_weights(m);
}

StateBytes whole_states(const TrainConfig& config) {
  const DType dtype = parse_dtype(config.dtype);
  const int64_t n = num_parameters(config.model);
  const int64_t own = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
  int64_t gradient = acc;
  if (config.grad_accumulation == "bf16") gradient = own;
  if (config.grad_accumulation == "both") gradient = own + acc;
  const int64_t master = own == acc ? 0 : acc;
  return {n * own, n * gradient, n * (master + 2 * acc)};
}
// [states]

// [activations]
std::vector<LiveBytes> predict_activations(const TrainConfig& config) {
  const ModelConfig& m = config.model;
  const DType dtype = parse_dtype(config.dtype);
  const int64_t own = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
  const int64_t B = config.micro_batch_size, S = config.seq_len, T = B * S;
  const int64_t H = m.hidden_size, N = m.num_heads, G = m.num_kv_heads, D = m.head_dim();
  const int64_t F = m.ffn_hidden_size, V = m.vocab_size;
  const int64_t token = 4;  // i32
  const bool inputs_only = config.recompute == "full";
  const bool probabilities = config.attention == "naive" && config.recompute == "none";

  std::vector<LiveBytes> parts = {{-1, "tokens", T * token}, {-1, "targets", T * token}};
  parts.push_back({0, "residual", T * H * own});  // the embedding's output
  for (int l = 1; l <= m.num_layers; ++l) {
    if (!inputs_only) {
      parts.push_back({l, "rstd", 2 * T * acc});
      parts.push_back({l, "norm", 2 * T * H * own});  // the inputs of qkv and of gate and up
      parts.push_back({l, "qkv", T * (N + 2 * G) * D * own});
      parts.push_back({l, "attention", T * N * D * own});
      parts.push_back({l, "lse", T * N * acc});
      if (probabilities) parts.push_back({l, "probabilities", B * N * S * S * own});
      parts.push_back({l, "gate_up", T * 2 * F * own});
      parts.push_back({l, "swiglu", T * F * own});
    }
    // Each of its two sums; the second is the input of the next block.
    parts.push_back({l, "residual", (inputs_only ? 1 : 2) * T * H * own});
  }
  const int head = static_cast<int>(m.num_layers) + 1;
  parts.push_back({head, "rstd", T * acc});
  parts.push_back({head, "norm", T * H * own});
  parts.push_back({head, "logits", T * V * own});
  parts.push_back({head, "lse", T * acc});
  return parts;
}
// [activations]

// [flops]
std::pair<double, double> predict_flops(const TrainConfig& config) {
  const ModelConfig& m = config.model;
  const double S = double(config.seq_len);
  const double samples = double(config.micro_batch_size * config.grad_acc_steps);
  const double layers = 2 * double(m.num_layers * layer_matmul_weights(m)) * samples * S;
  const double lm_head = 2 * double(m.hidden_size * m.vocab_size) * samples * S;
  // One product of the (query, key) pairs with all heads' channels.
  const double pairs = double(m.num_layers) * samples * S * (S + 1) / 2;
  const double product = 2 * pairs * double(m.num_heads * m.head_dim());
  // Twice as much backward as forward: every product has two gradients.
  const double needed = 3 * (layers + lm_head + 2 * product);
  double again = 0;
  if (config.attention == "blockwise") again += product;  // q by k, for the rows' probabilities
  if (config.attention == "naive" && config.recompute == "selective") again += 2 * product;
  if (config.recompute == "full") again += layers + 2 * product;
  return {needed, again};
}
// [flops]

// [book]
double book_activations(const TrainConfig& config) {
  const double h = double(config.model.hidden_size), s = double(config.seq_len);
  const double heads = double(config.model.num_heads);
  double bytes = 34 + 5 * heads * s / h;
  if (config.recompute == "selective") bytes = 34;
  if (config.recompute == "full") bytes = 2;
  return double(config.model.num_layers * config.micro_batch_size) * s * h * bytes;
}

double book_whole_states(const TrainConfig& config) {
  const bool both = config.grad_accumulation == "both";
  return (both ? 20 : 16) * double(num_parameters(config.model));
}
// [book]

int64_t Simulation::saved_bytes() const { return sum_of(saved); }

Simulation make_simulation(int64_t steps) {
  Runtime& runtime = Runtime::current();
  const Allocator& allocator = runtime.allocator();
  Simulation simulation;
  simulation.states = {allocator.live_bytes(Category::weights),
                       allocator.live_bytes(Category::gradients),
                       allocator.live_bytes(Category::optimizer)};
  simulation.saved = saved_activations(allocator, runtime.tracer());
  simulation.buffers = peaks_by_name(allocator, Category::communication);
  simulation.peak_activations = allocator.peak_bytes(Category::activations);
  simulation.peak = allocator.peak_bytes();
  simulation.reserved = allocator.reserved_bytes() - allocator.reserved_workspace_bytes();
  simulation.flops = runtime.flops() / double(steps);
  simulation.recomputed_flops = runtime.recomputed_flops() / double(steps);
  return simulation;
}

std::string estimate_text(const TrainConfig& config, const Simulation& simulation) {
  const StateBytes states = predict_states(config);
  const std::vector<LiveBytes> activations = predict_activations(config);
  const double n = double(num_parameters(config.model));
  constexpr double kGiB = 1 << 30;
  std::string text = fmt::format(
      "{:.0f} parameters in {}; {} x {} tokens, {} attention, recompute {}: a step without data\n\n"
      "{:<22}{:>12}{:>12}{:>12}{:>14}\n",
      n, config.dtype, config.micro_batch_size, config.seq_len, config.attention, config.recompute,
      "GiB", "formula", "simulated", "the book's", "a parameter");
  const auto row = [&](std::string_view what, double formula, double simulated, double book,
                       bool by_parameters = false) {
    const auto cell = [](double value) {
      return std::isnan(value) ? std::string() : fmt::format("{:.3f}", value / kGiB);
    };
    text +=
        fmt::format("{:<22}{:>12}{:>12}{:>12}{:>14}\n", what, cell(formula), cell(simulated),
                    cell(book), by_parameters ? fmt::format("{:.2f} bytes", simulated / n) : "");
  };
  const double none = std::nan("");
  row("weights", double(states.weights), double(simulation.states.weights), none, true);
  row("gradients", double(states.gradients), double(simulation.states.gradients), none, true);
  row("optimizer states", double(states.optimizer), double(simulation.states.optimizer), none,
      true);
  row("these together", double(states.total()), double(simulation.states.total()),
      book_states(config), true);
  row("saved activations", double(sum_of(activations)), double(simulation.saved_bytes()),
      book_activations(config));
  for (const LiveBytes& buffer : predict_buffers(config)) {
    row(buffer.name, double(buffer.bytes), double(bytes_of(simulation.buffers, buffer)), none);
  }
  row("peak activations", none, double(simulation.peak_activations), none);
  row("peak of all", none, double(simulation.peak), none);
  row("reserved", none, double(simulation.reserved), none);
  const int block = static_cast<int>(config.model.num_layers);  // one of the layers
  text += fmt::format("\nsaved by one layer:   {:>12}{:>12}\n", "formula", "simulated");
  for (const LiveBytes& part : activations) {
    if (part.block != block) continue;
    text += fmt::format("{:<22}{:>12}{:>12}\n", part.name, in_mib(double(part.bytes)),
                        in_mib(double(bytes_of(simulation.saved, part))));
  }
  const auto [needed, again] = predict_flops(config);
  text += fmt::format(
      "\nFLOPs of a step: {:.4g} needed, {:.4g} recomputed ({:.1f} %); simulated: {:.4g} and "
      "{:.4g}\n",
      double(needed), double(again), 100 * double(again) / double(needed),
      double(simulation.flops - simulation.recomputed_flops), double(simulation.recomputed_flops));
  return text;
}

std::string estimate_json(const TrainConfig& config, const Simulation& simulation,
                          const std::string& config_json) {
  const StateBytes states = predict_states(config);
  const std::vector<LiveBytes> activations = predict_activations(config);
  const auto [needed, again] = predict_flops(config);
  nlohmann::ordered_json json;
  json["config"] = nlohmann::ordered_json::parse(config_json);
  json["parameters"] = num_parameters(config.model);
  json["predicted"] = {{"weights", states.weights},     {"gradients", states.gradients},
                       {"optimizer", states.optimizer}, {"activations", sum_of(activations)},
                       {"flops", needed + again},       {"recomputed_flops", again}};
  json["simulated"] = {{"weights", simulation.states.weights},
                       {"gradients", simulation.states.gradients},
                       {"optimizer", simulation.states.optimizer},
                       {"activations", simulation.saved_bytes()},
                       {"peak_activations", simulation.peak_activations},
                       {"peak_total", simulation.peak},
                       {"reserved", simulation.reserved},
                       {"flops", simulation.flops},
                       {"recomputed_flops", simulation.recomputed_flops}};
  json["buffers"] = nlohmann::ordered_json::array();
  for (const LiveBytes& buffer : predict_buffers(config)) {
    json["buffers"].push_back({{"name", buffer.name},
                               {"bytes", bytes_of(simulation.buffers, buffer)},
                               {"predicted", buffer.bytes}});
  }
  json["book"] = {{"activations", book_activations(config)},
                  {"weights_gradients_optimizer", book_states(config)}};
  for (const LiveBytes& part : activations) {
    json["activations"].push_back({{"layer", part.block},
                                   {"name", part.name},
                                   {"bytes", bytes_of(simulation.saved, part)},
                                   {"predicted", part.bytes}});
  }
  return json.dump(1) + "\n";
}

std::vector<std::pair<std::string, std::string>> memory_rows(const TrainConfig& config) {
  Runtime& runtime = Runtime::current();
  const Allocator& allocator = runtime.allocator();
  const StateBytes states = predict_states(config);
  std::vector<std::pair<std::string, std::string>> rows;
  const auto row = [&](std::string_view what, int64_t measured, int64_t predicted) {
    rows.emplace_back(what,
                      fmt::format("{}, predicted {} ({:.4f})", in_mib(double(measured)),
                                  in_mib(double(predicted)), double(measured) / double(predicted)));
  };
  row("weights", allocator.peak_bytes(Category::weights), states.weights);
  row("gradients", allocator.peak_bytes(Category::gradients), states.gradients);
  row("optimizer states", allocator.peak_bytes(Category::optimizer), states.optimizer);
  const auto buffers = peaks_by_name(allocator, Category::communication);
  for (const LiveBytes& buffer : buffers.empty() ? buffers : predict_buffers(config)) {
    row(buffer.name, bytes_of(buffers, buffer), buffer.bytes);
  }
  const std::vector<LiveBytes> saved = saved_activations(allocator, runtime.tracer());
  if (!saved.empty()) {
    row("saved activations", sum_of(saved), sum_of(predict_activations(config)));
  }
  rows.emplace_back("reserved memory",
                    fmt::format("{}, {} of it as workspace of kernels",
                                in_mib(double(allocator.reserved_bytes())),
                                in_mib(double(allocator.reserved_workspace_bytes()))));
  return rows;
}

}  // namespace usp

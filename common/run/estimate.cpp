#include "run/estimate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tensor/runtime.h"

namespace usp {

namespace {

int64_t sum_of(const std::vector<LiveBytes>& parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0},
                         [](int64_t sum, const LiveBytes& part) { return sum + part.bytes; });
}

/// Bytes of the part with the same name in the same block; 0: there is none.
int64_t bytes_of(const std::vector<LiveBytes>& parts, const LiveBytes& wanted) {
  const auto found = std::ranges::find_if(parts, [&](const LiveBytes& part) {
    return part.block == wanted.block && part.name == wanted.name;
  });
  return found == parts.end() ? 0 : found->bytes;
}

std::string in_mib(double bytes) { return fmt::format("{:.2f} MiB", bytes / (1 << 20)); }

/// First of the ranks whose peak is highest.
const RankEstimate& fullest(const std::vector<RankEstimate>& ranks) {
  return *std::ranges::max_element(
      ranks, {}, [](const RankEstimate& estimate) { return estimate.simulation.peak; });
}

/// In bytes: ranks may differ by few.
std::string table_of_ranks(const std::vector<RankEstimate>& ranks) {
  if (ranks.size() == 1) return "";
  std::string text =
      fmt::format("\nranks that differ, simulated, in bytes:\n{:>10}{:>8}{:>18}{:>18}{:>18}\n",
                  "the first", "alike", "model states", "peak activations", "peak memory");
  for (const auto& [prediction, simulation, count, what] : ranks) {
    text +=
        fmt::format("{:>10}{:>8}{:>18}{:>18}{:>18}  {}\n", prediction.rank, count,
                    simulation.states.total(), simulation.peak_activations, simulation.peak, what);
  }
  return text;
}

/// Bytes that this rank sends in a step over each kind of link, a row for each group that sends.
std::string table_of_links(const Simulation& simulation) {
  std::map<std::string, Ledger::Entry> groups;
  for (const auto& [key, entry] : simulation.sent.entries()) groups[key.first] += entry;
  std::string text = fmt::format("\n{:<22}{:>18}{:>18}\n",
                                 "sent in a step, bytes:", "inside its node", "to other nodes");
  for (const auto& [group, entry] : groups) {
    if (entry.wire_bytes == 0) continue;  // a barrier, or all of it on one rank
    const auto a_step = [&](int64_t bytes) { return double(bytes) / double(simulation.steps); };
    text += fmt::format("{:<22}{:>18.0f}{:>18.0f}\n", group,
                        a_step(entry.wire_bytes - entry.net_bytes), a_step(entry.net_bytes));
  }
  return text;
}

}  // namespace

int64_t Prediction::saved_bytes() const { return sum_of(saved); }

int64_t Prediction::needed() const { return states.total() + peak_activations + sum_of(buffers); }

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
  simulation.sent = runtime.ledger();
  simulation.steps = steps;
  return simulation;
}

Simulation simulate_steps(TrainerBase& trainer) {
  constexpr int64_t kSteps = 2;
  Runtime& runtime = Runtime::current();
  runtime.allocator().record_events(true);
  runtime.tracer().record(true);
  for (int64_t step = 0; step < kSteps; ++step) {
    runtime.tracer().set_step(step + 1);
    trainer.train_step(step);
  }
  return make_simulation(kSteps);
}

std::string estimate_text(const RunConfig& config, const std::vector<RankEstimate>& ranks) {
  const auto& [prediction, simulation, count, what] = fullest(ranks);
  const StateBytes& states = prediction.states;
  const double n = double(prediction.parameters);
  // A share of the weights over all parameters would say nothing.
  const bool has_all = states.weights >= prediction.parameters;
  constexpr double kGiB = 1 << 30;
  const MeshSizes mesh = config.mesh();
  std::string text = fmt::format(
      "{:.0f} parameters in {}; {} x {} tokens, {}: a step without data\n"
      "rank {} of {}{}: {}\n\n"
      "{:<22}{:>12}{:>12}{:>12}{:>14}\n",
      n, config.dtype, config.micro_batch_size, config.seq_len, prediction.execution,
      prediction.rank, mesh.ranks(), ranks.size() > 1 ? ", the fullest" : "", describe(mesh), "GiB",
      "formula", "simulated", "the book's", has_all ? "a parameter" : "");
  const auto row = [&](std::string_view what, double formula, double simulated, double book,
                       bool by_parameters = false) {
    const auto cell = [](double value) {
      return std::isnan(value) ? std::string() : fmt::format("{:.3f}", value / kGiB);
    };
    text += fmt::format("{:<22}{:>12}{:>12}{:>12}{:>14}\n", what, cell(formula), cell(simulated),
                        cell(book),
                        by_parameters && has_all ? fmt::format("{:.2f} bytes", simulated / n) : "");
  };
  const double none = std::nan("");
  row("weights", double(states.weights), double(simulation.states.weights), none, true);
  row("gradients", double(states.gradients), double(simulation.states.gradients), none, true);
  row("optimizer states", double(states.optimizer), double(simulation.states.optimizer), none,
      true);
  row("model states", double(states.total()), double(simulation.states.total()),
      prediction.book_states, true);
  row("saved activations", double(prediction.saved_bytes()), double(simulation.saved_bytes()),
      prediction.book_activations);
  for (const LiveBytes& buffer : prediction.buffers) {
    row(buffer.name, double(buffer.bytes), double(bytes_of(simulation.buffers, buffer)), none);
  }
  row("peak activations", double(prediction.peak_activations), double(simulation.peak_activations),
      none);
  row("peak memory", none, double(simulation.peak), none);
  row("reserved", none, double(simulation.reserved), none);
  const double share = double(simulation.peak) / (config.device_memory * kGiB);
  text += fmt::format("\nA device of {:g} GiB {}.\n", config.device_memory,
                      share <= 1
                          ? fmt::format("holds it: the peak takes {:.0f} %", 100 * share)
                          : fmt::format("does not hold it: the peak is {:.2f} times that", share));
  const int block = static_cast<int>(config.model.num_layers);  // one of the layers
  text += fmt::format("\nsaved by one layer:   {:>12}{:>12}\n", "formula", "simulated");
  for (const LiveBytes& part : prediction.saved) {
    if (part.block != block) continue;
    text += fmt::format("{:<22}{:>12}{:>12}\n", part.name, in_mib(double(part.bytes)),
                        in_mib(double(bytes_of(simulation.saved, part))));
  }
  const double needed = prediction.flops, again = prediction.recomputed_flops;
  text += fmt::format(
      "\nFLOPs of a step: {:.4g} needed, {:.4g} recomputed ({:.1f} %); simulated: {:.4g} and "
      "{:.4g}\n",
      needed, again, 100 * again / needed, simulation.flops - simulation.recomputed_flops,
      simulation.recomputed_flops);
  if (mesh.ranks() > 1) text += table_of_links(simulation);
  return text + table_of_ranks(ranks);
}

std::string estimate_json(const std::string& config_json, const MeshSizes& mesh,
                          const std::vector<RankEstimate>& ranks) {
  const auto& [prediction, simulation, count, what] = ranks.front();
  nlohmann::ordered_json json;
  json["config"] = nlohmann::ordered_json::parse(config_json);
  json["mesh"] = {
      {"dp", mesh.dp}, {"pp", mesh.pp}, {"cp", mesh.cp}, {"tp", mesh.tp}, {"ep", mesh.ep}};
  json["rank"] = prediction.rank;
  json["parameters"] = prediction.parameters;
  json["predicted"] = {{"weights", prediction.states.weights},
                       {"gradients", prediction.states.gradients},
                       {"optimizer", prediction.states.optimizer},
                       {"activations", prediction.saved_bytes()},
                       {"peak_activations", prediction.peak_activations},
                       {"flops", prediction.flops + prediction.recomputed_flops},
                       {"recomputed_flops", prediction.recomputed_flops}};
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
  for (const LiveBytes& buffer : prediction.buffers) {
    json["buffers"].push_back({{"name", buffer.name},
                               {"bytes", bytes_of(simulation.buffers, buffer)},
                               {"predicted", buffer.bytes}});
  }
  json["sent"] = {{"steps", simulation.steps},
                  {"ledger", nlohmann::ordered_json::parse(simulation.sent.to_json())}};
  json["book"] = {{"activations", prediction.book_activations},
                  {"weights_gradients_optimizer", prediction.book_states}};
  for (const LiveBytes& part : prediction.saved) {
    json["activations"].push_back({{"layer", part.block},
                                   {"name", part.name},
                                   {"bytes", bytes_of(simulation.saved, part)},
                                   {"predicted", part.bytes}});
  }
  json["fullest_rank"] = fullest(ranks).prediction.rank;
  json["distinct_ranks"] = nlohmann::ordered_json::array();
  for (const RankEstimate& estimate : ranks) {
    json["distinct_ranks"].push_back({{"rank", estimate.prediction.rank},
                                      {"ranks", estimate.ranks},
                                      {"what", estimate.what},
                                      {"states", estimate.simulation.states.total()},
                                      {"peak_activations", estimate.simulation.peak_activations},
                                      {"peak_total", estimate.simulation.peak}});
  }
  return json.dump(1) + "\n";
}

ReportRows prediction_rows(const Prediction& prediction) {
  Runtime& runtime = Runtime::current();
  const Allocator& allocator = runtime.allocator();
  const StateBytes& states = prediction.states;
  ReportRows rows;
  rows.emplace_back(
      "FLOPs of a step",
      fmt::format("{:.4g} needed, {:.4g} recomputed; by the book's count {:.4g}", prediction.flops,
                  prediction.recomputed_flops, prediction.book_flops));
  rows.emplace_back("peak memory",
                    fmt::format("{:.1f} MiB", double(allocator.peak_bytes()) / (1 << 20)));
  const auto row = [&](std::string_view what, int64_t measured, int64_t predicted) {
    rows.emplace_back(what,
                      fmt::format("{}, predicted {} ({:.4f})", in_mib(double(measured)),
                                  in_mib(double(predicted)), double(measured) / double(predicted)));
  };
  row("weights", allocator.peak_bytes(Category::weights), states.weights);
  row("gradients", allocator.peak_bytes(Category::gradients), states.gradients);
  row("optimizer states", allocator.peak_bytes(Category::optimizer), states.optimizer);
  const auto buffers = peaks_by_name(allocator, Category::communication);
  for (const LiveBytes& buffer : buffers.empty() ? buffers : prediction.buffers) {
    row(buffer.name, bytes_of(buffers, buffer), buffer.bytes);
  }
  const std::vector<LiveBytes> saved = saved_activations(allocator, runtime.tracer());
  if (!saved.empty()) {
    row("saved activations", sum_of(saved), prediction.saved_bytes());
  }
  rows.emplace_back("reserved memory",
                    fmt::format("{}, {} of it as workspace of kernels",
                                in_mib(double(allocator.reserved_bytes())),
                                in_mib(double(allocator.reserved_workspace_bytes()))));
  return rows;
}

}  // namespace usp

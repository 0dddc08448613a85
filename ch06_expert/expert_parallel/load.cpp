#include "expert_parallel/load.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>

#include "config.h"
#include "run/metrics.h"
#include "tensor/expert_ops.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

double SeenLoad::max_over_mean() const {
  const double sum = std::accumulate(counts.begin(), counts.end(), 0.0);
  return sum == 0 ? 0 : *std::ranges::max_element(counts) * double(counts.size()) / sum;
}

const LayerLoad& ExpertLoad::add_layer(int64_t layer) {
  layers_.push_back(std::make_unique<LayerLoad>());
  layers_.back()->layer = layer;
  return *layers_.back();
}

void ExpertLoad::allocate(int64_t num_experts, DType dtype) {
  if (layers_.empty()) return;
  // Of two ranks that hold the same layers, one may have built them in another order.
  std::ranges::sort(layers_, {}, [](const auto& layer) { return layer->layer; });
  const CategoryScope scope(Category::workspace);
  const DType acc = accumulate_dtype(dtype);
  const int64_t L = std::ssize(layers_), E = num_experts;
  counts_ = Tensor::zeros({L, E + 1}, acc);
  before_ = Tensor::zeros({L, E + 1}, acc);
  if (config_.has_bias()) biases_ = Tensor::zeros({L, E}, acc);
  loss_ = Tensor::zeros({1}, DType::f64);
  entropies_ = Tensor::zeros({L}, DType::f64);
  const bool counted = std::ranges::all_of(
      summed_over_, [](const Communicator& group) { return group.rank() == 0; });
  const auto buffer = [&](const LayerLoad& layer, const char* name, const Tensor& value) {
    Parameter& parameter = *buffers_.emplace_back(std::make_unique<Parameter>());
    parameter.name = fmt::format("model.layers.{}.mlp.gate.{}", layer.layer, name);
    parameter.global_shape = {value.numel()};
    parameter.value = value;
    parameter.shard = {0, value.numel(), value, value, {}};
    parameter.counted = counted;
  };
  for (int64_t i = 0; i < L; ++i) {
    LayerLoad& layer = *layers_[i];
    const auto part = [&](const Tensor& all, int64_t begin, int64_t length) {
      return all.narrow(0, i, 1).narrow(1, begin, length).view({length});
    };
    layer.counts = part(counts_, 0, E);
    layer.dropped = part(counts_, E, 1);
    layer.before = part(before_, 0, E);
    layer.loss = loss_;
    layer.entropy = entropies_.narrow(0, i, 1);
    if (config_.balance == "batch") buffer(layer, "load", layer.before);
    if (!config_.has_bias()) continue;
    layer.bias = part(biases_, 0, E);
    buffer(layer, "e_score_correction_bias", layer.bias);
  }
}

void ExpertLoad::begin_step() {
  if (layers_.empty()) return;
  ops::fill(counts_, 0);
  ops::fill(loss_, 0);
  ops::fill(entropies_, 0);
}

void ExpertLoad::sum(const Tensor& numbers) const {
  for (const Communicator& group : summed_over_) group.all_reduce(numbers);
}

void ExpertLoad::end_step() {
  if (layers_.empty()) return;
  ops::copy(before_, counts_);
  sum(before_);  // E + 1 numbers a layer
  for (const auto& layer : layers_) {
    if (layer->bias.defined()) {
      ops::balance_bias(layer->bias, layer->before, config_.bias_update_rate);
    }
  }
}

std::vector<SeenLoad> ExpertLoad::seen(int64_t tokens) const {
  std::vector<SeenLoad> seen;
  if (layers_.empty()) return seen;
  const Tensor of_all = Tensor::empty(entropies_.shape(), entropies_.dtype());
  ops::copy(of_all, entropies_);
  sum(of_all);
  const std::vector<double> entropies = of_all.items(), numbers = before_.items();
  const auto row = std::ssize(numbers) / std::ssize(layers_);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto begin = numbers.begin() + std::ssize(seen) * row;
    seen.push_back({layers_[i]->layer,
                    {begin, begin + row - 1},
                    begin[row - 1],
                    entropies[i] / double(tokens)});
  }
  return seen;
}

double ExpertLoad::loss(const Communicator& all) const {
  const Tensor sum = Tensor::zeros({1}, DType::f64);
  if (!layers_.empty()) ops::copy(sum, loss_);
  all.all_reduce(sum);
  return sum.item();
}

std::string expert_metrics(const ExpertLoad& load, const TrainConfig& config,
                           const Communicator& world) {
  if (config.model.experts.num_experts == 0) return "";
  std::map<int64_t, std::string> layers;  // as every rank that holds one says the same of it
  const UncountedTraffic uncounted;
  const int digits = config.dtype == "f64" ? 17 : 9;
  std::string own;
  for (const SeenLoad& seen : load.seen(config.tokens_per_step())) {
    own += fmt::format(
        "{0} {{\"layer\": {0}, \"tokens\": [{1}], \"max_over_mean\": {2}, \"dropped\": {3}, "
        "\"entropy\": {4}}}\n",
        seen.layer, fmt::join(seen.counts, ", "), json_number(seen.max_over_mean(), digits),
        seen.dropped, json_number(seen.entropy, digits));
  }
  for (const std::string& of_rank : world.all_gather_text(own)) {
    std::istringstream lines(of_rank);
    for (std::string line; std::getline(lines, line);) {
      const size_t space = line.find(' ');
      layers[std::stoll(line)] = line.substr(space + 1);
    }
  }
  std::vector<std::string> in_order;
  for (const auto& [number, text] : layers) in_order.push_back(text);
  return fmt::format("\"expert_loss\": {}, \"experts\": [{}]",
                     json_number(load.loss(world), digits), fmt::join(in_order, ", "));
}

std::vector<Communicator> workers_of_stages(const TrainConfig& config, const Mesh& mesh) {
  std::vector<Communicator> groups = {mesh.stage()};
  if (config.pipeline.mirrors(config.grad_acc_steps)) groups.push_back(mesh.group("mirror"));
  return groups;
}

std::vector<Parameter*> ExpertLoad::buffers() const {
  std::vector<Parameter*> buffers;
  for (const auto& buffer : buffers_) buffers.push_back(buffer.get());
  return buffers;
}

}  // namespace usp

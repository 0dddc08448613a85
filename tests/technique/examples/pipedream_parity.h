#pragma once

#include "technique/pipeline_parallel/pipeline_parity.h"
#include "technique/solo_trainer.h"

/// What PipeDream's updates come to, without a pipeline.
namespace usp::test {

inline constexpr int64_t kStashSteps = 3;

/// What PipeDream's updates come to, one micro-batch after the other on one rank. It knows neither
/// a schedule nor a stash: micro-batch i of a step meets, on the stage of rank r, the weights that
/// the first max(0, i - (p-1-r)) micro-batches of the step have made.
class SerialPipeDream {
 public:
  SerialPipeDream(const TrainConfig& config, const Dataset& dataset)
      : config_(config),
        dataset_(dataset),
        stages_(blocks_of_stages(config.pipeline, config.model, config.pipeline.pp_size)),
        model_(alone(config), RankView(alone(config), rank_.mesh)) {
    model_.parameters().allocate(DType::f64, uint64_t(config.seed));
    for (size_t i = 0; i < model_.parameters().size(); ++i) {
      const Parameter& parameter = model_.parameters()[i];
      Weight& weight = weights_.emplace_back();
      weight.versions = {parameter.value.items()};
      weight.m = weight.v = std::vector<double>(weight.versions[0].size());
      weight.stage =
          std::ranges::find_if(
              stages_, [&](const BlockRange& stage) { return parameter.block < stage.end; }) -
          stages_.begin();
    }
  }

  /// The mean loss of a step's micro-batches, each before its own update.
  double step(int64_t step) {
    const int64_t p = config_.pipeline.pp_size, m = config_.grad_acc_steps;
    for (Weight& weight : weights_) weight.versions = {weight.versions.back()};
    const Tensor loss = Tensor::zeros({1}, DType::f64);
    for (int64_t i = 0; i < m; ++i) {
      for (size_t w = 0; w < weights_.size(); ++w) {
        const int64_t version = std::max<int64_t>(0, i - (p - 1 - weights_[w].stage));
        model_.parameters()[w].value.assign(weights_[w].versions[version]);
      }
      run(step * m + i, loss);
      for (size_t w = 0; w < weights_.size(); ++w) update(w, step, step * m + i + 1);
    }
    return loss.item() / double(m);
  }

  /// As train() gathers it.
  TrainedState state() {
    TrainedState state;
    for (size_t w = 0; w < weights_.size(); ++w) {
      const std::string& name = model_.parameters()[w].name;
      state.tensors.push_back({name + ".grad", weights_[w].gradient});
      state.tensors.push_back({name + ".m", weights_[w].m});
      state.tensors.push_back({name + ".v", weights_[w].v});
      state.tensors.push_back({name, weights_[w].versions.back()});
    }
    return state;
  }

 private:
  struct Weight {
    int64_t stage;
    std::vector<std::vector<double>> versions;  ///< of this step
    std::vector<double> m, v, gradient;
  };

  static TrainConfig alone(TrainConfig config) {
    config.pipeline = {};
    config.tensor_parallel = {};
    config.context_parallel = {};
    config.recompute = "none";
    return config;
  }

  /// Forward and backward of a micro-batch, of the samples of all data-parallel ranks.
  void run(int64_t number, const Tensor& loss) {
    const int64_t samples = config_.micro_batch_size * config_.data_parallel.dp_size;
    const int64_t tokens = samples * config_.seq_len;
    std::vector<int32_t> inputs(tokens), targets(tokens);
    dataset_.read(Split::train, number * samples, inputs, targets);
    Pass pass;
    pass.seed = uint64_t(config_.seed);
    pass.first_sample = number * samples;
    pass.num_samples = samples;
    pass.seq_len = config_.seq_len;
    pass.positions = Positions(0, config_.seq_len);
    pass.tokens = Tensor::from_host(inputs, {tokens});
    pass.targets = Tensor::from_host(targets, {tokens});
    pass.loss_scale = 1 / double(tokens);
    pass.loss = loss;
    Grads grads(model_.parameters());
    grads.begin_window(1);
    model_.backward(model_.forward(pass), grads, pass);
    grads.end_window();
  }

  /// AdamW, Loshchilov & Hutter (2019), https://arxiv.org/abs/1711.05101, to the newest version.
  void update(size_t w, int64_t step, int64_t count) {
    const OptimizerConfig& adam = config_.optimizer;
    const double lr = learning_rate(adam, step, config_.steps);
    const Parameter& parameter = model_.parameters()[w];
    const double decay = parameter.global_shape.rank() >= 2 ? adam.weight_decay : 0;
    Weight& weight = weights_[w];
    weight.gradient = parameter.grad.items();
    std::vector<double> next = weight.versions.back();
    for (size_t i = 0; i < next.size(); ++i) {
      const double g = weight.gradient[i];
      weight.m[i] += (1 - adam.adam_beta1) * (g - weight.m[i]);
      weight.v[i] += (1 - adam.adam_beta2) * (g * g - weight.v[i]);
      const double mean = weight.m[i] / (1 - std::pow(adam.adam_beta1, double(count)));
      const double square = weight.v[i] / (1 - std::pow(adam.adam_beta2, double(count)));
      next[i] -= lr * (mean / (std::sqrt(square) + adam.adam_eps) + decay * next[i]);
    }
    weight.versions.push_back(std::move(next));
  }

  TrainConfig config_;
  const Dataset& dataset_;
  std::vector<BlockRange> stages_;
  OneRank rank_;
  Model model_;
  std::vector<Weight> weights_;
};

}  // namespace usp::test

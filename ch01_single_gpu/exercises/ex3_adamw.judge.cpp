#include <cmath>

#include "judge/judge.h"
#include "tensor/ops.h"

namespace usp::judging {

struct Answer {
  void (*adamw_update)(double& weight, double& m, double& v, double grad,
                       const AdamWSettings& settings);
};

namespace {

/// Updates of one weight in a row.
struct Training {
  double weight;
  Values gradients;
  AdamWSettings settings;
};

using Update = std::function<void(double& weight, double& m, double& v, double grad,
                                  const AdamWSettings& settings)>;

/// weight, m and v after every update.
Values states_after(const Training& training, const Update& update) {
  double weight = training.weight, m = 0, v = 0;
  Values states;
  AdamWSettings settings = training.settings;
  for (size_t i = 0; i < training.gradients.size(); ++i) {
    settings.step = static_cast<int64_t>(i) + 1;
    update(weight, m, v, training.gradients[i], settings);
    states.insert(states.end(), {weight, m, v});
  }
  return states;
}

/// The project's own kernel, on tensors of one element.
void update_by_kernel(double& weight, double& m, double& v, double grad,
                      const AdamWSettings& settings) {
  const auto tensor = [](double value) {
    return Tensor::from_host(Values{value}, {1}, DType::f64);
  };
  const Tensor w = tensor(weight), first = tensor(m), second = tensor(v);
  ops::adamw(w, w, first, second, tensor(grad), tensor(1), settings);
  weight = w.item();
  m = first.item();
  v = second.item();
}

/// What people make of it.
struct Variant {
  const char* words;
  bool unbiased = true;
  double decay = 1;  ///< of lr * weight_decay
  bool decay_without_lr = false, decay_in_gradient = false, eps_in_root = false, keeps = true;
  double sign = 1;
};

Update update_by(const Variant& variant) {
  return [variant](double& weight, double& m, double& v, double grad, const AdamWSettings& s) {
    if (variant.decay_in_gradient) grad += s.weight_decay * weight;
    const double first = s.beta1 * m + (1 - s.beta1) * grad;
    const double second = s.beta2 * v + (1 - s.beta2) * grad * grad;
    const double t = double(s.step);
    const double mean = variant.unbiased ? first / (1 - std::pow(s.beta1, t)) : first;
    const double square = variant.unbiased ? second / (1 - std::pow(s.beta2, t)) : second;
    const double root = variant.eps_in_root ? std::sqrt(square + s.eps) : std::sqrt(square) + s.eps;
    const double decay = variant.decay_in_gradient ? 0 : variant.decay * s.weight_decay;
    weight *= 1 - decay * (variant.decay_without_lr ? 1 : s.lr);
    weight -= variant.sign * s.lr * mean / root;
    if (!variant.keeps) return;
    m = first;
    v = second;
  };
}

const Variant kVariants[] = {
    {.words = "the bias correction is missing: moments that begin at 0 are too small at first, by "
              "1 - beta^step",
     .unbiased = false},
    {.words = "the decay went through the moments, as in Adam with L2: AdamW takes it from the "
              "weight directly",
     .decay_in_gradient = true},
    {.words = "the weight decay is missing", .decay = 0},
    {.words = "the weight decay has the wrong sign", .decay = -1},
    {.words = "the decay is not scaled by the learning rate", .decay_without_lr = true},
    {.words = "eps stands inside the root: it belongs beside it", .eps_in_root = true},
    {.words = "the step goes uphill: it is subtracted", .sign = -1},
    {.words = "the moments are as they were: the next update needs them", .keeps = false},
};

Outcome run(const Training& training, const Update& update) {
  return run_alone([&] { return states_after(training, update); });
}

void judge_one(const Answer& answer, const std::string& setting, const Training& training) {
  std::vector<Suspect> suspects;
  for (const Variant& variant : kVariants) {
    suspects.push_back({variant.words, {states_after(training, update_by(variant))}});
  }
  expect_values(setting, "(weight, m, v)", run(training, answer.adamw_update),
                run(training, update_by_kernel).values, suspects,
                "the update is not AdamW's; m and v beside it say which line to look at", 1e-9);
}

Training random_training(uint64_t seed, int64_t updates) {
  const Values values = normals(seed, updates + 1);
  AdamWSettings settings;
  settings.lr = 0.02;
  settings.beta1 = 0.8;
  settings.beta2 = 0.95;
  settings.eps = 0.01;
  settings.weight_decay = 0.3;
  return {values[0], Values(values.begin() + 1, values.end()), settings};
}

}  // namespace

void judge(const Answer& answer) {
  judge_one(answer, "one update", random_training(1, 1));
  judge_one(answer, "six updates", random_training(2, 6));
  Training small = random_training(3, 4);
  for (double& gradient : small.gradients) gradient *= 1e-3;  // eps counts
  judge_one(answer, "small gradients", small);
}

Values observe(const Answer& answer, uint64_t seed) {
  return run(random_training(100 + seed, 1 + static_cast<int64_t>(seed % 7)), answer.adamw_update)
      .values[0];
}

}  // namespace usp::judging

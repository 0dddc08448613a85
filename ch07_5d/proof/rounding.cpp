#include "proof/rounding.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "base/clock.h"
#include "base/file_writer.h"
#include "base/rng.h"
#include "base/rules.h"
#include "comm/launch.h"
#include "composition/layout.h"
#include "proof/temporary_folder.h"
#include "train_step.h"

namespace usp {

namespace {

constexpr int64_t kRoundedSteps = 40;
/// Micro-batches of a step: so many where they may be multiplied; of fewer there are no five
/// orders.
constexpr int64_t kFewest = 8, kLeast = 4;
constexpr int64_t kShownSteps[] = {1, kRoundedSteps / 2, kRoundedSteps};
constexpr size_t kOrders = 5;

/// A way to add up the gradients of a step's samples.
struct SampleOrder {
  std::string what;
  int64_t micro_batch_size;
  std::vector<int64_t> samples;  ///< of a step's batch, in the order in which they are taken
};

/// Orders that differ in what is added to what: other cuts into micro-batches, and micro-batches in
/// other orders. Experts' balance is counted by the micro-batch, so these are not cut otherwise.
std::vector<SampleOrder> orders_of(const TrainConfig& one) {
  const int64_t size = one.micro_batch_size, batch = one.global_batch_size();
  std::vector<int64_t> as_they_come(batch);
  std::iota(as_they_come.begin(), as_they_come.end(), 0);
  std::vector<SampleOrder> orders = {
      {fmt::format("one process, micro-batches of {}", size), size, as_they_come}};
  if (one.model.experts.num_experts == 0) {
    for (int64_t cut : {batch, batch / 2}) {
      if (cut == size || batch % cut != 0) continue;
      orders.push_back({fmt::format("one process, micro-batches of {}", cut), cut, as_they_come});
    }
  }
  for (uint64_t shuffle = 0; orders.size() < kOrders; ++shuffle) {
    const Permutation permutation(shuffle, "order of micro-batches", uint64_t(batch / size));
    SampleOrder order{"one process, another order", size, {}};
    for (int64_t i = 0; i < batch; ++i) {
      order.samples.push_back(int64_t(permutation(0, uint64_t(i / size))) * size + i % size);
    }
    const auto is_same = [&](const SampleOrder& other) { return other.samples == order.samples; };
    if (std::ranges::none_of(orders, is_same)) orders.push_back(std::move(order));
  }
  return orders;
}

/// Writes the samples of all steps as one stream in which each begins with a separator: so the last
/// target of a sample is the same whichever sample follows. A token mostly follows from the one
/// before, so that there is something to learn.
void write_samples(const std::string& path, const TrainConfig& config,
                   const std::vector<int64_t>& order) {
  std::string text;
  const RandomStream random(1, "samples");
  const auto words = uint64_t(config.model.vocab_size - 1);
  const auto put = [&](uint64_t token) { text += {char(token), char(token >> 8)}; };
  for (int64_t step = 0; step < kRoundedSteps; ++step) {
    for (int64_t place : order) {
      const auto sample = uint64_t(step * std::ssize(order) + place);
      uint64_t token = 0;
      put(token);
      for (int64_t i = 1; i < config.seq_len; ++i) {
        const auto [a, b] = random.bits(sample, uint64_t(i));
        token = a % 4 == 0 ? 1 + b % words : 1 + (3 * token + 1) % words;
        if (b % 16 == 1) token = 0;  // a document ends
        put(token);
      }
    }
  }
  put(0);
  write_file(path, text);
}

/// Updates that are large enough for rounding to spread in so few steps.
TrainConfig with_rate(TrainConfig config) {
  config.optimizer.lr = 0.01;
  config.optimizer.warmup_steps = 2;
  config.steps = kRoundedSteps;
  return config;
}

TrainedSeries train_series(const TrainConfig& config, const std::vector<int64_t>& order) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "samples.bin").string();
  write_samples(path, config, order);
  const TokenFile file(path, 2, config.model.vocab_size);
  const Dataset dataset(file, config.seq_len, 0, DataOrder::sequential, uint64_t(config.seed));
  TrainedSeries series;
  run_threads(int(config.mesh().ranks()), [&](const Communicator& world) {
    world.engine().set_node_size(config.communication->node_size);
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&dataset, mesh});
    for (int64_t step = 0; step < kRoundedSteps; ++step) {
      trainer.train_step(step);
      const StepMetrics metrics = trainer.report(step, 0);
      if (world.rank() != 0) continue;
      series.losses.push_back(metrics.loss);
      series.norms.push_back(metrics.grad_norm);
    }
  });
  return series;
}

/// In the quadratic mean over the second half.
double apart(const std::vector<double>& one, const std::vector<double>& other) {
  double squares = 0;
  const size_t begin = one.size() / 2;
  for (size_t i = begin; i < one.size(); ++i) squares += std::pow(one[i] / other[i] - 1, 2);
  return std::sqrt(squares / double(one.size() - begin));
}

bool is_finite(const std::vector<double>& values) {
  return std::ranges::all_of(values, [](double value) { return std::isfinite(value); });
}

/// Ratio of the layout's distance to the orders', which may be 0.
double ratio(double layout, double orders) { return layout == 0 ? 0 : layout / orders; }

std::vector<const TrainedSeries*> all_of(const RoundingResult& result) {
  std::vector<const TrainedSeries*> all = {&result.layout};
  for (const TrainedSeries& order : result.orders) all.push_back(&order);
  return all;
}

}  // namespace

SeriesDistance distance_of(const TrainedSeries& one, const TrainedSeries& other) {
  return {apart(one.losses, other.losses), apart(one.norms, other.norms)};
}

void judge(RoundingResult& result) {
  for (const TrainedSeries* series : all_of(result)) {
    if (is_finite(series->losses) && is_finite(series->norms)) continue;
    result.failure = fmt::format("{}: a loss or a gradient norm is no number", series->what);
    return;
  }
  bool all_are_equal = true;
  result.of_layout = distance_of(result.layout, result.orders.front());
  for (size_t i = 0; i < result.orders.size(); ++i) {
    const SeriesDistance from = distance_of(result.layout, result.orders[i]);
    result.of_layout.loss = std::min(result.of_layout.loss, from.loss);
    result.of_layout.norm = std::min(result.of_layout.norm, from.norm);
    for (size_t j = 0; j < i; ++j) {
      const auto& [loss, norm] = distance_of(result.orders[i], result.orders[j]);
      result.of_orders.loss = std::max(result.of_orders.loss, loss);
      result.of_orders.norm = std::max(result.of_orders.norm, norm);
      all_are_equal &= result.orders[i].losses == result.orders[j].losses &&
                       result.orders[i].norms == result.orders[j].norms;
    }
  }
  if (all_are_equal) {
    result.failure = "the five orders differ in no bit, so they say nothing about rounding";
    return;
  }
  const auto& [loss, norm] = result.of_layout;
  result.ratio = std::max(ratio(loss, result.of_orders.loss), ratio(norm, result.of_orders.norm));
  if (result.ratio > kMostOfRounding) {
    result.failure = fmt::format(
        "{:.1f} times as far from one process as any two of its orders are from each other",
        result.ratio);
  }
}

Twin in_bf16(const Twin& twin) {
  const TrainConfig& config = twin.config;
  const int64_t micro_batches = config.grad_acc_steps * config.data_parallel.dp_size;
  const int64_t times = (kFewest + micro_batches - 1) / micro_batches;
  // A schedule from a file keeps its micro-batches.
  for (const int64_t more : {times, int64_t{1}}) {
    if (more * micro_batches < kLeast) continue;
    std::vector<std::string> words;
    std::istringstream stream(twin.flags);
    for (std::string word; stream >> word;) {
      // What dropout leaves out goes by a sample's number.
      const bool is_left_out =
          word == "--dtype" || word == "--grad_acc_steps" || word == "--dropout";
      if (is_left_out) stream >> word;
      if (!is_left_out) words.push_back(word);
    }
    for (const char* word :
         {"--dtype", "bf16", "--grad_accumulation", "bf16", "--grad_acc_steps"}) {
      words.emplace_back(word);
    }
    words.push_back(fmt::format("{}", more * config.grad_acc_steps));
    if (std::optional<Twin> found = read_twin(words)) return *found;
  }
  usage_error(
      "prove_dtype=bf16 puts the {} micro-batches of a batch in other orders, and there must be at "
      "least {}; try --grad_acc_steps {}",
      micro_batches, kLeast, kFewest);
}

RoundingResult compare_rounding(const Twin& twin) {
  const int64_t begin = clock_ns();
  RoundingResult result;
  TrainConfig config = with_rate(twin.config);
  config.composition.check_copies = has_copies(place_parameters(config)) ? 1 : 0;
  TrainConfig one = with_rate(alone(twin));
  one.dtype = config.dtype;
  one.grad_accumulation = config.grad_accumulation;
  const std::vector<SampleOrder> orders = orders_of(one);
  try {
    result.layout = train_series(config, orders.front().samples);
    result.layout.what = "the layout";
    for (const SampleOrder& order : orders) {
      TrainConfig own = one;
      own.micro_batch_size = order.micro_batch_size;
      own.grad_acc_steps = one.global_batch_size() / order.micro_batch_size;
      result.orders.push_back(train_series(own, order.samples));
      result.orders.back().what = order.what;
    }
    judge(result);
  } catch (const std::exception& error) {
    result.failure = error.what();
  }
  result.seconds = seconds_since(begin);
  return result;
}

std::string table_of(const RoundingResult& result) {
  std::string text = fmt::format("{:<34}", "");
  for (const char* what : {"loss", "norm"}) {
    for (int64_t step : kShownSteps)
      text += fmt::format("{:>13}", fmt::format("{} of {}", what, step));
  }
  const auto add = [&](const TrainedSeries& series) {
    text += fmt::format("\n{:<34}", series.what);
    for (const auto& values : {series.losses, series.norms}) {
      for (int64_t step : kShownSteps) text += fmt::format("{:>13.7f}", values[step - 1]);
    }
  };
  add(result.layout);
  for (const TrainedSeries& series : result.orders) add(series);
  const auto compare = [&](const char* what, double layout, double orders) {
    text += fmt::format("\n{}: {:.1e} from the nearest order; two orders are up to {:.1e} apart",
                        what, layout, orders);
  };
  compare("losses", result.of_layout.loss, result.of_orders.loss);
  compare("gradient norms", result.of_layout.norm, result.of_orders.norm);
  return text;
}

}  // namespace usp

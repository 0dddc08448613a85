#include "planner/parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "accounting/memory.h"
#include "planner/record.h"

namespace usp {

namespace {

constexpr int64_t kLayers = 2;    ///< of the model that is recorded
constexpr double kInTurns = 2.5;  ///< 1: device and host one after the other; infinite: at once

/// The run whose record has each part of this one's model.
TrainConfig alone(TrainConfig config) {
  config.model.num_layers = kLayers;
  config.data_parallel.dp_size = config.pipeline.pp_size = config.pipeline.pp_chunks = 1;
  config.pipeline.pp_schedule = "1f1b";
  config.data_parallel.zero_stage = 0;
  config.grad_acc_steps = 1;
  config.communication->ranks = config.mesh().ranks();
  return config;
}

void add_event(PartWork& work, const Program& program, const Event& event, double share) {
  if (event.kind == Event::compute) work.kernels[program.kernels[event.what]] += share;
  if (event.kind == Event::post) work.exchanges[program.exchanges[event.what]] += share;
}

// [seconds]
/// Seconds of the work, with `besides` seconds of the device on top of its kernels.
double seconds_of(const PartWork& work, const LayerClass& of, Cost& cost, double besides = 0) {
  double device = besides, launches = 0, exchanges = 0;
  for (const auto& [kernel, times] : work.kernels) {
    device += times * cost.of(kernel);
    launches += times;
  }
  for (const auto& [exchange, times] : work.exchanges) {
    exchanges += times * cost.of(exchange, of.groups[exchange.group]).busy;
    launches += times;
  }
  const double host = launches * cost.launch();
  const auto& framework = cost.cluster().framework;
  return std::pow(std::pow(device, kInTurns) + std::pow(host, kInTurns), 1 / kInTurns) +
         exchanges * (framework ? framework->exposed.value : 1);
}
// [seconds]

ProgramGroup group_of_mesh(const TrainConfig& config, const char* name) {
  return {.name = name,
          .members = std::make_shared<const std::vector<int>>(config.mesh().members(name, 0))};
}

}  // namespace

std::string layer_class_key(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {} {}", model.hidden_size, model.num_heads,
                     model.num_kv_heads, model.ffn_hidden_size, model.vocab_size,
                     model.tie_word_embeddings, config.seq_len, config.micro_batch_size,
                     config.tensor_parallel.tp_size, config.tensor_parallel.sequence_parallel,
                     config.attention, config.recompute);
}

// [layer_class]
LayerClass record_layer_class(const TrainConfig& config) {
  const TrainConfig small = alone(config);
  const Program program = record(small, 0);
  LayerClass found;
  found.groups = program.groups;
  found.parameters = num_parameters(small.model) / small.tensor_parallel.tp_size;
  found.logits = double(small.micro_batch_size * small.seq_len * small.model.vocab_size) /
                 double(small.tensor_parallel.tp_size);
  for (const Event& event : program.events) {
    const char work = program.segments[event.segment].work;
    if (work == 'U') {
      add_event(found.update, program, event, 1);
      continue;
    }
    const bool is_layer = event.block >= 1 && event.block <= kLayers;
    Passes& part = event.block == 0 ? found.embedding : is_layer ? found.layer : found.head;
    add_event(work == 'F' ? part.forward : part.backward, program, event,
              is_layer ? 1.0 / kLayers : 1);
  }
  return found;
}
// [layer_class]

PartSeconds part_seconds(const LayerClass& layer_class, Cost& cost) {
  const auto of = [&](const PartWork& work, double besides = 0) {
    return seconds_of(work, layer_class, cost, besides);
  };
  const Cluster& cluster = cost.cluster();
  const double bytes = cluster.framework ? cluster.framework->logit_bytes.value : 0;
  const double loss = layer_class.logits * bytes / 2 / (cluster.memory_gbs.value * 1e9);
  return {of(layer_class.embedding.forward),
          of(layer_class.embedding.backward),
          of(layer_class.layer.forward),
          of(layer_class.layer.backward),
          of(layer_class.head.forward, loss),
          of(layer_class.head.backward, loss),
          of(layer_class.update) / double(layer_class.parameters)};
}

namespace {

/// Seconds in which dp exchanges gradients and weights of `parameters` parameters.
double exchange_gradients(const TrainConfig& config, double parameters, Cost& cost) {
  if (config.data_parallel.dp_size * config.context_parallel.cp_size < 2) return 0;
  const ProgramGroup group = group_of_mesh(config, "dp_cp");
  const auto& framework = cost.cluster().framework;
  const DType dtype = parse_dtype(config.dtype);
  const double bytes =
      framework ? framework->gradient_bytes.value : double(bytes_of(accumulate_dtype(dtype)));
  const auto of = [&](CommKind kind, double bytes_each) {
    return cost.of({.kind = kind, .payload_bytes = int64_t(parameters * bytes_each)}, group).busy;
  };
  const int64_t stage = config.data_parallel.zero_stage;
  const auto m = double(config.grad_acc_steps);
  if (stage == 0) return of(CommKind::all_reduce, bytes);
  const double gather = of(CommKind::all_gather, double(bytes_of(dtype)));
  return of(CommKind::reduce_scatter, bytes) * (stage == 1 ? 1 : m) +
         gather * (stage == 3 ? 2 * m : 1);
}

double message(const TrainConfig& config, Cost& cost) {
  const ProgramGroup group = group_of_mesh(config, "pp");
  const int64_t shares =
      config.tensor_parallel.sequence_parallel ? config.tensor_parallel.tp_size : 1;
  const int64_t bytes = config.micro_batch_size * config.seq_len * config.model.hidden_size *
                        bytes_of(parse_dtype(config.dtype)) / shares;
  return cost.of({.kind = CommKind::send, .peer = 1, .payload_bytes = bytes}, group).arrives;
}

}  // namespace

// [step_of_parts]
StepOfParts step_of_parts(const TrainConfig& config, const PartSeconds& parts, Cost& cost) {
  const int64_t p = config.pipeline.pp_size, layers = config.model.num_layers;
  const auto m = double(config.grad_acc_steps), v = double(config.pipeline.pp_chunks);
  const double layer = parts.layer_forward + parts.layer_backward;
  const double first = parts.embedding_forward + parts.embedding_backward;
  const double last = parts.head_forward + parts.head_backward;
  const double most = double((layers + p - 1) / p);  // layers of the fullest stage
  const double slowest =
      p == 1 ? first + most * layer + last : most * layer + std::max(first, last);

  StepOfParts step;
  step.stages = m * slowest;
  step.bubble = (first + double(layers) * layer + last - slowest) / v;
  if (p > 1) step.messages = 2 * (m * v + double(p) - 1) * message(config, cost);
  const auto& framework = cost.cluster().framework;
  const ModelConfig& model = config.model;
  const double ends =
      double(model.vocab_size * model.hidden_size) * (p > 1 || model.tie_word_embeddings ? 1 : 2);
  const double own = (most * double(model.layer_weights(0, false)) + ends) /
                     double(config.tensor_parallel.tp_size);
  const double hidden = (framework ? framework->overlap.value : 1) *
                        (most * parts.layer_backward + parts.head_backward);
  step.gradients = std::max(0.0, exchange_gradients(config, own, cost) - hidden);
  const int64_t shares = config.data_parallel.zero_stage > 0 ? config.data_parallel.dp_size : 1;
  step.update = own / double(shares) * parts.update_of_parameter;
  step.constant = framework ? framework->step_ms.value * 1e-3 : 0;
  return step;
}
// [step_of_parts]

}  // namespace usp

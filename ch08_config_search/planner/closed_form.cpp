#include "planner/closed_form.h"

#include <algorithm>

#include "accounting/memory.h"
#include "planner/cost.h"

namespace usp {

namespace {

/// Seconds in which a ring of this group sends `bytes` bytes once around: (n-1)/n of them.
double around(const TrainConfig& config, Cost& cost, const char* group, double bytes) {
  ProgramGroup of{
      .name = group,
      .members = std::make_shared<const std::vector<int>>(config.mesh().members(group, 0))};
  if (of.members->size() < 2) return 0;
  return cost.of({.kind = CommKind::all_gather, .payload_bytes = int64_t(bytes)}, of).busy;
}

}  // namespace

// [closed_form]
ClosedForm closed_form(const TrainConfig& config, const Cluster& cluster) {
  Cost cost(cluster);
  const MeshSizes mesh = config.mesh();
  const auto ranks = double(mesh.ranks()), tokens = double(config.tokens_per_step());
  const DType dtype = parse_dtype(config.dtype);
  const auto element = double(bytes_of(dtype));
  const auto m = double(config.grad_acc_steps), v = double(config.pipeline.pp_chunks);
  const auto p = double(mesh.pp);

  ClosedForm step;
  const double again = config.recompute == "full" ? 4.0 / 3 : 1;
  const double flops = tokens * again * model_flops_per_token(config.model, double(config.seq_len));
  const auto peak = cluster.peak_tflops.find(dtype);
  const double rate = peak == cluster.peak_tflops.end() ? 1 : peak->second.value * 1e12;
  step.computes = flops / (ranks * rate * cluster.matmul.value);
  step.bubble = step.computes * (p - 1) / (m * v);
  // Twice each way, a gather and a reduce-scatter a region, of all tokens of a rank's copy.
  const double stream = double(config.micro_batch_size * config.seq_len / mesh.cp) *
                        double(config.model.hidden_size) * element;
  const double layers = double(config.model.num_layers) / p;
  step.tensor = 8 * m * layers * around(config, cost, "tp", stream);
  const double own = double(num_parameters(config.model)) / double(mesh.tp * mesh.pp);
  const double summed = own * double(bytes_of(accumulate_dtype(dtype)));
  const int64_t stage = config.data_parallel.zero_stage;
  const double once = around(config, cost, "dp_cp", summed);
  const double gathers = around(config, cost, "dp_cp", own * element) * (stage == 3 ? 2 * m : 1);
  const double sends = stage == 0 ? 2 * once : once * (stage >= 2 ? m : 1) + gathers;
  const double hides = (stage >= 2 ? 1 : 1 / m) * step.computes * 2 / 3;  // backward: two of three
  step.data = std::max(0.0, sends - hides);
  return step;
}
// [closed_form]

}  // namespace usp

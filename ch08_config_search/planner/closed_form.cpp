#include "planner/closed_form.h"

#include <algorithm>
#include <cmath>

#include "accounting/memory.h"
#include "planner/cost.h"

namespace usp {

namespace {

/// How the group of ranks that differ along these axes alone lies on nodes.
GroupLayout layout_along(const MeshSizes& mesh, MeshAxis one, MeshAxis other, const char* name,
                         int64_t ranks_per_node) {
  int64_t ranks = 1, distance = 1, faster = 1;
  for (auto axis = mesh.order.end(); axis-- != mesh.order.begin();) {
    const int64_t size = mesh.size(*axis);
    if (size > 1 && (*axis == one || *axis == other)) {
      if (ranks == 1) distance = faster;
      // Another axis lies between two of these: the ranks are not equally far apart.
      if (distance * ranks != faster) return layout_of(mesh.members(name, 0), ranks_per_node);
      ranks *= size;
    }
    faster *= size;
  }
  return layout_of(ranks, distance, ranks_per_node);
}

/// Seconds in which a ring of this group sends `bytes` bytes once around: (n-1)/n of them.
double around(const GroupLayout& group, Cost& cost, double bytes) {
  return group.ranks < 2 ? 0 : cost.of(CommKind::all_gather, std::floor(bytes), group).busy;
}

// [bubble]
/// Whether a pipeline idles as its schedule's formula says. Ranks fill other gaps with too few
/// micro-batches, with runs that are shorter than others, and where a backward pass waits for
/// neighbors; and what takes each action as it comes has no formula.
bool has_formula(const PipelineConfig& pipeline, int64_t m, double F, double B) {
  const std::string_view name = pipeline.pp_schedule;
  const int64_t p = pipeline.pp_size;
  if (pipeline.overlap_dispatch) return false;
  if (name == "interleaved" || name == "llama3") {
    return pipeline.pp_run_length == 0 && (m <= p || m % p == 0);
  }
  if (name == "zb_h1" || name == "zb_h2") return m >= 2 * p - 1;
  if (name == "dualpipe" || name == "dualpipe_v") return B <= F;
  return name == "naive" || name == "afab" || name == "breadth_first" || name == "1f1b";
}

/// What the ranks of a pipeline idle, over what they work, by the formula of each schedule, or by
/// the schedule itself, laid out. A backward pass is as long as two forward passes, and half of it
/// makes gradients of weights.
double bubble_of(const TrainConfig& config) {
  const PipelineConfig& pipeline = config.pipeline;
  const std::string_view name = pipeline.pp_schedule;
  if (pipeline.pp_size == 1) return 0;
  const auto p = double(pipeline.pp_size), v = double(pipeline.pp_chunks);
  const auto m = double(config.grad_acc_steps);
  const double F = 1, B = config.recompute == "full" ? 2 : 1, W = 1;
  if (!has_formula(pipeline, config.grad_acc_steps, F, B)) {
    return simulate_schedule(pipeline.schedule(config.grad_acc_steps), {F, B, W}).bubble();
  }
  const double work = m * (F + B + W);
  if (name == "naive") return p - 1;
  if (name == "zb_h1") return (p - 1) * std::max(B, F + B - W) / work;
  if (name == "zb_h2") return (p - 1) * std::max({F, B - F, F + B - 2 * W}) / work;
  if (name == "dualpipe") return (p / 2 - 1) * F / work;
  if (name == "dualpipe_v") return (p - 1) / 2 * F / work;
  return (p - 1 + (v - 1) * std::max(0.0, p - m)) / (v * m);
}
// [bubble]

}  // namespace

ModelSize::ModelSize(const TrainConfig& config)
    : flops_per_token(model_flops_per_token(config.model, double(config.seq_len))),
      parameters(double(num_parameters(config.model))) {}

ClosedForm closed_form(const TrainConfig& config, const Cluster& cluster) {
  return closed_form(config, cluster, ModelSize(config));
}

// [closed_form]
ClosedForm closed_form(const TrainConfig& config, const Cluster& cluster, const ModelSize& size) {
  Cost cost(cluster);
  const MeshSizes mesh = config.mesh();
  const auto ranks = double(mesh.ranks()), tokens = double(config.tokens_per_step());
  const DType dtype = parse_dtype(config.dtype);
  const auto element = double(bytes_of(dtype));
  const auto m = double(config.grad_acc_steps), p = double(mesh.pp);

  ClosedForm step;
  const double again = config.recompute == "full" ? 4.0 / 3 : 1;
  const double flops = tokens * again * size.flops_per_token;
  const auto peak = cluster.peak_tflops.find(dtype);
  const double rate = peak == cluster.peak_tflops.end() ? 1 : peak->second.value * 1e12;
  step.computes = flops / (ranks * rate * cluster.matmul.value);
  step.bubble = step.computes * bubble_of(config);
  // Twice each way, a gather and a reduce-scatter a region, of all tokens of a rank's copy.
  const double stream = double(config.micro_batch_size * config.seq_len / mesh.cp) *
                        double(config.model.hidden_size) * element;
  const double layers = double(config.model.num_layers) / p;
  const auto node = static_cast<int64_t>(cluster.ranks_per_node.value);
  const GroupLayout tensor = layout_along(mesh, MeshAxis::tp, MeshAxis::tp, "tp", node);
  const GroupLayout data = layout_along(mesh, MeshAxis::dp, MeshAxis::cp, "dp_cp", node);
  step.tensor = 8 * m * layers * around(tensor, cost, stream);
  const double own = size.parameters / double(mesh.tp * mesh.pp);
  const double summed = own * double(bytes_of(accumulate_dtype(dtype)));
  const int64_t stage = config.data_parallel.zero_stage;
  const double once = around(data, cost, summed);
  const double gathers = around(data, cost, own * element) * (stage == 3 ? 2 * m : 1);
  const double sends = stage == 0 ? 2 * once : once * (stage >= 2 ? m : 1) + gathers;
  const double hides = (stage >= 2 ? 1 : 1 / m) * step.computes * 2 / 3;  // backward: two of three
  step.data = std::max(0.0, sends - hides);
  return step;
}
// [closed_form]

}  // namespace usp

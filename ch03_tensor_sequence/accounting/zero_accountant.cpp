#include "accounting/zero_accountant.h"

#include <algorithm>

#include "data_parallel/zero.h"

namespace usp {

namespace {

/// A step of the rank's own DataParallelStrategy, of whose blocks nothing is left but what that put
/// around them. Backward writes the gradients that `chunks` name, or none. The runtime of `dry`
/// counts what is gathered and reduced. Returns the micro-batches that each chunk runs.
int64_t run_data_parallel(const TrainConfig& config, DryRank& dry,
                          const std::vector<PassBytes>& chunks) {
  Model& model = dry.model;
  ParameterList& parameters = model.parameters();
  Grads grads(parameters);
  Optimizer optimizer(parameters, config.optimizer);
  const auto strategy = make_data_parallel(config, model, grads, optimizer, dry.mesh());
  model.recompute({0, 0});
  for (size_t chunk = 0; chunk < model.ranges().size(); ++chunk) {
    for (Block& block : model.chunk(chunk)) {
      std::erase_if(block, [](const auto& segment) { return segment->name() != "unshard"; });
    }
  }
  // Sums over further groups are of those who hold copies for another reason.
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].grad_groups.resize(1);
  // [passes]
  const std::vector<ChunkPass> passes(config.grad_acc_steps);
  // [passes]
  const int64_t micro_batches = std::ranges::count_if(
      passes, [](const ChunkPass& pass) { return pass.gradients && pass.chunk == 0; });
  strategy->begin_step(micro_batches);
  for (const auto& [chunk, forward, backward, gradients] : passes) {
    if (forward) model.forward_chunk(chunk, {}, /*activations=*/nullptr, {});
    if (backward) {
      model.backward_chunk(chunk, {}, Model::Activations(model.chunk(chunk).size()), grads, {});
    }
    if (!gradients || chunks.empty()) continue;
    for (int64_t written : chunks[chunk].written) grads.add({&parameters[written]}, [](bool) {});
  }
  strategy->finish();
  for (size_t i = 0; i < parameters.size(); ++i) ++parameters[i].version;  // all are updated
  strategy->after_update();
  return micro_batches;
}

}  // namespace

int64_t shard_size(const TrainConfig& config, int64_t copies) {
  const DataParallelConfig& dp = config.data_parallel;
  return dp.shard_size > 0 && dp.zero_stage > 0 ? dp.shard_size : copies;
}

int64_t shard_size(const TrainConfig& config) { return shard_size(config, config.mesh().dp_cp()); }

std::vector<UnitShape> unit_shapes(const TrainConfig& config, DryRank& dry) {
  std::vector<UnitShape> units;
  for (const Unit& unit : cut_into_units(dry.model.parameters())) {
    const std::string& group = unit.parameters.front()->grad_groups.front();
    const Communicator& all = dry.mesh().group(group);
    const int64_t copies = all.size(), Z = shard_size(config, copies);
    units.push_back({(unit.numel + Z - 1) / Z * Z, unit.numel, group, copies, Z, all.rank()});
  }
  return units;
}

void shard_states(const TrainConfig& config, DryRank& dry, const std::vector<PassBytes>& chunks,
                  Prediction& prediction) {
  prediction.states = sharded_states(config, unit_shapes(config, dry));
  prediction.book_states = book_sharded_states(config);
  prediction.buffers = data_parallel_buffers(config, prediction.rank, chunks);
}

StateBytes sharded_states(const TrainConfig& config, const std::vector<UnitShape>& units) {
  const int64_t stage = config.data_parallel.zero_stage;
  int64_t held = 0, whole = 0, shard = 0, updated = 0;
  for (const UnitShape& unit : units) {
    held += unit.held;
    whole += unit.numel;
    shard += unit.shard();
    updated += unit.updated_by(unit.rank);
  }
  if (stage == 0) return whole_states(held, config);
  const KeptByStage& kept = kKept[stage];
  const DType dtype = parse_dtype(config.dtype);
  const int64_t weight = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
  const auto elements = [&](Kept part) { return part == Kept::whole ? whole : shard; };
  StateBytes states{};
  states.weights = elements(kept.weights) * weight;
  states.gradients = elements(kept.gradients) * bytes_of(dtype_of_gradient_sum(config));
  if (kept.gradients == Kept::whole && config.grad_accumulation == "both") {
    states.gradients += held * weight;
  }
  states.optimizer = shard * (weight == acc ? 0 : acc) + updated * 2 * acc;
  return states;
}

std::vector<LiveBytes> data_parallel_buffers(const TrainConfig& config, int64_t rank,
                                             const std::vector<PassBytes>& chunks) {
  DryRank dry(config, static_cast<int>(rank));
  Allocator& allocator = dry.runtime.allocator();
  allocator.record_events(true);
  run_data_parallel(config, dry, chunks);
  std::vector<LiveBytes> buffers = peaks_by_name(allocator, Category::communication);
  // Last, whenever it was first needed: others may add to it.
  std::ranges::stable_partition(
      buffers, [](const LiveBytes& buffer) { return buffer.name != "scratch of reductions"; });
  return buffers;
}

double book_sharded_states(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage;
  const double Z = double(shard_size(config));
  const double gradients = config.grad_accumulation == "both" ? 6 : 2;
  const double bytes =
      2 / (stage == 3 ? Z : 1) + gradients / (stage >= 2 ? Z : 1) + 12 / (stage >= 1 ? Z : 1);
  return bytes * double(num_parameters(config.model));
}

ZeroTraffic predict_traffic(const TrainConfig& config, int rank) {
  const DataParallelConfig& dp = config.data_parallel;
  const int64_t gradient = bytes_of(dtype_of_reduction(config));
  DryRank dry(config, rank);
  const std::vector<UnitShape> units = unit_shapes(config, dry);
  const int64_t copies = config.mesh().dp_cp();
  // What one of n ranks sends to have a sum on all of them.
  const auto sent_to_sum = [&](int64_t numel, int64_t n) {
    return 2 * (n - 1) * numel * copies / n;
  };
  ZeroTraffic traffic;
  const ParameterList& parameters = dry.model.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t n = dry.mesh().group(parameters[i].grad_groups.front()).size();
    traffic.all_reduce += sent_to_sum(parameters[i].local_shape().numel(), n) * gradient;
  }
  if (dp.zero_stage == 0) return traffic;
  traffic = {};
  const int64_t rounds = rounds_of_step(dp, run_data_parallel(config, dry, /*chunks=*/{}));
  for (const UnitShape& unit : units) {
    traffic.reduce_scatter += copies * rounds * (unit.ranks - 1) * unit.shard() * gradient;
    traffic.all_reduce += sent_to_sum(unit.shard(), unit.copies / unit.ranks) *
                          bytes_of(dtype_of_gradient_sum(config));
  }
  for (const auto& [operation, sent] : dry.runtime.ledger().entries()) {
    if (operation.second == CommKind::all_gather) traffic.all_gather += copies * sent.wire_bytes;
  }
  return traffic;
}

Traffic traffic_of(const DataParallelConfig& dp, const TrainConfig& config, const DryRank& dry) {
  const int rank = dry.mesh().world().rank();
  DryRank own(config, rank);  // of which the strategy changes the model
  Grads grads(own.model.parameters());
  Optimizer optimizer(own.model.parameters(), config.optimizer);
  const auto strategy = make_data_parallel(config, own.model, grads, optimizer, own.mesh());
  Traffic traffic{.what = "gradients, weights sent", .counted = strategy->operations()};
  traffic.formula = double(predict_traffic(config, rank).total()) / double(config.mesh().dp_cp());
  if (dp.zero_stage == 0) {
    traffic.what = "gradients sent";
    traffic.beside = fmt::format(", buckets: {}; by formula", strategy->num_buckets());
  }
  return traffic;
}

}  // namespace usp

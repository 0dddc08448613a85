#include "accounting/expert_accountant.h"

#include <algorithm>

#include "accounting/pipeline_accountant.h"
#include "expert_parallel/node_dispatch.h"
#include "expert_parallel/router.h"

namespace usp {

int64_t predict_expert_traffic(const TrainConfig& config, int rank) {
  const int64_t ep = config.expert_parallel.ep_size, H = config.model.hidden_size;
  const int64_t shares = config.expert_parallel.expert_tp ? 1 : config.tensor_parallel.row_shares();
  const int64_t T =
      config.micro_batch_size * config.seq_len / (config.context_parallel.cp_size * shares);
  const int64_t k = config.model.experts.num_experts_per_tok;
  const int64_t row = H * bytes_of(parse_dtype(config.dtype)), again = config.recompute == "full";
  const int64_t exchanges = 4 + 2 * again;
  int64_t bytes = T * k * (ep - 1) / ep * exchanges * row;
  if (config.expert_parallel.by_node()) {
    const int64_t here = config.expert_parallel.ranks_in_node(config);
    const int64_t n = ep / here, copies = T * std::min(k, n) * (n - 1) / n;
    const int64_t gates = k * bytes_of(accumulate_dtype(parse_dtype(config.dtype)));
    bytes = copies * (exchanges * row + (2 + again) * gates) +
            T * k * (here - 1) / here * exchanges * row;
  }
  int64_t layer_passes = 0;  // of this rank's chunks, over the step's micro-batches
  const Stages stages = config.pipeline.schedule(config.grad_acc_steps).stages;
  const int stage_rank = static_cast<int>(config.mesh().place_of(rank).pp);
  for (const ModelConfig& chunk : chunk_models(config, stage_rank)) {
    layer_passes +=
        chunk.experts.layers(0, chunk.num_layers) * stages.share_of(config.grad_acc_steps);
  }
  return layer_passes * bytes;
}

std::vector<RankTrait> expert_traits(const TrainConfig& config) {
  const std::vector<RowsOfRank> rows = even_rows_of_ranks(config);
  const auto received = [](int64_t choices) {
    return choices > 0 ? fmt::format("{} rows for its experts", choices) : "";
  };
  return {{[=](const MeshPlace& at) { return rows[at.ep].choices; }, received},
          {[=](const MeshPlace& at) { return rows[at.ep].copies; }, [](int64_t) { return ""; }}};
}

std::vector<RowsOfRank> even_rows_of_ranks(const TrainConfig& config) {
  const TensorParallelConfig& tensor = config.tensor_parallel;
  const ExpertConfig& experts = config.expert_parallel;
  const int64_t ep = experts.ep_size, E = config.model.experts.num_experts;
  std::vector<RowsOfRank> rows(ep);
  if (E == 0) return rows;
  const int64_t shares = experts.expert_tp ? 1 : tensor.row_shares();
  const int64_t T =
      config.samples_of_pass() * config.seq_len / (config.context_parallel.cp_size * shares);
  const int64_t k = config.model.experts.num_experts_per_tok;
  const int64_t here = experts.by_node() ? experts.ranks_in_node(config) : ep;
  const int64_t n = ep / here;
  for (int64_t rank = 0; rank < ep; ++rank) {
    int64_t& copies = rows[rank].copies = T;
    if (experts.by_node()) copies = even_received(T * std::min(k, n), n, n, rank / here);
    rows[rank].choices = even_received(k * std::min(T, copies), E / n, here, rank % here);
  }
  return rows;
}

bool tp_cuts_unevenly(const TrainConfig& config) {
  const ExpertShape& experts = config.model.experts;
  const int64_t F = config.model.ffn_hidden_size, width = experts.width(F);
  const auto has_rest = [&](int64_t n) { return n % config.tensor_parallel.tp_size != 0; };
  return has_rest(F) || has_rest(experts.num_shared_experts * width) ||
         (config.expert_parallel.expert_tp && has_rest(width));
}

TensorTraffic expert_traffic_over_tp(const TrainConfig& config) {
  const TensorParallelConfig& tp = config.tensor_parallel;
  const ExpertConfig& experts = config.expert_parallel;
  const ExpertShape& shape = config.model.experts;
  const int64_t t = tp.tp_size, T = config.micro_batch_size * config.seq_len;
  const int64_t x = (t - 1) * T * config.model.hidden_size * bytes_of(parse_dtype(config.dtype));
  const int64_t again = config.recompute == "full" ? 1 : 0;
  const int64_t gathered_again = tp.gathered_input == "again" ? 1 : 0;
  int64_t gathers = -2 - gathered_again - again, scatters = -2;  // of the MLP that is not there
  if (shape.num_shared_experts > 0) {
    gathers += 2 + gathered_again + again;
    scatters += 2 + again;  // another segment ends the block
  }
  if (experts.expert_tp) {
    gathers += 2 + again;
    scatters += 2;
  }
  int64_t counts = 0;
  if (!experts.expert_tp && (experts.balance == "sample" || experts.capacity_factor > 0)) {
    const int64_t rows =
        config.samples_of_pass() * config.seq_len / (config.context_parallel.cp_size * t);
    const int64_t runs = T / run_length(config.context_parallel, rows, config.seq_len);
    counts = (t - 1) * runs * (shape.num_experts + 1) * bytes_of(DType::i32);
  }
  const int64_t passes = config.data_parallel.dp_size * config.grad_acc_steps *
                         shape.layers(0, config.model.num_layers);
  return {.all_gather = passes * (gathers * x + counts), .reduce_scatter = passes * scatters * x};
}

Traffic traffic_of(const ExpertConfig&, const TrainConfig& config, const DryRank& dry) {
  Operations counted(dry.mesh().ep(), CommKind::all_to_all);
  if (const NodeGroups* nodes = dry.view.experts.nodes()) {
    counted.add(*nodes->between.ranks(), CommKind::all_to_all)
        .add(*nodes->within.ranks(), CommKind::all_to_all);
  }
  return {.what = "rows sent over ep",
          .counted = counted,
          .formula = double(predict_expert_traffic(config, dry.mesh().world().rank())),
          .beside = ", with even load"};
}

}  // namespace usp

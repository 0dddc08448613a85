#include "accounting/context_accountant.h"

#include "latent_attention/ring.h"

namespace usp {

ContextTraffic predict_context_traffic(const TrainConfig& config) {
  const ContextParallelConfig& cp = config.context_parallel;
  const int64_t n = cp.ring_size(), u = cp.head_ranks(), t = config.tensor_parallel.tp_size;
  const int64_t N = config.model.num_heads / t, D = config.model.head_dim();
  const int64_t G = std::max<int64_t>(1, config.model.num_kv_heads / t);
  const int64_t own = bytes_of(parse_dtype(config.dtype));
  const int64_t acc = bytes_of(accumulate_dtype(parse_dtype(config.dtype)));
  const int64_t rows = config.micro_batch_size * config.seq_len / cp.cp_size;
  // Of the group's rows, the kv heads that a rank has while it attends.
  // [travels]
  const bool latents = passes_latents_on(config.model, cp);
  const int64_t of_position =
      latents ? config.model.mla.cached() : 2 * std::max<int64_t>(1, G / u) * D;
  const int64_t keys = u * rows * of_position;
  // [travels]
  const bool full = config.recompute == "full";
  const int64_t forwards = full && cp.cp_recompute == "exchange" ? 2 : 1;
  const int64_t ranks = config.mesh().dp_cp() * t;
  const int64_t blocks = config.grad_acc_steps * config.model.num_layers * ranks;
  // [sent]
  ContextTraffic sent;
  const int64_t of_keys = blocks * (n - 1) * (forwards + 1) * keys * own;  // and in backward again
  const int64_t of_gradients = blocks * (n - 1) * keys * acc;
  if (cp.by_ring()) {
    sent.send = of_keys + of_gradients;
  } else {
    sent.all_gather = of_keys;
    sent.reduce_scatter = of_gradients;
  }
  const int64_t qkv = rows * (N + 2 * std::max(G, u)) * D, out = rows * N * D;
  const int64_t back =
      u > G ? acc : own;  // copies of a kv head are summed by whoever receives them
  const int64_t to_heads = (full ? 2 : 1) * (qkv + out) * own + out * own + qkv * back;
  sent.all_to_all = blocks * (u - 1) * to_heads / u;
  // [sent]
  return sent;
}

RankTrait ring_trait(const TrainConfig& config) {
  const ContextParallelConfig& cp = config.context_parallel;
  const bool places = cp.by_ring() && cp.ring_size() > 1 && cp.cp_layout == "contiguous";
  const int64_t head_ranks = cp.head_ranks();
  return {
      [=](const MeshPlace& at) { return places ? std::min<int64_t>(at.cp / head_ranks, 2) : 0; },
      [=](int64_t place) {
        if (!places) return std::string();
        return fmt::format("ring place {}{}", place, place == 2 ? "+" : "");
      }};
}

double keys_of_a_query(const TrainConfig& config, int rank) {
  const ContextParallelConfig& cp = config.context_parallel;
  const int64_t ring_place = config.mesh().place_of(rank).cp / cp.head_ranks();
  const Positions attended = cp.of_ring_place(config.seq_len, ring_place);
  return double(causal_pairs(attended, {0, config.seq_len})) / double(attended.count());
}

Traffic traffic_of(const ContextParallelConfig&, const TrainConfig& config, const DryRank& dry) {
  const ContextGroup& group = dry.view.context;
  Operations counted(group.ring(), CommKind::send);
  counted.add(group.ring_gradients(), CommKind::send)
      .add(group.ring(), CommKind::all_gather)
      .add(group.ring(), CommKind::reduce_scatter)
      .add(group.heads(), CommKind::all_to_all);
  const MeshSizes sizes = config.mesh();
  return {.what = "attention sent over cp",
          .counted = counted,
          .formula = double(predict_context_traffic(config).total()) /
                     double(sizes.dp_cp() * sizes.tp * sizes.pp),
          .note = sizes.pp > 1 ? ", mean of all stages" : ""};
}

}  // namespace usp

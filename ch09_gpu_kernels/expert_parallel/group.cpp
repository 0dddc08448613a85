#include "expert_parallel/group.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/rules.h"
#include "config.h"
#include "expert_parallel/node_dispatch.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

void ExpertConfig::bind(Args& args) {
  args.group("Expert parallelism");
  args.bind("ep_size", ep_size, "ranks that shard the experts of a layer").may_differ_on_resume();
  args.bind("dispatch", dispatch, {"direct", "by_node"},
            "how tokens reach their experts: a copy for each, or one for each node (of node_size "
            "ranks) that hands it on")
      .may_differ_on_resume();
  args.bind("expert_tp", expert_tp,
            "the ranks of tp shard each expert, rather than hold whole ones")
      .may_differ_on_resume();
  args.bind(
      "balance", balance, {"none", "sample", "batch", "bias"},
      "what evens out the experts' load: a loss for every sample, one for the global batch, or "
      "a bias of the choice");
  args.bind("balance_coef", balance_coef, "factor of the balance loss");
  args.bind("router_z_loss_coef", router_z_loss_coef,
            "factor of the mean of log(sum of exp(router logits)) squared; 0: none");
  args.bind("bias_update_rate", bias_update_rate, "what a step adds to, or takes from, a bias");
  args.bind(
      "capacity_factor", capacity_factor,
      "choices of a sample that an expert takes, over their mean; 0: all, nothing is dropped");
}

void ExpertConfig::validate(const Args& args) const {
  check_range("ep_size", double(ep_size), 1, 1 << 16);
  check_range("balance_coef", balance_coef, 0, 1e6);
  check_range("router_z_loss_coef", router_z_loss_coef, 0, 1e6);
  check_range("bias_update_rate", bias_update_rate, 0, 1e6);
  if (args.given("capacity_factor") && !(capacity_factor > 0 && capacity_factor <= 1 << 16)) {
    usage_error("capacity_factor={} must be above 0 and at most {}; try 1.25, or leave it out",
                capacity_factor, 1 << 16);
  }
}

namespace {

/// Refuses nodes of which some would have more of the ranks of an ep group than others.
void check_nodes(const MeshSizes& mesh, int64_t node_size) {
  if (mesh.expert_ranks() % mesh.ep != 0) return;  // check_mesh() refuses it
  const std::vector<int> group = mesh.members("ep", 0);
  const int apart = group[1] - group[0];
  const Remedies remedies = divisors_of("node_size", apart * mesh.ep);
  if (node_size == 0) {
    refuse_silent("nodes_to_dispatch", remedies,
                  "dispatch=by_node needs nodes between which tokens travel, and node_size=0");
    return;
  }
  std::map<std::pair<int64_t, int64_t>, int64_t> in_node;  // by group and node
  for (int64_t rank = 0; rank < mesh.ranks(); ++rank) {
    ++in_node[{mesh.colour("ep", rank), rank / node_size}];
  }
  const auto as_many = [&](const auto& count) { return count.second == in_node.begin()->second; };
  if (!std::ranges::all_of(in_node, as_many)) {
    refuse("nodes_of_equal_experts", remedies,
           "dispatch=by_node: node_size={} must give every node as many of the {} ranks of ep, "
           "which lie {} apart",
           node_size, mesh.ep, apart);
  }
}

/// Refuses shards of ZeRO's that do not fill the ranks with the same experts.
void check_shards(const TrainConfig& run) {
  const MeshSizes sizes = run.mesh();
  const int64_t shards = run.data_parallel.shard_size, edp = sizes.expert_ranks() / sizes.ep;
  if (shards == 0 || edp % shards == 0) return;
  refuse("shards_in_edp", divisors_of("shard_size", std::gcd(edp, sizes.dp_cp())),
         "shard_size={} must divide the {} ranks of edp, which hold the same experts", shards, edp);
}

}  // namespace

void ExpertConfig::check(const TrainConfig& run) const {
  const ExpertShape& experts = run.model.experts;
  const TensorParallelConfig& tensor = run.tensor_parallel;
  const ExpertConfig unset;
  const auto needs = [](const char* what, const char* flag, bool is_set) {
    if (!is_set) return;
    refuse_silent("flag_of_ep", {fmt::format("leave out --{}", flag)}, "{} is for {}", flag, what);
  };
  if (experts.num_experts == 0) {
    const auto needs_experts = [](const char* flag, bool asked) {
      if (!asked) return;
      refuse_silent("flag_of_experts", {"--num_experts 8", fmt::format("leave out --{}", flag)},
                    "{} needs experts", flag);
    };
    needs_experts("ep_size", ep_size > 1);
    needs_experts("expert_tp", expert_tp);
    needs_experts("balance", balance != "none");
    needs_experts("router_z_loss_coef", router_z_loss_coef > 0);
    needs_experts("capacity_factor", capacity_factor > 0);
    needs_experts("dispatch", by_node());
    needs_experts("balance_coef", balance_coef != unset.balance_coef);
    needs_experts("bias_update_rate", bias_update_rate != unset.bias_update_rate);
    return;
  }
  needs("ep_size above 1", "dispatch", by_node() && ep_size == 1);
  needs("tp_size above 1", "expert_tp", expert_tp && tensor.tp_size == 1);
  needs("balance=sample or batch", "balance_coef",
        balance_coef != unset.balance_coef && !has_loss());
  needs("balance=bias", "bias_update_rate",
        bias_update_rate != unset.bias_update_rate && !has_bias());
  if (experts.choice_bias && !has_bias()) {
    refuse(
        "bias_of_the_model", {"--balance bias"},
        "balance={}: the routers of model={} choose with biases, which bias_update_rate=0 leaves "
        "as they are",
        balance, run.model.model);
  }
  if (experts.num_experts % ep_size != 0) {
    refuse("ep_of_experts", divisors_of("ep_size", experts.num_experts),
           "ep_size={} must divide num_experts={}", ep_size, experts.num_experts);
  }
  if (tensor.tp_size > 1 && !tensor.sequence_parallel) {
    refuse("tokens_on_one_rank", {"--sequence_parallel"},
           "experts with tp_size={} need each token on one rank of tp", tensor.tp_size);
  }
  if (tensor.dropout > 0) {
    refuse_silent("experts_without_dropout", {"leave out --dropout"},
                  "dropout={} is for MLPs, and experts add all that they compute", tensor.dropout);
  }
  const int64_t width = experts.width(run.model.ffn_hidden_size);
  if (expert_tp && width < tensor.tp_size) {
    refuse_silent("tp_of_experts", divisors_of("tp_size", width),
                  "expert_tp: tp_size={} must be at most the experts' width of {}", tensor.tp_size,
                  width);
  }
  check_shards(run);
  if (by_node()) check_nodes(run.mesh(), run.communication->node_size);
}

int64_t ExpertConfig::ranks_in_node(const RunConfig& run) const {
  const int64_t node_size = run.communication ? run.communication->node_size : 0;
  if (node_size == 0) return ep_size;
  return std::ranges::count_if(run.mesh().members("ep", 0),
                               [=](int rank) { return rank < node_size; });
}

int64_t RowCounts::sent() const {
  return std::accumulate(rows_to_rank.begin(), rows_to_rank.end(), int64_t{0});
}

int64_t RowCounts::received() const {
  return std::accumulate(rows_by_rank.begin(), rows_by_rank.end(), int64_t{0});
}

namespace {

/// The sums of this many equal stretches of counts.
std::vector<int64_t> sums_of(const std::vector<int64_t>& counts, int64_t stretches) {
  std::vector<int64_t> sums(stretches);
  const int64_t length = std::ssize(counts) / stretches;
  for (int64_t i = 0; i < std::ssize(counts); ++i) sums[i / length] += counts[i];
  return sums;
}

}  // namespace

std::vector<int64_t> even_counts(int64_t choices, int64_t experts) {
  std::vector<int64_t> counts(experts, choices / experts);
  for (int64_t expert = 0; expert < choices % experts; ++expert) ++counts[expert];
  return counts;
}

int64_t even_received(int64_t choices, int64_t experts, int64_t ranks, int64_t rank) {
  const int64_t here = experts / ranks;
  const std::vector<int64_t> counts = even_counts(choices, experts);
  const auto first = counts.begin() + rank * here;
  return ranks * std::accumulate(first, first + here, int64_t{0});
}

EvenRows even_rows(int64_t choices, int64_t experts, const ExpertGroup& ranks) {
  return {choices, even_received(choices, experts, ranks.size(), ranks.rank())};
}

ExpertGroup::ExpertGroup(const ExpertConfig& config, const Mesh& mesh)
    : ExpertGroup(config, mesh.ep()) {
  if (config.by_node()) nodes_ = std::make_shared<NodeGroups>(config, mesh.ep());
}

ExpertGroup::ExpertGroup(const ExpertConfig& config, const Communicator& ranks)
    : config_(config),
      ep_(ranks),
      counts_(ranks.split(ranks.name() + "_counts", [](int) { return 0; })) {}

// [exchange_counts]
RowCounts ExpertGroup::exchange_counts(const Tensor& counts, int64_t choices) const {
  const int64_t E = counts.numel(), ep = size(), here = E / ep;
  RowCounts rows;
  const Tensor from_ranks = ep > 1 ? Tensor::empty({E}, DType::i32) : counts;
  if (ep > 1) counts_->all_to_all(from_ranks, counts);  // E numbers
  if (counts.device() == Device::meta) {
    rows.to_experts = even_counts(choices, E);
    const auto own = rows.to_experts.begin() + rank() * here;
    for (int64_t r = 0; r < ep; ++r) {
      rows.from_ranks.insert(rows.from_ranks.end(), own, own + here);
    }
  } else {
    // A read to the host, which even a training step makes: it says how large buffers must be.
    rows.to_experts = counts.counts();
    rows.from_ranks = from_ranks.counts();
  }
  rows.rows_to_rank = sums_of(rows.to_experts, ep);
  rows.rows_by_rank = sums_of(rows.from_ranks, ep);
  rows.of_expert.resize(here);
  for (int64_t i = 0; i < E; ++i) rows.of_expert[i % here] += rows.from_ranks[i];
  return rows;
}
// [exchange_counts]

namespace {

/// Elements of this many rows for each rank.
std::vector<int64_t> elements(std::vector<int64_t> rows, int64_t width) {
  for (int64_t& count : rows) count *= width;
  return rows;
}

}  // namespace

// [exchange]
Pending ExpertGroup::exchange(const Tensor& rows, const std::vector<int64_t>& to,
                              const std::vector<int64_t>& from, const TensorRegion& region) const {
  if (size() == 1) return region.on_its_way(rows);
  const int64_t H = rows.size(1);
  const int64_t arriving = std::accumulate(from.begin(), from.end(), int64_t{0});
  const Tensor arrived = Tensor::empty({arriving, H}, rows.dtype(), "exchanged");
  Pending pending = region.on_its_way(arrived);
  pending.add(ep_->all_to_all_v_async(arrived, rows, elements(from, H), elements(to, H)));
  return pending;
}

Pending ExpertGroup::to_experts(const Tensor& rows, const RowCounts& counts,
                                const TensorRegion& region) const {
  return exchange(rows, counts.rows_to_rank, counts.rows_by_rank, region);
}

Pending ExpertGroup::from_experts(const Tensor& rows, const RowCounts& counts,
                                  const TensorRegion& region) const {
  return exchange(rows, counts.rows_by_rank, counts.rows_to_rank, region);
}
// [exchange]

Tensor ExpertGroup::numbers_to_experts(const Tensor& numbers, const RowCounts& counts) const {
  if (size() == 1) return numbers;
  const int64_t N = numbers.size(1);
  const Tensor arrived = Tensor::empty({counts.received(), N}, numbers.dtype(), "choices");
  counts_
      ->all_to_all_v_async(arrived, numbers, elements(counts.rows_by_rank, N),
                           elements(counts.rows_to_rank, N))
      .wait();
  return arrived;
}

Tensor ExpertGroup::by_expert(const Tensor& rows, const RowCounts& counts) const {
  return regroup(rows, counts, /*by_expert=*/true);
}

Tensor ExpertGroup::by_rank(const Tensor& rows, const RowCounts& counts) const {
  return regroup(rows, counts, /*by_expert=*/false);
}

Tensor ExpertGroup::regroup(const Tensor& rows, const RowCounts& counts, bool by_expert) const {
  if (size() == 1) return rows;  // one source: both orders are the same
  const int64_t ep = size(), here = std::ssize(counts.of_expert);
  const Tensor regrouped = Tensor::empty(rows.shape(), rows.dtype(), "regrouped");
  std::vector<int64_t> begin(counts.from_ranks.size());  // of each part where ranks come first
  std::exclusive_scan(counts.from_ranks.begin(), counts.from_ranks.end(), begin.begin(),
                      int64_t{0});
  int64_t at = 0;  // where experts do
  for (int64_t expert = 0; expert < here; ++expert) {
    for (int64_t r = 0; r < ep; ++r) {
      const int64_t count = counts.from_ranks[r * here + expert];
      const int64_t by_source = begin[r * here + expert];
      ops::copy(regrouped.narrow(0, by_expert ? at : by_source, count),
                rows.narrow(0, by_expert ? by_source : at, count));
      at += count;
    }
  }
  return regrouped;
}

}  // namespace usp

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/args.h"
#include "comm/mesh.h"
#include "run/run_config.h"
#include "tensor_parallel/region.h"

namespace usp {

struct TrainConfig;

/// Who holds which experts, and what keeps them evenly loaded.
struct ExpertConfig {
  int64_t ep_size = 1;  ///< ranks that shard the experts of a layer
  std::string dispatch = "direct";
  bool expert_tp = false;  ///< the ranks of tp shard each expert; else they hold whole ones
  std::string balance = "none";
  double balance_coef = 0.01;
  double router_z_loss_coef = 0;
  double bias_update_rate = 0.001;
  double capacity_factor = 0;  ///< 0: no token is dropped

  void bind(Args& args);
  void validate(const Args& args) const;
  /// Throws UsageError where the experts, the ranks or their shards do not divide.
  void check(const TrainConfig& run) const;

  bool by_node() const { return dispatch == "by_node"; }
  /// Ranks of ep on each node.
  int64_t ranks_in_node(const RunConfig& run) const;
  bool has_bias() const { return balance == "bias"; }  ///< loss-free balancing
  bool has_loss() const { return balance == "sample" || balance == "batch"; }
};

// [counts]
/// How many rows go where. Rows on their way are ordered by destination rank, expert and token;
/// where they arrive, by source rank, expert and token.
///
/// On rank 0 of two, with experts 0 and 1 here and 2 and 3 there, where this rank's tokens chose
/// experts 0 0 1 3 3 3 and the other's 0 2 2 3:
///   to_experts {2, 1, 0, 3}, rows_to_rank {3, 3}: the rows leave as 0 0 1 | 3 3 3;
///   from_ranks {2, 1, 1, 0}, rows_by_rank {3, 1}: rows arrive for 0 0 1 | 0, from rank 0 | 1;
///   of_expert {3, 1}: by_expert() sorts them to 0 0 0 | 1, and by_rank() back.
struct RowCounts {
  std::vector<int64_t> to_experts;    ///< [E]: rows of this rank for each expert
  std::vector<int64_t> from_ranks;    ///< [ep, E/ep]: rows from each rank for each expert here
  std::vector<int64_t> rows_to_rank;  ///< [ep]: sums of to_experts
  std::vector<int64_t> rows_by_rank;  ///< [ep]: sums of from_ranks
  std::vector<int64_t> of_expert;     ///< [E/ep]: rows that arrive for each expert here

  int64_t sent() const;      ///< R
  int64_t received() const;  ///< Q
};
// [counts]

struct NodeGroups;

/// A rank's view of those with which it shards the experts: ep ranks, each with E/ep of them in
/// a row. Lepikhin et al., GShard (2021), https://arxiv.org/abs/2006.16668.
///
/// |            | one GPU               | rank r of ep                                  |
/// |------------|-----------------------|-----------------------------------------------|
/// | experts    | all E                 | E/ep of them, from r E/ep onward              |
/// | tokens     | those that chose them | of all ranks, those that chose one of these   |
/// | gradients  | of all tokens         | complete within ep; summed over edp           |
class ExpertGroup {
 public:
  ExpertGroup() = default;  ///< of a single rank, where nothing is sent
  ExpertGroup(const ExpertConfig& config, const Mesh& mesh);
  /// Group of ranks that send each other rows directly.
  ExpertGroup(const ExpertConfig& config, const Communicator& ranks);

  const ExpertConfig& config() const { return config_; }
  int64_t size() const { return config_.ep_size; }
  int64_t rank() const { return ep_ ? ep_->rank() : 0; }
  /// Ranks among which rows travel; none where there is a single rank.
  const std::optional<Communicator>& ranks() const { return ep_; }
  /// Groups of ranks in which rows travel with dispatch=by_node; nullptr: directly.
  const NodeGroups* nodes() const { return nodes_.get(); }

  /// From the choices that fell on each expert, counts [E] i32, what each rank sends and receives.
  /// On meta, where nobody has chosen, all experts are equally popular: see even_counts().
  RowCounts exchange_counts(const Tensor& counts, int64_t choices) const;
  /// Rows [R, H] in the order of their destinations -> [Q, H] on their way.
  Pending to_experts(const Tensor& rows, const RowCounts& counts, const TensorRegion& region) const;
  /// Rows [Q, H] in the order of their sources -> [R, H] on their way back.
  Pending from_experts(const Tensor& rows, const RowCounts& counts,
                       const TensorRegion& region) const;
  /// What to_experts() would send, of small numbers [R, N] for which the host waits: [Q, N].
  Tensor numbers_to_experts(const Tensor& numbers, const RowCounts& counts) const;
  /// Rows by source rank, expert and token -> by expert, source rank and token.
  Tensor by_expert(const Tensor& rows, const RowCounts& counts) const;
  /// Back to the order in which they arrived.
  Tensor by_rank(const Tensor& rows, const RowCounts& counts) const;

 private:
  Pending exchange(const Tensor& rows, const std::vector<int64_t>& to,
                   const std::vector<int64_t>& from, const TensorRegion& region) const;
  Tensor regroup(const Tensor& rows, const RowCounts& counts, bool by_expert) const;

  ExpertConfig config_;
  std::optional<Communicator> ep_;
  /// The same ranks: counts must not queue behind another micro-batch's rows.
  std::optional<Communicator> counts_;
  std::shared_ptr<const NodeGroups> nodes_;
};

/// How many of these choices fall on each of E experts if all are equally popular.
std::vector<int64_t> even_counts(int64_t choices, int64_t experts);

/// Rows that one rank gets in all, where this many shard the experts: as many from each of them.
int64_t even_received(int64_t choices, int64_t experts, int64_t ranks, int64_t rank);

/// What a rank sends and receives then.
struct EvenRows {
  int64_t sent, received;
};
/// Rows that this rank of `ranks`, which shard the experts, sends and receives then.
EvenRows even_rows(int64_t choices, int64_t experts, const ExpertGroup& ranks);

}  // namespace usp

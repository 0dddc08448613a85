#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "config.h"
#include "train/parameter.h"

namespace usp {

// [kept]
/// What a rank keeps from step to step, of all that it would hold alone.
enum class Kept { whole, shard };
/// What a stage keeps of each.
struct KeptByStage {
  Kept weights, gradients, optimizer;
};
inline constexpr KeptByStage kKept[] = {
    // weights     gradients    optimizer states
    {Kept::whole, Kept::whole, Kept::whole},  // stage 0: data parallelism alone
    {Kept::whole, Kept::whole, Kept::shard},  // stage 1
    {Kept::whole, Kept::shard, Kept::shard},  // stage 2
    {Kept::shard, Kept::shard, Kept::shard},  // stage 3
};
// [kept]

/// Parameters whose weights are gathered, and whose gradients are reduced, as one message: those of
/// one block that are summed over the same ranks. They lie side by side, followed by padding up to
/// a multiple of Z, the number of ranks that shard one copy. Rank s owns part s of Z equal
/// ones, wherever in a parameter that begins and ends, and updates nothing else.
struct Unit {
  std::vector<Parameter*> parameters;
  int64_t numel = 0;   ///< of the parameters; padding follows
  int64_t length = 0;  ///< of a rank's part

  const Communicator* shard_group = nullptr;  ///< ranks that shard one copy
  const Communicator* replicas = nullptr;     ///< ranks that hold the same part, of every copy

  // [tensors]
  // What lasts from step to step.
  Tensor values;        ///< [Z length]; where weights are kept as shards: only while unsharded
  Tensor value_shard;   ///< [length]: this rank's part of them
  Tensor master_shard;  ///< [length], acc dtype
  Tensor gradient;      ///< [Z length]; where gradients are kept as shards: until they are reduced
  Tensor grad_shard;    ///< [length]: this rank's part of the sum
  // [tensors]

  int64_t block() const { return parameters.front()->block; }
  /// Whether a block reads any of its weights.
  bool serves(int64_t block) const;
  /// Lets a tensor of each parameter be its part of `flat`, or nothing.
  void slice_into(Tensor Parameter::*member, const Tensor& flat);
};

/// The list's parameters as units of Z = 1: in order, cut where block or gradient group change. A
/// weight that several pipeline stages hold is alone in its unit, and weights that are cut into
/// parts of different lengths lie apart from the others: neighbors that differ from rank to rank
/// would give copies of a weight other bounds.
std::vector<Unit> cut_into_units(ParameterList& parameters);

/// How often a step reduces each unit's gradients.
int64_t rounds_of_step(const DataParallelConfig& config, int64_t micro_batches);
/// Whether a micro-batch's gradients are added to whole ones in another dtype that do not last.
bool adds_up_before_reduction(const TrainConfig& config);
/// In what gradients travel.
DType dtype_of_reduction(const TrainConfig& config);
/// In what the gradients of several micro-batches are added up.
DType dtype_of_gradient_sum(const TrainConfig& config);

/// Who holds which elements: the units of a rank's parameters, with memory and initial values.
class ZeroLayout {
 public:
  /// Collective over every group that gradients are summed over. Throws UsageError where
  /// shard_size does not divide one, and Error where ranks that hold copies of a weight would shard
  /// it in different ways.
  ZeroLayout(const TrainConfig& config, ParameterList& parameters, const Mesh& mesh);
  ZeroLayout(const ZeroLayout&) = delete;
  ZeroLayout& operator=(const ZeroLayout&) = delete;

  const KeptByStage& kept() const { return kept_; }
  DType weights() const { return dtype_; }       ///< dtype of the weights that travel
  DType reduced() const { return reduced_; }     ///< of the gradients that travel
  DType gradient_sum() const { return sum_; }    ///< of their sum over micro-batches
  std::vector<Unit>& units() { return units_; }  ///< in the order of the parameters
  Unit& unit_of(const Parameter& parameter) { return units_[unit_of_[parameter.index]]; }

 private:
  /// The communicators of one gradient group.
  struct Groups {
    Communicator shard, replicas;
  };

  const Groups& groups_of(const std::string& name, const DataParallelConfig& config,
                          const Mesh& mesh);
  void allocate_weights(Unit& unit);
  void allocate_gradients(Unit& unit, bool both);
  void share_out(Unit& unit);
  static void check_copies(const ParameterList& parameters, const Mesh& mesh);

  KeptByStage kept_;
  DType dtype_, reduced_, sum_;
  std::map<std::string, Groups> groups_;  ///< by the name of the gradient group
  std::vector<Unit> units_;
  std::vector<size_t> unit_of_;  ///< by index of the parameter
};

}  // namespace usp

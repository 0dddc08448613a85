#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data_parallel/strategy.h"
#include "data_parallel/zero_layout.h"
#include "model.h"
#include "optimizer.h"

namespace usp {

/// ZeRO: ranks that hold copies of one model shard what they would all keep. Rajbhandari et al.
/// (2020), https://arxiv.org/abs/1910.02054; stage 3 is also known as FSDP, Zhao et al. (2023),
/// https://arxiv.org/abs/2304.11277. P parameters, Z ranks that shard one copy, M micro-batches in
/// a step; a rank sends (Z-1)/Z times the last column's elements:
///
/// | stage | weights           | gradients       | optimizer | sent            |
/// |-------|-------------------|-----------------|-----------|-----------------|
/// | 0     | P                 | P               | P         | 2 P             |
/// | 1     | P                 | P               | P/Z       | 2 P             |
/// | 2     | P                 | P/Z + 2 units   | P/Z       | (M + 1) P       |
/// | 3     | P/Z + 2 units     | P/Z + 2 units   | P/Z       | just below 3 MP |
///
/// ZeroLayout says who holds which elements; this class moves them. Weights that are kept as shards
/// are unsharded (gathered) for a block and prefetched for the one that runs next; those of every
/// other block are resharded (freed), or stay through more passes (`reshard_after`). A unit's
/// gradients are reduced when backward has written the last of them in a micro-batch, or in the
/// step (`reduce_after`).
///
/// Where Z is less than dp (`shard_size`: hybrid sharding) there are dp/Z copies. A step's sum of
/// gradients over the ranks that shard one is then summed over the copies.
class Zero : public DataParallelStrategy {
 public:
  /// Gives the parameters memory and initial values, and puts segments around the blocks of every
  /// chunk that see to it that weights are there. From here on `grads` and `optimizer` report to
  /// this object.
  Zero(const TrainConfig& config, Model& model, Grads& grads, Optimizer& optimizer,
       const Mesh& mesh);

  void begin_step(int64_t micro_batches, int64_t parts = 1) override;
  void finish() override;
  void after_update() override;

  int64_t num_buckets() const override;
  Operations operations() const override;

 private:
  // [moving]
  /// A unit, and what of it is under way.
  struct Moving {
    explicit Moving(Unit& unit) : unit(unit) {}

    Unit& unit;
    Handle gathering;
    int64_t version = 0;  ///< of the weights in `unit.values`

    Tensor addend;  ///< [length]: what a reduction returns where it has to be added to the sum
    Handle reduction;
    size_t begun = 0, ready = 0;  ///< parameters whose gradients are, in this round
    int64_t rounds_done = 0;      ///< in this step
  };
  // [moving]
  using Units = std::vector<Moving*>;
  class Boundary;

  Units read_by(int64_t block);
  Units stay_through(const BlockRange& chunk);
  void surround_blocks(Model& model);

  void enter(int64_t part, const Units& units, const Units& next, const Units& stay = {});
  void unshard(Moving& unit);
  void reshard(Moving& unit);

  void begin_gradient(Moving& unit);
  void reduce_gradient(Moving& unit);
  void complete_reductions();
  void complete(Moving& unit);

  Moving& moving(const Parameter& parameter);

  const TrainConfig config_;
  ZeroLayout layout_;
  const KeptByStage kept_;
  std::vector<Moving> units_;          ///< one for each of the layout's
  std::vector<Units> reads_{Units()};  ///< what each part of a micro-batch reads
  Units reducing_;                     ///< whose gradients are on their way, the oldest first
  int64_t rounds_ = 0;                 ///< reductions of each unit in this step
};

/// DataParallel or Zero, whichever the configuration asks for. The parameters have memory and their
/// initial values afterwards.
std::unique_ptr<DataParallelStrategy> make_data_parallel(const TrainConfig& config, Model& model,
                                                         Grads& grads, Optimizer& optimizer,
                                                         const Mesh& mesh);

}  // namespace usp

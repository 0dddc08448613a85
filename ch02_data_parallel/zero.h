#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "data_parallel.h"
#include "model.h"
#include "optimizer.h"

namespace usp {

/// ZeRO: ranks that hold copies of one model share out what they would all keep. Rajbhandari et al.
/// (2020); stage 3 is also known as FSDP, Zhao et al. (2023). P parameters, S ranks that share out
/// one copy, G micro-batches in a step; a rank sends (S-1)/S times the last column's elements:
///
/// | stage | weights           | gradients       | optimizer | sent            |
/// |-------|-------------------|-----------------|-----------|-----------------|
/// | 0     | P                 | P               | P         | 2 P             |
/// | 1     | P                 | P               | P/S       | 2 P             |
/// | 2     | P                 | P/S + 2 units   | P/S       | (G + 1) P       |
/// | 3     | P/S + 2 units     | P/S + 2 units   | P/S       | just below 3 GP |
///
/// What travels as one message is a unit: a block of the model, or the root, which is all the rest:
/// embedding, final norm and head. The parameters of a unit lie side by side, followed by padding
/// up to a multiple of S; rank s owns part s of S equal ones, wherever in a parameter that begins
/// and ends, and updates nothing else. "2 units" are two blocks, and the root besides.
///
/// Where S is less than dp (`shard_size`: hybrid sharding) there are dp/S copies. A step's sum of
/// gradients over the ranks that share out one is then summed over the copies.
class Zero : public DataParallelStrategy {
 public:
  /// Gives the parameters memory and initial values, and puts segments around the model's blocks
  /// that see to it that weights are there. From here on `grads` and `optimizer` report to this
  /// object.
  Zero(const TrainConfig& config, Model& model, Grads& grads, Optimizer& optimizer,
       const Mesh& mesh);
  ~Zero() override;

  void begin_step(int64_t micro_batches) override;
  void finish() override;
  void after_update() override;

  int64_t num_buckets() const override;
  std::pair<std::string, std::string> traffic_row(int64_t steps) override;

 private:
  struct Unit;
  class Boundary;

  void cut_into_units();
  void allocate(Unit& unit);
  void share_out(Unit& unit);
  void surround_blocks(Model& model);

  /// Gathers what a unit's turn needs and the next one's will; returns when the first is there.
  void prepare(int64_t unit, int64_t next);
  /// Begins to make the unit's values whole, unless they are or will be.
  void gather(Unit& unit);
  void free(Unit& unit);

  void begin_gradient(Unit& unit);
  void reduce_gradient(Unit& unit);
  void complete_reduction();

  Unit& unit_of(const Parameter& parameter);
  int64_t sent_bytes() const;

  const TrainConfig config_;
  const int64_t stage_;
  const DType dtype_;          ///< of weights
  const DType reduced_dtype_;  ///< of the gradients that travel
  const DType sum_dtype_;      ///< of their sum over micro-batches
  const Communicator shard_group_, replicas_;
  std::vector<Unit> units_;   ///< the root, then the blocks in the model's order
  Unit* reducing_ = nullptr;  ///< whose gradients are on their way
  int64_t rounds_ = 0;        ///< reductions of each unit in this step
  int64_t sent_before_step_ = 0, sent_in_steps_ = 0;
};

/// DataParallel or Zero, whichever the configuration asks for. The parameters have memory and their
/// initial values afterwards.
std::unique_ptr<DataParallelStrategy> make_data_parallel(const TrainConfig& config, Model& model,
                                                         Grads& grads, Optimizer& optimizer,
                                                         const Mesh& mesh);

}  // namespace usp

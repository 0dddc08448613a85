#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "train/checkpoint.h"

namespace usp {

/// A number of 64 bits for the elements' bits, in which any single change shows. Reads from the
/// device.
uint64_t digest_of(const Tensor& tensor, uint64_t seed = 0);

/// Ranks that hold copies of the same elements: replicas of dp, norms under tp, kv heads that
/// several ranks share, tied ends, mirrored stages. All of them update their copy by themselves, so
/// the copies stay equal only as long as every gradient is summed over the right ranks. A copy that
/// drifts raises no error, and the loss hardly shows it.
///
/// What a rank compares are the elements that it updates: weight, master weight, both moments, or
/// the value of a buffer. With ZeRO these are its shards. The ranks find out who has the same ones
/// from the slices of their Parameters, of whatever axis.
class Copies {
 public:
  /// `every`: steps from one comparison to the next; 0: none. A dry run compares nothing.
  /// Collective.
  Copies(int64_t every, const Mesh& mesh, ParameterList& parameters,
         const std::vector<Parameter*>& buffers);

  /// Compares, if it is time to, and sends 8 bytes for each parameter and copy. Collective. Throws
  /// Error where two ranks differ, with the first parameter, its ranks and the step.
  void after_step(int64_t step, const std::function<TrainState()>& state);

 private:
  /// Parameters whose copies lie on the same ranks.
  struct Held {
    Communicator ranks;
    std::vector<int> members;        ///< of the world
    std::vector<size_t> parameters;  ///< positions in own_
  };
  /// A parameter whose copies are not equal.
  struct Difference {
    size_t parameter;  ///< its position in own_
    std::string text;
  };

  void find_copies();
  Held held_by(const std::vector<int>& partition,
               const std::map<std::string, std::vector<int>>& holders) const;
  std::optional<Difference> compare(const Held& held, const std::vector<uint64_t>& digests) const;

  int64_t every_;
  Communicator world_;
  std::vector<const Parameter*> own_;  ///< of which this rank updates elements; then the buffers
  std::vector<Held> held_;
};

}  // namespace usp

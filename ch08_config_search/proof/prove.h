#pragma once

#include <string>

#include "comm/communicator.h"
#include "proof/shrink.h"
#include "types/mutation.h"

namespace usp {

/// How a twin has trained, beside one process with the same model and batch.
struct TwinResult {
  double largest = 0;    ///< relative difference of a loss, a norm or an element
  int64_t compared = 0;  ///< steps
  std::string failure;   ///< what is wrong, in a few lines; empty: nothing
  double seconds = 0;
};

/// Trains the twin for two steps on threads of this process, and its model on one, and evaluates
/// them. What has to agree: losses and norms, every gradient, weight and moment, element by
/// element, copies to the bit, bytes sent and bytes that last by their formulas, and bytes to other
/// nodes as in a dry run. `then` is a layout of the same model and global batch: it takes the
/// second step, too, from a checkpoint of the first.
TwinResult run_twin(const Twin& twin, const Twin* then = nullptr);

/// The same on the ranks of `world`, each of which calls it and gets the same result; there are as
/// many of them as in both layouts, on one machine. What a rank throws is thrown here.
TwinResult run_twin(const Twin& twin, const Twin* then, const Communicator& world);

/// Lines two columns further to the right.
std::string indented(std::string text);

/// Says of a layout whether its twins compute what one process does, line by line as it is found
/// (`--prove`); or of which types and shapes its tensors are (`--mesh_show types`, `shapes`). With
/// `--prove` and `--mesh_show types` it first says in a line whether the types fit, and ends if one
/// does not. Returns the exit code: 1 if a twin differs, or a type does not fit. `mutation`: of
/// what is typed, in tests. Throws UsageError where nothing can be proven.
int prove(const TrainConfig& config, const types::Mutation& mutation = {});

/// The same, and with `--fuzz` fuzz() on the ranks of `world`.
int prove(const TrainConfig& config, const Communicator& world);

}  // namespace usp

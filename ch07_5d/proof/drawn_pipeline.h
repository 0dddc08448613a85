#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/rng.h"
#include "pipeline_parallel/schedule.h"

namespace usp {

/// Numbers drawn one after the other; the same number and name draw the same ones.
class Draws {
 public:
  Draws(uint64_t number, std::string_view name) : random_(number, name) {}

  bool chance(double probability) { return random_.uniform(next_++) < probability; }
  size_t index(size_t size) { return random_.bits(next_++).a % size; }           ///< below `size`
  int64_t pick(const std::vector<int64_t>& of) { return of[index(of.size())]; }  ///< one of them
  /// Both of them included.
  int64_t between(int64_t low, int64_t high) {
    return low + int64_t(index(size_t(high - low + 1)));
  }

 private:
  RandomStream random_;
  uint64_t next_ = 0;
};

/// Layers of each stage: at least one in each but the first and the last, which have the embedding
/// and the head, as far as there are enough.
std::vector<int64_t> draw_layers(int64_t layers, int64_t stages, Draws& draws);

/// Any order that check_schedule() takes: at each point one of the actions whose inputs are there,
/// on any rank. Some backward passes are cut into B and W, some pairs run in turns.
Schedule draw_schedule(const Stages& stages, int64_t micro_batches, Draws& draws);

/// Writes a file that is there until the process ends; where it is.
std::string keep_drawn(const std::string& name, const std::string& text);

}  // namespace usp

#include <algorithm>
#include <vector>

#include "judge/todo.h"
#include "pipeline_parallel/schedule.h"

namespace usp {

/// What one of p ranks does under 1F1B in a step of m micro-batches, in order: the actions F and BW
/// of each micro-batch. First come the forward passes that fill the pipeline, so many that the
/// first gradient is never waited for longer than it takes; then forward and backward in turns;
/// then the backward passes that are left.
std::vector<Action> one_f_one_b_of_rank(int64_t rank, int64_t p, int64_t m) {
  std::vector<Action> actions;
  // SOLUTION BEGIN (about 7 lines): forward passes ahead, F and BW in turns, the rest
  const int64_t ahead = std::min(p - 1 - rank, m);
  for (int64_t i = 0; i < ahead; ++i) actions.push_back({Work::F, i});
  for (int64_t i = ahead; i < m; ++i) {
    actions.push_back({Work::F, i});
    actions.push_back({Work::BW, i - ahead});
  }
  for (int64_t i = m - ahead; i < m; ++i) actions.push_back({Work::BW, i});
  // SOLUTION END
  return actions;
}

}  // namespace usp

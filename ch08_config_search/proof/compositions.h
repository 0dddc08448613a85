#pragma once

#include <optional>
#include <vector>

#include "base/rng.h"
#include "proof/prove.h"

namespace usp {

/// A layout drawn at random, small enough to be run here, and a second one of the same model and
/// global batch in which its run can go on.
struct Composition {
  Twin first;
  std::optional<Twin> second;  ///< none where few draws found none
};

/// Draws raw flags, of every part, and asks the checks of all parts which of them go together: what
/// they accept has to be right. The same number draws the same composition.
class CompositionDraw {
 public:
  CompositionDraw(uint64_t number, int64_t most_ranks);

  /// The next composition whose first layout the checks accept.
  Composition draw();
  int64_t drawn() const { return drawn_; }  ///< lists of flags so far, refused ones included

 private:
  using Words = std::vector<std::string>;

  bool chance(double probability) { return random_.uniform(next_++) < probability; }
  int64_t pick(const std::vector<int64_t>& of) { return of[random_.bits(next_++).a % of.size()]; }
  int64_t between(int64_t low, int64_t high) {
    return low + int64_t(random_.bits(next_++).a % uint64_t(high - low + 1));
  }
  void add(Words& words, const char* flag, int64_t value) const;
  void add(Words& words, const char* flag, const std::vector<const char*>& of);

  MeshSizes mesh();
  Words model(const MeshSizes& mesh);
  Words experts(const MeshSizes& mesh);
  Words latent_attention();
  Words layout(const MeshSizes& mesh, bool has_experts);
  Words pipeline(int64_t stages);
  std::optional<Twin> composed(const MeshSizes& mesh, int64_t samples, Words model);

  RandomStream random_;
  const int64_t most_ranks_;
  uint64_t next_ = 0;
  int64_t drawn_ = 0;
};

/// Trains one composition after the other beside one process, until this many minutes are over
/// (`--fuzz`), beginning with that of number `seed`. Returns the exit code: 1 if one differs.
int fuzz(const TrainConfig& config);

}  // namespace usp

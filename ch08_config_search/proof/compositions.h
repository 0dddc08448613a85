#pragma once

#include <optional>
#include <vector>

#include "proof/drawn_pipeline.h"
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
  /// Layouts of at most so many ranks; `exactly`: of as many.
  CompositionDraw(uint64_t number, int64_t most_ranks, bool exactly = false);

  /// The next composition whose first layout the checks accept.
  Composition draw();
  int64_t drawn() const { return drawn_; }  ///< lists of flags so far, refused ones included

 private:
  using Words = std::vector<std::string>;

  bool chance(double probability) { return draws_.chance(probability); }
  int64_t pick(const std::vector<int64_t>& of) { return draws_.pick(of); }
  int64_t between(int64_t low, int64_t high) { return draws_.between(low, high); }
  void add(Words& words, const char* flag, int64_t value) const;
  void add(Words& words, const char* flag, const std::vector<const char*>& of);
  static void leave_out(Words& words, const char* flag);

  MeshSizes mesh();
  MeshSizes mesh_of_all();
  Words model(const MeshSizes& mesh);
  Words experts(const MeshSizes& mesh);
  Words latent_attention();
  Words rotary_embedding(bool latent);
  Words layout(const MeshSizes& mesh, bool has_experts);
  Words pipeline(int64_t stages);
  std::optional<Twin> composed(const MeshSizes& mesh, int64_t samples, Words model);

  Words with_layers(Words words, const TrainConfig& of);
  Words with_file(Words words, const TrainConfig& of);
  std::optional<Twin> with_own_pipeline(const Words& words, const Twin& named);

  const uint64_t number_;
  Draws draws_;
  /// Draws of what is no flag's value, and of RoPE: apart, they leave all others as they are.
  Draws pipeline_, rope_;
  const int64_t most_ranks_;
  const bool exactly_;
  int64_t drawn_ = 0, files_ = 0;
};

/// Trains one composition after the other beside one process, until this many minutes are over
/// (`--fuzz`), beginning with that of number `seed`. On the ranks of `world` if there are several,
/// each layout on all of them; else on threads, at most 16. Returns the exit code: 1 if one
/// differs.
int fuzz(const TrainConfig& config, const Communicator& world);

}  // namespace usp

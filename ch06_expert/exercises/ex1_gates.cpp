#include <span>

#include "judge/todo.h"

namespace usp {

/// Adds what one token's gates' gradient means for the scores: dscores [E] += the gradient.
/// Forward made gates[j] = scale * scores[choices[j]], and where `normalised` divided this by the
/// sum of the scores of all k choices. dgates, choices: [k]; scores: [E].
void gates_gradient(std::span<double> dscores, std::span<const double> dgates,
                    std::span<const double> scores, std::span<const int> choices, bool normalised,
                    double scale) {
  const size_t k = choices.size();
  // TODO (about 9 lines): the sum of the chosen scores, the gates' mean gradient, dscores
  USP_TODO("ch06.ex1");
}

}  // namespace usp

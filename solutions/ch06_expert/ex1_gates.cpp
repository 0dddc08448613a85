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
  // SOLUTION BEGIN (about 9 lines): the sum of the chosen scores, the gates' mean gradient, dscores
  double sum = 1, mean = 0;  // of dgates, weighted by shares of the sum
  if (normalised) {
    sum = 0;
    for (size_t j = 0; j < k; ++j) sum += scores[choices[j]];
    for (size_t j = 0; j < k; ++j) mean += dgates[j] * scores[choices[j]] / sum;
  }
  for (size_t j = 0; j < k; ++j) dscores[choices[j]] += scale * (dgates[j] - mean) / sum;
  // SOLUTION END
}

}  // namespace usp

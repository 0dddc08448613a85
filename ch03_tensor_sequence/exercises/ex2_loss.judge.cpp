#include <algorithm>
#include <cmath>

#include "comm/algorithms.h"
#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  std::vector<double> (*vocab_parallel_loss)(const Communicator& tp, std::span<const double> logits,
                                             std::span<const int64_t> targets, int64_t begin);
};

namespace {

/// Logits [T, V] around `centre`, whose columns this many ranks split.
struct Head {
  int ranks;
  int64_t T, V;
  double centre = 0;

  std::string text() const {
    return fmt::format("{} rank{}, {} tokens, vocabulary of {}, logits around {}", ranks,
                       ranks == 1 ? "" : "s", T, V, centre);
  }
  algorithms::Slice own(int rank) const { return algorithms::slice(V, ranks, rank); }
  Values logits() const {
    Values values = normals(600 + V, T * V);
    for (double& value : values) value = 2 * value + centre;
    return values;
  }
  Values columns(int rank) const {
    const Values all = logits();
    Values part;
    for (int64_t i = 0; i < T; ++i) {
      const auto first = all.begin() + i * V + own(rank).begin;
      part.insert(part.end(), first, first + own(rank).count);
    }
    return part;
  }
  /// The first and the last token of every rank's, in turns.
  std::vector<int64_t> targets() const {
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < T; ++i) {
      const auto [begin, count] = own(static_cast<int>(i / 2 % ranks));
      tokens.push_back(i % 2 == 0 ? begin : begin + count - 1);
    }
    return tokens;
  }
};

/// What a rank's columns say of a token.
struct Part {
  double max = 0;      ///< the largest logit
  double sum = 0;      ///< of exp(logit - max)
  double target = 0;   ///< the target's logit, or 0
  double nearest = 0;  ///< the logit of the column that is nearest to the target
  double modulo = 0;   ///< the logit of the column whose number is the target's, modulo the width
};

Part part_of(const Head& head, const Values& logits, int64_t token, int rank) {
  const auto [begin, count] = head.own(rank);
  const double* row = logits.data() + token * head.V + begin;
  const int64_t target = head.targets()[token], column = target - begin;
  Part part;
  part.max = *std::max_element(row, row + count);
  for (int64_t i = 0; i < count; ++i) part.sum += std::exp(row[i] - part.max);
  if (column >= 0 && column < count) part.target = row[column];
  part.nearest = row[std::clamp<int64_t>(column, 0, count - 1)];
  part.modulo = row[target % count];
  return part;
}

/// A token's figures over all ranks, and what adding up in a wrong way gives.
struct Whole {
  double max = -INFINITY, sum = 0, target = 0;
  double unscaled = 0;  ///< the ranks' sums, each relative to its own max
  double nearest = 0, modulo = 0;

  double loss() const { return std::log(sum) + max - target; }
};

using Loss = std::function<double(const Whole& whole, const Part& part)>;

/// The losses of a way to compute them, by rank.
std::vector<Values> losses(const Head& head, const Loss& loss) {
  const Values logits = head.logits();
  std::vector<Values> found(head.ranks);
  for (int64_t i = 0; i < head.T; ++i) {
    std::vector<Part> parts;
    Whole whole;
    for (int rank = 0; rank < head.ranks; ++rank) {
      const Part& part = parts.emplace_back(part_of(head, logits, i, rank));
      whole.max = std::max(whole.max, part.max);
      whole.target += part.target;
      whole.unscaled += part.sum;
      whole.nearest += part.nearest;
      whole.modulo += part.modulo;
    }
    for (const Part& part : parts) whole.sum += part.sum * std::exp(part.max - whole.max);
    for (int rank = 0; rank < head.ranks; ++rank) found[rank].push_back(loss(whole, parts[rank]));
  }
  return found;
}

std::vector<Suspect> suspects(const Head& head) {
  const auto with = [&](const Loss& loss) { return losses(head, loss); };
  const std::string unscaled =
      "the ranks' sums refer to different logits: each is rescaled to the largest of all ranks "
      "before they are added";
  const std::string targets =
      "every rank has given a target's logit: the token lies on one rank, and the others give 0";
  const double t = head.ranks;
  return {
      {"every rank's loss is that of its own columns: nothing has crossed the ranks",
       with([](const Whole&, const Part& p) { return std::log(p.sum) + p.max - p.target; })},
      {unscaled,
       with([](const Whole& w, const Part&) { return std::log(w.unscaled) + w.max - w.target; })},
      {unscaled,
       with([](const Whole& w, const Part& p) { return std::log(w.unscaled) + p.max - w.target; })},
      {targets,
       with([](const Whole& w, const Part&) { return std::log(w.sum) + w.max - w.nearest; })},
      {targets,
       with([](const Whole& w, const Part&) { return std::log(w.sum) + w.max - w.modulo; })},
      {"the target's logit stays on the rank that has it: the others subtract 0",
       with([](const Whole& w, const Part& p) { return std::log(w.sum) + w.max - p.target; })},
      {"the sum of exponentials is that of a rank's own columns: it is not summed over the group",
       with([](const Whole& w, const Part& p) {
         return std::log(p.sum) + p.max - w.max + w.max - w.target;
       })},
      {"the loss is added up over ranks that all have it: it is t times too large",
       with([t](const Whole& w, const Part&) { return t * w.loss(); })},
      {"the largest logit is missing: exp was taken without it, so it comes back after the log",
       with([](const Whole& w, const Part&) { return w.loss() - w.max; })},
      {"the target's logit is missing",
       with([](const Whole& w, const Part&) { return w.loss() + w.target; })}};
}

Outcome run(const Answer& answer, const Head& head) {
  return run_ranks(head.ranks, [&](const Communicator& tp) {
    return answer.vocab_parallel_loss(tp, head.columns(tp.rank()), head.targets(),
                                      head.own(tp.rank()).begin);
  });
}

void judge_values(const Answer& answer, const Head& head) {
  expect_values(head.text(), "loss", run(answer, head),
                losses(head, [](const Whole& whole, const Part&) { return whole.loss(); }),
                suspects(head),
                head.centre == 0 ? "the loss is not log(sum of exp(logit)) - the target's logit"
                                 : "logits far from 0 leave the range of exp: take it of "
                                   "differences from the largest logit");
}

/// T and V are multiples of the number of ranks.
void judge_traffic(const Answer& answer, const Head& head) {
  const int64_t t = head.ranks, T = head.T, V = head.V;
  const auto each = [&](int64_t values) {
    return std::vector<int64_t>(t, values * bytes_of(DType::f64));
  };
  expect_traffic(head.text(), run(answer, head), each(3 * 2 * (t - 1) * T / t),
                 {{"the values are right, but the logits travel: three numbers a token are enough",
                   each((t - 1) * T * V / t)},
                  {"the values are right, but the logits travel: three numbers a token are enough",
                   each(2 * (t - 1) * T * V / t)},
                  {"the values are right, but every rank gathered the numbers of all ranks: reduce "
                   "them",
                   each(3 * (t - 1) * T)}});
}

}  // namespace

void judge(const Answer& answer) {
  judge_values(answer, {3, 6, 10});
  judge_values(answer, {4, 9, 17});
  judge_values(answer, {1, 3, 5});
  judge_values(answer, {3, 7, 12, 1000});
  judge_values(answer, {2, 5, 9, -1000});
  judge_traffic(answer, {4, 8, 64});
}

Values observe(const Answer& answer, uint64_t seed) {
  const int64_t value = static_cast<int64_t>(seed);
  const Head head = {1 + static_cast<int>(seed % 4), 1 + value % 9, 5 + value % 13};
  Values all;
  for (const Values& values : run(answer, head).values) {
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace usp::judging

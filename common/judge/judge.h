#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "judge/todo.h"
#include "tensor/ledger.h"
#include "tensor/runtime.h"

/// What the judges of exercises share. A judge calls an answer, compares what it did with what is
/// right, and throws NotYet for the first difference. docs/exercises.md says how one is written.
namespace usp::judging {

/// What an answer has computed on one rank.
using Values = std::vector<double>;

/// Ends the judging of a wrong answer. Its lines go to the reader: first what is wrong, in the
/// words of the field; then a number that shows it; then the traffic, where there is any.
class NotYet : public std::exception {
 public:
  explicit NotYet(std::vector<std::string> lines) : lines_(std::move(lines)) {}
  const std::vector<std::string>& lines() const { return lines_; }
  const char* what() const noexcept override { return lines_.front().c_str(); }

 private:
  std::vector<std::string> lines_;
};

/// What an answer did on every rank.
struct Outcome {
  std::vector<Values> values;  ///< by rank
  std::vector<Ledger> traffic;
};

/// A wrong result that has a name: what a well-known mistake makes of the same input.
struct Suspect {
  std::string words;           ///< what is wrong, and what is missing
  std::vector<Values> values;  ///< by rank
};

/// Runs body() on this many ranks, which are threads; it returns what the judge is to look at. An
/// exception of the answer becomes NotYet, except Unsolved.
Outcome run_ranks(int ranks, const std::function<Values(const Communicator& world)>& body);
/// The same without ranks.
Outcome run_alone(const std::function<Values()>& body);

/// Throws NotYet unless every |got - wanted| <= tolerance * the largest |wanted|; NaN throws. The
/// words are those of the first suspect that agrees with what was got, or `otherwise`.
/// `what`: the name of a value, such as "x"; `setting`: on what input, such as "3 ranks".
void expect_values(const std::string& setting, const std::string& what, const Outcome& got,
                   const std::vector<Values>& wanted, const std::vector<Suspect>& suspects,
                   const std::string& otherwise, double tolerance = 1e-10);

/// Wrong traffic that has a name.
struct TrafficMistake {
  std::string words;
  std::vector<int64_t> bytes;  ///< by rank
};
/// Throws NotYet unless each rank has sent this many bytes of tensors. The words are those of the
/// first entry of `mistakes` that agrees, or say "too many" or "too few".
void expect_traffic(const std::string& setting, const Outcome& got,
                    const std::vector<int64_t>& wanted,
                    const std::vector<TrafficMistake>& mistakes);

/// Throws NotYet, with these words, if any rank has called this operation.
void expect_unused(const Outcome& got, CommKind kind, const std::string& words);

/// Random numbers of a judge's input: a function of seed and index.
Values normals(uint64_t seed, int64_t count);

/// One answer, and what it is called: yours, starter, solution, a wrong answer, a mutant.
template <class Answer>
struct Named {
  std::string name;
  Answer answer;
};

/// Calls judge() and prints its lines. Returns 0 if the answer is right, 1 if it is not yet, 77 if
/// it is unsolved.
int print_verdict(const std::function<void()>& judge);
/// Compares two answers in `count` random observations, each made of a seed. Returns 0 if they
/// agree, 1 after printing the first that differs, or that ends in an exception.
int print_difference(const std::function<Values(uint64_t seed)>& one,
                     const std::function<Values(uint64_t seed)>& other, int count);
/// Throws UsageError naming those that there are.
[[noreturn]] void no_such_answer(const std::string& name, const std::vector<std::string>& names);

/// The whole of main: `PROGRAM [NAME]` judges an answer, by default the first one; `PROGRAM NAME
/// OTHER COUNT` compares two of them.
template <class Answer>
int judge_main(int argc, char** argv, const std::vector<Named<Answer>>& answers,
               void (*judge)(const Answer&), Values (*observe)(const Answer&, uint64_t seed)) {
  const auto find = [&](const std::string& name) -> const Answer& {
    std::vector<std::string> names;
    for (const auto& [candidate, answer] : answers) {
      if (candidate == name) return answer;
      names.push_back(candidate);
    }
    no_such_answer(name, names);
  };
  const Answer& answer = argc > 1 ? find(argv[1]) : answers.front().answer;
  if (argc <= 3) return print_verdict([&] { judge(answer); });
  const Answer& other = find(argv[2]);
  return print_difference([&](uint64_t seed) { return observe(answer, seed); },
                          [&](uint64_t seed) { return observe(other, seed); }, std::stoi(argv[3]));
}

}  // namespace usp::judging

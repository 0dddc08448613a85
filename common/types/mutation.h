#pragma once

#include <string>
#include <utility>

#include "types/checker.h"

namespace usp::types {

/// What is wrong with a message on purpose, to see whether the types say so.
struct Mutation {
  /// What may happen to it.
  enum class What { none, left_out, twice };
  What what = What::none;  ///< what happens to it
  int64_t message = -1;    ///< the number of the message, from 0 on, among those of the rank
};

/// A Checker that hears of one message not at all, or twice.
class MutatedChecker : public Checker {
 public:
  MutatedChecker(Setting setting, const Mutation& mutation)
      : Checker(std::move(setting)), mutation_(mutation) {}

  /// Name of the message that was mutated, such as "all_reduce over dp"; empty: it was not met.
  const std::string& mutated() const { return mutated_; }
  /// Whether it carried what types cannot tell apart: integers, which have none, or zeros, whose
  /// sum is the same however often it is taken.
  bool mutated_untyped() const { return mutated_untyped_; }

  int64_t post(const Posted& operation) override;
  void wait(int64_t posted) override;

 private:
  Mutation mutation_;
  int64_t met_ = 0;
  std::string mutated_;
  bool mutated_untyped_ = false;
};

}  // namespace usp::types

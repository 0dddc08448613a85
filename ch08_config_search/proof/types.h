#pragma once

#include <functional>
#include <string>

#include "train_step.h"
#include "types/mutation.h"

namespace usp {

/// The factors of a layout's mesh: its axes, cut where its groups are. Throws UsageError where the
/// sizes have no types.
std::vector<types::Factor> factors_of(const TrainConfig& config);

/// What the types of a run's tensors say of it.
struct TypeCheck {
  int64_t ranks = 0, ops = 0, messages = 0;  ///< that were followed
  std::string error;                         ///< the first; empty: there is none
  std::string mutated;  ///< which message was, such as "all_reduce over dp"; empty: none was met
  bool mutated_untyped = false;  ///< it carried integers or zeros, see Checker
};

/// Rank of a stage on which a run is followed: the first along every factor of the mesh, or the
/// second. Who enters what all ranks know into a sum is seen from both alone.
enum class TypedPlace { first, second };

/// Two training steps of one rank, on meta: the rank of that place in this stage of the pipeline.
struct TypedRank {
  TypedPlace place = TypedPlace::first;
  int64_t stage = 0;
  types::Mutation mutation;
  std::function<void(const types::Checker&, const types::TypedOp&)> listener;  ///< may be empty
  bool keeps_history = false;  ///< for the listener: Checker::history()
};

/// What goes in `sent` and `received`, where they are not nullptr: messages along pp, by peer.
TypeCheck check_types_of(const TrainConfig& config, const TypedRank& rank,
                         std::map<int, int64_t>* sent = nullptr,
                         std::map<int, int64_t>* received = nullptr);

/// Every stage in both places; besides, that each message from one of these ranks to another of
/// them has a receive. Throws UsageError where the sizes of the mesh have no types.
TypeCheck check_types(const TrainConfig& config, const types::Mutation& mutation = {});

/// The same layout with as little of it as types depend on: of each stage's layers the first and
/// the last of each kind, the fewest micro-batches that the schedule takes, three at least, and of
/// more than two stages in a row with the same layers two. Throws UsageError like check_types().
TrainConfig reduced_for_types(const TrainConfig& config);

/// What check_types() says of the reduced layout. If a type does not fit there, what it says of the
/// whole one, so that the error has the names and numbers of that.
TypeCheck check_types_reduced(const TrainConfig& config, const types::Mutation& mutation = {});

/// Prints in one line what check_types_reduced() has followed, or its error. Returns whether all
/// types fit. Throws UsageError like check_types().
bool say_types(const TrainConfig& config, const types::Mutation& mutation = {});

/// How the result of an operation of the first decoder layer came to its type, along each axis: the
/// operations that gave it another letter, from the last to the first, in lines. `words`: of the
/// operation's row in show_types(); the last row that has them all is meant. Throws UsageError like
/// check_types(), and if no row has them.
std::string why_typed(const TrainConfig& config, const std::string& words);

/// The number that a Mutation knows a message by which has the `place`th row, from 1 on, among the
/// messages in show_types(). Throws UsageError like check_types(), and if there are fewer.
int64_t message_of_row(const TrainConfig& config, int64_t place);

/// Prints the types of the tensors of a decoder layer, or with `--mesh_why` why one of them has its
/// type, and whether all of the run fit (`--mesh_show types`); with `--mesh_left_out` this alone,
/// of a run without that message. Returns the exit code: 1 if one does not. Throws UsageError like
/// check_types().
int show_types(const TrainConfig& config);

}  // namespace usp

#pragma once

#include <compare>
#include <string>
#include <tuple>
#include <vector>

#include "planner/classes_of_ranks.h"

namespace usp {

/// Name and number of a communicator; the peer of messages, -1 of collectives; whether it sends.
using ActionQueue = std::tuple<std::string, int64_t, int, bool>;

/// A time that leaves a stretch of a program.
struct ActionOutput {
  /// Which it is.
  enum Kind : int32_t {
    over,     ///< an exchange is, and somebody waits for it later
    ready,    ///< this rank, for an exchange with ranks of other classes
    arrives,  ///< a message does, at its receiver
  };
  Kind kind;
  int32_t post;  ///< of which exchange

  std::strong_ordering operator<=>(const ActionOutput&) const = default;
};

/// What a program does in a block of the model, whatever it has done before. It is a matrix from
/// the rank's clocks and inputs to its clocks and outputs. Inputs are times at which exchanges that
/// were posted before are over.
struct ActionBlock {
  /// An event.
  struct Part {
    /// What happens.
    enum Kind : int32_t {
      compute,     ///< kernel `what`
      post,        ///< exchange `what`, among ranks of this class
      send,        ///< message `what`
      meet,        ///< an exchange with other classes begins when all of them are ready
      receive,     ///< a message may come, whenever it was sent
      wait_own,    ///< for the exchange that the block posted as number `what`
      wait_input,  ///< for input `what`
    };
    Kind kind;
    int32_t what;
    int32_t queue;  ///< of post, send: its clock; -1 - q: a queue that every block leaves empty

    std::strong_ordering operator<=>(const Part&) const = default;
  };
  int32_t inputs = 0;
  std::vector<Part> parts;
  std::vector<ActionOutput> outputs;  ///< `post` counts the block's own

  std::strong_ordering operator<=>(const ActionBlock&) const = default;
};

/// Blocks one after the other, without a wait for ranks of other classes but at the begin: F, B, W
/// of a chunk or a part of it. It is the product of their matrices.
struct FoldedAction {
  /// A block at its place.
  struct Use {
    int32_t block;
    std::vector<int32_t> inputs;  ///< inputs of the action; -1 - i: output i of all blocks so far

    std::strong_ordering operator<=>(const Use&) const = default;
  };
  int32_t inputs = 0;
  std::vector<Use> uses;
  std::vector<int32_t> outputs;  ///< which of all its blocks' outputs leave it

  std::strong_ordering operator<=>(const FoldedAction&) const = default;
};

// [folded_program]
/// A program whose equal blocks and equal actions are there once.
struct ActionProgram {
  /// An action at its place.
  struct Turn {
    int32_t action;
    char work;                          ///< as a ProgramSegment has it
    std::vector<int32_t> inputs;        ///< numbers of posts; of the last step's: `posts` more
    std::vector<ActionOutput> outputs;  ///< `post`: number in the step
  };
  /// An exchange of the step.
  struct Post {
    int32_t exchange;  ///< of the program
    int32_t queue;
    bool crosses;   ///< its end depends on ranks of other classes
    int32_t place;  ///< in the queue, from the step's begin
  };
  static constexpr int kHost = 0, kDevice = 1, kQueues = 2;
  /// Number of the rank's clocks: its host's, its device's, and one for each of these queues, in
  /// which a block may leave something.
  int clocks() const { return kQueues + static_cast<int>(clock_queues.size()); }
  std::vector<int32_t> clock_queues;
  std::vector<ActionBlock> blocks;
  std::vector<FoldedAction> actions;
  std::vector<Turn> turns;
  int64_t tail = 0;  ///< the first turn behind the last gradient
  std::vector<Post> posts;
  std::vector<ActionQueue> queues;
  std::vector<int32_t> kept;  ///< posts that the next step waits for
};
// [folded_program]

/// The program of a class's representative, folded.
ActionProgram fold_actions(const Program& program, const RankClasses& classes);

}  // namespace usp

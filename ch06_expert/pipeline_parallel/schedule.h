#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace usp {

// [action]
/// What a rank does at a time, for one micro-batch in one of its chunks.
enum class Work {
  F,   ///< forward
  B,   ///< backward, the gradient of the chunk's input alone
  W,   ///< the gradients of its weights, which nobody waits for before the update
  BW,  ///< backward, both
};

/// A piece of work, and on what.
struct Action {
  Work work;
  int64_t micro_batch;
  int64_t chunk = 0;  ///< of this rank
  /// In turns with the action after it: both begin when both can, and both are over at once.
  bool with_next = false;

  bool operator==(const Action&) const = default;
};
// [action]

// [places]
/// Where a stage lies.
struct Place {
  int rank;
  int64_t chunk;

  bool operator==(const Place&) const = default;
};

/// Which rank holds which stages. p ranks, v chunks on each:
///
/// | placement | stages | stage s lies on                                                      |
/// |-----------|--------|----------------------------------------------------------------------|
/// | loop      | p v    | rank s mod p, its chunk s / p: the last rank is followed by the first |
/// | fold      | 2 p    | rank s, then, from stage p on, backwards: rank 2p-1-s                 |
/// | mirror    | p      | rank s and rank p-1-s: two copies of each stage                       |
enum class Placement { loop, fold, mirror };

/// The stages of a pipeline, and the way of a micro-batch through them.
struct Stages {
  Placement placement = Placement::loop;
  int64_t ranks = 1;   ///< p
  int64_t chunks = 1;  ///< v

  int64_t count() const { return placement == Placement::mirror ? ranks : ranks * chunks; }
  int64_t stage_of(const Place& place) const;  ///< the stage that lies there
  /// Where a micro-batch meets a stage. Of m micro-batches the second half runs through a mirrored
  /// pipeline from its other end.
  Place place_of(int64_t stage, int64_t micro_batch, int64_t m) const;
  /// Micro-batches that a chunk sees, of m in all.
  int64_t share_of(int64_t m) const { return placement == Placement::mirror ? m / 2 : m; }
};
// [places]

// [schedule]
/// What every rank of a pipeline does in a step, in order. Which messages it sends and receives
/// follows from that.
struct Schedule {
  Stages stages;
  int64_t micro_batches = 0;                 ///< m
  std::vector<std::vector<Action>> actions;  ///< of each rank
};
// [schedule]

/// An activation or its gradient, on its way from one stage to the next.
struct StageMessage {
  int from, to;  ///< ranks
  int64_t micro_batch;
  int64_t sent_by, used_by;  ///< actions of theirs
};

/// All of them, in the order in which each rank sends; those from a rank to itself, too. Throws
/// Error where a schedule is not one that check_schedule() accepts.
std::vector<StageMessage> messages(const Schedule& schedule);

// [text]
/// As a table that a reader can edit: a line with the placement, then one line for each rank, such
/// as "1: F0 F1 BW0 F2&BW1 BW2"; "F3.1" is micro-batch 3 in chunk 1, "&" puts two actions that run
/// in turns together.
std::string to_text(const Schedule& schedule);
std::string to_text(const Action& action);  ///< such as "F3.1"
/// Reads that. Throws UsageError, with line and word, where it is not of this form. `name`: in
/// errors.
Schedule parse_schedule(std::string_view text, std::string_view name);
// [text]

/// The forward passes alone, of this many micro-batches.
Schedule forward_only(const Stages& stages, int64_t micro_batches);

}  // namespace usp

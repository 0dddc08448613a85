#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/args.h"
#include "planner/classes_of_ranks.h"

namespace usp {

/// The segments of a dry run: what a rank does in each action (F, B, W of a chunk), by all that it
/// depends on. Programs of more or fewer micro-batches are written out of them.
class Segments {
 public:
  /// Segments of a rank's recorded program. Has none where two actions run in turns, where the
  /// program does not follow its schedule, and where two segments that should be alike are not.
  Segments(const TrainConfig& config, const Program& program);

  /// What record() returns for this rank of the layout with any number of micro-batches. nullopt:
  /// some segment is missing.
  std::optional<Program> write(const TrainConfig& config, int rank) const;

  /// The fewest micro-batches in which this rank does all that it does in the layout's step: what
  /// to record.
  static int64_t micro_batches_to_record(const TrainConfig& config, int rank);

 private:
  /// An event that says nothing of where it stands in the step.
  struct Item {
    Event::Kind kind;
    int32_t what;   ///< as an Event has it; of a wait: which of those that its queue still has
    int32_t queue;  ///< of a wait
    char work;      ///< that of its action; '-' or 'U': of none
    int32_t chunk;  ///< that the block belongs to
    int32_t block;  ///< counted from the chunk's first; -1: none

    bool operator==(const Item&) const = default;
  };
  /// What a rank does from an action's first event to that of the next, and with which memory.
  struct Segment {
    std::vector<Item> items;
    int64_t keeps = 0;  ///< bytes more at its end than at its begin
    int64_t peak = 0;   ///< at a time, at most, beyond its begin

    bool operator==(const Segment&) const = default;
  };
  using Key = std::vector<int64_t>;
  class Reader;
  class Writer;

  static std::vector<Key> keys_of(const Schedule& schedule, int stage);

  bool is_usable_ = false;
  int64_t begin_ = 0;  ///< bytes when a step begins
  std::vector<Kernel> kernels_;
  std::vector<ProgramGroup> groups_;
  std::vector<Exchange> exchanges_;
  std::vector<int32_t> queue_of_;  ///< of each shape of exchange
  std::vector<size_t> left_;       ///< exchanges that a step leaves to the next, of each queue
  std::map<Key, Segment> of_action_;
  Segment tail_;  ///< behind the last gradient
};

/// What a segment depends on, of a layout: all of its flags but the number of micro-batches.
class LayoutKeys {
 public:
  LayoutKeys() : args_("") { any_.bind(args_); }
  /// As text.
  std::string of(const TrainConfig& config);

 private:
  TrainConfig any_;
  Args args_;  ///< bound to that one: to bind flags takes longer than to write a program
};

/// Dry runs of a search, each segment recorded once.
class SegmentRecords {
 public:
  /// The programs of the classes' representatives, as record_classes() returns them.
  std::vector<Program> programs(const TrainConfig& config, const RankClasses& classes);
  int64_t recorded() const { return recorded_; }  ///< ranks' steps, in dry runs
  int64_t written() const { return written_; }    ///< out of what others have recorded

 private:
  Program program(const TrainConfig& config, int rank, const std::string& layout);

  LayoutKeys keys_;
  std::map<std::pair<std::string, int>, std::vector<Segments>> known_;  ///< by layout, rank
  int64_t recorded_ = 0, written_ = 0;
};

/// The fewest micro-batches of a layout between which there is a steady state, so that as many more
/// as there are stages do the same once more; all of them where a file has the schedule.
int64_t steady_micro_batches(const TrainConfig& config);

/// What a rank's shapes depend on, within a layout: its place in all groups but the pipeline, and
/// in a node, and the layers of its stage.
std::vector<int64_t> stage_work(const TrainConfig& config, int rank);

}  // namespace usp

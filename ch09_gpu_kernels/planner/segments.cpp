#include "planner/segments.h"

#include <algorithm>
#include <deque>
#include <set>
#include <tuple>

#include "pipeline_parallel/stages.h"

namespace usp {

namespace {

char work_of(const Action& action) {
  return action.work == Work::F ? 'F' : action.work == Work::W ? 'W' : 'B';
}

ProgramSegment segment_of(const Action& action, const Stages& stages, int stage) {
  return {work_of(action), stages.stage_of({stage, action.chunk}), action.chunk,
          action.micro_batch};
}

/// What Mail does around each action of a rank: from which stage it takes a message, after
/// how many of its own messages there are over; which receives are posted before it begins, for the
/// next one; where its output goes. Stages are counted from the rank's own.
struct MailTurn {
  std::vector<int64_t> takes, posts, sends;
};

// [mail]
std::vector<MailTurn> mail_of(const Schedule& schedule, int stage) {
  const int64_t count = std::ssize(schedule.actions[stage]);
  std::vector<MailTurn> turns(count + 1);
  std::vector<const StageMessage*> sent(count), comes(count);
  std::map<int, std::deque<const StageMessage*>> to_post;
  std::map<int, std::deque<int64_t>> used_by;  // of what was sent to a stage
  const std::vector<StageMessage> all = messages(schedule);
  for (const StageMessage& message : all) {
    if (message.from == stage) sent[message.sent_by] = &message;
    if (message.to != stage || message.from == stage) continue;
    comes[message.used_by] = &message;
    to_post[message.from].push_back(&message);
  }
  std::vector<bool> is_posted(count);
  const auto post = [&](int64_t action, MailTurn& turn) {
    if (action >= count || comes[action] == nullptr) return;
    std::deque<const StageMessage*>& from = to_post[comes[action]->from];
    while (!is_posted[action]) {
      turn.posts.push_back(from.front()->from - stage);
      is_posted[from.front()->used_by] = true;
      from.pop_front();
    }
  };
  for (int64_t i = 0; i < count; ++i) {
    MailTurn& turn = turns[i];
    post(i, turn);
    if (comes[i] != nullptr) {
      std::deque<int64_t>& open = used_by[comes[i]->from];
      int64_t over = 0;
      for (; !open.empty() && open.front() <= comes[i]->sent_by; open.pop_front()) ++over;
      turn.takes = {comes[i]->from - stage, over};
    }
    post(i + 1, turn);
    if (sent[i] == nullptr) continue;
    turn.sends = {sent[i]->to - stage};
    if (sent[i]->to != stage) used_by[sent[i]->to].push_back(sent[i]->used_by);
  }
  return turns;
}
// [mail]

void append(std::vector<int64_t>& key, const std::vector<int64_t>& part) {
  key.push_back(std::ssize(part));
  key.insert(key.end(), part.begin(), part.end());
}

int stage_of(const TrainConfig& config, int rank) {
  return static_cast<int>(config.mesh().place_of(rank).pp);
}

}  // namespace

// [key]
/// Keys of the step's begin, then each action: what its events depend on within a layout. That is
/// its work and its neighbors', whether it is among the chunk's first of its kind or the last, and
/// messages until the next one begins.
std::vector<Segments::Key> Segments::keys_of(const Schedule& schedule, int stage) {
  constexpr int64_t kUnlike = 2;  // a second backward pass may wait for what the first has posted
  const std::vector<Action>& actions = schedule.actions[stage];
  const std::vector<MailTurn> mail = mail_of(schedule, stage);
  std::map<std::pair<Work, int64_t>, int64_t> all, done;
  for (const Action& action : actions) ++all[{action.work, action.chunk}];
  std::vector<Key> keys;
  for (int64_t i = -1; i < std::ssize(actions); ++i) {
    Key key;
    for (int64_t at : {i - 1, i, i + 1}) {
      const bool is_there = at >= 0 && at < std::ssize(actions);
      key.push_back(is_there ? int64_t(actions[at].work) : -1);
      key.push_back(is_there ? actions[at].chunk : -1);
    }
    if (i >= 0) {
      const std::pair kind(actions[i].work, actions[i].chunk);
      const int64_t number = done[kind]++;
      key.push_back(std::min<int64_t>(number, actions[i].work == Work::F ? 1 : kUnlike));
      key.push_back(number + 1 == all[kind]);
      append(key, mail[i].sends);
    }
    append(key, mail[i + 1].takes);
    append(key, mail[i + 1].posts);
    keys.push_back(std::move(key));
  }
  return keys;
}
// [key]

/// Cuts a program at its actions, and makes items of its events.
class Segments::Reader {
 public:
  Reader(const TrainConfig& config, const Program& program)
      : program_(program),
        stage_(stage_of(config, program.rank)),
        schedule_(config.pipeline.schedule(config.grad_acc_steps)),
        chunks_(blocks_of_rank(config, stage_).chunks) {}

  /// Whether it could.
  bool read(Segments& into) {
    const std::vector<Action>& actions = schedule_.actions[stage_];
    if (std::ranges::any_of(actions, &Action::with_next) || !cut(actions)) return false;
    std::map<std::tuple<int, CommKind, int>, int32_t> queues;
    for (const Exchange& of : program_.exchanges) {
      const auto number = static_cast<int32_t>(queues.size());
      into.queue_of_.push_back(
          queues.try_emplace({of.group, of.kind, of.peer}, number).first->second);
    }
    open_.resize(queues.size());
    for (const Event& event : program_.events) {
      if (event.kind == Event::post) posted_.push_back(into.queue_of_[event.what]);
    }
    find_left();
    for (const std::vector<int32_t>& left : left_) into.left_.push_back(left.size());
    const std::vector<Key> keys = keys_of(schedule_, stage_);
    for (size_t i = 0; i < keys.size(); ++i) {
      const Segment of = segment(i);
      const auto [known, is_new] = into.of_action_.emplace(keys[i], of);
      if (!is_new && known->second != of) return false;
    }
    into.tail_ = segment(keys.size());
    into.begin_ = program_.memory.front().begin;
    return std::ranges::max(program_.memory, {}, &ProgramMemory::peak).peak == program_.peak;
  }

 private:
  /// Finds where the step begins, and each action, and at last the tail.
  bool cut(const std::vector<Action>& actions) {
    begins_ = {0};
    for (int64_t i = 0; i < program_.tail; ++i) {
      const ProgramSegment& segment = program_.segments[program_.events[i].segment];
      if (segment.work == '-') continue;
      const size_t next = begins_.size() - 1;
      const auto is = [&](size_t at) {
        return segment == segment_of(actions[at], schedule_.stages, stage_);
      };
      if (next > 0 && is(next - 1)) continue;
      if (next == actions.size() || !is(next)) return false;
      begins_.push_back(i);
    }
    const bool has_all = begins_.size() == actions.size() + 1;
    begins_.push_back(program_.tail);
    return has_all && std::ranges::equal(begins_, program_.memory, {}, {}, &ProgramMemory::event);
  }

  /// What nobody waits for in this step, by queue.
  void find_left() {
    std::vector<bool> waited(posted_.size());
    for (const Event& event : program_.events) {
      if (event.kind == Event::wait) waited[event.what] = true;
    }
    left_.resize(open_.size());
    for (size_t i = 0; i < posted_.size(); ++i) {
      if (!waited[i]) left_[posted_[i]].push_back(static_cast<int32_t>(i));
    }
  }

  Segment segment(size_t number) {
    const std::vector<ProgramMemory>& memory = program_.memory;
    const bool is_last = number + 1 == memory.size();  // a step ends with what it begins with
    const ProgramMemory &own = memory[number], &next = memory[is_last ? 0 : number + 1];
    Segment segment{{}, next.begin - own.begin, own.peak - own.begin};
    const int64_t to = is_last ? std::ssize(program_.events) : next.event;
    for (int64_t i = own.event; i < to; ++i) segment.items.push_back(item_of(program_.events[i]));
    return segment;
  }

  Item item_of(const Event& event) {
    const char work = program_.segments[event.segment].work;
    Item item{event.kind, event.what, -1, work, 0, -1};
    for (size_t chunk = 0; chunk < chunks_.size() && event.block >= 0; ++chunk) {
      if (!chunks_[chunk].contains(event.block)) continue;
      item.chunk = static_cast<int32_t>(chunk);
      item.block = static_cast<int32_t>(event.block - chunks_[chunk].begin);
    }
    if (event.kind == Event::post) {
      open_[posted_[next_]].push_back(next_);
      ++next_;
    } else if (event.kind != Event::compute) {
      item.queue = posted_[event.what];
      const bool of_last = event.kind == Event::wait_last;
      std::vector<int32_t>& of = of_last ? left_[item.queue] : open_[item.queue];
      const auto found = std::ranges::find(of, event.what);
      item.what = static_cast<int32_t>(found - of.begin());
      if (!of_last) of.erase(found);
    }
    return item;
  }

  const Program& program_;
  const int stage_;
  const Schedule schedule_;
  const std::vector<BlockRange> chunks_;
  std::vector<int64_t> begins_;             ///< the first event of each segment before the tail
  std::vector<int32_t> posted_;             ///< the queue of each post
  std::vector<std::vector<int32_t>> open_;  ///< of each queue, posts that are still waited for
  std::vector<std::vector<int32_t>> left_;  ///< those that the next step waits for
  int32_t next_ = 0;
};

Segments::Segments(const TrainConfig& config, const Program& program)
    : kernels_(program.kernels), groups_(program.groups), exchanges_(program.exchanges) {
  is_usable_ = Reader(config, program).read(*this);
}

/// Puts segments one behind the other.
class Segments::Writer {
 public:
  Writer(const Segments& from, const TrainConfig& config, int rank)
      : from_(from),
        stage_(stage_of(config, rank)),
        chunks_(blocks_of_rank(config, stage_).chunks),
        open_(from.left_.size()) {
    program_.rank = rank;
    program_.kernels = from.kernels_;
    program_.exchanges = from.exchanges_;
    program_.groups = from.groups_;
    program_.peak = live_ = from.begin_;
  }

  std::optional<Program> take(const Schedule& schedule) {
    const std::vector<Action>& actions = schedule.actions[stage_];
    const std::vector<Key> keys = keys_of(schedule, stage_);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto found = from_.of_action_.find(keys[i]);
      if (found == from_.of_action_.end()) return std::nullopt;
      const ProgramSegment own =
          i == 0 ? ProgramSegment{} : segment_of(actions[i - 1], schedule.stages, stage_);
      if (!write(found->second, own)) return std::nullopt;
    }
    program_.tail = std::ssize(program_.events);
    if (!write(from_.tail_, {}) || !write_left()) return std::nullopt;
    program_.posts = posts_;
    return std::move(program_);
  }

 private:
  /// False where a wait has nothing to wait for.
  bool write(const Segment& from, const ProgramSegment& own) {
    const int64_t peak = live_ + from.peak;
    program_.memory.push_back({std::ssize(program_.events), live_, peak});
    program_.peak = std::max(program_.peak, peak);
    live_ += from.keeps;
    const int32_t here = segment(own), between = segment({}), update = segment({.work = 'U'});
    for (const Item& item : from.items) {
      Event event{item.kind, item.what,
                  item.work == '-'   ? between
                  : item.work == 'U' ? update
                                     : here,
                  -1};
      if (item.block >= 0) {
        event.block = static_cast<int32_t>(chunks_[item.chunk].begin) + item.block;
      }
      if (item.kind == Event::post) {
        open_[from_.queue_of_[item.what]].push_back(posts_++);
      } else if (item.kind == Event::wait) {
        std::vector<int32_t>& open = open_[item.queue];
        if (item.what >= std::ssize(open)) return false;
        event.what = open[item.what];
        open.erase(open.begin() + item.what);
      } else if (item.kind == Event::wait_last) {
        of_last_.push_back({program_.events.size(), item.queue});
      }
      program_.events.push_back(event);
    }
    return true;
  }

  /// What is waited for in the next step is known at the end of this one. False where it is not as
  /// much as was recorded.
  bool write_left() {
    for (size_t queue = 0; queue < open_.size(); ++queue) {
      if (open_[queue].size() != from_.left_[queue]) return false;
    }
    for (const auto& [event, queue] : of_last_) {
      int32_t& what = program_.events[event].what;
      what = open_[queue][what];
    }
    return true;
  }

  int32_t segment(const ProgramSegment& of) {
    const auto [known, is_new] =
        segments_.emplace(of, static_cast<int32_t>(program_.segments.size()));
    if (is_new) program_.segments.push_back(of);
    return known->second;
  }

  const Segments& from_;
  const int stage_;
  const std::vector<BlockRange> chunks_;
  Program program_;
  std::vector<std::vector<int32_t>> open_;  ///< of each queue, posts that are still waited for
  std::vector<std::pair<size_t, int32_t>>
      of_last_;  ///< events that wait for the last step's, queues
  std::map<ProgramSegment, int32_t> segments_;
  int32_t posts_ = 0;
  int64_t live_;  ///< bytes
};

std::optional<Program> Segments::write(const TrainConfig& config, int rank) const {
  if (!is_usable_) return std::nullopt;
  return Writer(*this, config, rank).take(config.pipeline.schedule(config.grad_acc_steps));
}

// [work]
std::string LayoutKeys::of(const TrainConfig& config) {
  any_ = config;
  any_.grad_acc_steps = 0;
  return fmt::format("{} ranks: {}", config.mesh().ranks(), args_.to_json());
}

std::vector<int64_t> stage_work(const TrainConfig& config, int rank) {
  const MeshPlace at = config.mesh().place_of(rank);
  const int64_t node = config.communication->node_size;
  const RankBlocks blocks = blocks_of_rank(config, static_cast<int>(at.pp));
  std::vector<int64_t> key = {at.dp, at.cp, at.tp, node > 0 ? rank % node : 0, blocks.ends_apart};
  const int64_t layers = config.model.num_layers;
  const Stages stages = config.pipeline.schedule(config.grad_acc_steps).stages;
  if (stages.placement == Placement::mirror) key.push_back(at.pp);
  for (const BlockRange& chunk : blocks.chunks) {
    for (int64_t block = chunk.begin; block < chunk.end; ++block) {
      const bool is_layer = block > 0 && block <= layers;
      key.push_back(is_layer ? config.model.layer_weights(block - 1, /*active=*/false) : -block);
      if (is_layer) key.push_back(config.model.layer_weights(block - 1, /*active=*/true));
    }
    key.push_back(-1);
  }
  return key;
}
// [work]

int64_t steady_micro_batches(const TrainConfig& config) {
  const int64_t p = config.pipeline.pp_size;
  const bool is_file = config.pipeline.pp_schedule.find_first_of("/.") != std::string::npos;
  return is_file ? config.grad_acc_steps : 2 * p + config.grad_acc_steps % p;
}

int64_t Segments::micro_batches_to_record(const TrainConfig& config, int rank) {
  const int64_t most = std::max<int64_t>(4, steady_micro_batches(config));
  if (config.grad_acc_steps <= most) return config.grad_acc_steps;
  if (config.pipeline.pp_schedule != "1f1b") return most;  // others may refuse some numbers
  const auto keys = [&](int64_t micro_batches) {
    const auto all = keys_of(config.pipeline.schedule(micro_batches), stage_of(config, rank));
    return std::set<Key>(all.begin(), all.end());
  };
  const std::set<Key> needed = keys(config.grad_acc_steps);
  int64_t count = 4;
  while (count < most && !std::ranges::includes(keys(count), needed)) ++count;
  return count;
}

// [records]
std::vector<Program> SegmentRecords::programs(const TrainConfig& config,
                                              const RankClasses& classes) {
  const std::string layout = keys_.of(config);
  std::vector<Program> programs;
  for (int rank : classes.representative) programs.push_back(program(config, rank, layout));
  return programs;
}

Program SegmentRecords::program(const TrainConfig& config, int rank, const std::string& layout) {
  std::vector<Segments>& known = known_[{layout, rank}];
  for (const Segments& segments : known) {
    if (std::optional<Program> program = segments.write(config, rank)) {
      ++written_;
      return *std::move(program);
    }
  }
  TrainConfig shorter = config;
  if (known.empty()) shorter.grad_acc_steps = Segments::micro_batches_to_record(config, rank);
  Program program = record(shorter, rank);
  known.emplace_back(shorter, program);
  ++recorded_;
  if (shorter.grad_acc_steps == config.grad_acc_steps) return program;
  return this->program(config, rank, layout);
}
// [records]

}  // namespace usp

#include "planner/actions.h"

#include <algorithm>
#include <map>

namespace usp {

namespace {

/// A value's number among those that are there; it is added if it is new.
template <class Value>
int32_t interned(const Value& value, std::map<Value, int32_t>& known, std::vector<Value>& all) {
  const auto [place, is_new] = known.emplace(value, static_cast<int32_t>(all.size()));
  if (is_new) all.push_back(value);
  return place->second;
}

class Folder {
 public:
  Folder(const Program& program, const RankClasses& classes)
      : program_(program), classes_(classes) {
    read_posts();
    cut();
    find_clocks();
  }

  ActionProgram take() {
    for (size_t i = 0; i + 1 < actions_.size(); ++i) {
      if (blocks_[actions_[i]] == program_.tail) folded_.tail = std::ssize(folded_.turns);
      add_action(actions_[i], actions_[i + 1]);
    }
    if (program_.tail == std::ssize(program_.events)) folded_.tail = std::ssize(folded_.turns);
    for (size_t i = 0; i < waits_.size(); ++i) {
      if (waits_[i].by_next) folded_.kept.push_back(static_cast<int32_t>(i));
    }
    return std::move(folded_);
  }

 private:
  /// Who waits for a post: the last such event of its step, and whether the next step does.
  struct Waits {
    int64_t last = -1;
    bool by_next = false;
  };

  bool crosses(const Exchange& exchange) const {
    if (exchange.kind == CommKind::send) return false;  // it waits for nobody
    if (exchange.kind == CommKind::recv) return true;
    const std::vector<int>& members = *program_.groups[exchange.group].members;
    const int own = classes_.of_rank[program_.rank];
    return std::ranges::any_of(members, [&](int rank) { return classes_.of_rank[rank] != own; });
  }

  void read_posts() {
    std::map<ActionQueue, int32_t> known;
    std::vector<int32_t> lengths;
    for (const Event& event : program_.events) {
      if (event.kind != Event::post) continue;
      const Exchange& exchange = program_.exchanges[event.what];
      const ProgramGroup& group = program_.groups[exchange.group];
      const int32_t queue =
          interned({group.name, group.number, exchange.peer, exchange.kind == CommKind::send},
                   known, folded_.queues);
      lengths.resize(folded_.queues.size());
      folded_.posts.push_back({event.what, queue, false, lengths[queue]++});
      crosses_.resize(lengths.size());
      if (crosses(exchange)) crosses_[queue] = true;
    }
    // Communicators of one name share a queue, and may have members of other classes or none.
    for (ActionProgram::Post& post : folded_.posts) post.crosses = crosses_[post.queue];
    waits_.resize(folded_.posts.size());
    for (int64_t i = 0; i < std::ssize(program_.events); ++i) {
      const Event& event = program_.events[i];
      if (event.kind == Event::wait) waits_[event.what].last = i;
      if (event.kind == Event::wait_last) waits_[event.what].by_next = true;
    }
  }

  // [cut]
  /// Where blocks and actions begin. An action begins with what it waits for from other classes:
  /// what it does until then may be what they wait for.
  void cut() {
    bool works = false;
    int32_t posts = 0;
    for (int64_t i = 0; i < std::ssize(program_.events); ++i) {
      const Event& event = program_.events[i];
      const bool waits = event.kind == Event::wait || event.kind == Event::wait_last;
      const bool comes = waits && folded_.posts[event.what].crosses;
      const bool new_action = i == 0 || i == program_.tail || (comes && works) ||
                              event.segment != program_.events[i - 1].segment;
      if (new_action) actions_.push_back(std::ssize(blocks_)), works = false;
      if (new_action || event.block != program_.events[i - 1].block) {
        blocks_.push_back(i);
        first_posts_.push_back(posts);
      }
      works |= !comes;
      posts += event.kind == Event::post;
    }
    actions_.push_back(std::ssize(blocks_));
    blocks_.push_back(std::ssize(program_.events));
    first_posts_.push_back(posts);
  }
  // [cut]

  /// Whether somebody waits for a post from this event on.
  bool outlives(int32_t post, int64_t event) const {
    return waits_[post].by_next || waits_[post].last >= event;
  }

  /// Whoever has waited for all that a queue had is later than it: such a queue needs no clock.
  void find_clocks() {
    std::vector<bool> has(folded_.queues.size());
    for (size_t block = 0; block + 1 < blocks_.size(); ++block) {
      for (int32_t i = first_posts_[block]; i < first_posts_[block + 1]; ++i) {
        const ActionProgram::Post& post = folded_.posts[i];
        if (post.crosses) continue;
        if (waits_[i].last < 0 || outlives(i, blocks_[block + 1])) has[post.queue] = true;
      }
    }
    for (size_t queue = 0; queue < has.size(); ++queue) {
      const auto number = static_cast<int32_t>(queue);
      clocks_.push_back(has[queue] ? folded_.clocks() : -1 - number);
      if (has[queue]) folded_.clock_queues.push_back(number);
    }
  }

  /// The number of an input, by the post that it is about.
  static int32_t input_of(int32_t post, std::vector<int32_t>& inputs) {
    const auto found = std::ranges::find(inputs, post);
    const auto place = static_cast<int32_t>(found - inputs.begin());
    if (found == inputs.end()) inputs.push_back(post);
    return place;
  }

  // [block]
  /// The block's matter; `inputs`: of which posts.
  ActionBlock block_of(int64_t number, std::vector<int32_t>& inputs) const {
    using Part = ActionBlock::Part;
    const int32_t first = first_posts_[number];
    ActionBlock block;
    int32_t next = first;
    for (int64_t i = blocks_[number]; i < blocks_[number + 1]; ++i) {
      const Event& event = program_.events[i];
      if (event.kind == Event::compute) {
        block.parts.push_back({Part::compute, event.what, 0});
      } else if (event.kind == Event::post) {
        block.parts.push_back(part_of(folded_.posts[next++]));
      } else if (event.kind == Event::wait && event.what >= first) {
        block.parts.push_back({Part::wait_own, event.what - first, 0});
      } else {
        const bool of_last = event.kind == Event::wait_last;
        const int32_t post = event.what + (of_last ? static_cast<int32_t>(waits_.size()) : 0);
        block.parts.push_back({Part::wait_input, input_of(post, inputs), 0});
      }
    }
    block.inputs = static_cast<int32_t>(inputs.size());
    for (int32_t post = first; post < next; ++post) {
      const CommKind kind = program_.exchanges[folded_.posts[post].exchange].kind;
      const bool meets = folded_.posts[post].crosses && kind != CommKind::recv;
      if (meets) block.outputs.push_back({ActionOutput::ready, post - first});
      if (kind == CommKind::send) block.outputs.push_back({ActionOutput::arrives, post - first});
      if (!folded_.posts[post].crosses && outlives(post, blocks_[number + 1])) {
        block.outputs.push_back({ActionOutput::over, post - first});
      }
    }
    return block;
  }
  // [block]

  ActionBlock::Part part_of(const ActionProgram::Post& post) const {
    using Part = ActionBlock::Part;
    const CommKind kind = program_.exchanges[post.exchange].kind;
    if (kind == CommKind::recv) return {Part::receive, 0, 0};
    if (post.crosses) return {Part::meet, 0, 0};
    return {kind == CommKind::send ? Part::send : Part::post, post.exchange, clocks_[post.queue]};
  }

  // [action]
  /// Blocks from one to another. What one of them posts and another waits for stays inside.
  void add_action(int64_t from, int64_t to) {
    FoldedAction action;
    const Event& begin = program_.events[blocks_[from]];
    ActionProgram::Turn turn{0, program_.segments[begin.segment].work, {}, {}};
    std::vector<ActionOutput> made;
    for (int64_t number = from; number < to; ++number) {
      std::vector<int32_t> waited;
      const ActionBlock block = block_of(number, waited);
      FoldedAction::Use use{interned(block, known_blocks_, folded_.blocks), {}};
      for (int32_t post : waited) {
        const auto own = std::ranges::find(made, ActionOutput{ActionOutput::over, post});
        use.inputs.push_back(own == made.end() ? input_of(post, turn.inputs)
                                               : -1 - static_cast<int32_t>(own - made.begin()));
      }
      action.uses.push_back(std::move(use));
      for (const ActionOutput& output : block.outputs) {
        made.push_back({output.kind, first_posts_[number] + output.post});
      }
    }
    action.inputs = static_cast<int32_t>(turn.inputs.size());
    for (int32_t i = 0; i < std::ssize(made); ++i) {
      if (made[i].kind == ActionOutput::over && !outlives(made[i].post, blocks_[to])) continue;
      action.outputs.push_back(i);
      turn.outputs.push_back(made[i]);
    }
    turn.action = interned(action, known_actions_, folded_.actions);
    folded_.turns.push_back(std::move(turn));
  }
  // [action]

  const Program& program_;
  const RankClasses& classes_;
  ActionProgram folded_;
  std::vector<bool> crosses_;         ///< of each queue: some exchange has members of other classes
  std::vector<Waits> waits_;          ///< of each post
  std::vector<int64_t> blocks_;       ///< the first event of each; at last, of none
  std::vector<int32_t> first_posts_;  ///< the first post of each
  std::vector<int64_t> actions_;      ///< the first block of each; at last, of none
  std::vector<int32_t> clocks_;       ///< of each queue, as a Part has it
  std::map<ActionBlock, int32_t> known_blocks_;
  std::map<FoldedAction, int32_t> known_actions_;
};

}  // namespace

ActionProgram fold_actions(const Program& program, const RankClasses& classes) {
  return Folder(program, classes).take();
}

}  // namespace usp

#include "planner/replay.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "base/check.h"

namespace usp {

namespace {

constexpr int kReplayed = 2;  ///< the first one fills what a step leaves to the next

/// A time, and the last point on the way to it.
struct Clock {
  double at = 0;
  int32_t point = -1;
};

const Clock& later(const Clock& a, const Clock& b) { return b.at > a.at ? b : a; }

/// Exchanges that a communicator carries out one after the other: its collectives, or the messages
/// to one peer. As one rank sees them.
struct Queue {
  std::vector<int> exchanges;  ///< which shape, as posted
  std::vector<Clock> ready;    ///< when this rank had posted each
  std::vector<Clock> over;     ///< as far as is known
  std::vector<Clock> arrives;
  Clock free;
};

/// Name and number of the communicator; the peer of messages, -1 for collectives; whether it sends.
using QueueKey = std::tuple<std::string, int64_t, int, bool>;

/// A class's representative on its way through its program.
struct Actor {
  const Program* program = nullptr;
  int32_t number = 0;                 ///< of its class
  std::vector<double> kernels;        ///< seconds of each
  std::vector<ExchangeSeconds> busy;  ///< of each shape of exchange
  std::vector<int> queue_of;          ///< of each shape of exchange
  std::vector<int> group_of;          ///< of each post of a step
  std::map<QueueKey, int> queue_index;
  std::vector<Queue> queues;
  struct Posted {
    int queue, place;
  };
  std::vector<Posted> posted[2];  ///< of this step, of the one before

  Clock host, device;
  int64_t at = 0;
  int step = 0;
  Clock begin, end;  ///< of the last step
  RankTime time;
  /// What the device did in the last step, one thing after the other, until when.
  struct Span {
    double until;
    int64_t event;
    bool starves;
  };
  std::vector<Span> spans;

  bool done() const { return step == kReplayed; }
  void spend(bool starves) { spans.push_back({device.at, at, starves}); }
};

class Replay {
 public:
  Replay(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost)
      : classes_(classes), cost_(cost) {
    host_computes_ = cost.cluster().host_computes;
    launch_ = cost.launch();
    for (const Program& program : programs) prepare(program);
  }

  Replayed run() {
    for (bool moves = true; moves;) {
      moves = false;
      for (Actor& actor : actors_) moves |= advance(actor);
    }
    for (const Actor& actor : actors_) {
      if (!actor.done()) fail("the ranks wait for each other for ever:{}", stuck());
    }
    Replayed result;
    Clock begin, end;
    for (const Actor& actor : actors_) {
      begin = later(begin, actor.begin);
      end = later(end, actor.end);
    }
    result.step = end.at - begin.at;
    for (Actor& actor : actors_) {
      actor.time.gradients -= begin.at;
      result.gradients = std::max(result.gradients, actor.time.gradients);
      actor.time.end = actor.end.at;
      actor.time.parts = parts_of(actor, begin.at, end.at);
      result.classes.push_back(std::move(actor.time));
    }
    add_way(result.path, end, 1);
    add_way(result.path, begin, -1);
    return result;
  }

  // [slices]
  std::vector<std::vector<TimelineSlice>> slices() {
    std::vector<std::vector<TimelineSlice>> all;
    for (Actor& actor : actors_) {
      std::vector<TimelineSlice>& of_class = all.emplace_back();
      double from = actor.begin.at;
      for (const Actor::Span& span : actor.spans) {
        if (!span.starves && span.until > from) of_class.push_back({from, span.until, span.event});
        from = std::max(from, span.until);
      }
      size_t post = 0;
      for (int64_t i = 0; i < std::ssize(actor.program->events); ++i) {
        if (actor.program->events[i].kind != Event::post) continue;
        const auto [number, place] = actor.posted[1][post++];
        const Queue& queue = actor.queues[number];
        if (actor.program->exchanges[queue.exchanges[place]].kind == CommKind::recv) continue;
        if (!carry_out(actor, number, place)) continue;  // what is left to the next step as well
        const double over = queue.over[place].at;
        of_class.push_back({over - actor.busy[queue.exchanges[place]].busy, over, i, true});
      }
    }
    return all;
  }
  // [slices]

 private:
  void prepare(const Program& program) {
    Actor actor;
    actor.number = static_cast<int32_t>(actors_.size());
    actor.program = &program;
    actor.time.rank = program.rank;
    for (const Kernel& kernel : program.kernels) actor.kernels.push_back(cost_.of(kernel));
    for (const Exchange& exchange : program.exchanges) {
      const ProgramGroup& group = program.groups[exchange.group];
      actor.busy.push_back(cost_.of(exchange, group));
      const QueueKey key(group.name, group.number, exchange.peer, exchange.kind == CommKind::send);
      const auto [place, is_new] =
          actor.queue_index.emplace(key, static_cast<int>(actor.queues.size()));
      if (is_new) actor.queues.emplace_back();
      actor.queue_of.push_back(place->second);
    }
    for (const Event& event : program.events) {
      if (event.kind == Event::post) actor.group_of.push_back(program.exchanges[event.what].group);
    }
    actors_.push_back(std::move(actor));
  }

  // [event]
  /// Goes on until it has to wait for another rank, or ends. Returns whether it got anywhere.
  bool advance(Actor& actor) {
    const std::vector<Event>& events = actor.program->events;
    const int64_t from = actor.at;
    const int step = actor.step;
    while (!actor.done()) {
      if (actor.at == actor.program->tail) {
        (actor.step == 0 ? actor.time.first_gradients : actor.time.gradients) = now(actor).at;
      }
      if (actor.at == std::ssize(events)) {
        end_step(actor);
        continue;
      }
      const Event& event = events[actor.at];
      if (event.kind == Event::compute) {
        compute(actor, event.what);
      } else if (event.kind == Event::post) {
        post(actor, event.what);
      } else if (!wait(actor, event)) {
        break;
      }
      ++actor.at;
    }
    return actor.at != from || actor.step != step;
  }

  /// So much later than a time, for this reason.
  Clock after(const Clock& clock, const PathPoint& why, double seconds) {
    if (seconds == 0) return clock;
    points_.push_back({clock.point, why});
    return {clock.at + seconds, static_cast<int32_t>(points_.size() - 1)};
  }

  /// Where the host computes, it launches nothing meanwhile: its clock is the device's.
  void launch(Actor& actor) {
    if (host_computes_) actor.host = actor.device;
    actor.host = after(actor.host, {actor.number, PathPoint::launch, 0}, launch_);
    if (!host_computes_) return;
    actor.time.starves += actor.host.at - actor.device.at;
    actor.device = actor.host;
    actor.spend(/*starves=*/true);
  }

  /// The device does ops in order, each when the host has launched it.
  void compute(Actor& actor, int kernel) {
    launch(actor);
    const double idle_from = actor.device.at, seconds = actor.kernels[kernel];
    actor.device = later(actor.device, actor.host);
    actor.time.starves += actor.device.at - idle_from;
    actor.spend(/*starves=*/true);
    actor.time.computes += seconds;
    actor.device = after(actor.device, {actor.number, PathPoint::kernel, kernel}, seconds);
    actor.spend(/*starves=*/false);
  }

  /// It may begin when the device has done all that was launched before.
  void post(Actor& actor, int exchange) {
    launch(actor);
    const int number = actor.queue_of[exchange];
    Queue& queue = actor.queues[number];
    queue.exchanges.push_back(exchange);
    queue.ready.push_back(later(actor.host, actor.device));
    actor.posted[0].push_back({number, static_cast<int>(queue.ready.size()) - 1});
  }

  /// The device, not the host, waits for what comes. False: nobody knows yet when.
  bool wait(Actor& actor, const Event& event) {
    const bool of_last = event.kind == Event::wait_last;
    if (of_last && actor.step == 0) return true;  // there was none
    const auto [number, place] = actor.posted[of_last ? 1 : 0][event.what];
    Queue& queue = actor.queues[number];
    const Exchange& exchange = actor.program->exchanges[queue.exchanges[place]];
    Clock over;
    if (exchange.kind == CommKind::recv) {
      if (!arrived(actor, exchange, place, over)) return false;
    } else {
      if (!carry_out(actor, number, place)) return false;
      over = queue.over[place];
    }
    const ProgramGroup& group = actor.program->groups[exchange.group];
    actor.time.exposed[group.name] += std::max(0.0, over.at - actor.device.at);
    actor.device = later(actor.device, over);
    actor.spend(/*starves=*/false);
    return true;
  }
  // [event]

  Actor& actor_of(int world_rank) { return actors_[classes_.of_rank[world_rank]]; }

  // [carry]
  /// Carries out the exchanges of a queue up to this one: each begins when all members have posted
  /// theirs and the one before it is over. False where one of them has not.
  bool carry_out(Actor& actor, int number, int place) {
    Queue& queue = actor.queues[number];
    for (int i = static_cast<int>(queue.over.size()); i <= place; ++i) {
      const Exchange& exchange = actor.program->exchanges[queue.exchanges[i]];
      Clock ready = queue.ready[i];
      if (exchange.kind != CommKind::send) {
        const ProgramGroup& group = actor.program->groups[exchange.group];
        const QueueKey key(group.name, group.number, -1, false);
        for (int member : *group.members) {
          const Actor& other = actor_of(member);
          const auto found = other.queue_index.find(key);
          if (found == other.queue_index.end()) return false;
          const Queue& theirs = other.queues[found->second];
          if (i >= std::ssize(theirs.ready)) return false;
          ready = later(ready, theirs.ready[i]);
        }
      }
      const int shape = queue.exchanges[i];
      const ExchangeSeconds& seconds = actor.busy[shape];
      const Clock begin = later(ready, queue.free);
      queue.free = after(begin, {actor.number, PathPoint::busy, shape}, seconds.busy);
      queue.over.push_back(queue.free);
      queue.arrives.push_back(
          after(begin, {actor.number, PathPoint::arrives, shape}, seconds.arrives));
    }
    return true;
  }
  // [carry]

  /// A message is there when its sender has sent it, whether or not it was asked for.
  bool arrived(Actor& actor, const Exchange& exchange, int place, Clock& when) {
    const ProgramGroup& group = actor.program->groups[exchange.group];
    Actor& sender = actor_of((*group.members)[exchange.peer]);
    const auto found = sender.queue_index.find({group.name, group.number, group.rank, true});
    if (found == sender.queue_index.end()) return false;
    const Queue& theirs = sender.queues[found->second];
    if (place >= std::ssize(theirs.ready)) return false;
    carry_out(sender, found->second, place);
    when = theirs.arrives[place];
    return true;
  }

  static const Clock& now(const Actor& actor) { return later(actor.host, actor.device); }

  /// The report reads the loss: the host waits for its device.
  void end_step(Actor& actor) {
    actor.host = actor.device = Clock(now(actor));
    (++actor.step == kReplayed ? actor.end : actor.begin) = actor.device;
    actor.at = 0;
    actor.posted[1] = std::move(actor.posted[0]);
    actor.posted[0].clear();
    if (actor.done()) return;
    const double first = actor.time.first_gradients;
    actor.time = {.rank = actor.program->rank,
                  .exposed = {},
                  .first_gradients = first,
                  .peak = actor.program->peak,
                  .parts = {}};
    actor.spans.clear();
  }

  // [parts]
  /// What the rank's device did between two times, which all ranks share.
  static std::map<std::string, double> parts_of(const Actor& actor, double begin, double end) {
    const Program& program = *actor.program;
    std::vector<double> sums(kParts + program.groups.size(), 0.0);
    double from = begin;
    for (const Actor::Span& span : actor.spans) {
      const double until = std::clamp(span.until, from, end);
      sums[part_of(actor, span)] += until - from;
      from = until;
    }
    sums[kTail] += end - from;  // its host, and ranks that end later
    std::map<std::string, double> parts;
    for (size_t i = 0; i < sums.size(); ++i) {
      if (sums[i] == 0) continue;
      const std::string dimension = i < kParts ? "" : dimension_of(program.groups[i - kParts].name);
      parts[i < kParts ? kPartNames[i] : dimension == "pp" ? "bubble" : dimension] += sums[i];
    }
    return parts;
  }

  static constexpr size_t kLaunch = 9, kTail = 10, kParts = 11;
  static constexpr std::array<const char*, kParts> kPartNames = {"forward matmul",
                                                                 "forward attention",
                                                                 "forward memory",
                                                                 "backward matmul",
                                                                 "backward attention",
                                                                 "backward memory",
                                                                 "between matmul",
                                                                 "between attention",
                                                                 "between memory",
                                                                 "launch",
                                                                 "tail"};

  /// Which of these; beyond, the group of an exchange that is waited for.
  static size_t part_of(const Actor& actor, const Actor::Span& span) {
    const Program& program = *actor.program;
    if (span.event >= program.tail) return kTail;
    if (span.starves) return kLaunch;
    const Event& event = program.events[span.event];
    if (event.kind != Event::compute) return kParts + actor.group_of[event.what];
    const char work = program.segments[event.segment].work;
    const size_t pass = work == 'F' ? 0 : work == '-' ? 2 : 1;
    return 3 * pass + size_t(program.kernels[event.what].kind);
  }
  // [parts]

  std::string stuck() const {
    std::string text;
    for (const Actor& actor : actors_) {
      if (actor.done()) continue;
      const Event& event = actor.program->events[actor.at];
      const auto [number, place] = actor.posted[event.kind == Event::wait_last ? 1 : 0][event.what];
      const Exchange& exchange = actor.program->exchanges[actor.queues[number].exchanges[place]];
      text +=
          fmt::format("\n  rank {} waits for {} #{} of {}", actor.program->rank,
                      name(exchange.kind), place + 1, actor.program->groups[exchange.group].name);
      if (exchange.peer >= 0) text += fmt::format(" with rank {} of it", exchange.peer);
      text += fmt::format(", in {}", actor.program->site(event));
    }
    return text;
  }

  // [way]
  /// Adds each point on the way to a time, `times` times.
  void add_way(CriticalPath& path, const Clock& to, int64_t times) const {
    for (int32_t point = to.point; point >= 0; point = points_[point].before) {
      path[points_[point].why] += times;
    }
    std::erase_if(path, [](const auto& entry) { return entry.second == 0; });
  }
  // [way]

  struct Point {
    int32_t before;
    PathPoint why;
  };
  const RankClasses& classes_;
  Cost& cost_;
  bool host_computes_;
  double launch_;
  std::vector<Actor> actors_;
  std::vector<Point> points_;
};

}  // namespace

double Replayed::exposed(const RankClasses& of, const std::string& group) const {
  double sum = 0;
  int64_t ranks = 0;
  for (size_t i = 0; i < classes.size(); ++i) {
    ranks += of.ranks[i];
    const auto found = classes[i].exposed.find(group);
    if (found != classes[i].exposed.end()) sum += double(of.ranks[i]) * found->second;
  }
  return sum / (double(ranks) * step);
}

double Replayed::bubble(const RankClasses& of) const {
  return exposed(of, "pp") + exposed(of, "world") + exposed(of, "mirror");
}

int Replayed::last() const {
  return static_cast<int>(std::ranges::max_element(classes, {}, &RankTime::end) - classes.begin());
}

std::string dimension_of(const std::string& group) {
  if (group == "dp_cp" || group == "shard" || group == "replica" || group == "edp") return "dp";
  if (group.starts_with("cp")) return "cp";
  if (group.starts_with("ep") || group == "stage") return "ep";  // and how full experts are
  if (group == "tp_kv") return "tp";
  if (group == "world" || group == "mirror" || group == "embedding") return "pp";
  return group;
}

// [seconds_of]
ResourceSeconds seconds_of(const CriticalPath& path, const std::vector<Program>& programs,
                           Cost& cost) {
  ResourceSeconds seconds{};
  const auto add = [&](Resource resource, double of, int64_t times) {
    seconds[size_t(resource)] += of * double(times);
  };
  for (const auto& [point, times] : path) {
    const Program& program = programs[point.of_class];
    if (point.kind == PathPoint::launch) {
      add(Resource::launch, cost.launch(), times);
    } else if (point.kind == PathPoint::kernel) {
      const Kernel& kernel = program.kernels[point.what];
      add(cost.limit(kernel), cost.of(kernel), times);
    } else {
      const Exchange& exchange = program.exchanges[point.what];
      const ExchangeSeconds of = cost.of(exchange, program.groups[exchange.group]);
      const double all = point.kind == PathPoint::busy ? of.busy : of.arrives;
      const double latency = of.latency - (of.arrives - all);
      add(Resource::latency, latency, times);
      add(of.link, all - latency, times);
    }
  }
  return seconds;
}
// [seconds_of]

Replayed replay(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost,
                std::vector<std::vector<TimelineSlice>>* slices) {
  Replay replay(programs, classes, cost);
  Replayed replayed = replay.run();
  if (slices != nullptr) *slices = replay.slices();
  replayed.critical = seconds_of(replayed.path, programs, cost);
  return replayed;
}

}  // namespace usp

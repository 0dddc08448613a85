#include "planner/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

namespace usp {

namespace {

using OrderedJson = nlohmann::ordered_json;

/// The slices of one class.
class ClassTimeline {
 public:
  ClassTimeline(const Program& program, double begin) : program_(program), begin_(begin) {}

  std::vector<OrderedJson> events(const std::vector<TimelineSlice>& slices, int64_t ranks) {
    const std::string others = ranks == 1 ? "" : fmt::format(" and {} like it", ranks - 1);
    name("process_name", 0, fmt::format("rank {}{}", program_.rank, others));
    name("thread_name", 0, "device");
    for (const TimelineSlice& slice : slices) {
      if (!slice.is_sent) add_pass(slice);
    }
    end_pass();
    for (const TimelineSlice& slice : slices) add(slice);
    return std::move(events_);
  }

 private:
  /// Microseconds from the step's begin.
  double us(double seconds) const { return 1e6 * (seconds - begin_); }

  void name(const char* what, int lane, const std::string& text) {
    events_.push_back({{"ph", "M"},
                       {"name", what},
                       {"pid", program_.rank},
                       {"tid", lane},
                       {"args", {{"name", text}}}});
  }

  void add_slice(const std::string& name, const char* category, int lane, double begin, double end,
                 OrderedJson args) {
    events_.push_back({{"ph", "X"},
                       {"name", name},
                       {"cat", category},
                       {"pid", program_.rank},
                       {"tid", lane},
                       {"ts", us(begin)},
                       {"dur", 1e6 * (end - begin)},
                       {"args", std::move(args)}});
  }

  // [pass]
  /// A pass lasts from the first of its slices to the last that follows without another pass's.
  void add_pass(const TimelineSlice& slice) {
    const int32_t segment = program_.events[slice.event].segment;
    if (segment != pass_) end_pass(), pass_ = segment, pass_begin_ = slice.begin;
    pass_end_ = slice.end;
  }
  void end_pass() {
    if (pass_ < 0) return;
    const ProgramSegment& pass = program_.segments[pass_];
    const std::string name = pass.work == 'U'   ? "update"
                             : pass.work == '-' ? "between two passes"
                                                : fmt::format("{}{}", pass.work, pass.micro_batch);
    add_slice(name, "phase", 0, pass_begin_, pass_end_,
              {{"micro_batch", pass.micro_batch}, {"chunk", pass.chunk}});
    pass_ = -1;
  }
  // [pass]

  void add(const TimelineSlice& slice) {
    const Event& event = program_.events[slice.event];
    if (slice.is_sent) return add_exchange(slice);
    if (event.kind != Event::compute) {
      return add_slice("wait", "wait", 0, slice.begin, slice.end, OrderedJson::object());
    }
    const Kernel& kernel = program_.kernels[event.what];
    add_slice(kernel.op, "op", 0, slice.begin, slice.end,
              {{"flops", kernel.flops}, {"bytes", kernel.bytes}});
  }

  void add_exchange(const TimelineSlice& slice) {
    const Exchange& exchange = program_.exchanges[program_.events[slice.event].what];
    const ProgramGroup& group = program_.groups[exchange.group];
    std::string queue = fmt::format("{} {}", group.name, group.number);
    if (exchange.peer >= 0) queue += fmt::format(" to {}", (*group.members)[exchange.peer]);
    const auto [lane, is_new] = lanes_.emplace(queue, int(lanes_.size()) + 1);
    if (is_new) this->name("thread_name", lane->second, queue);
    add_slice(std::string(usp::name(exchange.kind)), "comm", lane->second, slice.begin, slice.end,
              {{"dimension", group.name}, {"payload_bytes", exchange.payload_bytes}});
  }

  const Program& program_;
  double begin_;
  std::vector<OrderedJson> events_;
  std::map<std::string, int> lanes_;
  int32_t pass_ = -1;
  double pass_begin_ = 0, pass_end_ = 0;
};

}  // namespace

std::string timeline(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost) {
  std::vector<std::vector<TimelineSlice>> slices;
  const Replayed replayed = replay(programs, classes, cost, &slices);
  double begin = HUGE_VAL;
  for (const auto& of_class : slices) {
    for (const TimelineSlice& slice : of_class) begin = std::min(begin, slice.begin);
  }
  OrderedJson events = OrderedJson::array();
  for (size_t i = 0; i < programs.size(); ++i) {
    ClassTimeline of(programs[i], begin);
    for (OrderedJson& event : of.events(slices[i], classes.ranks[i]))
      events.push_back(std::move(event));
  }
  OrderedJson json = {{"otherData",
                       {{"origin", "predicted"},
                        {"cluster", cost.cluster().name},
                        {"ranks", classes.of_rank.size()},
                        {"step_us", 1e6 * replayed.step}}},
                      {"traceEvents", std::move(events)}};
  return json.dump() + "\n";
}

}  // namespace usp

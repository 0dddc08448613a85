#include "run/timeline.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/clock.h"
#include "base/machine.h"
#include "base/threads.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

using Json = nlohmann::ordered_json;

constexpr int kClockRounds = 20;

constexpr std::string_view kStep = "train_step";

/// Whether a moment lies in a recorded training step.
bool in_step(const Tracer& tracer, int64_t time_ns) {
  return std::any_of(tracer.spans().begin(), tracer.spans().end(), [&](const Tracer::Span& span) {
    return span.name == kStep && span.begin_ns <= time_ns && time_ns <= span.end_ns;
  });
}

/// When an operation was under way.
std::pair<int64_t, int64_t> carried_out(const Tracer::Exchange& e) {
  if (!e.by_device()) return {e.begin_ns, e.end_ns};
  const Tracer::Exchange::DevicePart& whole = e.device_parts[0];
  // Its marks may not have been passed when recording ended.
  if (whole.begin < 0) return {e.queued_ns, std::max(e.queued_ns, e.wait_end_ns)};
  return {whole.begin, whole.end};
}

/// What a device had to do with an operation; null where it had nothing.
Json on_device_json(const Tracer::Exchange& e, int64_t clock_offset) {
  if (e.device_wait_begin < 0) return nullptr;
  Json json = {{"wait_begin", e.device_wait_begin - clock_offset},
               {"wait_end", e.device_wait_end - clock_offset},
               {"by_device", e.by_device()},
               {"copies", Json::array()}};
  for (const Tracer::Exchange::DevicePart& part : e.device_parts) {
    if (part.begin < 0) continue;
    json.emplace("came", part.begin - clock_offset);  // the first one's
    if (e.by_device() || part.bytes == 0) continue;
    json["copies"].push_back({{"where_to", part.where_to},
                              {"bytes", part.bytes},
                              {"begin", part.begin - clock_offset},
                              {"end", part.end - clock_offset}});
  }
  return json;
}

/// What every rank sends to rank 0.
Json exchanges_json(const Tracer& tracer, int64_t clock_offset) {
  Json list = Json::array();
  for (const Tracer::Exchange& e : tracer.exchanges()) {
    const auto [begin, end] = carried_out(e);
    list.push_back({{"group", e.group},
                    {"id", e.group_id},
                    {"members", *e.members},
                    {"kind", e.kind},
                    {"number", e.number},
                    {"peer", e.peer},
                    {"payload", e.payload_bytes},
                    {"wire", e.wire_bytes},
                    {"step", e.step},
                    {"in_step", in_step(tracer, e.wait_begin_ns)},
                    {"queued", e.queued_ns - clock_offset},
                    {"queued_cpu", e.queued_cpu_ns},
                    {"begin", begin - clock_offset},
                    {"end", end - clock_offset},
                    {"wait_begin", e.wait_begin_ns - clock_offset},
                    {"wait_end", e.wait_end_ns - clock_offset},
                    {"wait_cpu_begin", e.wait_cpu_begin_ns},
                    {"wait_cpu_end", e.wait_cpu_end_ns},
                    {"turn", e.turn},
                    {"on_device", on_device_json(e, clock_offset)}});
  }
  return list;
}

/// Every rank's text at rank 0, by rank; nothing elsewhere.
std::vector<std::string> gather_text(const Communicator& world, const std::string& text) {
  std::vector<std::string> all;
  if (world.rank() != 0) {
    std::string padded = text;
    padded.resize((text.size() + 3) / 4 * 4);
    const auto words = static_cast<int64_t>(padded.size() / 4);
    std::vector<int32_t> values(words);
    std::copy(padded.begin(), padded.end(), reinterpret_cast<char*>(values.data()));
    world.send(Tensor::from_host(std::vector<int32_t>{int32_t(words), int32_t(text.size())}, {2}),
               0);
    world.send(Tensor::from_host(values, {words}), 0);
    return all;
  }
  all.push_back(text);
  for (int rank = 1; rank < world.size(); ++rank) {
    const Tensor size = Tensor::zeros({2}, DType::i32);
    world.recv(size, rank);
    const Tensor words = Tensor::zeros({size.counts()[0]}, DType::i32);
    world.recv(words, rank);
    const char* begin = reinterpret_cast<const char*>(words.data<int32_t>());
    all.emplace_back(begin, begin + size.counts()[1]);
  }
  return all;
}

double minimum(const Communicator& world, double value) {
  const Tensor negative = Tensor::from_host(std::vector<double>{-value}, {1}, DType::f64);
  world.all_reduce(negative, ReduceOp::max);
  return -negative.item();
}

/// What the ranks have in common of one operation: the group, by its id and first member (the parts
/// of one split share the id), the number, and for a message who sends it to whom.
using Key = std::tuple<int64_t, int, int64_t, int, int>;

Key key_of(const Json& exchange, int rank) {
  const int64_t id = exchange["id"], number = exchange["number"];
  const int first = exchange["members"][0], peer = exchange["peer"];
  if (peer < 0) return {id, first, number, -1, -1};
  const int other = exchange["members"][peer];
  const bool sends = exchange["kind"] == "send";
  return {id, first, number, sends ? rank : other, sends ? other : rank};
}

struct Participants {
  int64_t last_queued = 0;
  int64_t last_came = 0;  ///< to it, of the devices; of a rank without, when it was queued
  int64_t count = 0;
  int64_t flow = 0;  ///< of a message
};

/// Turns the ranks' exchanges into trace events.
class TimelineWriter {
 public:
  TimelineWriter(std::vector<Json> exchanges, int64_t origin_ns)
      : exchanges_(std::move(exchanges)), origin_ns_(origin_ns) {
    int64_t flows = 0;
    for (int rank = 0; rank < std::ssize(exchanges_); ++rank) {
      for (const Json& exchange : exchanges_[rank]) {
        Participants& participants = participants_[key_of(exchange, rank)];
        const int64_t queued = exchange["queued"];
        participants.last_queued = std::max(participants.last_queued, queued);
        participants.last_came = std::max(participants.last_came, came_to(exchange));
        if (++participants.count == 2 && exchange["peer"] >= 0) participants.flow = ++flows;
        Json& group = groups_[std::to_string(int64_t(exchange["id"]))];
        group["name"] = exchange["group"];
        Json& parts = group["members"];  // of the split that made it
        if (std::find(parts.begin(), parts.end(), exchange["members"]) == parts.end()) {
          parts.push_back(exchange["members"]);
        }
      }
    }
  }

  const Json& groups() const { return groups_; }
  double exposed_ns() const { return exposed_ns_; }  ///< in steps, of all ranks together
  double skew_ns() const { return skew_ns_; }

  std::string events(int rank) {
    std::string text;
    Lanes lanes{rank, {}, {}};
    for (const Json& exchange : exchanges_[rank]) {
      const bool by_device = is_by_device(exchange);
      const std::string queue = queue_of(exchange);
      const int lane =
          by_device ? lanes.device("device: messages of " + queue, text) : lanes.host(queue, text);
      const Participants& participants = participants_.at(key_of(exchange, rank));
      text += wait_event(exchange, rank, participants);
      text += comm_event(exchange, rank, lane);
      text += flow_event(exchange, rank, lane, participants);
      if (exchange["on_device"].is_null()) continue;
      text += device_wait_event(exchange, rank, participants);
      for (const Json& copy : exchange["on_device"]["copies"]) {
        const std::string where_to = copy["where_to"];
        text += copy_event(exchange, copy, rank,
                           lanes.device(fmt::format("device: messages {}", where_to), text));
      }
    }
    return text;
  }

 private:
  /// The lanes of a rank by name: the host's communication threads, and the device's queues.
  struct Lanes {
    int rank;
    std::map<std::string, int> of_host, of_device;

    /// Its number; a new one is named in `text`.
    int host(const std::string& name, std::string& text) {
      return number(of_host, kTurns, name, text);
    }
    int device(const std::string& name, std::string& text) {
      return number(of_device, kDeviceLane + kTurns, name, text);
    }

   private:
    int number(std::map<std::string, int>& lanes, int first, const std::string& name,
               std::string& text) const {
      const auto [lane, is_new] = lanes.try_emplace(name, first + int(lanes.size()));
      if (is_new) text += lane_name_event(rank, lane->second, name);
      return lane->second;
    }
  };

  static bool is_by_device(const Json& exchange) {
    return !exchange["on_device"].is_null() && exchange["on_device"]["by_device"];
  }

  /// When a rank, or its device, was ready for the operation.
  static int64_t came_to(const Json& exchange) {
    const Json& on_device = exchange["on_device"];
    const bool known = !on_device.is_null() && on_device.contains("came");
    return known ? on_device["came"] : exchange["queued"];
  }

  /// What an operation shares a lane with: those of its communicator follow one another, and so do
  /// messages to one rank or from one. Others may be under way at the same time.
  static std::string queue_of(const Json& exchange) {
    const std::string group = exchange["group"], kind = exchange["kind"];
    const int peer = exchange["peer"];
    if (peer < 0) return group;
    return fmt::format("{} {} {} rank {}", group, kind, kind == "send" ? "to" : "from",
                       int(exchange["members"][peer]));
  }

  double us(const Json& time) const { return double(int64_t(time) - origin_ns_) * 1e-3; }

  static std::string line(const Json& event) { return fmt::format(",\n{}", event.dump()); }

  /// Which operation it is.
  static Json name_of(const Json& e) {
    return {{"step", e["step"]},
            {"group", e["id"]},
            {"kind", e["kind"]},
            {"number", e["number"]},
            {"peer", e["peer"]}};
  }

  std::string wait_event(const Json& e, int rank, const Participants& participants) {
    const int64_t begin = e["wait_begin"], end = e["wait_end"];
    const int64_t cpu_begin = e["wait_cpu_begin"], cpu_end = e["wait_cpu_end"];
    const int64_t ready = std::clamp(participants.last_queued, begin, end);
    if (e["on_device"].is_null()) add_up(e, begin, ready, end);
    Json event = wait_of(e, "wait", rank, e["turn"], begin, ready, end);
    event["tts"] = double(cpu_begin) * 1e-3;
    event["tdur"] = double(cpu_end - cpu_begin) * 1e-3;
    return line(event);
  }

  /// The device's own queue stands still from when it has come to the wait until it goes on.
  std::string device_wait_event(const Json& e, int rank, const Participants& participants) {
    const int64_t begin = e["on_device"]["wait_begin"], end = e["on_device"]["wait_end"];
    const int64_t ready = std::clamp(participants.last_came, begin, end);
    add_up(e, begin, ready, end);
    const int lane = kDeviceLane + int(e["turn"]);
    return line(wait_of(e, "device wait", rank, lane, begin, ready, end));
  }

  /// Skew until `ready`, when all had come; exposed from then on.
  Json wait_of(const Json& e, const char* category, int rank, int lane, int64_t begin,
               int64_t ready, int64_t end) const {
    Json args = name_of(e);
    args["exposed_us"] = double(end - ready) * 1e-3;
    args["skew_us"] = double(ready - begin) * 1e-3;
    return {{"name", fmt::format("wait {}", std::string(e["kind"]))},
            {"cat", category},
            {"ph", "X"},
            {"pid", rank},
            {"tid", lane},
            {"ts", us(begin)},
            {"dur", double(end - begin) * 1e-3},
            {"args", args}};
  }

  /// Adds a wait to the report's, unless it was for a validation, or to agree on when to stop.
  void add_up(const Json& e, int64_t begin, int64_t ready, int64_t end) {
    if (!e["in_step"]) return;
    exposed_ns_ += double(end - ready);
    skew_ns_ += double(ready - begin);
  }

  std::string copy_event(const Json& e, const Json& copy, int rank, int lane) const {
    Json args = name_of(e);
    args["dimension"] = e["group"];
    args["where_to"] = copy["where_to"];
    args["bytes"] = copy["bytes"];
    return line(
        {{"name", fmt::format("{} {}", std::string(e["kind"]), std::string(copy["where_to"]))},
         {"cat", "device copy"},
         {"ph", "X"},
         {"pid", rank},
         {"tid", lane},
         {"ts", us(copy["begin"])},
         {"dur", double(int64_t(copy["end"]) - int64_t(copy["begin"])) * 1e-3},
         {"args", args}});
  }

  std::string comm_event(const Json& e, int rank, int lane) const {
    Json args = name_of(e);
    args["dimension"] = e["group"];
    args["payload_bytes"] = e["payload"];
    args["wire_bytes"] = e["wire"];
    args["submitted"] = us(e["queued"]);
    args["submitted_cpu"] = double(int64_t(e["queued_cpu"])) * 1e-3;
    return line({{"name", e["kind"]},
                 {"cat", "comm"},
                 {"ph", "X"},
                 {"pid", rank},
                 {"tid", lane},
                 {"ts", us(e["begin"])},
                 {"dur", double(int64_t(e["end"]) - int64_t(e["begin"])) * 1e-3},
                 {"args", args}});
  }

  /// An arrow from the span that sends to the one that receives. Each end lies within its span: at
  /// the end of one, Perfetto would find none.
  std::string flow_event(const Json& e, int rank, int lane,
                         const Participants& participants) const {
    if (participants.flow == 0) return {};
    const bool sends = e["kind"] == "send";
    const int64_t begin = e["begin"], end = e["end"];
    Json event = {{"name", "message"},
                  {"cat", "comm"},
                  {"ph", sends ? "s" : "f"},
                  {"id", participants.flow},
                  {"pid", rank},
                  {"tid", lane},
                  {"ts", us(sends ? begin : std::max(begin, end - 1))}};
    if (!sends) event["bp"] = "e";
    return line(event);
  }

  std::vector<Json> exchanges_;  ///< by rank
  int64_t origin_ns_;
  std::map<Key, Participants> participants_;
  Json groups_ = Json::object();
  double exposed_ns_ = 0, skew_ns_ = 0;
};

Json link_json(const Link& link) {
  return {{"latency_us", link.latency_us}, {"gb_per_s", link.gb_per_s}};
}

Json facts(const Connection& connection, std::string_view chapter, int64_t tokens_per_step,
           const Json& groups) {
  Json links = nullptr;
  if (connection.links) {
    const auto kind = [&](const Link& link) {
      return link.gb_per_s > 0 ? link_json(link) : link_json(connection.host);
    };
    links = {{"node", kind(connection.links->node)}, {"net", kind(connection.links->net)}};
  }
  return {{"format", 1},
          {"origin", "measured"},
          {"chapter", chapter},
          {"ranks", connection.ranks},
          {"threads", num_threads()},
          {"cores", available_cores()},
          {"node_size", connection.node_size},
          {"links", links},
          {"host_link", connection.ranks > 1 ? link_json(connection.host) : Json(nullptr)},
          {"global_batch_tokens", tokens_per_step},
          {"groups", groups}};
}

/// Steps and their length, over this rank's recorded train_step spans.
std::pair<int64_t, double> steps_of(const Tracer& tracer) {
  int64_t steps = 0;
  double ns = 0;
  for (const Tracer::Span& span : tracer.spans()) {
    if (span.name != kStep) continue;
    ++steps;
    ns += double(span.on_device() ? span.device_end - span.device_begin
                                  : span.end_ns - span.begin_ns);
  }
  return {steps, ns};
}

}  // namespace

int64_t measure_clock_offset(const Communicator& world, const std::function<int64_t()>& clock) {
  const HostScope on_host;
  int64_t offset = 0;
  for (int rank = 1; rank < world.size(); ++rank) {
    if (world.rank() != 0 && world.rank() != rank) continue;
    int64_t fastest = INT64_MAX;
    for (int round = 0; round < kClockRounds; ++round) {
      const Tensor time = Tensor::zeros({1}, DType::f64);
      if (world.rank() == rank) {
        const int64_t begin = clock();
        world.send(time, 0);
        world.recv(time, 0);
        const int64_t end = clock();
        if (end - begin >= fastest) continue;
        fastest = end - begin;
        offset = begin + (end - begin) / 2 - static_cast<int64_t>(time.item());
      } else {
        world.recv(time, rank);
        Tensor(time).assign(std::vector<double>{double(clock())});
        world.send(time, rank);
      }
    }
  }
  return offset;
}

WaitingTime write_timeline(const Communicator& world, const Connection& connection,
                           const RunDir& run_dir, std::string_view chapter, int64_t tokens_per_step,
                           std::optional<int64_t> clock_offset) {
  const UncountedTraffic uncounted;
  const HostScope on_host;
  const Tracer& tracer = Runtime::current().tracer();
  // Processes of one machine read the same clock, which no message could tell as precisely.
  if (!clock_offset && on_one_machine(world)) clock_offset = 0;
  const int64_t offset = clock_offset ? *clock_offset : measure_clock_offset(world, clock_ns);
  const double own_origin = tracer.spans().empty() ? HUGE_VAL : double(tracer.origin_ns() - offset);
  const double origin = minimum(world, own_origin);
  const int64_t origin_ns = std::isfinite(origin) ? static_cast<int64_t>(origin) : 0;
  const std::vector<std::string> spans = gather_text(
      world, tracer.span_events(world.rank(), origin_ns + offset) +
                 memory_events(Runtime::current().allocator(), world.rank(), origin_ns + offset));
  const std::vector<std::string> texts = gather_text(world, exchanges_json(tracer, offset).dump());
  const auto [steps, step_ns] = steps_of(tracer);
  const Tensor totals = Tensor::zeros({4}, DType::f64);
  if (world.rank() == 0) {
    std::vector<Json> exchanges;
    for (const std::string& text : texts) exchanges.push_back(Json::parse(text));
    TimelineWriter writer(std::move(exchanges), origin_ns);
    std::vector<std::string> events;
    for (int rank = 0; rank < world.size(); ++rank) {
      events.push_back(process_name_events(rank));
      events.push_back(spans[rank]);
      events.push_back(writer.events(rank));
    }
    write_trace_file(run_dir.file("trace.json"),
                     facts(connection, chapter, tokens_per_step, writer.groups()).dump(), events);
    Tensor(totals).assign(
        std::vector<double>{double(steps), step_ns, writer.exposed_ns(), writer.skew_ns()});
  }
  world.broadcast(totals, 0);
  const double n = std::max(1.0, totals.item(0)), ranks = world.size();
  return {totals.item(1) / n * 1e-6, totals.item(2) / n / ranks * 1e-6,
          totals.item(3) / n / ranks * 1e-6};
}

std::pair<std::string, std::string> waiting_row(const WaitingTime& waiting, int ranks) {
  if (ranks == 1) return {"communication not hidden", "none: one rank sends nothing"};
  if (waiting.step_ms == 0) return {"communication not hidden", "no step was traced"};
  return {"communication not hidden",
          fmt::format("{:.2f} of a traced step's {:.2f} ms; waiting for a late rank: {:.2f} ms",
                      waiting.exposed_ms, waiting.step_ms, waiting.skew_ms)};
}

}  // namespace usp

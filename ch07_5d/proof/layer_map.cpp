#include "proof/layer_map.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "proof/types.h"
#include "tensor/console.h"

namespace usp {

namespace {

using types::Kind;

/// Neither computes with a layer's values nor sends any.
bool is_left_out(const types::TypedOp& op) {
  static constexpr std::array<std::string_view, 8> kLeftOut = {
      "fill",         "copy",       "count_choices",  "choose_experts",
      "assign_slots", "accumulate", "router_entropy", "all_to_all over ep_counts"};
  return std::ranges::count(kLeftOut, op.name) > 0;
}

/// Which axis of a tensor the ranks along a factor cut, where they have other parts of it.
int cut_axis(const Shape& shape, Kind kind, MeshAxis axis) {
  const int last = shape.rank() - 1;
  switch (kind) {
    case Kind::rows:
    case Kind::dispatched:
      if (axis == MeshAxis::dp || last < 2) return 0;
      return last == 2 ? 2 : 1;  // [samples, heads, tokens], or [samples, tokens, heads, features]
    case Kind::columns:
      return last == 3 ? 2 : std::min(last, 1);
    case Kind::outputs:
      return std::max(0, last - 1);
    case Kind::inputs:
      return last;
    default:
      return 0;  // experts
  }
}

void add_once(std::vector<std::string>& names, std::string_view name) {
  if (std::ranges::count(names, name) == 0) names.emplace_back(name);
}

/// What the ranks along each factor have of what is made.
void relate(LayerPoint& point, const types::Type& type, const std::vector<types::Factor>& factors) {
  point.whole = point.made;
  for (size_t f = 0; f < factors.size(); ++f) {
    const Kind kind = type[f];
    const std::string_view axis = factors[f].name();
    point.is_routed = point.is_routed || kind == Kind::dispatched;
    if (kind == Kind::partial) add_once(point.terms_over, axis);
    const bool are_tokens = kind == Kind::rows || kind == Kind::dispatched;
    const bool are_features = kind == Kind::columns || kind == Kind::outputs ||
                              kind == Kind::inputs || kind == Kind::experts;
    if (are_tokens) add_once(point.tokens_over, axis);
    if (are_features) add_once(point.features_over, axis);
    if (are_tokens || are_features) {
      point.whole[cut_axis(point.made, kind, factors[f].axis)] *= factors[f].size;
    }
  }
}

/// What a rank does, block by block, in the first micro-batch of its first step.
class LayerLog {
 public:
  void hear(const types::Checker& checker, const types::TypedOp& op) {
    if (is_left_out(op)) return;
    if (op.name.ends_with(" over pp")) {
      crossings_.push_back({op.name.starts_with("send"), op.peer, point_of(checker, op)});
    }
    if (op.block < 0) return;
    if (op.micro_batch != 0 || op.phase.empty()) return;
    Block& block = blocks_[op.block];
    block.is_over = block.is_over || (op.phase == "forward" && block.goes_back);
    if (block.is_over) return;  // the second step
    block.goes_back = block.goes_back || op.phase == "backward";
    block.has_experts = block.has_experts || op.name.starts_with("grouped_linear");
    block.has_attention = block.has_attention || op.name.starts_with("attention");
    LayerPoint point = point_of(checker, op);
    if (block.points.empty() || !(block.points.back() == point)) block.points.push_back(point);
  }

  /// The last layer, with experts if any has them, and the messages of its chunk.
  std::vector<LayerPoint> layer(const TrainConfig& config, int stage) const {
    const Block* chosen = nullptr;
    int64_t number = 0;
    for (const auto& [block, own] : blocks_) {
      const bool is_better = chosen == nullptr || own.has_experts || !chosen->has_experts;
      if (own.has_attention && is_better) chosen = &own, number = block;
    }
    USP_CHECK(chosen != nullptr, "the stage has no layer");
    const RankBlocks held = blocks_of_rank(config, stage);
    const auto chunk = std::ranges::find_if(
        held.chunks, [&](const BlockRange& of) { return of.begin <= number && number < of.end; });
    const Crossings crossings{config, stage, chunk - held.chunks.begin()};
    std::vector<LayerPoint> points;
    const auto cross = [&](bool sends, const char* phase) {
      if (const LayerPoint* found = crossing(crossings, sends, phase)) {
        points.push_back(*found);
        points.back().phase = phase;
      }
    };
    cross(/*sends=*/false, "forward");
    bool goes_back = false;
    for (const LayerPoint& point : chosen->points) {
      if (!std::exchange(goes_back, point.phase != "forward") && goes_back) {
        cross(/*sends=*/true, "forward");
        cross(/*sends=*/false, "backward");
      }
      points.push_back(point);
    }
    cross(/*sends=*/true, "backward");
    return points;
  }

 private:
  struct Block {
    std::vector<LayerPoint> points;
    bool goes_back = false, is_over = false, has_experts = false, has_attention = false;
  };

  /// A message between stages.
  struct Crossing {
    bool sends;
    int peer;
    LayerPoint point;
  };
  /// Whose messages are asked for.
  struct Crossings {
    const TrainConfig& config;
    int stage;
    int64_t chunk;
  };

  /// The message that the first micro-batch's pass through the chunk waits for, or sends on. Two
  /// ranks send in the order of their schedule, so it has the same number here and there.
  const LayerPoint* crossing(const Crossings& of, bool sends, std::string_view phase) const {
    const Schedule schedule = of.config.pipeline.schedule(of.config.grad_acc_steps);
    std::map<int, int64_t> numbers;  // of each peer
    for (const StageMessage& message : messages(schedule)) {
      if (message.from == message.to) continue;
      if ((sends ? message.from : message.to) != of.stage) continue;
      const int peer = sends ? message.to : message.from;
      const int64_t number = numbers[peer]++;
      const Action& action = schedule.actions[of.stage][sends ? message.sent_by : message.used_by];
      const bool goes_back = action.work != Work::F;
      if (action.micro_batch != 0 || action.chunk != of.chunk) continue;
      if (goes_back == (phase == "backward")) return nth(sends, peer, number);
    }
    return nullptr;
  }

  const LayerPoint* nth(bool sends, int peer, int64_t number) const {
    for (const Crossing& of : crossings_) {
      if (of.sends == sends && of.peer == peer && number-- == 0) return &of.point;
    }
    return nullptr;
  }

  static LayerPoint point_of(const types::Checker& checker, const types::TypedOp& op) {
    LayerPoint point;
    point.phase = op.phase.empty() ? "forward" : op.phase;
    point.operation = op.name;
    point.parameter = op.parameter;
    const std::string layer = fmt::format("model.layers.{}.", op.block - 1), end = ".weight";
    if (point.parameter.starts_with(layer)) point.parameter.erase(0, layer.size());
    if (point.parameter.ends_with(end)) point.parameter.erase(point.parameter.size() - end.size());
    point.taken = op.taken;
    point.made = op.shape;
    const bool is_message = op.name.find(" over ") != std::string::npos;
    if (is_message && op.shape.rank() == 1) {  // several weights in one buffer
      point.parameter.clear();
    } else if (op.result) {
      relate(point, *op.result, checker.setting().factors);
    }
    return point;
  }

  std::map<int, Block> blocks_;
  std::vector<Crossing> crossings_;
};

using Cells = std::array<std::string, 7>;

/// A message brings what the row before it has, in another shape: what it sends is said of buffers.
Cells cells_of(const LayerPoint& point) {
  const bool has_weight = !point.parameter.empty();
  std::string weight, made = point.made.rank() > 0 ? point.made.to_string() : "";
  if (has_weight) {
    const std::string name = point.parameter.substr(point.parameter.rfind('.') + 1);
    weight = fmt::format("{} {}", name, point.taken.to_string());
  } else if (point.made.rank() == 0) {
    made = point.taken.to_string();
  } else if (point.taken.rank() == 1) {
    made = fmt::format("{} -> {}", point.taken.to_string(), made);
  }
  const auto list = [](const std::vector<std::string>& axes) {
    return fmt::format("{}", fmt::join(axes, " "));
  };
  return {point.operation,
          weight,
          made,
          point.whole.rank() > 0 ? point.whole.to_string() : "",
          list(point.tokens_over),
          list(point.features_over),
          list(point.terms_over)};
}

}  // namespace

std::vector<LayerPoint> map_layer(const TrainConfig& config) {
  TypedRank of;
  of.stage = config.pipeline.pp_size / 2;
  LayerLog log;
  of.listener = [&](const types::Checker& checker, const types::TypedOp& op) {
    log.hear(checker, op);
  };
  const TypeCheck found = check_types_of(config, of);
  if (!found.error.empty()) fail("{}", found.error);
  return log.layer(config, int(of.stage));
}

std::string table_of_layer(const TrainConfig& config) {
  const std::vector<LayerPoint> points = map_layer(config);
  std::vector<Cells> rows = {
      {"", "weight", "on this rank", "on all", "tokens", "features", "terms"}};
  std::string phase;
  for (const LayerPoint& point : points) {
    if (point.phase != phase) rows.push_back({phase = point.phase});
    rows.push_back(cells_of(point));
  }
  std::array<size_t, 7> widths{};
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text =
      fmt::format("a layer on {} ranks: {}\n", config.mesh().ranks(), describe(config.mesh()));
  for (const Cells& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  }
  return text + "tokens, features, terms: axes whose ranks have different ones (terms of a sum)\n";
}

int show_layer(const TrainConfig& config) {
  print("{}", table_of_layer(config));
  return 0;
}

}  // namespace usp

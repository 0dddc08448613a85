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
  explicit LayerLog(bool sends_on) : sends_on_(sends_on) {}

  void hear(const types::Checker& checker, const types::TypedOp& op) {
    if (is_left_out(op)) return;
    if (op.block < 0) return hear_between(checker, op);
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

  /// The last layer, with experts if any has them.
  std::vector<LayerPoint> layer() const {
    const Block* chosen = nullptr;
    for (const auto& [number, block] : blocks_) {
      const bool is_better = chosen == nullptr || block.has_experts || !chosen->has_experts;
      if (block.has_attention && is_better) chosen = &block;
    }
    USP_CHECK(chosen != nullptr, "the stage has no layer");
    std::vector<LayerPoint> points;
    if (received_) points.push_back(*received_);
    for (const LayerPoint& point : chosen->points) {
      if (sent_ && point.phase == "backward" && points.back().phase == "forward") {
        points.push_back(*sent_);
      }
      points.push_back(point);
    }
    return points;
  }

 private:
  struct Block {
    std::vector<LayerPoint> points;
    bool goes_back = false, is_over = false, has_experts = false, has_attention = false;
  };

  /// The first message from the stage before is the first micro-batch's, and so is the first to the
  /// next one.
  void hear_between(const types::Checker& checker, const types::TypedOp& op) {
    const bool computed = std::ranges::any_of(
        blocks_, [](const auto& block) { return !block.second.points.empty(); });
    if (op.name == "recv over pp" && !received_ && !computed) received_ = point_of(checker, op);
    if (op.name == "send over pp" && !sent_ && sends_on_) sent_ = point_of(checker, op);
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

  const bool sends_on_;
  std::map<int, Block> blocks_;
  std::optional<LayerPoint> received_, sent_;
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
  LayerLog log(/*sends_on=*/of.stage + 1 < config.pipeline.pp_size);
  of.listener = [&](const types::Checker& checker, const types::TypedOp& op) {
    log.hear(checker, op);
  };
  const TypeCheck found = check_types_of(config, of);
  if (!found.error.empty()) fail("{}", found.error);
  return log.layer();
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

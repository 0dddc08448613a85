#include "proof/classes.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "accounting/zero_accountant.h"
#include "base/stretch.h"

namespace usp {

namespace {

std::string size_label(int64_t n) { return n == 1 ? "1" : n == 2 ? "2" : "3 or more"; }

std::string part_label(int64_t whole, int64_t parts) {
  if (parts == 1) return "not cut";
  if (whole < parts) return "fewer than parts";
  if (whole == parts) return "one each";
  return whole % parts == 0 ? "several each" : "several, with a rest";
}

std::string within_label(int64_t group, int64_t whole) {
  if (whole == 1) return "-";
  return group == 1 ? "1 of them" : group == whole ? "all" : "some";
}

/// Along which axes these ranks of the world lie.
std::string span_label(const std::vector<int>& ranks, const MeshSizes& mesh) {
  std::vector<std::string> axes;
  size_t product = 1;
  for (MeshAxis axis : mesh.order) {
    std::set<int64_t> seen;
    for (int rank : ranks) seen.insert(mesh.coordinates(rank)[size_t(axis)]);
    product *= seen.size();
    if (seen.size() == 1) continue;
    axes.push_back(fmt::format("{}{}", kMeshAxes[size_t(axis)],
                               std::ssize(seen) == mesh.size(axis) ? "" : " in part"));
  }
  if (product != ranks.size()) axes.emplace_back("askew");
  return axes.empty() ? "one rank" : fmt::format("{}", fmt::join(axes, "+"));
}

/// Every `step`-th of `count` ranks of rank 0's group.
std::vector<int> some_of(const std::vector<int>& group, int64_t count, int64_t step) {
  std::vector<int> ranks;
  for (int64_t i = 0; i < std::ssize(group) && std::ssize(ranks) < count; i += step) {
    ranks.push_back(group[i]);
  }
  return ranks;
}

/// Stages of the model; the same for any number of micro-batches that the schedule takes.
int64_t stages_of(const TrainConfig& config) {
  const PipelineConfig& pipeline = config.pipeline;
  thread_local std::map<std::tuple<std::string, int64_t, int64_t>, int64_t> known;
  const auto key = std::tuple(pipeline.pp_schedule, pipeline.pp_size, pipeline.pp_chunks);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const bool is_file = pipeline.pp_schedule.find_first_of("/.") != std::string::npos;
  const int64_t micro_batches = is_file ? config.grad_acc_steps : 4 * pipeline.pp_size;
  return known[key] = pipeline.schedule(micro_batches).stages.count();
}

std::vector<int64_t> layers_of_stages(const TrainConfig& config) {
  std::vector<int64_t> layers;
  const auto blocks = blocks_of_stages(config.pipeline, config.model, stages_of(config));
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int64_t ends = (i == 0) + (i + 1 == blocks.size());
    layers.push_back(blocks[i].end - blocks[i].begin - ends);
  }
  return layers;
}

/// What classes() fills, technique by technique.
class Classes {
 public:
  explicit Classes(const TrainConfig& config)
      : c_(config),
        mesh_(config.mesh()),
        ep_(config.expert_parallel.ep_size),
        dp_(mesh_.dp),
        pp_(mesh_.pp),
        cp_(mesh_.cp),
        tp_(mesh_.tp),
        N_(config.model.num_heads),
        G_(config.model.num_kv_heads),
        V_(config.model.vocab_size),
        S_(config.seq_len),
        b_(config.micro_batch_size),
        m_(config.grad_acc_steps) {
    all_.reserve(128);
  }

  std::vector<RemainderClass> take() {
    axes();
    context();
    if (c_.model.experts.num_experts > 0) groups_of_experts();
    nodes();
    tensor();
    tokens();
    if (pp_ > 1) {
      schedule();
    } else {
      one_stage();
    }
    if (c_.model.experts.num_experts > 0) experts();
    return take_of_widths();
  }

  /// Adds the classes that widths decide, and returns them with all that are there already.
  std::vector<RemainderClass> take_of_widths() {
    vocabulary();
    if (pp_ > 1) layers();
    zero();
    lengths();
    return std::move(all_);
  }

 private:
  void put(std::string name, std::string label, double weight = 2) {
    all_.push_back({std::move(name), std::move(label), weight});
  }
  void put_if(std::string name, bool is, double weight) {
    put(std::move(name), is ? "yes" : "no", weight);
  }

  void axes() {
    const std::vector<std::tuple<const char*, int64_t, double>> axes = {
        {"dp", dp_, 3}, {"cp", cp_, 4}, {"tp", tp_, 2}, {"pp", pp_, 6}};
    for (const auto& [axis, ranks, weight] : axes) {
      put_if(fmt::format("{}: used", axis), ranks > 1, 100);
      put_if(fmt::format("{}: a rank that is neither first nor last", axis), ranks > 2, weight);
    }
  }

  void context() {
    if (cp_ == 1) return;
    const int64_t u = c_.context_parallel.head_ranks();
    put("ulysses in cp", within_label(u, cp_), 20);
    if (u > 1) {
      put("ring of ulysses groups", size_label(c_.context_parallel.ring_size()), 4);
      put("ulysses ranks", size_label(u), 2);
    }
    const int64_t heads = std::max<int64_t>(1, N_ / tp_), kv = std::max<int64_t>(1, G_ / tp_);
    put("heads of a rank over ulysses", part_label(heads, u), 4);
    put("kv heads of a rank over ulysses", part_label(kv, u), 8);
    if (u > kv) put("ulysses ranks with one kv head", within_label(u / kv, u), 4);
  }

  void groups_of_experts() {
    const int64_t edp = mesh_.expert_ranks() / ep_;
    put_if("ep: used", ep_ > 1, 100);
    put_if("ep: a rank that is neither first nor last", ep_ > 2, 3);
    put("edp = ranks with the same experts", size_label(edp), 8);
    put("ep lies along", span_label(mesh_.members("ep", 0), mesh_), 5);
    put("edp lies along", span_label(mesh_.members("edp", 0), mesh_), 5);
    if (!c_.expert_parallel.by_node()) return;
    const int64_t inside = c_.expert_parallel.ranks_in_node(c_);
    put("ranks of ep in a node", within_label(inside, ep_), 20);
    put("ranks of ep in a node, size", size_label(inside), 2);
    put("nodes of ep", size_label(ep_ / inside), 3);
  }

  void nodes() {
    if (const int64_t node = c_.communication->node_size; node > 0) {
      std::vector<int> ranks(std::min(node, mesh_.ranks()));
      std::iota(ranks.begin(), ranks.end(), 0);
      put("a node spans", span_label(ranks, mesh_), 5);
      put("nodes", size_label(mesh_.ranks() / node), 3);
    }
    if (c_.data_parallel.zero_stage == 0 || mesh_.dp_cp() == 1) return;
    const int64_t Z = shard_size(c_);
    const std::vector<int> copies = mesh_.members("dp_cp", 0);
    put("shard of ZeRO lies along", span_label(some_of(copies, Z, 1), mesh_), 6);
    put("replicas of shards lie along", span_label(some_of(copies, mesh_.dp_cp(), Z), mesh_), 8);
    put("ZeRO ranks that shard a copy", size_label(Z), 4);
  }

  void tensor() {
    put("kv heads over tp", part_label(G_, tp_), 10);
    if (tp_ > G_) put("tp ranks with one kv head", within_label(tp_ / G_, tp_), 10);
    put("heads of a rank", N_ / tp_ == 1 ? "one" : "several", 3);
    put("queries of a kv head", N_ == G_ ? "one" : "several", 10);
    put("kv heads", G_ == 1 ? "one" : "several", 6);
  }

  void vocabulary() {
    put("vocabulary over tp", part_label(V_, tp_), 10);
    // [rest]
    if (V_ % tp_ != 0) {
      // With a rest of 1, rank r begins at r V/t all the same: what forgets the rest is right then.
      bool moves = false;
      for (int64_t r = 0; r < tp_; ++r) moves |= cut(V_, r, tp_).begin != r * (V_ / tp_);
      put_if("vocabulary over tp: the rest moves where a part begins", moves, 8);
    }
    // [rest]
    put_if("heads together are as wide as the model",
           N_ * c_.model.head_dim() == c_.model.hidden_size, 4);
    put("MLP width over tp", part_label(c_.model.ffn_hidden_size, tp_), 3);
    if (c_.expert_parallel.expert_tp)
      put("expert width over tp", part_label(expert_width(), tp_), 3);
  }

  void tokens() {
    const int64_t pieces =
        cp_ == 1 ? 1 : (c_.context_parallel.cp_layout == "zigzag" ? 2 * cp_ : cp_);
    const int64_t shares = c_.tensor_parallel.row_shares(), rows = S_ / cp_;
    put("rows of a piece of a sample", S_ == pieces ? "one" : "several", 3);
    put("rows of a rank's share of a sample over tp", part_label(rows, shares), 3);
    put("samples of a micro-batch", b_ == 1 ? "one" : "several", 4);
    const int64_t share = c_.samples_of_pass() * rows / shares;
    if (shares > 1) put_if("a rank's rows over tp: end within a sample", share % rows != 0, 4);
    if (c_.tensor_parallel.tp_overlap == "chunks" && tp_ > 1) {
      put("rows of a rank over 4 chunks", part_label(share, 4), 3);
    }
    if (pieces > 1 && shares > 1) {
      put_if("a tp rank's rows over pieces: end within one", share % (S_ / pieces) != 0, 2);
    }
  }

  void one_stage() {
    put("micro-batches", size_label(m_), 3);
    put("layers", c_.model.num_layers == 1 ? "one" : "several", 3);
    if (c_.model.experts.num_experts == 0) return;
    put("dense layers", c_.model.experts.first_dense_layers == 0 ? "none" : "some", 6);
  }

  void schedule() {
    const PipelineConfig& pipeline = c_.pipeline;
    const std::string& name = pipeline.pp_schedule;
    put("chunks of a rank", size_label(pipeline.pp_chunks), 6);
    put("micro-batches and stages",
        m_ == 1         ? "1"
        : m_ < pp_ - 1  ? "< p-1"
        : m_ == pp_ - 1 ? "= p-1"
        : m_ == pp_     ? "= p"
                        : "> p",
        8);
    if (name == "interleaved" || name == "llama3") {
      const int64_t run =
          name == "llama3" && pipeline.pp_run_length > 0 ? pipeline.pp_run_length : pp_;
      put("micro-batches over runs", part_label(m_, run), 10);
      if (name == "llama3") put("a run and stages", compared(run, pp_), 6);
    }
    if (name == "zb_v" || name == "dualpipe_v" || name == "dualpipe" || name == "zb_h2") {
      put("micro-batches and twice the stages", compared(m_, 2 * pp_), 6);
    }
    if (name == "dualpipe") put("pairs of mirrored stages", size_label(pp_ / 2), 3);
    if (c_.model.tie_word_embeddings) {
      put("ranks between the tied ends", pp_ == 2 ? "none" : "some", 8);
    }
    if (name == "auto") {
      const int64_t most = pipeline.pp_in_flight;
      put("in flight and stages", 0 < most && most < pp_ ? "<" : ">=", 4);
    }
  }

  void layers() {
    const std::vector<int64_t> layers = layers_of_stages(c_);
    const auto [low, high] = std::ranges::minmax(layers);
    put("layers over stages", part_label(c_.model.num_layers, std::ssize(layers)), 10);
    put("stages of more and of fewer layers",
        fmt::format("{} apart", std::min<int64_t>(high - low, 2)), 6);
    put_if("a stage without a layer", low == 0, 10);
    put_if("a stage with one layer", std::ranges::count(layers, 1) > 0, 2);
    put("first stage", layers.front() == high ? "as many layers as most" : "fewer", 4);
    put("last stage", layers.back() == high ? "as many layers as most" : "fewer", 4);
    if (c_.model.experts.num_experts == 0) return;
    const int64_t dense = c_.model.experts.first_dense_layers;
    int64_t end = 0;
    bool at_end = false;
    for (int64_t count : layers) at_end |= (end += count) == dense;
    put("dense layers end",
        dense == 0 ? "none"
        : at_end   ? "at a stage's end"
                   : "within a stage",
        6);
    put("dense layers lie in",
        dense == 0                ? "none"
        : dense <= layers.front() ? "the first stage"
                                  : "several stages",
        6);
  }

  void experts() {
    const ExpertShape& shape = c_.model.experts;
    const int64_t E = shape.num_experts, k = shape.num_experts_per_tok;
    put("experts over ep", part_label(E, ep_), 10);
    put("experts of a token", k == 1 ? "one" : k == E ? "all" : "several", 6);
    put("experts of a token and ranks of ep", compared(k, ep_), 2);
    const int64_t shared = shape.num_shared_experts;
    put("shared experts", shared == 0 ? "none" : size_label(shared), 3);
    if (const double factor = c_.expert_parallel.capacity_factor; factor > 0) {
      put_if("experts can refuse tokens",
             std::ceil(factor * double(k * S_) / double(E)) < double(S_), 8);
    }
    const int64_t groups = shape.expert_nodes;
    if (groups == 1 && shape.route_nodes == 0) return;
    put("experts over groups of routing", part_label(E, groups), 6);
    put("groups of a token", within_label(shape.nodes_of_token(), groups), 8);
    put("experts of a token over its groups", part_label(k, shape.nodes_of_token()), 2);
    if (!c_.expert_parallel.by_node()) return;
    const int64_t real = ep_ / c_.expert_parallel.ranks_in_node(c_);
    put("groups of routing and nodes",
        groups == real       ? "same"
        : real % groups == 0 ? "groups divide"
        : groups % real == 0 ? "nodes divide"
                             : "neither",
        4);
  }

  void zero() {
    const std::vector<UnitSizes> units = unit_sizes(c_);
    if (c_.data_parallel.zero_stage == 0) {
      if (mesh_.dp_cp() == 1 || c_.data_parallel.grad_sync != "bucketed") return;
      int64_t layer = 0;
      for (size_t i = 1; i + 1 < units.size(); ++i) layer = std::max(layer, total(units[i]));
      const int64_t most = pp_ > 1 ? std::ranges::max(layers_of_stages(c_)) : c_.model.num_layers;
      const double bytes = double(total(units.front()) + total(units.back()) + layer * most) *
                           double(bytes_of(accumulate_dtype(parse_dtype(c_.dtype))));
      const double bucket = c_.data_parallel.bucket_mb * double(1 << 20);
      put("buckets of gradients", size_label(int64_t(std::ceil(bytes / bucket))), 2);
      return;
    }
    for (const UnitSizes& unit : units) cuts(unit);
  }

  void cuts(const UnitSizes& unit) {
    const std::string name = "ZeRO, " + unit.name;
    const int64_t Z = unit.ranks, whole = total(unit);
    if (Z == 1) {
      put(name, "not cut", 3);
      return;
    }
    const int64_t length = (whole + Z - 1) / Z;
    bool within = false, over_three = false, several = false;
    int64_t begin = 0;
    for (size_t i = 0; i < unit.sizes.size(); ++i) {
      const int64_t last = begin + unit.sizes[i] - 1;
      const int64_t first_part = begin / length, last_part = last / length;
      within |= first_part != last_part;
      over_three |= last_part - first_part > 1;
      several |= i > 0 && begin % length != 0;
      begin = last + 1;
    }
    put(name, whole % Z == 0 ? "cut, no padding" : "cut, with padding", 4);
    put_if(name + ": a rank with padding alone", length * (Z - 1) >= whole, 4);
    put_if(name + ": a part ends within a parameter", within, 5);
    if (unit.sizes.size() > 1) put_if(name + ": several parameters in a part", several, 2);
    put_if(name + ": a parameter over three ranks", over_three, 2);
  }

  /// Only where two lengths differ does a transposed or mistaken axis show.
  void lengths() {
    const int64_t D = c_.model.head_dim();
    std::vector<std::pair<const char*, int64_t>> all = {
        {"hidden_size", c_.model.hidden_size},
        {"a rank's query rows", std::max<int64_t>(1, N_ / tp_) * D},
        {"its kv rows", std::max<int64_t>(1, G_ / tp_) * D},
        {"its MLP width", c_.model.ffn_hidden_size / tp_},
        {"its vocabulary", cut(V_, 0, tp_).count},
        {"its tokens", b_ * S_ / cp_}};
    if (c_.model.experts.num_experts > 0) {
      all.emplace_back("its expert width",
                       expert_width() / (c_.expert_parallel.expert_tp ? tp_ : 1));
      all.emplace_back("experts", c_.model.experts.num_experts);
    }
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t j = i + 1; j < all.size(); ++j) {
        // That they are equal in the real one is nothing to keep.
        if (all[i].second == all[j].second) continue;
        std::string name = all[i].first;
        put_if((name += " and ") += std::string(all[j].first) + " differ", true, 1);
      }
    }
  }

  static std::string compared(int64_t a, int64_t b) { return a < b ? "<" : a == b ? "=" : ">"; }
  static int64_t total(const UnitSizes& unit) {
    return std::accumulate(unit.sizes.begin(), unit.sizes.end(), int64_t{0});
  }
  int64_t expert_width() const { return c_.model.experts.width(c_.model.ffn_hidden_size); }

  const TrainConfig& c_;
  const MeshSizes mesh_;
  const int64_t ep_, dp_, pp_, cp_, tp_, N_, G_, V_, S_, b_, m_;
  std::vector<RemainderClass> all_;
};

/// A layer's attention: its parameters on a rank of tp, in the order in which it adds them.
std::vector<int64_t> attention_sizes(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  const int64_t H = model.hidden_size, D = model.head_dim(), tp = config.tensor_parallel.tp_size;
  const int64_t N = std::max<int64_t>(1, model.num_heads / tp);
  const int64_t G = std::max<int64_t>(1, model.num_kv_heads / tp);
  if (!model.mla.on()) return {H, N * D * H, G * D * H, G * D * H, H * N * D};
  const MlaShape& mla = model.mla;
  const int64_t Q = mla.q_lora_rank, C = mla.kv_lora_rank;
  std::vector<int64_t> sizes = {H};
  if (Q > 0) {
    for (int64_t size : {Q * H, Q, N * D * Q}) sizes.push_back(size);
  } else {
    sizes.push_back(N * D * H);
  }
  for (int64_t size : {(C + mla.qk_rope_head_dim) * H, C,
                       N * (mla.qk_nope_head_dim + mla.v_head_dim) * C, H * N * mla.v_head_dim}) {
    sizes.push_back(size);
  }
  return sizes;
}

}  // namespace

std::vector<UnitSizes> unit_sizes(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  const ExpertShape& experts = model.experts;
  const int64_t H = model.hidden_size, tp = config.tensor_parallel.tp_size;
  const int64_t F = cut(model.ffn_hidden_size, 0, tp).count, V = cut(model.vocab_size, 0, tp).count;
  const MeshSizes mesh = config.mesh();
  const int64_t Z = shard_size(config, mesh.dp_cp());
  const std::vector<int64_t> attention = attention_sizes(config);
  std::vector<UnitSizes> units = {{"embedding", {V * H}, Z}};
  if (experts.num_experts == 0 || experts.first_dense_layers > 0) {
    units.push_back({"dense layer", attention, Z});
    units.back().sizes.push_back(H);
    if (model.ffn_hidden_size % tp != 0) units.push_back({"MLP", {}, Z});
    units.back().sizes.insert(units.back().sizes.end(), 3, F * H);
  }
  if (experts.num_experts > 0) {
    const int64_t width = experts.width(model.ffn_hidden_size), E = experts.num_experts;
    units.push_back({"MoE layer", attention, Z});
    for (int64_t size : {H, E * H}) units.back().sizes.push_back(size);
    const int64_t shared = cut(experts.num_shared_experts * width, 0, tp).count;
    if (experts.num_shared_experts * width % tp != 0) units.push_back({"shared experts", {}, Z});
    for (int i = 0; shared > 0 && i < 3; ++i) units.back().sizes.push_back(shared * H);
    const int64_t own = config.expert_parallel.expert_tp ? cut(width, 0, tp).count : width;
    units.push_back({"experts", std::vector<int64_t>(3 * E / mesh.ep, own * H),
                     shard_size(config, mesh.expert_ranks() / mesh.ep)});
  }
  units.push_back({"head", {H}, Z});
  if (model.tie_word_embeddings) return units;
  if (model.vocab_size % tp != 0) units.push_back({"table of the head", {}, Z});
  units.back().sizes.push_back(V * H);
  return units;
}

std::vector<RemainderClass> classes(const TrainConfig& config) { return Classes(config).take(); }

std::vector<RemainderClass> classes_of_widths(const TrainConfig& config) {
  return Classes(config).take_of_widths();
}

std::vector<LostClass> lost_classes(const std::vector<RemainderClass>& real,
                                    const std::vector<RemainderClass>& twin) {
  std::vector<LostClass> lost;
  // Both mostly have the same names in the same order.
  const auto other = [](const std::vector<RemainderClass>& in, const std::string& name,
                        size_t& at) {
    for (size_t i = 0; i < in.size(); ++i) {
      const size_t place = (at + i) % in.size();
      if (in[place].name != name) continue;
      at = place + 1;
      return &in[place];
    }
    return static_cast<const RemainderClass*>(nullptr);
  };
  size_t at = 0;
  for (const RemainderClass& own : real) {
    const RemainderClass* found = other(twin, own.name, at);
    if (found != nullptr && found->label == own.label) continue;
    lost.push_back({own.name, own.label, found == nullptr ? "-" : found->label, own.weight});
  }
  at = 0;
  for (const RemainderClass& own : twin) {
    if (own.name.ends_with(" differ") || other(real, own.name, at) != nullptr) continue;
    lost.push_back({own.name, "-", own.label, own.weight});
  }
  return lost;
}

}  // namespace usp

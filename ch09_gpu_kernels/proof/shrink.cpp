#include "proof/shrink.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "run/command_line.h"

namespace usp {

namespace {

constexpr size_t kMostTwins = 5, kMostMeshes = 24, kMostChecked = 40;

bool is_file(const PipelineConfig& pipeline) {
  return pipeline.pp_schedule.find_first_of("/.") != std::string::npos;
}

/// What a twin has of the real layout before its sizes are chosen: all that is a word, not a size.
TrainConfig words_of(const TrainConfig& real) {
  TrainConfig twin;
  twin.model = real.model;
  twin.model.model = TrainConfig().model.model;
  twin.model.pretrained = false;
  twin.model.max_position_embeddings = 0;
  twin.model.experts.choice_bias = false;
  if (real.optimizer.grad_clip == 0) twin.optimizer.grad_clip = 0;
  twin.data_parallel = real.data_parallel;
  twin.tensor_parallel = real.tensor_parallel;
  twin.context_parallel = real.context_parallel;
  twin.context_parallel.document_separator = 0;
  twin.pipeline = real.pipeline;
  twin.pipeline.pp_show.clear();
  twin.pipeline.pp_layers.clear();
  if (real.pipeline.measures_times()) twin.pipeline.pp_times = PipelineConfig().pp_times;
  twin.pipeline.pp_chunks = std::min<int64_t>(3, real.pipeline.pp_chunks);
  if (is_file(real.pipeline)) twin.grad_acc_steps = real.grad_acc_steps;  // those of the file
  twin.expert_parallel = real.expert_parallel;
  twin.composition.mesh_order = real.composition.mesh_order;
  twin.communication->node_size = real.communication->node_size;
  twin.attention = real.attention;
  twin.recompute = real.recompute;
  // [fusion]
  twin.fusion = real.fusion.of_twin(real);
  // [fusion]
  twin.dtype = "f64";
  return twin;
}

/// Without the flags of dimensions that a twin leaves out.
void leave_out_unused(TrainConfig& twin) {
  if (twin.context_parallel.cp_size == 1) {
    ContextParallelConfig unset;
    unset.document_mask = twin.context_parallel.document_mask;
    twin.context_parallel = unset;
  }
  if (twin.pipeline.pp_size == 1) twin.pipeline = {};
  if (twin.expert_parallel.ep_size == 1) twin.expert_parallel.dispatch = "direct";
  if (twin.tensor_parallel.tp_size == 1) {
    const double dropout = twin.tensor_parallel.dropout;
    twin.tensor_parallel = {};
    twin.tensor_parallel.dropout = dropout;
    twin.expert_parallel.expert_tp = false;
  }
  if (twin.mesh().dp_cp() == 1) twin.data_parallel.shard_size = 0;
}

nlohmann::json json_of(TrainConfig& config) {
  Args args("");
  config.bind(args);
  return nlohmann::json::parse(args.to_json());
}

/// The flags by which it differs from the program's defaults.
std::vector<std::string> flags_of(TrainConfig config) {
  TrainConfig unset;
  const nlohmann::json defaults = json_of(unset), values = json_of(config);
  std::vector<std::string> words;
  for (const auto& [flag, value] : values.items()) {
    // A changed number of heads changes that of kv heads unless the flag is there.
    const bool always = flag == "num_kv_heads" && !config.model.mla.on();
    if (value == defaults[flag] && !always) continue;
    if (flag == "num_kv_heads" && config.model.mla.on()) continue;
    if (value.is_boolean()) {
      words.push_back("--" + flag);
    } else if (!value.is_array()) {
      words.push_back("--" + flag);
      words.push_back(value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
  return words;
}

/// What classes of which names are worth at present; others what they weigh.
using Weights = std::map<std::string, double>;

/// Finds the twin that loses least, and of these one of few ranks and little work.
class Search {
 public:
  Search(const TrainConfig& real, int64_t most_ranks, Weights weights)
      : real_(real),
        most_ranks_(most_ranks),
        weights_(std::move(weights)),
        classes_(classes(real)),
        of_widths_(classes_of_widths(real)),
        base_(words_of(real)) {}

  std::optional<Twin> best() {
    std::vector<std::pair<double, TrainConfig>> meshes = ranked_meshes();
    for (size_t i = 0; i < std::min(kMostMeshes, meshes.size()); ++i) {
      // What the mesh loses alone no sizes bring back.
      if (!found_.empty() && meshes[i].first > found_.begin()->first.lost) break;
      fill(meshes[i].second);
    }
    size_t checked = 0;
    for (const auto& [rank, config] : found_) {
      if (checked++ == kMostChecked) break;
      if (std::optional<Twin> twin = read_twin(flags_of(config))) return twin;
    }
    return {};
  }

 private:
  /// Key by which candidates are ordered.
  struct Rank {
    double lost;
    int64_t ranks, work;
    auto operator<=>(const Rank&) const = default;
  };
  using IsOf = bool (*)(const std::string& name);
  using Take = std::function<void(TrainConfig&&, double work)>;

  double weight(const LostClass& of) const {
    const auto own = weights_.find(of.name);
    return own == weights_.end() ? of.weight : own->second;
  }
  bool may_leave_out(const char* axis) const {
    return weights_.contains(fmt::format("{}: used", axis));
  }

  /// What the candidate loses of the classes with such names; nothing where it cannot be.
  std::optional<double> loses(const TrainConfig& candidate, IsOf is_of = nullptr) const {
    try {
      double sum = 0;
      for (const LostClass& of : lost_classes(classes_, classes(candidate))) {
        if (is_of == nullptr || is_of(of.name)) sum += weight(of);
      }
      return sum;
    } catch (const UsageError&) {
      return {};
    }
  }

  /// The same of the classes that widths decide.
  std::optional<double> loses_by_widths(const TrainConfig& candidate) const {
    try {
      double sum = 0;
      for (const LostClass& of : lost_classes(of_widths_, classes_of_widths(candidate))) {
        sum += weight(of);
      }
      return sum;
    } catch (const UsageError&) {
      return {};
    }
  }

  /// Candidate that loses least, of those that `each` makes of `from`.
  template <class Each>
  TrainConfig best_of(const TrainConfig& from, const Each& each, IsOf is_of) const {
    std::optional<std::pair<double, double>> least;
    TrainConfig best = from;
    each(from, [&](TrainConfig&& candidate, double work) {
      const std::optional<double> lost = loses(candidate, is_of);
      if (!lost || (least && std::pair(*lost, work) >= *least)) return;
      least = {*lost, work};
      best = std::move(candidate);
    });
    return best;
  }

  std::vector<std::pair<double, TrainConfig>> ranked_meshes() const;
  void groups_of_mesh(const TrainConfig& mesh, std::vector<TrainConfig>& all) const;
  void fill(const TrainConfig& mesh);

  void each_heads(const TrainConfig& from, const Take& take) const;
  void each_tokens(const TrainConfig& from, const Take& take) const;
  void each_experts(const TrainConfig& from, const Take& take) const;
  void each_layers(const TrainConfig& from, const Take& take) const;
  void each_micro_batches(const TrainConfig& from, const Take& take) const;
  void each_widths(const TrainConfig& from, const Take& take) const;

  const TrainConfig& real_;
  const int64_t most_ranks_;
  const Weights weights_;
  const std::vector<RemainderClass> classes_, of_widths_;
  const TrainConfig base_;
  std::multimap<Rank, TrainConfig> found_;
};

bool contains_any(const std::string& name, std::initializer_list<const char*> parts) {
  return std::ranges::any_of(parts, [&](const char* part) { return name.find(part) != name.npos; });
}
bool begins_with_any(const std::string& name, std::initializer_list<const char*> parts) {
  return std::ranges::any_of(parts, [&](const char* part) { return name.starts_with(part); });
}

bool is_of_mesh(const std::string& name) {
  return name.ends_with(": used") || name.ends_with("first nor last") ||
         contains_any(name, {" lies along", " lie along", "a node spans"}) ||
         begins_with_any(name, {"ulysses in cp", "ring of ulysses", "ulysses ranks", "nodes",
                                "ranks of ep in a node", "edp = ", "ZeRO ranks that", "pairs of",
                                "ranks between"});
}
bool is_of_heads(const std::string& name) {
  return begins_with_any(name, {"kv heads", "tp ranks with", "heads", "queries", "ulysses"});
}
bool is_of_tokens(const std::string& name) {
  return contains_any(name, {"rows of a", "rows over", "samples of"});
}
bool is_of_layers(const std::string& name) {
  return begins_with_any(name,
                         {"layers", "stages of", "a stage", "first stage", "last stage", "dense"});
}
bool is_of_micro_batches(const std::string& name) {
  return begins_with_any(name, {"micro-batch", "a run", "in flight", "chunks"});
}
bool is_of_experts(const std::string& name) { return contains_any(name, {"experts", "groups of"}); }

int64_t stages_at_most(const TrainConfig& config) {
  return config.pipeline.pp_size * std::max<int64_t>(2, config.pipeline.pp_chunks);
}

std::vector<std::pair<double, TrainConfig>> Search::ranked_meshes() const {
  std::vector<TrainConfig> all;
  const MeshSizes sizes = real_.mesh();
  const auto low = [&](const char* axis, int64_t n) {
    return n == 1 || may_leave_out(axis) ? int64_t{1} : int64_t{2};
  };
  const auto high = [&](int64_t n, int64_t most) { return std::min({n, most, most_ranks_}); };
  std::array<int64_t, 4> lows = {low("dp", sizes.dp), low("pp", sizes.pp), low("cp", sizes.cp),
                                 low("tp", sizes.tp)};
  const bool keeps_stages = is_file(real_.pipeline);
  if (keeps_stages) lows[1] = sizes.pp;
  if (lows[0] * lows[1] * lows[2] * lows[3] > most_ranks_) {
    lows = {1, keeps_stages ? sizes.pp : 1, 1, 1};
  }
  for (int64_t pp = lows[1]; pp <= high(sizes.pp, sizes.pp); ++pp) {
    for (int64_t tp = lows[3]; tp <= high(sizes.tp, 8); ++tp) {
      for (int64_t cp = lows[2]; cp <= high(sizes.cp, 8); ++cp) {
        for (int64_t dp = lows[0]; dp <= high(sizes.dp, 32); ++dp) {
          if (pp * tp * cp * dp > most_ranks_) break;
          if (pp * tp * cp * dp == 1) continue;  // one process is always equal to one process
          TrainConfig mesh = base_;
          mesh.data_parallel.dp_size = dp;
          mesh.pipeline.pp_size = pp;
          mesh.context_parallel.cp_size = cp;
          mesh.tensor_parallel.tp_size = tp;
          groups_of_mesh(mesh, all);
        }
      }
    }
  }
  std::vector<std::pair<double, TrainConfig>> ranked;
  for (TrainConfig& mesh : all) {
    mesh.model.num_layers = std::max<int64_t>(64, stages_at_most(mesh));
    if (const std::optional<double> lost = loses(mesh, is_of_mesh)) {
      ranked.emplace_back(*lost, std::move(mesh));
    }
  }
  std::ranges::stable_sort(
      ranked, {}, [](const auto& of) { return std::pair(of.first, of.second.mesh().ranks()); });
  return ranked;
}

void Search::groups_of_mesh(const TrainConfig& mesh, std::vector<TrainConfig>& all) const {
  const auto only_one = std::vector<int64_t>{1};
  const MeshSizes sizes = mesh.mesh();
  const bool has_ulysses = mesh.context_parallel.cp_method == "ring_ulysses" && sizes.cp > 1;
  std::vector<int64_t> eps =
      real_.expert_parallel.ep_size > 1 ? divisors(sizes.expert_ranks()) : only_one;
  std::erase_if(eps, [&](int64_t ep) {
    return ep == 1 && real_.expert_parallel.ep_size > 1 && !may_leave_out("ep");
  });
  for (int64_t ep : eps) {
    for (int64_t u : has_ulysses ? divisors(sizes.cp) : only_one) {
      if (has_ulysses && u == 1 && real_.context_parallel.ulysses_size > 1) continue;
      std::vector<int64_t> shards = {0}, nodes = {0};
      if (real_.data_parallel.shard_size > 0) {
        shards = divisors(std::gcd(sizes.dp_cp(), sizes.expert_ranks() / ep));
      }
      if (real_.communication->node_size > 0) nodes = divisors(sizes.ranks());
      for (int64_t Z : shards) {
        for (int64_t node : nodes) {
          TrainConfig variant = mesh;
          variant.expert_parallel.ep_size = ep;
          variant.context_parallel.ulysses_size = u;
          variant.data_parallel.shard_size = Z;
          variant.communication->node_size = node;
          leave_out_unused(variant);
          if (variant.expert_parallel.by_node()) {
            const int64_t inside = variant.expert_parallel.ranks_in_node(variant);
            if (inside == 0 || ep % inside != 0) continue;
          }
          all.push_back(std::move(variant));
        }
      }
    }
  }
}

/// Sizes for a mesh, group by group, each by the classes that it decides.
void Search::fill(const TrainConfig& mesh) {
  const auto by = [this](auto each) {
    return [this, each](const TrainConfig& from, const Take& take) { (this->*each)(from, take); };
  };
  TrainConfig c = best_of(mesh, by(&Search::each_heads), is_of_heads);
  c.model.vocab_size = 16;
  c = best_of(c, by(&Search::each_tokens), is_of_tokens);
  if (c.model.experts.num_experts > 0) {
    c = best_of(c, by(&Search::each_experts), is_of_experts);
    if (c.model.experts.moe_ffn_hidden_size > 0) c.model.experts.moe_ffn_hidden_size = 4;
  }
  c = best_of(c, by(&Search::each_layers), is_of_layers);
  c = best_of(c, by(&Search::each_micro_batches), is_of_micro_batches);
  std::vector<TrainConfig> options = {c};
  if (!c.pipeline.pp_layers.empty() && real_.pipeline.pp_layers.empty()) {
    options.push_back(c);
    options.back().pipeline.pp_layers.clear();
  }
  if (c.data_parallel.zero_stage == 0 && c.data_parallel.grad_sync == "bucketed") {
    for (size_t i = options.size(); i-- > 0;) {
      options.push_back(options[i]);
      options.back().data_parallel.bucket_mb = 0.002;
    }
  }
  for (const TrainConfig& option : options) {
    // Layers that the default rule splits are those of more models.
    const double spelt =
        !option.pipeline.pp_layers.empty() && real_.pipeline.pp_layers.empty() ? 1 : 0;
    const std::optional<double> all = loses(option), by_widths = loses_by_widths(option);
    if (!all || !by_widths) continue;
    std::map<std::pair<double, double>, TrainConfig> best;
    each_widths(option, [&](TrainConfig&& candidate, double work) {
      const std::optional<double> lost = loses_by_widths(candidate);
      if (!lost) return;
      const std::pair key(*all - *by_widths + *lost, work);
      if (best.size() == 3 && key >= best.rbegin()->first) return;
      best.emplace(key, std::move(candidate));
      if (best.size() > 3) best.erase(std::prev(best.end()));
    });
    for (auto& [key, config] : best) {
      found_.emplace(Rank{key.first + spelt, config.mesh().ranks(), int64_t(key.second)},
                     std::move(config));
    }
  }
}

void Search::each_heads(const TrainConfig& from, const Take& take) const {
  const int64_t tp = from.tensor_parallel.tp_size, u = from.context_parallel.head_ranks();
  const bool mla = from.model.mla.on();
  for (int64_t own = 1; own <= 8; ++own) {
    const int64_t N = own * tp;
    for (int64_t G : mla ? std::vector<int64_t>{N} : divisors(N)) {
      const int64_t kv = std::max<int64_t>(1, G / tp);
      if ((G % tp != 0 && tp % G != 0) || own % u != 0 || (kv % u != 0 && u % kv != 0)) continue;
      TrainConfig c = from;
      ModelConfig& model = c.model;
      model.num_heads = N;
      model.num_kv_heads = G;
      const bool apart = real_.model.num_heads * real_.model.head_dim() != real_.model.hidden_size;
      model.given_head_dim = !mla && apart ? 4 : 0;
      model.hidden_size = N * 4 + (apart ? 4 : 0);
      model.ffn_hidden_size = 4 * tp;
      if (mla) {
        const MlaShape& shape = real_.model.mla;
        model.hidden_size = 12;
        model.mla.q_lora_rank = shape.q_lora_rank > 0 ? 6 : 0;
        model.mla.kv_lora_rank = 6;
        model.mla.qk_nope_head_dim = model.mla.qk_rope_head_dim = 2;
        model.mla.v_head_dim = shape.v_head_dim < shape.head_dim() ? 2 : 4;
      }
      take(std::move(c), double(N + G));
    }
  }
}

void Search::each_tokens(const TrainConfig& from, const Take& take) const {
  const int64_t cp = from.context_parallel.cp_size, shares = from.tensor_parallel.row_shares();
  const int64_t pieces = cp == 1 ? 1 : from.context_parallel.cp_layout == "zigzag" ? 2 * cp : cp;
  for (int64_t b = 1; b <= 4; ++b) {
    if (b % from.tensor_parallel.halves() != 0) continue;
    for (int64_t rows = 1; rows <= 24; ++rows) {
      const int64_t S = rows * pieces;
      if (S < 8 || (S / cp) % shares != 0) continue;
      TrainConfig c = from;
      c.micro_batch_size = b;
      c.seq_len = S;
      take(std::move(c), double(b * S));
    }
  }
}

void Search::each_experts(const TrainConfig& from, const Take& take) const {
  const int64_t ep = from.expert_parallel.ep_size;
  const ExpertShape& shape = real_.model.experts;
  for (int64_t E = ep; E <= 4 * ep; E += ep) {
    for (int64_t k = 1; k <= std::min<int64_t>(E, 6); ++k) {
      for (int64_t groups : shape.expert_nodes > 1 ? divisors(E) : std::vector<int64_t>{1}) {
        for (int64_t of_token = 0; of_token <= (shape.route_nodes > 0 ? groups : 0); ++of_token) {
          if (groups > 8 || of_token > 4) break;
          if ((of_token > 0 ? of_token : groups) * (E / groups) < k) continue;
          const int64_t most_shared = std::min<int64_t>(3, shape.num_shared_experts);
          for (int64_t shared = 0; shared <= most_shared; ++shared) {
            TrainConfig c = from;
            c.model.experts.num_experts = E;
            c.model.experts.num_experts_per_tok = k;
            c.model.experts.expert_nodes = groups;
            c.model.experts.route_nodes = of_token;
            c.model.experts.num_shared_experts = shared;
            take(std::move(c), double(E + k + shared) + double(groups) / 10);
          }
        }
      }
    }
  }
}

void Search::each_layers(const TrainConfig& from, const Take& take) const {
  const int64_t m = is_file(from.pipeline) ? from.grad_acc_steps : 4 * from.pipeline.pp_size;
  const int64_t stages = from.pipeline.schedule(m).stages.count();
  const auto with = [&](int64_t layers, int64_t dense, const std::vector<int64_t>& spelt,
                        double work) {
    TrainConfig c = from;
    c.model.num_layers = layers;
    c.model.experts.first_dense_layers = dense;
    c.pipeline.pp_layers = fmt::format("{}", fmt::join(spelt, ","));
    take(std::move(c), work);
  };
  for (int64_t L = 1; L <= 4 * stages + 1; ++L) {
    const int64_t most_dense =
        real_.model.experts.first_dense_layers > 0 ? std::min<int64_t>(L - 1, 5) : 0;
    for (int64_t dense = 0; dense <= most_dense; ++dense) {
      const auto work = double(L + dense);
      if (L >= stages) {
        with(L, dense, {}, work);
        // As the default rule would have it with a head of this many half layers; widths decide
        // that later, or else they stay spelt out.
        for (int64_t head = 0; stages > 1 && head <= 3; ++head) {
          std::vector<int64_t> layers(stages, 1), busy(stages, 2);
          busy.back() += head;
          for (int64_t left = L - stages; left > 0; --left) {
            const auto least = std::ranges::min_element(busy) - busy.begin();
            ++layers[least];
            busy[least] += 2;
          }
          with(L, dense, layers, work + 0.25);
        }
      }
      if (real_.pipeline.pp_layers.empty() || stages < 2) continue;
      for (int64_t first = 0; first <= 2; ++first) {
        for (int64_t last = 0; last <= 2; ++last) {
          const int64_t rest = L - first - last, between = stages - 2;
          if (rest < 0 || (between == 0 && rest > 0)) continue;
          std::vector<int64_t> layers = {first};
          for (int64_t i = 0; i < between; ++i) {
            layers.push_back(rest / between + (i < rest % between ? 1 : 0));
          }
          layers.push_back(last);
          with(L, dense, layers, work + 0.5);
        }
      }
    }
  }
}

void Search::each_micro_batches(const TrainConfig& from, const Take& take) const {
  const int64_t p = from.pipeline.pp_size;
  if (is_file(from.pipeline)) return;
  const bool runs = p > 1 && real_.pipeline.pp_run_length > 0;
  const bool flights = p > 1 && real_.pipeline.pp_in_flight > 0;
  for (int64_t m = 1; m <= 4 * p + 4; ++m) {
    for (int64_t run = runs ? 1 : 0; run <= (runs ? 2 * p + 1 : 0); ++run) {
      for (int64_t flight = flights ? 1 : 0; flight <= (flights ? 2 * p - 1 : 0); ++flight) {
        TrainConfig c = from;
        c.grad_acc_steps = m;
        c.pipeline.pp_run_length = run;
        c.pipeline.pp_in_flight = flight;
        try {
          if (p > 1) c.pipeline.schedule(m);
        } catch (const UsageError&) {
          continue;  // such as an odd number for a schedule of pairs
        }
        take(std::move(c), double(m) + 0.01 * double(run + flight));
      }
    }
  }
}

/// What the sizes of weights alone decide: layers of stages by the default rule, the cuts of ZeRO,
/// the vocabulary.
void Search::each_widths(const TrainConfig& from, const Take& take) const {
  const int64_t tp = from.tensor_parallel.tp_size, N = from.model.num_heads;
  const bool mla = from.model.mla.on(), apart = from.model.given_head_dim > 0;
  const bool own_width = from.model.experts.moe_ffn_hidden_size > 0;
  const int64_t rest =
      real_.model.ffn_hidden_size % real_.tensor_parallel.tp_size == 0 ? 0 : tp - 1;
  using Few = std::vector<int64_t>;
  Few vocabularies = {28, 31, 32, 33, 48, 49, 64, 65, 96, 97, 128, 129, 160};
  for (int64_t V = std::max<int64_t>(tp, 8); V < 25; V += own_width && V % 4 != 0 ? 3 : 1) {
    vocabularies.push_back(V);
  }
  for (int64_t D : mla ? Few{6, 8, 10} : Few{2, 4, 6, 8}) {
    for (int64_t F : own_width ? Few{2, 3, 4, 6} : Few{2, 3, 4, 6, 8, 12}) {
      for (int64_t width : own_width ? Few{2, 3, 4} : Few{0}) {
        for (int64_t more : mla || apart ? Few{0, 4, 8} : Few{0}) {
          for (int64_t V : vocabularies) {
            TrainConfig c = from;
            ModelConfig& model = c.model;
            model.ffn_hidden_size = F * tp + rest;
            model.vocab_size = V;
            if (mla) {
              model.hidden_size = 12 + more;
              model.mla.kv_lora_rank = D;
              if (model.mla.q_lora_rank > 0) model.mla.q_lora_rank = 4;
            } else {
              model.hidden_size = N * D + more;
              if (apart) model.given_head_dim = D;
            }
            model.experts.moe_ffn_hidden_size = width * (from.expert_parallel.expert_tp ? tp : 1);
            const int64_t work = model.hidden_size * (F * tp + V + 8 * D + 4 * width);
            take(std::move(c), double(work));
          }
        }
      }
    }
  }
}

}  // namespace

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> found;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) found.push_back(d);
  }
  return found;
}

std::optional<Twin> read_twin(std::vector<std::string> flags) {
  Twin twin{{}, fmt::format("{}", fmt::join(flags, " ")), {}};
  flags.insert(flags.begin(), "twin");
  try {
    Args args("");
    if (!read_without_advice(twin.config, args, flags, /*ranks=*/0)) return {};
    twin.classes = classes(twin.config);
  } catch (const UsageError&) {
    return {};
  }
  return twin;
}

TwinFamily shrink(const TrainConfig& real, int64_t most_ranks) {
  const PipelineConfig& pipeline = real.pipeline;
  if (is_file(pipeline) && pipeline.pp_size > most_ranks) {
    const bool can_be_more = pipeline.pp_size <= CompositionConfig::kMostRanksOfTwins;
    usage_error("prove={} must be at least the {} ranks of pp_schedule={}; try {}", most_ranks,
                pipeline.pp_size, pipeline.pp_schedule,
                can_be_more ? fmt::format("--prove {}", pipeline.pp_size) : "--pp_schedule 1f1b");
  }
  TwinFamily family{classes(real), {}, {}, {}};
  Weights weights;
  while (family.twins.size() < kMostTwins) {
    std::optional<Twin> twin = Search(real, most_ranks, weights).best();
    if (!twin) break;
    std::vector<LostClass> own = lost_classes(family.real, twin->classes);
    if (family.twins.empty()) {
      for (const LostClass& of : own) {
        if (!of.name.ends_with(": used")) continue;
        family.without.push_back(of.name.substr(0, of.name.find(':')));
      }
      family.lost = std::move(own);
    } else {
      const size_t before = family.lost.size();
      std::erase_if(family.lost, [&](const LostClass& lost) {
        return std::ranges::find(own, lost.name, &LostClass::name) == own.end();
      });
      if (family.lost.size() == before) break;
    }
    family.twins.push_back(std::move(*twin));
    if (family.lost.empty()) break;
    weights.clear();
    for (const RemainderClass& of : family.real) {
      const bool missing =
          std::ranges::find(family.lost, of.name, &LostClass::name) != family.lost.end();
      // The first twin has all dimensions at once; a further one may leave some out.
      weights[of.name] = of.name.ends_with(": used") ? 1
                         : of.weight >= 100          ? of.weight
                         : missing                   ? of.weight * 20
                                                     : of.weight / 20;
    }
  }
  if (family.twins.empty()) {
    constexpr int64_t kMost = CompositionConfig::kMostRanksOfTwins;
    usage_error("prove={} leaves room for no twin of 2 ranks or more; try {}", most_ranks,
                most_ranks < kMost
                    ? fmt::format("--prove {}", std::clamp<int64_t>(2 * most_ranks, 16, kMost))
                    : "a layout of fewer dimensions");
  }
  return family;
}

TrainConfig alone(const Twin& twin) {
  TrainConfig one = words_of(twin.config);
  one.model = twin.config.model;
  one.optimizer = twin.config.optimizer;
  one.seq_len = twin.config.seq_len;
  one.micro_batch_size = twin.config.micro_batch_size;
  one.grad_acc_steps = twin.config.grad_acc_steps * twin.config.data_parallel.dp_size;
  one.data_parallel = {};
  one.context_parallel.cp_size = one.tensor_parallel.tp_size = one.pipeline.pp_size = 1;
  one.expert_parallel.ep_size = 1;
  one.composition = {};
  // [reference]
  one.fusion = {};
  // [reference]
  one.communication->node_size = 0;
  leave_out_unused(one);
  return one;
}

}  // namespace usp

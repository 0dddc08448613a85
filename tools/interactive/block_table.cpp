#include "block_table.h"

#include <fmt/format.h>

#include "accounting/dry_rank.h"
#include "accounting/memory.h"
#include "context_parallel/attention.h"
#include "core_table.h"
#include "data_parallel/zero_layout.h"
#include "model.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

constexpr int64_t kMuch = int64_t{1} << 40;

/// Sizes of a rank: its heads, channels of the MLP and tokens of the vocabulary, its part of a
/// sample, and bytes of attention's core, whose own formulas are another table.
const Letters kLetters = {{.name = "b"},
                          {.name = "s/cp/tp", .power = 2},
                          {.name = "h", .largest = 1 << 16, .lowest = 0},
                          {.name = "a"},
                          {.name = "a_kv"},
                          {.name = "h/a"},
                          {.name = "h_ff"},
                          {.name = "v"},
                          {.name = "tp", .usual = 2, .largest = 64, .power = 2},
                          {.name = "core_kept", .largest = kMuch},
                          {.name = "core_through", .largest = kMuch}};
constexpr size_t kCore = 9;  // the first of its letters

Runtime& meta_runtime() {
  static Runtime runtime(Device::meta);
  return runtime;
}

/// "embedding", "layer" or "head", of a model of one layer; "batch": of no block.
std::string block_name(int block) {
  constexpr std::array<const char*, 4> names = {"batch", "embedding", "layer", "head"};
  return names.at(size_t(block + 1));
}

/// How a step is carried out; `rows` of the residual stream: each rank of tp has them all, or its
/// share of them, from which backward gathers again what it needs, or has kept it.
struct Mode {
  std::string attention, recompute, rows;
  std::string name() const { return attention + " " + recompute + " " + rows; }
  Probabilities attends() const {
    if (attention == "blockwise") return Probabilities::never_whole;
    return recompute == "selective" ? Probabilities::recomputed : Probabilities::stored;
  }
  TrainConfig set(TrainConfig config) const {
    config.attention = attention;
    config.recompute = recompute;
    config.tensor_parallel.sequence_parallel = rows != "whole";
    config.tensor_parallel.gathered_input = rows == "kept" ? "kept" : "again";
    return config;
  }
};

std::vector<Mode> modes() {
  std::vector<Mode> all;
  for (const char* attention : {"naive", "blockwise"}) {
    for (const char* recompute : {"none", "selective", "full"}) {
      for (const char* rows : {"whole", "again", "kept"})
        all.push_back({attention, recompute, rows});
    }
  }
  return all;
}

/// What the accountant reads of a pass of a rank.
PassShape shape_of(const TrainConfig& config) {
  return {config.micro_batch_size, config.seq_len / config.context_parallel.cp_size,
          parse_dtype(config.dtype), config.tensor_parallel.row_shares()};
}

/// What attention says of itself around a core.
Footprint attention_around(Footprint core, const TrainConfig& config, const PassShape& shape) {
  const ModelConfig& m = config.model;
  const int64_t H = m.hidden_size, D = m.head_dim(), N = m.num_heads, G = m.num_kv_heads;
  const DryMesh dry(config.mesh(), config.engine());
  const TensorRegion region(config.tensor_parallel, dry.mesh.tp());
  ParameterList list;
  Parameter &norm = list.add("norm", {H}, 0), &o = list.add("o", {H, N * D}, 0);
  Parameter &q = list.add("q", {N * D, H}, 0), &k = list.add("k", {G * D, H}, 0);
  Parameter& v = list.add("v", {G * D, H}, 0);
  region.replicate(norm);
  auto qkv_proj = make_qkv_parallel(q, k, v, G, region);
  auto o_proj = make_row_parallel(o, region);
  auto told = std::make_unique<ToldCore>(region.heads(N), region.heads(G), D, std::move(core));
  const Attention attention(RmsNorm(norm, m.rms_norm_eps), std::move(qkv_proj),
                            RopeTable(m, /*positions=*/1, shape.dtype), std::move(told),
                            std::move(o_proj));
  return attention.footprint(shape);
}

/// What the blocks of a model of one layer say of themselves around a core.
std::vector<BlockFootprint> blocks_around(Footprint core, TrainConfig config) {
  const Runtime::Use use(meta_runtime());
  const PassShape shape = shape_of(config);
  config.context_parallel = {};
  config.seq_len = 1;
  std::vector<BlockFootprint> blocks = DryRank(config, 0).model.footprints(shape);
  blocks.at(1).segments.at(0) = attention_around(std::move(core), config, shape);
  return blocks;
}

/// The same around a core of which the sizes say what it keeps.
std::vector<BlockFootprint> blocks_of(const Sizes& sizes, const TrainConfig& config) {
  return blocks_around(
      {.kept = {{"core", sizes[kCore]}}, .kept_through_recompute = {{"core", sizes[kCore + 1]}}},
      config);
}

/// {"saved/layer/norm": bytes} of what forward leaves, and {"layer/1/kept": bytes} of what each
/// segment of a block says that it keeps.
Named bytes_of(const std::vector<BlockFootprint>& blocks) {
  Named bytes;
  for (const LiveBytes& part : kept_bytes(blocks)) {
    bytes[fmt::format("saved/{}/{}", block_name(part.block), part.name)] += part.bytes;
  }
  for (const BlockFootprint& block : blocks) {
    for (size_t segment = 0; segment < block.segments.size(); ++segment) {
      const Footprint& footprint = block.segments[segment];
      const std::string name = fmt::format("{}/{}/", block_name(int(block.block)), segment);
      for (const NamedBytes& tensor : footprint.kept) bytes[name + "kept"] += tensor.bytes;
      for (const NamedBytes& tensor : footprint.kept_through_recompute) {
        bytes[name + "through"] += tensor.bytes;
      }
      bytes[name + "output"] = footprint.output.bytes;
    }
  }
  return bytes;
}

/// Adds rows [{block, name, bytes, modes}]: what forward leaves for backward, and
/// [{dtype, part, largest_of, modes}] in bytes: a part is a block, the number of its segment, and a
/// field of Footprint.
void add_mode(const Mode& mode, size_t number, Json& saved, Json& segments) {
  std::map<std::string, std::array<Maximum, 3>> found;
  for (size_t dtype = 0; dtype < kDTypeNames.size(); ++dtype) {
    for (const auto& [part, maximum] : interpolate(kLetters, [&](const Sizes& sizes) {
           return bytes_of(blocks_of(sizes, mode.set(config_of(sizes, kDTypeNames[dtype]))));
         })) {
      found[part][dtype] = maximum;
      if (part.starts_with("saved/")) continue;
      add_row(segments,
              {{"dtype", kDTypeNames[dtype]},
               {"part", part},
               {"largest_of", formulas(maximum, kLetters)}},
              "modes", number);
    }
  }
  // In the order in which the model makes them.
  const Sizes any = random_sizes(kLetters, 0);
  for (const LiveBytes& part : kept_bytes(blocks_of(any, mode.set(config_of(any, "f32"))))) {
    const std::string block = block_name(part.block);
    const auto& bytes = found.at(fmt::format("saved/{}/{}", block, part.name));
    add_row(saved, {{"block", block}, {"name", part.name}, {"bytes", formula(bytes, kLetters)}},
            "modes", number);
  }
}

/// Letters with sizes at which the accountant may run a block.
Letters small_letters() {
  Letters letters = kLetters;
  for (Letter& letter : letters)
    letter.usual = 2, letter.largest = 16, letter.lowest = letter.least;
  return letters;
}

/// With as many heads as its kv heads divide, for the same reason.
TrainConfig config_that_runs(const Sizes& sizes, const char* dtype) {
  TrainConfig config = config_of(sizes, dtype);
  config.model.num_heads = 4 * config.model.num_kv_heads;
  return config;
}

/// [{name, bytes}] of what belongs to no block, whatever the mode and the dtype.
Json batch_rows() {
  const auto of_batch = [](const Sizes& sizes) {
    Named bytes;
    for (const LiveBytes& part : predict(config_that_runs(sizes, "f32")).saved) {
      if (part.block < 0) bytes[std::string(part.name)] += part.bytes;
    }
    return bytes;
  };
  const Letters letters = small_letters();
  auto found = interpolate(letters, of_batch);
  Json rows = Json::array();
  for (const LiveBytes& part : predict(config_that_runs(random_sizes(letters, 0), "f32")).saved) {
    if (part.block >= 0) continue;
    const Maximum& bytes = found.at(std::string(part.name));
    rows.push_back({{"name", part.name}, {"bytes", formula(only(bytes), kLetters)}});
  }
  return rows;
}

/// A step of a model of one layer whose attention meets all keys by this exchange.
TrainConfig with_exchange(TrainConfig config, const Exchange& exchange, int64_t n) {
  ModelConfig& m = config.model;
  const int64_t u = exchange.by_head() ? 4 : 1;
  m.num_heads *= u;
  m.num_kv_heads = exchange.copies ? 2 * config.tensor_parallel.tp_size : m.num_kv_heads * u;
  ContextParallelConfig& cp = config.context_parallel;
  cp = exchange.config(exchange.in_ring() ? n : 1, u);
  const bool keeps = config.recompute == "full" && config.attention == "blockwise";
  if (keeps && cp.cp_size > 1) cp.cp_recompute = "keep";
  config.seq_len *= cp.cp_size;
  return config;
}

/// Checks one exchange, in one mode.
void check_exchange(const Exchange& exchange, const Mode& mode, const char* dtype,
                    uint64_t number) {
  const Sizes sizes = random_sizes(small_letters(), number);
  const TrainConfig config =
      with_exchange(mode.set(config_that_runs(sizes, dtype)), exchange, int64_t(2 + number % 4));
  const Runtime::Use use(meta_runtime());
  const DryMesh dry(config.mesh(), config.engine());
  const TensorRegion region(config.tensor_parallel, dry.mesh.tp());
  const ModelConfig& m = config.model;
  const auto core = make_core_attention(region.heads(m.num_heads), region.heads(m.num_kv_heads),
                                        m.head_dim(), exchange.probabilities,
                                        ContextGroup(config.context_parallel, dry.mesh.cp()));
  const PassShape shape = shape_of(config);
  const Named around = bytes_of(blocks_around(core->footprint(shape), config));
  USP_CHECK(around == bytes_of(DryRank(config, 0).model.footprints(shape)),
            "in mode {}, attention is not what is around its core, over cp by {}", mode.name(),
            exchange.method);
  Named saved;
  for (const LiveBytes& part : predict(config).saved) {
    if (part.block >= 0) {
      saved[fmt::format("saved/{}/{}", block_name(part.block), part.name)] += part.bytes;
    }
  }
  for (const auto& [name, bytes] : saved) {
    USP_CHECK(around.at(name) == bytes, "{}: {} bytes, by the accountant {}", name, around.at(name),
              bytes);
  }
}

/// {"embedding": elements} of the units that ZeRO shards, and of the parameters in them.
Named unit_elements(TrainConfig config, bool tied) {
  config.model.tie_word_embeddings = tied;
  DryRank rank(config, 0);
  Named elements;
  for (const Unit& unit : cut_into_units(rank.model.parameters())) {
    elements[block_name(int(unit.block()))] += unit.numel;
  }
  return elements;
}

}  // namespace

TrainConfig config_of(const Sizes& sizes, const char* dtype) {
  std::array<int64_t, kCore> of_rank{};
  std::copy_n(sizes.begin(), kCore, of_rank.begin());
  const auto [b, s, h, a, a_kv, width, h_ff, v, tp] = of_rank;
  TrainConfig config;
  ModelConfig& m = config.model;
  config.micro_batch_size = b;
  config.seq_len = s * tp;
  m.num_layers = 1;
  m.hidden_size = h;
  m.num_heads = a * tp;
  m.num_kv_heads = a_kv * tp;
  m.given_head_dim = width;
  m.ffn_hidden_size = h_ff * tp;
  m.vocab_size = v * tp;
  config.dtype = dtype;
  config.tensor_parallel.tp_size = tp;
  return config;
}

void check_exchanges() {
  uint64_t number = 0;
  for (const Mode& mode : modes()) {
    for (const Exchange& exchange : exchanges()) {
      if (exchange.probabilities != mode.attends()) continue;
      for (const char* dtype : kDTypeNames) check_exchange(exchange, mode, dtype, ++number);
    }
  }
}

Json parameter_table() {
  Json json;
  for (const bool tied : {false, true}) {
    const auto found = interpolate(
        kLetters, [&](const Sizes& sizes) { return unit_elements(config_of(sizes, "f32"), tied); });
    for (const char* block : {"embedding", "layer", "head"}) {
      json[tied ? "tied" : "untied"][block] = formula(only(found.at(block)), kLetters);
    }
  }
  return json;
}

Json block_table() {
  Json json = {{"modes", Json::array()},
               {"attends", Json::array()},
               {"batch", batch_rows()},
               {"saved", Json::array()},
               {"segments", Json::array()}};
  for (const Mode& mode : modes()) {
    add_mode(mode, json["modes"].size(), json["saved"], json["segments"]);
    json["modes"].push_back(mode.name());
    json["attends"].push_back(name_of(mode.attends()));
  }
  return json;
}

}  // namespace usp

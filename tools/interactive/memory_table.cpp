// Prints the formulas of the memory accountant as a table, for the page that computes with them in
// a browser. They are not written down here: the accountant of the newest chapter is asked at many
// sizes, and its answers determine its polynomials.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "model.h"
#include "polynomial.h"
#include "tensor/runtime.h"
#include "zero_accountant.h"

namespace usp {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<const char*, 3> kDTypeNames = {"f32", "bf16", "f64"};
constexpr Sizes kTwos = {2, 2, 2, 2, 2, 2, 2, 2, 2};
constexpr int64_t kStages = std::size(kKept);

/// A model of one layer with these sizes: what a layer more adds is what this one has.
TrainConfig config_of(const Sizes& sizes, const char* dtype) {
  const auto [b, s, h, a, a_kv, width, h_ff, v, tp] = sizes;
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

/// "embedding", "layer" or "head", of a model of one layer; "batch": of no block.
std::string block_name(int block) {
  constexpr std::array<const char*, 4> names = {"batch", "embedding", "layer", "head"};
  return names.at(size_t(block + 1));
}

/// {"layer/qkv": bytes} between forward and backward, as the accountant says.
Named saved_bytes(const TrainConfig& config) {
  Named bytes;
  for (const LiveBytes& part : predict(config).saved) {
    bytes[fmt::format("{}/{}", block_name(part.block), part.name)] += part.bytes;
  }
  return bytes;
}

/// Coefficients of the bytes of a number (own), of a sum (acc), and of neither, from those in f32,
/// bf16 and f64, where own and acc are 4 and 4, 2 and 4, 8 and 8.
std::array<int64_t, 3> by_width(int64_t f32, int64_t bf16, int64_t f64) {
  const int64_t own = (f32 - bf16) / 2, neither = 2 * f32 - f64;
  const int64_t acc = (f32 - neither) / 4 - own;
  USP_CHECK(4 * own + 4 * acc + neither == f32 && 2 * own + 4 * acc + neither == bf16,
            "bytes {}, {} and {} are no sum of own and acc", f32, bf16, f64);
  return {own, acc, neither};
}

void add_factor(std::string& text, const char* letter, int64_t exponent) {
  if (exponent == 0) return;
  text += letter;
  text += exponent == 1 ? " " : fmt::format("^{} ", exponent);
}

/// "2 own b s h_ff": letters of which each may have an exponent. s/tp and tp make s where both are.
std::string product(int64_t coefficient, const std::string& width, const Sizes& exponents) {
  std::string text = coefficient == 1 ? "" : fmt::format("{} ", coefficient);
  if (!width.empty()) text += width + " ";
  for (size_t letter = 0; letter + 1 < kSizes; ++letter) {
    if (letter != kSequence) {
      add_factor(text, kLetters[letter], exponents[letter]);
      continue;
    }
    const int64_t whole = std::min(exponents[kSequence], exponents[kRanks]);
    add_factor(text, "s", whole);
    add_factor(text, kLetters[kSequence], exponents[kSequence] - whole);
    add_factor(text, kLetters[kRanks], exponents[kRanks] - whole);
  }
  USP_CHECK(!text.empty(), "a term of {}", coefficient);
  return text.substr(0, text.size() - 1);
}

std::string formula(const Polynomial& polynomial) {
  std::string text;
  for (auto term = polynomial.rbegin(); term != polynomial.rend(); ++term) {
    text += (text.empty() ? "" : " + ") + product(term->second, "", term->first);
  }
  return text.empty() ? "0" : text;
}

/// Of what has no maximum in it.
const Polynomial& only(const Maximum& maximum) {
  USP_CHECK(maximum.size() == 1, "{} polynomials where one is expected", maximum.size());
  return maximum[0];
}

/// The formula of bytes, from those in every dtype.
std::string formula(const std::array<Maximum, 3>& by_dtype) {
  std::array<Polynomial, 3> each;
  for (size_t dtype = 0; dtype < each.size(); ++dtype) each[dtype] = only(by_dtype[dtype]);
  std::string text;
  const Polynomial terms = each[0];
  for (const auto& [exponents, ignored] : terms) {
    constexpr std::array<const char*, 3> names = {"own", "acc", ""};
    const std::array<int64_t, 3> widths =
        by_width(each[0][exponents], each[1][exponents], each[2][exponents]);
    for (size_t width = 0; width < widths.size(); ++width) {
      if (widths[width] == 0) continue;
      text += (text.empty() ? "" : " + ") + product(widths[width], names[width], exponents);
    }
  }
  return text;
}

/// How a step is carried out; `rows` of the residual stream: each rank of tp has them all, or its
/// share of them, from which backward gathers again what it needs, or has kept it.
struct Mode {
  std::string attention, recompute, rows;
  std::string name() const { return attention + " " + recompute + " " + rows; }
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

/// Adds the number of a mode to the row that is the same otherwise, or a row.
void add_row(Json& rows, Json row, size_t mode) {
  for (Json& other : rows) {
    Json without = other;
    without.erase("modes");
    if (without == row) {
      other["modes"].push_back(mode);
      return;
    }
  }
  row["modes"] = {mode};
  rows.push_back(std::move(row));
}

/// [{block, name, bytes, modes}]: what forward leaves for backward under each mode of execution.
Json saved_rows() {
  Json rows = Json::array();
  const std::vector<Mode> all = modes();
  for (size_t number = 0; number < all.size(); ++number) {
    const Mode& mode = all[number];
    std::map<std::string, std::array<Maximum, 3>> found;
    for (size_t dtype = 0; dtype < kDTypeNames.size(); ++dtype) {
      for (auto& [name, maximum] : interpolate([&](const Sizes& sizes) {
             return saved_bytes(mode.set(config_of(sizes, kDTypeNames[dtype])));
           })) {
        found[name][dtype] = std::move(maximum);
      }
    }
    // In the order in which the model makes them.
    for (const LiveBytes& part : predict(mode.set(config_of(kTwos, "f32"))).saved) {
      const std::string block = block_name(part.block);
      const auto& bytes = found.at(fmt::format("{}/{}", block, part.name));
      add_row(rows, {{"block", block}, {"name", part.name}, {"bytes", formula(bytes)}}, number);
    }
  }
  return rows;
}

/// {"layer/1/backward_peak": bytes}: what each segment of a block says of its peaks.
Named segment_bytes(const TrainConfig& config) {
  Runtime meta(Device::meta);
  const Runtime::Use use(meta);
  const PassShape shape{config.micro_batch_size, config.seq_len, parse_dtype(config.dtype),
                        config.tensor_parallel.row_shares()};
  Named bytes;
  for (const BlockFootprint& block : Model(config).footprints(shape)) {
    for (size_t segment = 0; segment < block.segments.size(); ++segment) {
      const Footprint& footprint = block.segments[segment];
      const std::string name = fmt::format("{}/{}/", block_name(int(block.block)), segment);
      for (const NamedBytes& tensor : footprint.kept) bytes[name + "kept"] += tensor.bytes;
      bytes[name + "output"] = footprint.output.bytes;
      bytes[name + "recomputed"] = footprint.recomputed;
      bytes[name + "forward_peak"] = footprint.forward_peak;
      bytes[name + "backward_peak"] = footprint.backward_peak;
    }
  }
  return bytes;
}

/// [{dtype, part, largest_of, modes}], in bytes: a part is a block, the number of its segment, and
/// a field of Footprint.
Json segment_rows() {
  Json rows = Json::array();
  const std::vector<Mode> all = modes();
  for (const char* dtype : kDTypeNames) {
    for (size_t number = 0; number < all.size(); ++number) {
      const Mode& mode = all[number];
      for (const auto& [part, maximum] : interpolate([&](const Sizes& sizes) {
             return segment_bytes(mode.set(config_of(sizes, dtype)));
           })) {
        std::vector<std::string> formulas;
        for (const Polynomial& polynomial : maximum) formulas.push_back(formula(polynomial));
        std::ranges::sort(formulas);
        add_row(rows, {{"dtype", dtype}, {"part", part}, {"largest_of", formulas}}, number);
      }
    }
  }
  return rows;
}

/// {"embedding": elements} of the units that ZeRO shares out, and of the parameters in them.
Named unit_elements(TrainConfig config, bool tied) {
  config.model.tie_word_embeddings = tied;
  Runtime meta(Device::meta);
  const Runtime::Use use(meta);
  Model model(config);
  Named elements;
  for (const Unit& unit : cut_into_units(model.parameters())) {
    elements[block_name(int(unit.block()))] += unit.numel;
  }
  return elements;
}

/// {"untied": {"embedding": formula, ...}, "tied": ...}: elements, whatever the batch.
Json parameters() {
  Json json;
  for (const bool tied : {false, true}) {
    const auto found = interpolate(
        [&](const Sizes& sizes) { return unit_elements(config_of(sizes, "f32"), tied); });
    for (const char* block : {"embedding", "layer", "head"}) {
      json[tied ? "tied" : "untied"][block] = formula(only(found.at(block)));
    }
  }
  return json;
}

/// A model whose parameters are so many that no padding is needed, shared out by two ranks.
TrainConfig two_ranks(const char* dtype, const char* accumulation, int64_t stage) {
  TrainConfig config = config_of({2, 2, 8, 2, 2, 4, 8, 8, 1}, dtype);
  config.grad_accumulation = accumulation;
  config.data_parallel.dp_size = 2;
  config.data_parallel.zero_stage = stage;
  return config;
}

/// Bytes an element, where a rank keeps `kept` of them.
int64_t an_element(int64_t bytes, int64_t elements) {
  USP_CHECK(bytes % elements == 0, "{} bytes of {} elements", bytes, elements);
  return bytes / elements;
}

/// Bytes a parameter of weights, gradients and optimizer states, of gradients that are not shared
/// out in any case, and of those that travel.
Json states_of(const char* dtype, const char* accumulation, int64_t stage) {
  const TrainConfig config = two_ranks(dtype, accumulation, stage);
  const StateBytes states = sharded_states(config);
  const int64_t all = num_parameters(config.model);
  const auto kept = [&](Kept part) { return part == Kept::whole ? all : all / 2; };
  const int64_t sum = bytes_of(dtype_of_gradient_sum(config));
  const int64_t summed = kept(kKept[stage].gradients) * sum;
  return {{"dtype", dtype},
          {"accumulation", accumulation},
          {"stage", stage},
          {"weights", an_element(states.weights, kept(kKept[stage].weights))},
          {"sums", sum},
          {"gradients", an_element(states.gradients - summed, all)},
          {"optimizer", an_element(states.optimizer, kept(kKept[stage].optimizer))},
          {"reduced", bytes_of(dtype_of_reduction(config))}};
}

Json states() {
  Json rows = Json::array();
  for (int64_t stage = 0; stage < kStages; ++stage) {
    for (const char* accumulation : {"f32", "bf16", "both"}) {
      for (const char* dtype : kDTypeNames) {
        // Where weights are no bf16 there is nothing to choose.
        if (accumulation == std::string("f32") || dtype == std::string("bf16")) {
          rows.push_back(states_of(dtype, accumulation, stage));
        }
      }
    }
  }
  return rows;
}

Json mode_names() {
  Json names = Json::array();
  for (const Mode& mode : modes()) names.push_back(mode.name());
  return names;
}

Json kept() {
  Json stages = Json::array();
  const auto name = [](Kept part) { return part == Kept::whole ? "whole" : "shard"; };
  for (const KeptByStage& stage : kKept) {
    stages.push_back({{"weights", name(stage.weights)},
                      {"gradients", name(stage.gradients)},
                      {"optimizer", name(stage.optimizer)}});
  }
  return stages;
}

Json widths() {
  Json json;
  for (const char* name : kDTypeNames) {
    const DType dtype = parse_dtype(name);
    json[name] = {{"own", bytes_of(dtype)}, {"acc", bytes_of(accumulate_dtype(dtype))}};
  }
  return json;
}

int print(int, char**) {
  const Json table = {{"chapter", USP_CHAPTER},
                      {"letters", kLetters},
                      {"widths", widths()},
                      {"modes", mode_names()},
                      {"saved", saved_rows()},
                      {"segments", segment_rows()},
                      {"parameters", parameters()},
                      {"kept", kept()},
                      {"states", states()},
                      {"scratch_limit", Engine::kScratchLimit},
                      {"bucket_mb", DataParallelConfig().bucket_mb}};
  fmt::print("{}\n", table.dump(1));
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::print, argc, argv); }

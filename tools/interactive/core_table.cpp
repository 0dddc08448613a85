#include "core_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/mesh.h"
#include "context_parallel/attention.h"
#include "context_parallel/ulysses.h"

namespace usp {

namespace {

constexpr int64_t kMuch = int64_t{1} << 40;

/// Sizes that a formula may read: heads are those of a rank of tp, u the ranks that exchange heads.
/// Zig-zag halves a rank's tokens. Formulas may hold at less than the least size.
Letters letters_of_core(const Exchange& exchange) {
  const std::string u = exchange.method == "ulysses" ? "cp" : "u";
  const auto heads = [](std::string name) {
    return Letter{.name = std::move(name), .step = 1, .least = 1, .usual = 2, .largest = 64};
  };
  Letters letters = {{.name = "b", .largest = 64},
                     {.name = "s/cp", .largest = 1 << 13, .lowest = 0, .power = 2},
                     {.name = "h/a", .step = 1, .least = 2, .largest = 1 << 14, .lowest = 0}};
  letters.push_back(heads(exchange.by_head() ? "a/" + u : "a"));
  letters.back().lowest = 0;
  letters.push_back(heads(exchange.by_head() && !exchange.copies ? "a_kv/" + u : "a_kv"));
  if (!exchange.by_head()) return letters;
  Letter members{.name = u, .step = 1, .least = 2, .usual = 4, .largest = 64, .power = 2};
  if (exchange.copies) {  // a multiple of a_kv, and so its squares are those of both
    letters.back().power = 2;
    letters.back().largest = members.largest = 8;
    members.name += "/a_kv";
  }
  letters.push_back(members);
  return letters;
}

/// A rank's core, with these sizes.
struct Core {
  int64_t b, rows, width, heads, kv_heads, u = 1, n = 1;  ///< n: places of the ring

  Core(const Exchange& exchange, const Sizes& sizes)
      : b(sizes[0]), rows(sizes[1]), width(sizes[2]), heads(sizes[3]), kv_heads(sizes[4]) {
    if (!exchange.by_head()) return;
    u = exchange.copies ? sizes[5] * kv_heads : sizes[5];
    heads *= u;
    if (!exchange.copies) kv_heads *= u;
  }
  PassShape shape(const char* dtype) const { return {b, rows, parse_dtype(dtype)}; }
};

/// Footprint of a core that keeps through a recomputation what it can keep.
Footprint footprint_of(const Exchange& exchange, const std::string& layout, const Core& core,
                       const char* dtype) {
  ContextParallelConfig config = exchange.config(core.n, core.u);
  config.cp_layout = layout;
  config.cp_recompute = "keep";
  const DryMesh dry({.cp = config.cp_size});
  return make_core_attention(core.heads, core.kv_heads, core.width, exchange.probabilities,
                             ContextGroup(config, dry.mesh.cp()))
      ->footprint(core.shape(dtype));
}

/// What is kept, with each name once.
Named named(const std::vector<NamedBytes>& tensors) {
  Named bytes;
  for (const NamedBytes& tensor : tensors) bytes[std::string(tensor.name)] += tensor.bytes;
  return bytes;
}

/// Adds what the cores of an exchange keep, or what of it outlives a recomputation.
void add_saved(Json& rows, const Exchange& exchange, size_t number, bool through) {
  Letters letters = letters_of_core(exchange);
  if (exchange.in_ring()) {
    letters.push_back({.name = exchange.by_head() ? "cp/u" : "cp", .step = 1, .largest = 64});
  }
  const auto tensors = [&](const Sizes& sizes, const char* dtype) {
    Core core(exchange, sizes);
    if (exchange.in_ring()) core.n = sizes.back();
    const Footprint footprint = footprint_of(exchange, "zigzag", core, dtype);
    return through ? footprint.kept_through_recompute : footprint.kept;
  };
  std::map<std::string, std::array<Maximum, 3>> found;
  for (size_t dtype = 0; dtype < kDTypeNames.size(); ++dtype) {
    for (const auto& [name, maximum] : interpolate(letters, [&](const Sizes& sizes) {
           return named(tensors(sizes, kDTypeNames[dtype]));
         })) {
      found[name][dtype] = maximum;
    }
  }
  // In the order in which the core makes them.
  for (const NamedBytes& tensor : tensors(random_sizes(letters, 0), kDTypeNames[0])) {
    const auto bytes = found.extract(std::string(tensor.name));
    if (bytes.empty()) continue;  // a second one with this name
    add_row(
        rows,
        {{"name", tensor.name}, {"through", through}, {"bytes", formula(bytes.mapped(), letters)}},
        "exchanges", number);
  }
}

}  // namespace

ContextParallelConfig Exchange::config(int64_t n, int64_t u) const {
  ContextParallelConfig config;
  config.cp_size = n * u;
  if (method != "none") config.cp_method = method;
  if (method == "ring_ulysses") config.ulysses_size = u;
  return config;
}

std::vector<Exchange> exchanges() {
  std::vector<Exchange> all;
  for (const Probabilities each :
       {Probabilities::never_whole, Probabilities::stored, Probabilities::recomputed}) {
    for (const char* method : {"none", "ring", "all_gather", "ulysses", "ring_ulysses"}) {
      all.push_back({each, method});
      if (all.back().by_head()) all.push_back({each, method, /*copies=*/true});
    }
  }
  return all;
}

std::string name_of(Probabilities probabilities) {
  if (probabilities == Probabilities::stored) return "stored";
  return probabilities == Probabilities::recomputed ? "recomputed" : "never_whole";
}

Json core_table() {
  Json json;
  for (const char* list : {"exchanges", "saved"}) json[list] = Json::array();
  for (const Exchange& exchange : exchanges()) {
    const size_t number = json["exchanges"].size();
    for (const bool through : {false, true}) add_saved(json["saved"], exchange, number, through);
    json["exchanges"].push_back({{"attends", name_of(exchange.probabilities)},
                                 {"method", exchange.method},
                                 {"copies", exchange.copies}});
  }
  // In the order in which a core makes them, which is the same in all.
  std::vector<std::string> names;
  const auto place = [&](const Json& row) {
    const auto name = row.at("name").get<std::string>();
    const auto found = std::ranges::find(names, name) - names.begin();
    if (found == std::ssize(names)) names.push_back(name);
    return found;
  };
  for (const Json& row : json["saved"]) place(row);
  std::stable_sort(json["saved"].begin(), json["saved"].end(),
                   [&](const Json& a, const Json& b) { return place(a) < place(b); });
  return json;
}

}  // namespace usp

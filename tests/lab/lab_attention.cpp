#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "base/check.h"
#include "lab/attention_case.h"
#include "lab/blocks.h"
#include "lab/degrees.h"
#include "lab/exponentials.h"
#include "lab/masks.h"
#include "lab/record.h"
#include "lab/schedule.h"

/// The rungs of attention on the emulated GPU, one JSON object a line: lab_attention S D prints
/// what each that takes them asks for and does for two heads of S queries and keys, D channels
/// wide; lab_attention masks P D the same of those for tensor cores, under the masks of pieces of P
/// positions; lab_attention decoding K D of one query with K keys; lab_attention degrees how far
/// off the powers of two of each polynomial are; lab_attention exponentials how many a row takes;
/// lab_attention orders how tiles fall to an H100's multiprocessors; lab_attention blocks what
/// fewer queries a block cost.
namespace usp::lab {
namespace {

constexpr int kHeads = 2;

/// What a rung did. False if the emulator has something to say of it, which is printed.
bool take_counters(const char* rung, emulator::Counters& counted) {
  const emulator::Report report = emulator::take_report();
  counted = report.total;
  if (report.problems.empty()) return true;
  std::fprintf(stderr, "error: %s: %s", rung, report.text().c_str());
  return false;
}

/// Prints what a rung did. False where take_counters() is.
template <class T, class Given>
bool show(const Rung<T, Given>& rung, const Shape& shape) {
  emulator::Counters counted;
  if (!take_counters(rung.name, counted)) return false;
  const attention::Cost predicted = rung.cost(shape);
  nlohmann::ordered_json row =
      record_of(rung.name, sizeof(T) == 2 ? "bf16" : "f32", predicted.bytes, counted);
  row["scores_bytes"] = rung.scratch(shape);
  row["blocks"] = predicted.blocks;
  add_flops(row, predicted.flops, counted);
  add_accesses(row, counted);
  std::puts(row.dump().c_str());
  return true;
}

template <class T>
bool run_and_show(const Rung<T>& rung, const Shape& shape) {
  const Attended<T> x(rung, shape);
  rung.run(nullptr, x.problem);
  return show(rung, shape);
}

bool run_and_show(const Rung<bf16, Gradients<bf16>>& rung, const Shape& shape) {
  const Differentiated x(shape);
  x.forward();
  if (!emulator::take_report().problems.empty()) return false;  // which its own row has shown
  rung.run(nullptr, x.gradients);
  return show(rung, shape);
}

/// Prints what a rung did under a mask. `tiles` says, of a shape, for how many tiles the rung
/// multiplies, in products of its own: once by asking each pair of a query and a key, once as if
/// each query saw each key.
template <class Given, class Tiles>
bool show_masked(const Rung<bf16, Given>& rung, const Masks::Mask& mask, const Tiles& tiles) {
  emulator::Counters counted;
  if (!take_counters(rung.name, counted)) return false;
  const Shape& x = mask.shape;
  Shape all = x;
  all.causal = false;
  const int64_t product = int64_t{2} * x.heads * rung.queries * rung.keys * x.width;
  nlohmann::ordered_json row = record_of(rung.name, "bf16", rung.cost(x).bytes, counted);
  row["mask"] = mask.name;
  add_flops(row, tiles(x) * product, counted);
  row["flops_without_a_mask"] = tiles(all) * product;
  std::puts(row.dump().c_str());
  return true;
}

int run_masks(int piece, int width) {
  emulator::options.counters = true;
  for (const Masks::Mask& mask : Masks(piece, width)) {
    attention::check(mask.shape);
    for (const Rung<bf16>* rung : attention::bf16_rungs()) {
      const Attended<bf16> x(*rung, mask.shape);
      rung->run(nullptr, x.problem);
      const auto tiles = [&](const Shape& shape) {
        return 2 * tiles_with_a_pair(shape, rung->queries, rung->keys);
      };
      if (!show_masked(*rung, mask, tiles)) return EXIT_FAILURE;
    }
    for (const auto* rung : attention::backward_rungs()) {
      const Differentiated x(mask.shape);
      x.forward();
      emulator::take_report();  // which the rung's own row has shown
      rung->run(nullptr, x.gradients);
      const auto tiles = [&](const Shape& shape) {
        return 4 * tiles_with_a_pair(shape, rung->keys, rung->queries) +
               3 * tiles_with_a_pair(shape, rung->queries, rung->keys);
      };
      if (!show_masked(*rung, mask, tiles)) return EXIT_FAILURE;
    }
  }
  return EXIT_SUCCESS;
}

/// One query of eight heads, which share two heads of keys.
int run_decoding(int keys, int width) {
  emulator::options.counters = true;
  Shape shape{1, 1, keys, 8, 2, width, /*causal=*/true, {keys - 1}};
  attention::check(shape);
  const auto run = [&](const Rung<bf16>& rung, int splits) {
    shape.splits = splits;
    const Attended<bf16> x(rung, shape);
    rung.run(nullptr, x.problem);
    emulator::Counters counted;
    if (!take_counters(rung.name, counted)) return false;
    const attention::Cost predicted = rung.cost(shape);
    const int tiles = (keys + rung.keys - 1) / rung.keys;
    nlohmann::ordered_json row = record_of(rung.name, "bf16", predicted.bytes, counted);
    row["parts"] = splits;
    row["blocks"] = predicted.blocks;
    row["keys_of_a_block"] = (tiles + splits - 1) / splits * rung.keys;
    row["parts_bytes"] = rung.scratch(shape);
    add_flops(row, predicted.flops, counted);
    std::puts(row.dump().c_str());
    return true;
  };
  const bool all = run(attention::kFlash2, 1) && run(attention::kFlashDecode, 1) &&
                   run(attention::kFlashDecode, attention::splits_of(shape, kMultiprocessors));
  return all ? EXIT_SUCCESS : EXIT_FAILURE;
}

int run_orders() {
  const Rung<bf16>& rung = attention::kFlash3;
  for (const auto& [heads, length] : {std::pair(32, 1024), {32, 4096}, {32, 8192}, {8, 4096}}) {
    const Shape shape = causal_sample(heads, length);
    const auto load = [&](TurnOf turn) { return load_of(shape, rung.queries, rung.keys, turn); };
    const Load taken = load(heaviest_of_all);
    nlohmann::ordered_json row;
    row["name"] = fmt::format("{} x {}", heads, length);
    row["blocks"] = taken.blocks;
    row["mean"] = taken.mean();
    row["lightest_by_head"] = load(lightest_by_head).busiest;
    row["heaviest_by_head"] = load(heaviest_by_head).busiest;
    row["heaviest_of_all"] = taken.busiest;
    row["persistent"] = load_of_persistent(shape, rung.queries, rung.keys).busiest;
    std::puts(row.dump().c_str());
  }
  return EXIT_SUCCESS;
}

int run_exponentials() {
  const Shape shape{1, 128, 1024, 1, 1, 64};
  emulator::options.counters = true;
  for (const Rung<bf16>* rung : attention::bf16_rungs()) {
    const Exponentials each = exponentials_of(*rung, shape);
    nlohmann::ordered_json row;
    row["name"] = rung->name;
    row["tiles"] = shape.keys / rung->keys;
    row["by_unit"] = each.by_unit;
    row["by_polynomial"] = each.by_polynomial;
    row["rescalings"] = each.rescalings;
    std::puts(row.dump().c_str());
  }
  return EXIT_SUCCESS;
}

int run_blocks() {
  const Shape shape{1, 256, 256, kHeads, kHeads, 64};
  emulator::options.counters = true;
  for (const Rung<bf16>* rung : attention::rungs_by_block()) {
    nlohmann::ordered_json row;
    row["name"] = fmt::format("{}", rung->queries);
    row["kept"] = rung->queries * shape.width;
    row["predicted_bytes_of_keys"] = bytes_of_keys_by_formula(*rung, shape);
    row["bytes_of_keys"] = bytes_of_keys(*rung, shape);
    row["predicted_bytes"] = rung->cost(shape).bytes;
    row["bytes"] = bytes_asked(*rung, shape);
    std::puts(row.dump().c_str());
  }
  return EXIT_SUCCESS;
}

int run_degrees() {
  for (const Degree& each : degrees()) {
    nlohmann::ordered_json row;
    row["name"] = fmt::format("{}", each.degree);
    row["fmas"] = each.degree;
    row["error"] = fmt::format("{:.1e}", each.error);
    row["chosen"] = each.degree == attention::kExp2Degree;
    std::puts(row.dump().c_str());
  }
  return EXIT_SUCCESS;
}

int run(int length, int width) {
  const Shape shape{1, length, length, kHeads, kHeads, width};
  attention::check(shape, attention::kWidestKeys);
  emulator::options.counters = true;
  const auto show_all = [&](const auto& rungs) {
    return std::ranges::all_of(
        rungs, [&](const auto* rung) { return !rung->takes(shape) || run_and_show(*rung, shape); });
  };
  const bool all = show_all(attention::f32_rungs()) && show_all(attention::bf16_rungs()) &&
                   show_all(attention::backward_rungs());
  return all ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace usp::lab

int main(int argc, char** argv) {
  if (argc == 2 && argv[1] == std::string_view("degrees")) return usp::lab::run_degrees();
  if (argc == 2 && argv[1] == std::string_view("blocks")) return usp::lab::run_blocks();
  if (argc == 2 && argv[1] == std::string_view("orders")) return usp::lab::run_orders();
  if (argc == 2 && argv[1] == std::string_view("exponentials")) return usp::lab::run_exponentials();
  const std::string_view word = argc == 4 ? argv[1] : "";
  const bool knows = argc == 3 || word == "masks" || word == "decoding";
  const int length = knows ? std::atoi(argv[argc - 2]) : 0;
  if (length < 1) {
    std::fprintf(stderr, "error: S and D must be at least 1; try lab_attention 256 64\n");
    return 2;
  }
  try {
    const int width = std::atoi(argv[argc - 1]);
    if (word == "masks") return usp::lab::run_masks(length, width);
    if (word == "decoding") return usp::lab::run_decoding(length, width);
    return usp::lab::run(length, width);
  } catch (const usp::UsageError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}

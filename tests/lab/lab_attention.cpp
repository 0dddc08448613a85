#include <cstdio>
#include <cstdlib>

#include "base/check.h"
#include "lab/attention_case.h"
#include "lab/record.h"

/// The rungs of attention on the emulated GPU: lab_attention S D prints what each asks for and does
/// for two heads of S queries and keys, D channels wide, one JSON object a line.
namespace usp::lab {
namespace {

constexpr int kHeads = 2;

/// Prints what a rung did. False if the emulator has something to say of it, which is printed.
template <class T, class Given>
bool show(const Rung<T, Given>& rung, const Shape& shape) {
  const emulator::Report report = emulator::take_report();
  if (!report.problems.empty()) {
    std::fprintf(stderr, "error: %s: %s", rung.name, report.text().c_str());
    return false;
  }
  const attention::Cost predicted = rung.cost(shape);
  nlohmann::ordered_json row =
      record_of(rung.name, sizeof(T) == 2 ? "bf16" : "f32", predicted.bytes, report.total);
  row["scores_bytes"] = rung.scratch(shape);
  row["blocks"] = predicted.blocks;
  add_flops(row, predicted.flops, report.total);
  add_accesses(row, report.total);
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

int run(int length, int width) {
  const Shape shape{1, length, length, kHeads, kHeads, width};
  attention::check(shape);
  emulator::options.counters = true;
  for (const auto* rung : attention::f32_rungs()) {
    if (!run_and_show(*rung, shape)) return EXIT_FAILURE;
  }
  for (const auto* rung : attention::bf16_rungs()) {
    if (!run_and_show(*rung, shape)) return EXIT_FAILURE;
  }
  for (const auto* rung : attention::backward_rungs()) {
    if (!run_and_show(*rung, shape)) return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace usp::lab

int main(int argc, char** argv) {
  const int length = argc == 3 ? std::atoi(argv[1]) : 0;
  if (length < 1) {
    std::fprintf(stderr, "error: S and D must be at least 1; try lab_attention 256 64\n");
    return 2;
  }
  try {
    return usp::lab::run(length, std::atoi(argv[2]));
  } catch (const usp::UsageError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}

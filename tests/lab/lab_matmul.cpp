#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/check.h"
#include "lab/case.h"
#include "lab/record.h"
#include "lab/requests.h"

/// The rungs of the ladder on the emulated GPU: lab_matmul M N K prints what each asks for and
/// does, one JSON object a line. lab_matmul stalls M N K prints what the f32 rungs let a
/// multiprocessor do between two requests to memory.
namespace usp::lab {
namespace {

/// The largest error beside the largest number, of sums in f64.
template <class T>
double relative_error(const Case<T>& x) {
  const std::vector<double> a = x.a(), b = x.b(), c = x.c();
  const auto [m, n, k] = std::tuple(x.product.m, x.product.n, x.product.k);
  double error = 0, scale = 0;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int l = 0; l < k; ++l) {
        sum += a[i * k + l] * (Case<T>::kTransposed ? b[j * k + l] : b[l * n + j]);
      }
      scale = std::max(scale, std::abs(sum));
      const double found = std::abs(c[i * n + j] - sum);
      if (!(found <= error)) error = found;
    }
  }
  return error / scale;
}

/// False if the emulator has something to say of the rung, which is printed.
template <class T>
bool show(const ladder::Rung<T>& rung, int m, int n, int k) {
  const Case<T> x(m, n, k);
  ladder::check(rung, x.product);
  rung.run(nullptr, x.product);
  const emulator::Report report = emulator::take_report();
  if (!report.problems.empty()) {
    std::fprintf(stderr, "error: %s: %s", rung.name, report.text().c_str());
    return false;
  }
  const emulator::Counters& counted = report.total;
  const ladder::Cost predicted = predict(rung, x.product);
  nlohmann::ordered_json row =
      record_of(rung.name, Case<T>::kTransposed ? "bf16" : "f32", predicted.bytes, counted);
  add_flops(row, predicted.flops, counted);
  const ladder::Cost of_block = rung.cost(k);
  row["predicted_bytes_a_block"] = of_block.bytes;
  row["predicted_flops_a_block"] = of_block.flops;
  const ladder::Cost large =
      predict(rung, ladder::Product<T>{4096, 4096, 4096, {}, 0, {}, 0, {}, 0});
  row["predicted_flops_per_byte"] =
      static_cast<double>(large.flops) / static_cast<double>(large.bytes);
  row["bytes_at_4096"] = large.bytes;
  add_accesses(row, counted);
  row["error"] = relative_error(x);
  std::puts(row.dump().c_str());
  return true;
}

/// False as above.
bool show_requests(const ladder::Rung<float>& rung, int m, int n, int k) {
  const Case<float> x(m, n, k);
  rung.run(nullptr, x.product);
  const emulator::Report report = emulator::take_report();
  if (!report.problems.empty()) {
    std::fprintf(stderr, "error: %s: %s", rung.name, report.text().c_str());
    return false;
  }
  const Requests requests = requests_of(report.total, m, n, k);
  std::puts(nlohmann::ordered_json{{"name", rung.name},
                                   {"type", "f32"},
                                   {"global_requests", requests.global},
                                   {"shared_requests", requests.shared},
                                   {"fmas_per_request", requests.fmas_of_each()},
                                   {"percent_of_peak_at_most", requests.most_percent()},
                                   {"barriers", report.total.barriers}}
                .dump()
                .c_str());
  return true;
}

int run_stalls(int m, int n, int k) {
  emulator::options.counters = true;
  for (const auto* rung : ladder::f32_rungs()) {
    if (!show_requests(*rung, m, n, k)) return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

int run(int m, int n, int k) {
  emulator::options.counters = true;
  for (const auto* rung : ladder::f32_rungs()) {
    if (!show(*rung, m, n, k)) return EXIT_FAILURE;
  }
  for (const auto* rung : ladder::bf16_rungs()) {
    if (!show(*rung, m, n, k)) return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace usp::lab

int main(int argc, char** argv) {
  int sizes[3] = {};
  const bool stalls = argc > 1 && std::string(argv[1]) == "stalls";
  if (stalls) ++argv, --argc;
  for (int i = 0; i < 3 && i + 1 < argc; ++i) sizes[i] = std::atoi(argv[i + 1]);
  if (argc != 4 || sizes[0] < 1 || sizes[1] < 1 || sizes[2] < 1) {
    std::fprintf(stderr, "error: M, N and K must be at least 1; try lab_matmul 128 256 128\n");
    return 2;
  }
  return (stalls ? usp::lab::run_stalls : usp::lab::run)(sizes[0], sizes[1], sizes[2]);
}

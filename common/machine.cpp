#include "machine.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <dnnl.hpp>
#include <fstream>
#include <sstream>

#include "commit.h"
#include "ops.h"
#include "rng.h"
#include "runtime.h"

namespace usp {

namespace {

constexpr const char* kInstructionSets[] = {"avx2",        "fma",      "avx512f", "avx512_vnni",
                                            "avx512_bf16", "amx_bf16", "asimd",   "bf16"};

/// The value of the first /proc/cpuinfo line that starts with `key`.
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with(key) && colon + 2 <= line.size()) return line.substr(colon + 2);
  }
  return "";
}

std::string onednn_isa() {
#if defined(__x86_64__)
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::avx2:
      return "avx2";
    case dnnl::cpu_isa::avx512_core:
    case dnnl::cpu_isa::avx512_core_vnni:
      return "avx512";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "avx512_bf16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "avx512_amx";
    default:
      return "other";
  }
#else
  return "native";
#endif
}

Tensor random_matrix(int64_t rows, int64_t columns, DType dtype, const std::string& name) {
  const RandomStream stream(1, name);
  std::vector<double> values(rows * columns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = stream.uniform(i) - 0.5;
  return Tensor::from_host(values, {rows, columns}, dtype);
}

}  // namespace

std::string cpu_name() {
  const std::string name = cpuinfo("model name");
  return name.empty() ? "unknown CPU" : name;
}

std::string instruction_sets() {
  std::istringstream words(cpuinfo("flags") + " " + cpuinfo("Features"));
  std::vector<std::string> present;
  for (std::string word; words >> word;) {
    if (std::ranges::find(kInstructionSets, word) != std::end(kInstructionSets)) {
      present.push_back(word);
    }
  }
  return fmt::format("{}", fmt::join(present, " "));
}

int available_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::string build_commit() { return USP_COMMIT; }

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

std::string build_architecture() { return USP_ARCH_FLAGS; }

std::string matmul_library() {
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("oneDNN {}.{}.{} ({})", version->major, version->minor, version->patch,
                     onednn_isa());
}

std::string build_report() {
  return fmt::format(
      "ultrascale.cpp {}\n"
      "compiler      {}\n"
      "built for     {}\n"
      "CPU           {}, {} cores\n"
      "has           {}\n"
      "matmul        {}\n"
      "bf16 matmul   {}",
      build_commit(), compiler(), build_architecture(), cpu_name(), available_cores(),
      instruction_sets(), matmul_library(),
      matmul_library().find("bf16") != std::string::npos ||
              matmul_library().find("amx") != std::string::npos
          ? "native"
          : "by conversion to f32");
}

double measure_matmul_gflops(DType dtype, const std::vector<MatmulShape>& shapes, double seconds) {
  const CategoryScope scope(Category::workspace);
  struct Product {
    Tensor a, b, c;
  };
  std::vector<Product> products;
  double flops = 0;
  for (const MatmulShape& shape : shapes) {
    products.push_back({random_matrix(shape.m, shape.k, dtype, "a"),
                        random_matrix(shape.n, shape.k, dtype, "b"),
                        Tensor::empty({shape.m, shape.n}, dtype)});
    flops += 2.0 * shape.m * shape.n * shape.k;
  }
  using Clock = std::chrono::steady_clock;
  const auto elapsed = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  double best = HUGE_VAL;
  const auto begin = Clock::now();
  // The first two rounds create the library's kernels and wake the cores; they do not count.
  for (int round = -2; round < 3 || elapsed(begin) < seconds; ++round) {
    const auto round_begin = Clock::now();
    for (Product& product : products) {
      ops::matmul(product.c, product.a, product.b.transposed());
    }
    if (round >= 0) best = std::min(best, elapsed(round_begin));
  }
  return flops / best * 1e-9;
}

}  // namespace usp

// Measures on a GPU what ./book gpu-check shows beside a data sheet: the matrix library's products,
// and memory-bound kernels beside a copy. Prints JSON.

#include <algorithm>
#include <chrono>
#include <functional>

#include "base/args.h"
#include "base/rng.h"
#include "tensor/console.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

constexpr int kRounds = 5;
constexpr double kRoundSeconds = 0.1;

/// Seconds of one call: the median of rounds, each of as many calls as fill a tenth of a second.
double seconds_of(const std::function<void()>& call) {
  const auto time = [&](int64_t calls) {
    Runtime::current().wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    Runtime::current().wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  time(2);  // chooses kernels, wakes the GPU
  const int64_t calls = std::max<int64_t>(1, std::llround(kRoundSeconds / (time(3) / 3)));
  std::vector<double> rounds;
  for (int i = 0; i < kRounds; ++i) rounds.push_back(time(calls) / double(calls));
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

/// Numbers between -0.5 and 0.5 that repeat: products of zeros take less power, and less time.
Tensor numbers(const Shape& shape, DType dtype) {
  const RandomStream stream(1, "gpu_bench");
  std::vector<double> values(1 << 16);
  for (size_t i = 0; i < values.size(); ++i) values[i] = stream.uniform(i) - 0.5;
  const Tensor pattern = Tensor::from_host(values, {1 << 16}, dtype);
  const Tensor x = Tensor::empty(shape, dtype), flat = x.view({x.numel()});
  for (int64_t first = 0; first < x.numel(); first += pattern.numel()) {
    const int64_t count = std::min(pattern.numel(), x.numel() - first);
    ops::copy(flat.narrow(0, first, count), pattern.narrow(0, 0, count));
  }
  return x;
}

/// Square products.
std::string measure_products() {
  std::string text;
  for (DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    const int64_t n = dtype == DType::f64 ? 4096 : 8192;
    const Tensor a = numbers({n, n}, dtype), b = numbers({n, n}, dtype);
    const Tensor c = Tensor::empty({n, n}, dtype);
    const double seconds = seconds_of([&] { ops::matmul(c, a, b.transposed()); });
    text += fmt::format("{}{{\"dtype\": \"{}\", \"n\": {}, \"tflops\": {:.2f}}}",
                        text.empty() ? "" : ", ", name(dtype), n,
                        2e-12 * double(n) * double(n) * double(n) / seconds);
  }
  return text;
}

struct Kernel {
  std::string name;
  int64_t bytes;  ///< that its operands imply, each read or written once
  std::function<void()> run;
};

/// Kernels of a transformer with rows of 4096, in bf16, beyond what caches hold.
std::string measure_memory() {
  const int64_t T = 16384, H = 4096, V = 32768;
  const DType dtype = DType::bf16, acc = accumulate_dtype(dtype);
  const Tensor x = numbers({T, H}, dtype), y = numbers({T, H}, dtype), z = numbers({T, H}, dtype);
  const Tensor gate_up = numbers({T, 2 * H}, dtype), weight = numbers({H}, dtype);
  const Tensor logits = numbers({T / 4, V}, dtype);
  const Tensor targets = Tensor::from_host(std::vector<int32_t>(T / 4, 5), {T / 4});
  const Tensor rstd = Tensor::zeros({T}, acc), max = Tensor::zeros({T / 4}, acc);
  const Tensor sum = Tensor::zeros({T / 4}, acc), target = Tensor::zeros({T / 4}, acc);
  const Tensor table = numbers({T, 64}, acc), heads = x.view({1, T, H / 128, 128});
  const int64_t n = int64_t{1} << 26;
  const Tensor value = Tensor::zeros({n}, dtype), grad = Tensor::zeros({n}, acc);
  const Tensor master = Tensor::zeros({n}, acc), m = Tensor::zeros({n}, acc);
  const Tensor v = Tensor::zeros({n}, acc), one = Tensor::zeros({1}, DType::f64);
  AdamWSettings settings;
  settings.lr = 1e-3;
  const Kernel kernels[] = {
      {"copy", 2 * x.bytes(), [&] { ops::copy(y, x); }},
      {"add", 3 * x.bytes(), [&] { ops::add(y, x, z); }},
      {"rmsnorm_forward", 2 * x.bytes(), [&] { ops::rmsnorm_forward(y, rstd, x, weight, 1e-5); }},
      {"rmsnorm_backward_input", 3 * x.bytes(),
       [&] { ops::rmsnorm_backward_input(y, z, x, weight, rstd, {}); }},
      {"rope", 2 * x.bytes() + 2 * table.bytes(),
       [&] {
         ops::rope(heads, table, table, {0, T}, false);
       }},
      {"swiglu_forward", 3 * x.bytes(), [&] { ops::swiglu_forward(y, gate_up); }},
      {"swiglu_backward", 5 * x.bytes(), [&] { ops::swiglu_backward(gate_up, y, gate_up); }},
      {"cross_entropy_forward", logits.bytes(),
       [&] { ops::cross_entropy_forward(max, sum, target, logits, targets, 0); }},
      {"adamw", value.bytes() + 7 * master.bytes(),
       [&] { ops::adamw(value, master, m, v, grad, one, settings); }},
  };
  std::string text;
  double copy = 0;
  for (const Kernel& kernel : kernels) {
    const double rate = 1e-9 * double(kernel.bytes) / seconds_of(kernel.run);
    if (copy == 0) copy = rate;
    text += fmt::format("{}{{\"kernel\": \"{}\", \"gb_per_s\": {:.0f}, \"of_copy\": {:.3f}}}",
                        text.empty() ? "" : ", ", kernel.name, rate, rate / copy);
  }
  return text;
}

int run(int argc, char** argv) {
  std::string measure = "products";
  Args args("Times products and kernels of a GPU.");
  args.bind("measure", measure, {"products", "memory"}, "what to measure");
  if (!args.parse(argc, argv)) return 0;
  Runtime runtime(Device::cuda);
  const Runtime::Use use(runtime);
  print("[{}]\n", measure == "products" ? measure_products() : measure_memory());
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::run, argc, argv); }

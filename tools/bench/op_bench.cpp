// Measures what ./book bench compares a training step with, with the kernels that training uses:
// the model's matrix products alone, memory-bound operations next to what the memory delivers,
// attention next to the matmul library, and ways of working next to what they replace. Prints JSON.

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>

#include "base/args.h"
#include "base/rng.h"
#include "cpu/parallel.h"
#include "tensor/console.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Bytes that no cache holds: four times the last level. The kernel knows its size better than
/// sysconf(), which on some CPUs gives that of all caches of the package together.
int64_t beyond_caches() {
  int64_t largest_kib = 16 << 10;
  for (int index = 0; index < 5; ++index) {
    std::ifstream file(fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/size", index));
    int64_t kib = 0;
    if (file >> kib) largest_kib = std::max(largest_kib, kib);
  }
  return 4 * (largest_kib << 10);
}

/// Random numbers in [-0.5, 0.5), which repeat after 2^16.
Tensor random_tensor(const Shape& shape, DType dtype) {
  static const std::vector<double> numbers = [] {
    const RandomStream stream(1, "op_bench");
    std::vector<double> values(1 << 16);
    for (size_t i = 0; i < values.size(); ++i) values[i] = stream.uniform(i) - 0.5;
    return values;
  }();
  static const Tensor pattern = Tensor::from_host(numbers, {1 << 16}, DType::f32);
  const Tensor x = Tensor::empty(shape, dtype), flat = x.view({x.numel()});
  for (int64_t first = 0; first < x.numel(); first += pattern.numel()) {
    const int64_t count = std::min(pattern.numel(), x.numel() - first);
    ops::copy(flat.narrow(0, first, count), pattern.narrow(0, 0, count));
  }
  return x;
}

/// Token ids below `vocab`.
Tensor random_tokens(int64_t count, int64_t vocab) {
  const RandomStream stream(1, "tokens");
  std::vector<int32_t> tokens(count);
  for (int64_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<int32_t>(stream.bits(i).a % static_cast<uint64_t>(vocab));
  }
  return Tensor::from_host(tokens, {count});
}

/// The flags, named as a chapter names them; defaults as for the operations alone.
struct Config {
  int64_t hidden_size = 512, num_layers = 8, num_heads = 8, num_kv_heads = 8;
  int64_t ffn_hidden_size = 1376, vocab_size = 4096, seq_len = 512, micro_batch_size = 4;
  int64_t activation_bytes = 1 << 28;
  std::string dtype_name = "f32", measure = "bound";
  double seconds = 2;

  void bind(Args& args) {
    args.bind("measure", measure, {"bound", "memory", "attention", "techniques"},
              "what to measure");
    args.bind("hidden_size", hidden_size, "channels of the residual stream");
    args.bind("num_layers", num_layers, "");
    args.bind("num_heads", num_heads, "");
    args.bind("num_kv_heads", num_kv_heads, "");
    args.bind("ffn_hidden_size", ffn_hidden_size, "");
    args.bind("vocab_size", vocab_size, "");
    args.bind("seq_len", seq_len, "");
    args.bind("micro_batch_size", micro_batch_size, "");
    args.bind("activation_bytes", activation_bytes, "most that a step keeps at a time");
    args.bind("dtype", dtype_name, {"f32", "bf16"}, "");
    args.bind("seconds", seconds, "to measure, after warming up");
  }
  DType dtype() const { return parse_dtype(dtype_name); }
  int64_t head_dim() const { return hidden_size / num_heads; }
  int64_t tokens() const { return micro_batch_size * seq_len; }
};

/// One linear layer's operands and results; a step does it `count` times.
struct LinearBuffers {
  Tensor x, weight, y, dx, dweight;

  LinearBuffers(int64_t tokens, int64_t in, int64_t out, DType dtype)
      : x(random_tensor({tokens, in}, dtype)),
        weight(random_tensor({out, in}, dtype)),
        y(random_tensor({tokens, out}, dtype)),
        dx(Tensor::empty(x.shape(), dtype)),
        dweight(Tensor::empty(weight.shape(), accumulate_dtype(dtype))) {}

  int64_t bytes() const { return 2 * x.bytes() + weight.bytes() + y.bytes() + dweight.bytes(); }

  static constexpr int kProducts = 3;
  void run(int product) const {
    if (product == 0) ops::linear_forward(y, x, weight);
    if (product == 1) ops::linear_backward_input(dx, y, weight);
    if (product == 2) ops::linear_backward_weight(dweight, y, x, /*accumulate=*/false);
  }
};

/// A model's linear layers as [in, out] and how many of each.
struct LinearShape {
  int64_t in, out, count;
};

std::vector<LinearShape> linear_shapes(const Config& c) {
  const int64_t q = c.num_heads * c.head_dim(), kv = c.num_kv_heads * c.head_dim();
  return {{c.hidden_size, q + 2 * kv, c.num_layers},
          {q, c.hidden_size, c.num_layers},
          {c.hidden_size, 2 * c.ffn_hidden_size, c.num_layers},
          {c.ffn_hidden_size, c.hidden_size, c.num_layers},
          {c.hidden_size, c.vocab_size, 1}};
}

/// Operations of causal attention's products: scores and values forward, their four gradients
/// backward; what a kernel computes a second time does not count.
double attention_flops(const Config& c) {
  const Positions positions(0, c.seq_len);
  return 6 * 2.0 * double(c.micro_batch_size * c.num_heads * c.head_dim()) *
         double(causal_pairs(positions, positions));
}

/// The time that a step's matrix products alone would take. The buffers take turns, so that
/// operands come from memory as they do in a step, whose other layers lie in between.
std::string measure_bound(const Config& config) {
  const std::vector<LinearShape> shapes = linear_shapes(config);
  std::vector<std::vector<LinearBuffers>> sets;
  for (int64_t bytes = 0; bytes < beyond_caches() || sets.size() < 2;) {
    sets.emplace_back();
    for (const LinearShape& shape : shapes) {
      sets.back().emplace_back(config.tokens(), shape.in, shape.out, config.dtype());
      bytes += sets.back().back().bytes();
    }
  }
  std::vector<std::vector<double>> times(shapes.size() * LinearBuffers::kProducts);
  double elapsed = 0;
  for (size_t round = 0; round < 2 * sets.size() || elapsed < config.seconds; ++round) {
    for (size_t i = 0; i < times.size(); ++i) {
      const LinearBuffers& buffers = sets[round % sets.size()][i / LinearBuffers::kProducts];
      const int product = static_cast<int>(i % LinearBuffers::kProducts);
      const double seconds = seconds_of([&] { buffers.run(product); });
      if (round < sets.size()) continue;  // warms up
      times[i].push_back(seconds);
      elapsed += seconds;
    }
  }
  double seconds[LinearBuffers::kProducts] = {}, flops = 0;
  for (size_t i = 0; i < times.size(); ++i) {
    const LinearShape& shape = shapes[i / LinearBuffers::kProducts];
    seconds[i % LinearBuffers::kProducts] += double(shape.count) * median(times[i]);
    flops += 2.0 * double(config.tokens() * shape.in * shape.out * shape.count);
  }
  const double linear = seconds[0] + seconds[1] + seconds[2], rate = flops / linear;
  const double attention = double(config.num_layers) * attention_flops(config) / rate;
  const double each = flops / LinearBuffers::kProducts * 1e-9;
  return fmt::format(
      "{{\"bound_tokens_per_s\": {:.1f}, \"bound_ms\": {:.3f}, \"bound_gflops\": {:.1f}, "
      "\"forward_gflops\": {:.1f}, \"input_gflops\": {:.1f}, \"weight_gflops\": {:.1f}}}",
      double(config.tokens()) / (linear + attention), 1e3 * (linear + attention), 1e-9 * rate,
      each / seconds[0], each / seconds[1], each / seconds[2]);
}

/// One of several ways to get the same result. What it takes is per step.
struct Way {
  std::string technique;
  bool with;  ///< the technique, or without it
  std::function<void()> run;
  double times_per_step = 1;
  std::vector<double> seconds{};

  /// The least of all rounds: what two ways differ by may be less than what disturbs either.
  double ms() const {
    return 1e3 * times_per_step * *std::min_element(seconds.begin(), seconds.end());
  }
};

/// Several layers that read the same x, as one product over weights that lie side by side and as a
/// product each, whose input gradients are to be added up.
void add_fused_products(std::vector<Way>& ways, const std::string& technique, int64_t in,
                        const std::vector<int64_t>& outs, const Config& config) {
  const double layers = double(config.num_layers);
  int64_t all = 0;
  for (int64_t out : outs) all += out;
  const LinearBuffers fused(config.tokens(), in, all, config.dtype());
  const auto forward_and_backward = [](const LinearBuffers& buffers) {
    for (int product = 0; product < LinearBuffers::kProducts; ++product) buffers.run(product);
  };
  ways.push_back({technique, true, [=] { forward_and_backward(fused); }, layers});
  std::vector<LinearBuffers> parts;
  for (int64_t out : outs) parts.emplace_back(config.tokens(), in, out, config.dtype());
  for (LinearBuffers& part : parts) part.x = fused.x;
  ways.push_back({technique, false,
                  [=] {
                    for (const LinearBuffers& part : parts) forward_and_backward(part);
                    for (size_t i = 1; i < parts.size(); ++i) {
                      ops::add(parts[0].dx, parts[0].dx, parts[i].dx);
                    }
                  },
                  layers});
}

/// Gradients of weights that the product writes over what was there, and gradients that begin as 0
/// and are added to.
void add_first_gradients(std::vector<Way>& ways, const Config& config) {
  for (const LinearShape& shape : linear_shapes(config)) {
    const LinearBuffers buffers(config.tokens(), shape.in, shape.out, config.dtype());
    for (bool overwrite : {true, false}) {
      ways.push_back({"first_gradients_overwrite", overwrite,
                      [=] {
                        if (!overwrite) ops::fill(buffers.dweight, 0);
                        ops::linear_backward_weight(buffers.dweight, buffers.y, buffers.x,
                                                    !overwrite);
                      },
                      double(shape.count)});
    }
  }
}

/// A step's activations in memory that is there from the step before, and in memory that the system
/// has to hand out and clear.
void add_kept_memory(std::vector<Way>& ways, const Config& config) {
  const auto touch = [](void* memory, int64_t bytes) { std::memset(memory, 1, bytes); };
  const int64_t bytes = config.activation_bytes;
  const Tensor kept = Tensor::zeros({bytes / 4}, DType::f32);
  ways.push_back({"memory_is_kept", true, [=] { touch(kept.address(), bytes); }});
  ways.push_back({"memory_is_kept", false, [=] {
                    void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                    if (fresh == MAP_FAILED) fail("the system has no {} bytes", bytes);
                    touch(fresh, bytes);
                    munmap(fresh, bytes);
                  }});
}

/// What techniques take a step, and what their absence would.
std::string measure_techniques(const Config& config) {
  const int64_t q = config.num_heads * config.head_dim();
  const int64_t kv = config.num_kv_heads * config.head_dim();
  std::vector<Way> ways;
  add_fused_products(ways, "one_product_for_qkv", config.hidden_size, {q, kv, kv}, config);
  add_fused_products(ways, "one_product_for_gate_and_up", config.hidden_size,
                     {config.ffn_hidden_size, config.ffn_hidden_size}, config);
  add_first_gradients(ways, config);
  add_kept_memory(ways, config);
  double elapsed = 0;
  for (int round = -2; round < 5 || elapsed < config.seconds; ++round) {
    for (Way& way : ways) {
      const double seconds = seconds_of(way.run);
      if (round < 0) continue;
      way.seconds.push_back(seconds);
      elapsed += seconds;
    }
  }
  std::map<std::string, std::array<double, 2>> ms;
  for (const Way& way : ways) ms[way.technique][way.with] += way.ms();
  std::string text;
  for (const auto& [technique, each] : ms) {
    text += fmt::format("{}{{\"technique\": \"{}\", \"with_ms\": {:.3f}, \"without_ms\": {:.3f}}}",
                        text.empty() ? "" : ", ", technique, each[1], each[0]);
  }
  return fmt::format("[{}]", text);
}

/// Random tensors out of memory that is asked for once: the first touch of a page takes longer
/// than all that is measured here.
class Pool {
 public:
  explicit Pool(DType dtype)
      : all_(random_tensor({beyond_caches() * 5 / 4 / bytes_of(dtype)}, dtype)) {}

  Tensor take(const Shape& shape) {
    const Tensor x = all_.narrow(0, used_, shape.numel()).view(shape);
    used_ += (shape.numel() + kStagger) / 32 * 32;  // whole cache lines
    return x;
  }
  void clear() { used_ = 0; }

 private:
  /// Elements between tensors: streams a power of two apart would meet in the same sets of a cache.
  static constexpr int64_t kStagger = 5000;

  Tensor all_;
  int64_t used_ = 0;
};

/// Memory for operands in the dtype measured, and for sums and statistics in f32.
struct Pools {
  Pool values, sums;
};

/// Something that streams through memory: its name and bytes per call, as its operands imply.
struct Stream {
  std::string name;
  int64_t bytes;
  std::function<void()> run;
  std::vector<double> seconds{};

  double gb_per_s() const { return 1e-9 * double(bytes) / median(seconds); }
};

/// How many times something of `bytes` bytes goes into what a call is to move.
int64_t times(int64_t bytes) { return beyond_caches() / bytes; }

/// a = b + s * c, the triad of McCalpin's STREAM.
Stream triad(Pool& pool) {
  pool.clear();
  const int64_t count = times(3 * sizeof(float));
  const Tensor a = pool.take({count}), b = pool.take({count}), c = pool.take({count});
  return {"triad", 3 * a.bytes(), [=] {
            float* to = a.data<float>();
            const float *left = b.data<float>(), *right = c.data<float>();
            cpu::parallel_for_elements(count,
                                       [=](int64_t i) { to[i] = left[i] + 0.5F * right[i]; });
          }};
}

std::vector<Stream> norm_streams(const Config& config, Pools& pools) {
  const int64_t H = config.hidden_size, rows = times(3 * H * bytes_of(config.dtype()));
  const Tensor x = pools.values.take({rows, H}), y = pools.values.take({rows, H}),
               dx = pools.values.take({rows, H}), weight = pools.values.take({H}),
               rstd = pools.sums.take({rows}), dweight = pools.sums.take({H});
  return {
      {"rmsnorm_forward", 2 * x.bytes(), [=] { ops::rmsnorm_forward(y, rstd, x, weight, 1e-5); }},
      {"rmsnorm_backward_input", 3 * x.bytes(),
       [=] { ops::rmsnorm_backward_input(dx, y, x, weight, rstd, {}); }},
      {"rmsnorm_backward_weight", 2 * x.bytes(),
       [=] { ops::rmsnorm_backward_weight(dweight, y, x, rstd, false); }}};
}

std::vector<Stream> rope_streams(const Config& config, Pools& pools) {
  const int64_t S = config.seq_len, N = config.num_heads, D = config.head_dim();
  const Tensor x = pools.values.take({times(S * N * D * bytes_of(config.dtype())), S, N, D});
  const Tensor cos = pools.sums.take({S, D / 2}), sin = pools.sums.take({S, D / 2});
  return {{"rope", 2 * x.bytes(), [=] { ops::rope(x, cos, sin, Positions(0, S), false); }}};
}

std::vector<Stream> softmax_streams(const Config& config, Pools& pools) {
  const int64_t S = config.seq_len, N = config.num_heads;
  const int64_t samples = times(2 * N * S * S * bytes_of(config.dtype()));
  const Tensor scores = pools.values.take({samples, N, S, S}),
               probs = pools.values.take(scores.shape()), lse = pools.sums.take({samples, N, S});
  const Positions positions(0, S);
  Backend* backend = &Runtime::current().backend();
  return {
      {"causal_softmax_forward", 2 * probs.bytes(),
       [=] { backend->causal_softmax_forward(probs, lse, scores, 0.1, positions, positions, {}); }},
      {"causal_softmax_backward", 3 * probs.bytes(),
       [=] { backend->causal_softmax_backward(scores, scores, probs, lse, 0.1); }}};
}

std::vector<Stream> swiglu_streams(const Config& config, Pools& pools) {
  const int64_t F = config.ffn_hidden_size, rows = times(5 * F * bytes_of(config.dtype()));
  const Tensor gate_up = pools.values.take({rows, 2 * F}), hidden = pools.values.take({rows, F}),
               dgate_up = pools.values.take({rows, 2 * F});
  return {{"swiglu_forward", gate_up.bytes() + hidden.bytes(),
           [=] { ops::swiglu_forward(hidden, gate_up); }},
          {"swiglu_backward", 2 * gate_up.bytes() + hidden.bytes(),
           [=] { ops::swiglu_backward(dgate_up, hidden, gate_up); }}};
}

std::vector<Stream> loss_streams(const Config& config, Pools& pools) {
  const int64_t V = config.vocab_size, rows = times(2 * V * bytes_of(config.dtype()));
  const Tensor logits = pools.values.take({rows, V}), dlogits = pools.values.take({rows, V}),
               row = pools.sums.take({rows}), targets = random_tokens(rows, V);
  return {{"cross_entropy_forward", logits.bytes(),
           [=] { ops::cross_entropy_forward(row, row, row, logits, targets); }},
          {"cross_entropy_backward", 2 * logits.bytes(),
           [=] { ops::cross_entropy_backward(dlogits, logits, targets, row, 0, 1e-3); }}};
}

std::vector<Stream> optimizer_streams(const Config& config, Pools& pools) {
  const bool wide = config.dtype() == DType::f32;  // the weights are their own master copy
  const int64_t count = times(4 * sizeof(float));
  const Tensor master = pools.sums.take({count}), grad = pools.sums.take({count}),
               m = pools.sums.take({count}), v = pools.sums.take({count}),
               value = wide ? master : pools.values.take({count}),
               one = Tensor::zeros({1}, DType::f64), sum = Tensor::zeros({1}, DType::f64);
  ops::fill(one, 1);
  ops::fill(v, 0.01);
  return {{"adamw", 7 * master.bytes() + (wide ? 0 : value.bytes()),
           [=] { ops::adamw(value, master, m, v, grad, one, {.lr = 1e-3}); }},
          {"sum_squares", grad.bytes(), [=] { ops::sum_squares(sum, grad); }}};
}

/// Rates of the memory-bound operations, in turns with triad.
std::string measure_memory(const Config& config) {
  Pools pools{Pool(config.dtype()), Pool(DType::f32)};
  Pool triad_memory(DType::f32);
  std::string text;
  for (const auto make : {norm_streams, rope_streams, softmax_streams, swiglu_streams, loss_streams,
                          optimizer_streams}) {
    pools.values.clear();
    pools.sums.clear();
    std::vector<Stream> streams = make(config, pools);
    streams.push_back(triad(triad_memory));
    double elapsed = 0;
    for (int round = -1; round < 5 || elapsed < config.seconds; ++round) {
      for (Stream& stream : streams) {
        const double seconds = seconds_of(stream.run);
        if (round < 0) continue;
        stream.seconds.push_back(seconds);
        elapsed += seconds;
      }
    }
    const double reference = streams.back().gb_per_s();
    streams.pop_back();
    for (const Stream& stream : streams) {
      text += fmt::format(
          "{}{{\"op\": \"{}\", \"gb_per_s\": {:.2f}, \"triad_gb_per_s\": {:.2f}, "
          "\"fraction\": {:.3f}}}",
          text.empty() ? "" : ", ", stream.name, stream.gb_per_s(), reference,
          stream.gb_per_s() / reference);
    }
  }
  return fmt::format("[{}]", text);
}

/// Attention forward and backward, in turns with a linear layer's product in f32 of about as many
/// operations.
std::string measure_attention(const Config& config) {
  const DType dtype = config.dtype(), acc = accumulate_dtype(dtype);
  const int64_t B = config.micro_batch_size, S = config.seq_len, N = config.num_heads,
                G = config.num_kv_heads, D = config.head_dim();
  const Positions positions(0, S);
  const Tensor qkv = random_tensor({B, S, N + 2 * G, D}, dtype),
               dqkv = Tensor::empty(qkv.shape(), dtype);
  const auto part = [&](const Tensor& x, int which) {
    return which == 0 ? x.narrow(2, 0, N) : x.narrow(2, N + (which - 1) * G, G);
  };
  const Tensor out = random_tensor({B, S, N, D}, dtype), dout = random_tensor({B, S, N, D}, dtype),
               lse = Tensor::empty({B, N, S}, acc), delta = Tensor::empty({B, N, S}, acc);
  const double scale = 1 / std::sqrt(double(D));
  const Tensor a = random_tensor({config.tokens(), config.hidden_size}, DType::f32),
               b = random_tensor({2 * config.ffn_hidden_size, config.hidden_size}, DType::f32),
               c = Tensor::empty({a.size(0), b.size(0)}, DType::f32);
  std::vector<double> forward, backward, matmul;
  double elapsed = 0;
  for (int round = -2; round < 5 || elapsed < config.seconds; ++round) {
    const double f = seconds_of([&] {
      ops::attention_forward(out, lse, {}, part(qkv, 0), part(qkv, 1), part(qkv, 2), scale,
                             positions, positions);
    });
    const double g = seconds_of([&] {
      ops::attention_delta(delta, dout, out);
      ops::attention_backward(part(dqkv, 0), part(dqkv, 1), part(dqkv, 2), dout, {}, part(qkv, 0),
                              part(qkv, 1), part(qkv, 2), lse, delta, scale, positions, positions,
                              /*accumulate=*/false);
    });
    const double m = seconds_of([&] { ops::linear_forward(c, a, b); });
    if (round < 0) continue;
    forward.push_back(f);
    backward.push_back(g);
    matmul.push_back(m);
    elapsed += f + g + m;
  }
  const double flops = 1e-9 * attention_flops(config);
  const double rate = flops / (median(forward) + median(backward));
  const double reference = 2e-9 * double(c.numel() * a.size(1)) / median(matmul);
  return fmt::format(
      "{{\"forward_gflops\": {:.1f}, \"backward_gflops\": {:.1f}, \"gflops\": {:.1f}, "
      "\"f32_matmul_gflops\": {:.1f}, \"fraction\": {:.3f}}}",
      flops / 3 / median(forward), flops * 2 / 3 / median(backward), rate, reference,
      rate / reference);
}

int run(int argc, char** argv) {
  Config config;
  Args args("Times operations.");
  config.bind(args);
  if (!args.parse(argc, argv)) return 0;
  Runtime runtime(Device::cpu);
  const Runtime::Use use(runtime);
  print("{}\n", config.measure == "bound"       ? measure_bound(config)
                : config.measure == "memory"    ? measure_memory(config)
                : config.measure == "attention" ? measure_attention(config)
                                                : measure_techniques(config));
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::run, argc, argv); }

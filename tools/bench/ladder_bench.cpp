// Measures on a GPU what chapter 9's pages ask of one: what the card is, the rungs of its two
// ladders, in turns with cuBLAS or with the trainer's attention, and those of one idea. Prints a
// JSON object a line. The tests run the same source on the emulated GPU.

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>

#include "base/args.h"
#include "cuda/cuda_device.h"
#include "cuda/device_limits.h"
#include "cuda/queue.h"
#include "gpu_numbers.h"
#include "kernels/attention/ladder.h"
#include "kernels/ideas/ideas.h"
#include "kernels/matmul/ladder.h"
#include "tensor/console.h"
#include "tensor/ops.h"

namespace usp {
namespace {

constexpr int kRounds = 5;
constexpr int kHopper = 90;
constexpr int kFirstOfBf16 = 80;
constexpr int kShare = 4;  ///< heads of a query that share keys, where decoding is measured
/// The most numbers of which one sum is exact in f32 in any order, if each is 1.
constexpr int64_t kExact = 1 << 24;

struct Options {
  std::string measure = "matmul", rung;  ///< rung: empty for all
  int64_t m = 4096, n = 4096, k = 4096;
  int64_t seq_len = 4096, num_heads = 16, head_dim = 128;
  bool causal = false;
  std::string inputs = "uniform";  ///< of a product
  int64_t numbers = 1 << 28;       ///< of a copy, and of a chain of FMAs
  double seconds = 0.05;           ///< that the calls of a round fill; 0: each is called once

  void bind(Args& args) {
    args.bind("measure", measure, {"card", "matmul", "attention", "backward", "decoding", "ideas"},
              "what to measure");
    args.bind("rung", rung, "of the ladder, this one alone; of ideas, a file of rungs");
    args.bind("m", m, "rows of a product c [m, n] = a [m, k] b, and of an idea's matrix");
    args.bind("n", n, "their columns");
    args.bind("k", k, "its depth");
    args.bind("inputs", inputs, {"uniform", "zeros"},
              "its operands: zeros take less power, so that the clock stays higher");
    args.bind("seq_len", seq_len,
              "queries and keys of attention; of decoding, the keys of a query");
    args.bind("num_heads", num_heads, "its heads; in decoding, four share keys");
    args.bind("head_dim", head_dim, "channels of a head; of 192, its values have 128");
    args.bind("causal", causal, "a query sees no key behind its own position");
    args.bind("numbers", numbers, "that a copy moves, and that a chain of FMAs changes");
    args.bind("seconds", seconds, "that a round of calls takes; 0: one call, for a profiler");
  }
  void validate() const {
    for (const auto& [flag, value] : {std::pair{"m", m},
                                      {"n", n},
                                      {"k", k},
                                      {"seq_len", seq_len},
                                      {"num_heads", num_heads},
                                      {"numbers", numbers}}) {
      check_range(flag, static_cast<double>(value), 1, 1 << 30);
    }
    check_range("seconds", seconds, 0, 10);
    if (measure == "decoding" && num_heads % kShare != 0) {
      usage_error("num_heads={} must be a multiple of {}, which share keys; try --num_heads {}",
                  num_heads, kShare, (num_heads + kShare - 1) / kShare * kShare);
    }
    if (inputs == "uniform" || measure == "matmul") return;
    usage_error("inputs={} is for measure=matmul, and not for {}; try --measure matmul", inputs,
                measure);
  }
  /// An operand of a product.
  Tensor operand(const Shape& shape, DType dtype, uint64_t seed) const {
    return inputs == "zeros" ? Tensor::zeros(shape, dtype) : usp::numbers(shape, dtype, seed);
  }
};

template <class T>
constexpr DType kType = sizeof(T) == sizeof(float) ? DType::f32 : DType::bf16;

template <class T>
T* at(const Tensor& x) {
  return static_cast<T*>(x.address());
}

/// The largest difference from what was computed first that a sum in another order explains, beside
/// the largest number. Two that are rounded to bf16 may lie a 128th apart.
double tolerance_of(DType dtype) { return dtype == DType::f32 ? 1e-4 : 1e-2; }

/// As "9.0".
std::string version(int capability) {
  return fmt::format("{}.{}", capability / 10, capability % 10);
}

/// The card's stream, and its clock.
class Card {
 public:
  Card() : stream_(dynamic_cast<cuda::CudaDevice&>(*Runtime::current().accelerator()).stream()) {
    for (cudaEvent_t* event : {&begin_, &end_}) USP_CUDA(cudaEventCreate(event));
  }
  ~Card() {
    for (cudaEvent_t event : {begin_, end_}) static_cast<void>(cudaEventDestroy(event));
  }
  Card(const Card&) = delete;
  Card& operator=(const Card&) = delete;

  cuda::Queue queue() const { return stream_; }
  int capability() const { return capability_; }

  /// Seconds of a call, of so many in a row, from an event before them to one behind them.
  double time(int64_t calls, const std::function<void()>& call) {
    USP_CUDA(cudaEventRecord(begin_, stream_));
    for (int64_t i = 0; i < calls; ++i) call();
    USP_CUDA(cudaEventRecord(end_, stream_));
    USP_CUDA(cudaEventSynchronize(end_));
    float milliseconds = 0;
    USP_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return 1e-3 * milliseconds / static_cast<double>(calls);
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  int capability_ = cuda::limits_of_this_device().capability;
};

/// One of those that compute the same.
struct Contender {
  std::string name;
  std::vector<Tensor> results;  ///< of one dtype
  std::function<void()> call;
  std::vector<double> seconds = {};  ///< of a call, by round
  double error = 0;                  ///< beside the first contender, of the worst result
  double largest = 0;                ///< number of its results

  double median() const {
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
  double spread() const {
    const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
    return (*most - *least) / median();
  }
};

/// The largest difference beside the largest number; infinite where one is none.
double difference(const std::vector<double>& found, const std::vector<double>& expected) {
  double largest = 0, scale = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double here = std::abs(found[i] - expected[i]);
    if (!std::isfinite(here)) return INFINITY;
    largest = std::max(largest, here);
    scale = std::max(scale, std::abs(expected[i]));
  }
  return largest == 0 ? 0 : largest / scale;
}

/// Runs each once, and compares what it leaves with what the first one does.
void compare(Card& card, std::vector<Contender>& all) {
  std::vector<std::vector<double>> expected;
  for (Contender& each : all) {
    for (const Tensor& result : each.results) ops::fill(result, NAN);
    each.seconds = {card.time(1, each.call)};
    for (size_t i = 0; i < each.results.size(); ++i) {
      std::vector<double> found = each.results[i].items();
      for (double number : found) each.largest = std::max(each.largest, std::abs(number));
      if (&each == &all.front())
        expected.push_back(std::move(found));
      else
        each.error = std::max(each.error, difference(found, expected[i]));
    }
    const double most = tolerance_of(each.results.front().dtype());
    if (!(each.error <= most)) {
      fail("{} differs from {} by {:.2g} of the largest number; at most {} is rounding", each.name,
           all.front().name, each.error, most);
    }
  }
}

/// Fills in the seconds of rounds in which each has its turn.
void time_in_turns(Card& card, std::vector<Contender>& all, double seconds) {
  std::vector<int64_t> calls;
  for (Contender& each : all) {  // the second call: the first one may have loaded its kernel
    calls.push_back(std::max<int64_t>(1, std::llround(seconds / card.time(1, each.call))));
    each.seconds.clear();
  }
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].seconds.push_back(card.time(calls[i], all[i].call));
    }
  }
}

/// The rate beside the first contender's: the median of the ratios of a round.
double of_first(const Contender& each, const Contender& first) {
  std::vector<double> ratios;
  for (size_t i = 0; i < first.seconds.size(); ++i) {
    ratios.push_back(first.seconds[i] / each.seconds[i]);
  }
  std::sort(ratios.begin(), ratios.end());
  return ratios[ratios.size() / 2];
}

/// What a call does, to be divided by its time: so many operations, or bytes.
struct Work {
  double amount;
  const char* rate = "tflops";
  double unit = 1e-12;
};

/// Compares, times, and prints a line for each.
void race(Card& card, std::vector<Contender> all, const Work& work, double seconds) {
  compare(card, all);
  if (seconds > 0) time_in_turns(card, all, seconds);
  for (const Contender& each : all) {
    print(
        "{{\"name\": \"{}\", \"type\": \"{}\", \"ms\": {:.5g}, \"spread\": {:.3f}, \"{}\": {:.4g}, "
        "\"of_first\": {:.4f}, \"error\": {:.2g}, \"largest\": {:.3g}}}\n",
        each.name, name(each.results.front().dtype()), 1e3 * each.median(), each.spread(),
        work.rate, work.unit * work.amount / each.median(), of_first(each, all.front()), each.error,
        each.largest);
  }
}

/// Hopper's boxes and warpgroups are for Hopper alone: later cards have others.
bool runs_on(int needed, int capability) {
  return needed == kHopper ? capability == kHopper : capability >= needed;
}

/// The rungs that are asked for and that this card runs. A line says which others there are, and
/// why. Throws UsageError where that is the one that was asked for.
template <class Rung>
std::vector<const Rung*> choose(std::span<const Rung* const> rungs, const Options& o, int here) {
  std::vector<const Rung*> chosen;
  for (const Rung* rung : rungs) {
    if (!o.rung.empty() && rung->name != o.rung) continue;
    if (runs_on(rung->capability, here)) {
      chosen.push_back(rung);
      continue;
    }
    const std::string why = fmt::format(
        "{} needs a card of compute capability {}{}, and this one has {}", rung->name,
        version(rung->capability), rung->capability == kHopper ? "" : " or later", version(here));
    if (!o.rung.empty()) {
      const bool first_runs = runs_on(rungs.front()->capability, here);
      usage_error("{}; try {}", why,
                  first_runs ? fmt::format("--rung {}", rungs.front()->name)
                             : "./book lab, which counts on the emulated one");
    }
    print("{{\"name\": \"{}\", \"why\": \"{}\"}}\n", rung->name, why);
  }
  return chosen;
}

/// Throws UsageError where no rung has the name that was asked for.
template <class... Spans>
void check_name(const Options& o, const Spans&... ladders) {
  std::vector<std::string> names;
  (std::transform(ladders.begin(), ladders.end(), std::back_inserter(names),
                  [](const auto* rung) { return rung->name; }),
   ...);
  if (!o.rung.empty() && std::find(names.begin(), names.end(), o.rung) == names.end()) {
    usage_error("rung={} must be one of {}; try --rung {}", o.rung, fmt::join(names, ", "),
                names.back());
  }
}

// --- the card
// ---------------------------------------------------------------------------------------

/// What the driver says of it.
std::string ask_driver() {
  cudaDeviceProp p{};
  int device = 0, clock = 0, memory_clock = 0;
  USP_CUDA(cudaGetDevice(&device));
  USP_CUDA(cudaGetDeviceProperties(&p, device));
  USP_CUDA(cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, device));
  USP_CUDA(cudaDeviceGetAttribute(&memory_clock, cudaDevAttrMemoryClockRate, device));
  return fmt::format(
      "\"card\": \"{}\", \"capability\": \"{}.{}\", \"multiprocessors\": {}, \"warps\": {}, "
      "\"registers\": {}, \"shared_bytes\": {}, \"shared_bytes_of_a_block\": {}, \"l2_bytes\": {}, "
      "\"clock_mhz\": {}, \"memory_clock_mhz\": {}, \"bus_bits\": {}, \"gb_per_s_by_clock\": "
      "{:.4g}",
      p.name, p.major, p.minor, p.multiProcessorCount, p.maxThreadsPerMultiProcessor / p.warpSize,
      p.regsPerMultiprocessor, p.sharedMemPerMultiprocessor, p.sharedMemPerBlockOptin,
      p.l2CacheSize, clock / 1000, memory_clock / 1000, p.memoryBusWidth,
      // Both edges of the clock carry a bit of each line.
      1e3 * 2 * memory_clock * (p.memoryBusWidth / 8) * 1e-9);
}

/// Seconds of a call, as a rung's.
double seconds_of(Card& card, const Options& o, const std::function<void()>& call) {
  std::vector<Contender> alone{{"", {}, call, {card.time(1, call)}}};
  if (o.seconds > 0) time_in_turns(card, alone, o.seconds);
  return alone[0].median();
}

/// A rung of the primer, by what it counts, a second.
double rate_of(Card& card, const Options& o, std::string_view name,
               int64_t ideas::Counts::*counted) {
  const auto rungs = ideas::kPrimer.rungs;
  const auto rung = std::find_if(rungs.begin(), rungs.end(),
                                 [&](const ideas::Rung& each) { return each.name == name; });
  const auto count = static_cast<int>(o.numbers);
  const Tensor x = numbers({count}, DType::f32), y = Tensor::empty({count}, DType::f32);
  const ideas::Data data{{1, count}, x.data<float>(), nullptr, y.data<float>(), nullptr};
  const double seconds = seconds_of(card, o, [&] { rung->run(card.queue(), data); });
  return static_cast<double>(rung->predict(data.shape).*counted) / seconds;
}

/// The rate of products in this type, in TFLOP/s, as JSON: null where the card multiplies no bf16.
std::string rate_of_products(Card& card, const Options& o, DType dtype) {
  if (dtype == DType::bf16 && card.capability() < kFirstOfBf16) return "null";
  const Tensor a = numbers({o.m, o.k}, dtype), b = numbers({o.n, o.k}, dtype, 2);
  const Tensor c = Tensor::empty({o.m, o.n}, dtype);
  const double seconds = seconds_of(card, o, [&] { ops::matmul(c, a, b.transposed()); });
  return fmt::format("{:.4g}", 2e-12 * double(o.m) * double(o.n) * double(o.k) / seconds);
}

void show_card(Card& card, const Options& o) {
  print(
      "{{{}, \"copy_gb_per_s\": {:.4g}, \"fma_tflops\": {:.4g}, \"f64_tflops\": {}, "
      "\"bf16_tflops\": {}}}\n",
      ask_driver(), 1e-9 * rate_of(card, o, "copy", &ideas::Counts::bytes),
      1e-12 * rate_of(card, o, "fma_chain", &ideas::Counts::flops),
      rate_of_products(card, o, DType::f64), rate_of_products(card, o, DType::bf16));
}

// --- the ladders
// ------------------------------------------------------------------------------------

template <class T>
using Rungs = std::vector<const ladder::Rung<T>*>;

/// Throws UsageError where rows of k or of n elements begin where a rung cannot read them.
template <class T>
void check_rows(const Rungs<T>& rungs, const Options& o) {
  for (const ladder::Rung<T>* rung : rungs) {
    for (const auto& [flag, length] : {std::pair{"k", o.k}, {"n", o.n}}) {
      if (length % rung->unit == 0) continue;
      usage_error(
          "{}: {}={} must be a multiple of {}, because rows have to begin at multiples of {} "
          "bytes; "
          "try --{} {}",
          rung->name, flag, length, rung->unit, rung->unit * sizeof(T), flag,
          (length + rung->unit - 1) / rung->unit * rung->unit);
    }
  }
}

template <class T>
void climb_product(Card& card, const Rungs<T>& rungs, const Options& o) {
  if (rungs.empty()) return;
  constexpr bool kTransposed = sizeof(T) == 2;
  const Tensor a = o.operand({o.m, o.k}, kType<T>, 1), c = Tensor::empty({o.m, o.n}, kType<T>);
  const Tensor b = o.operand(kTransposed ? Shape{o.n, o.k} : Shape{o.k, o.n}, kType<T>, 2);
  cuda::TensorMaps maps;
  const auto m = static_cast<int>(o.m), n = static_cast<int>(o.n), k = static_cast<int>(o.k);
  const ladder::Product<T> product{m,        n, k,    at<T>(a), k, at<T>(b), kTransposed ? k : n,
                                   at<T>(c), n, &maps};
  std::vector<Contender> all{
      {"cuBLAS", {c}, [&] { ops::matmul(c, a, kTransposed ? b.transposed() : b); }}};
  for (const auto* rung : rungs) {
    all.push_back({rung->name, {c}, [&, rung] { rung->run(card.queue(), product); }});
  }
  race(card, std::move(all), {2.0 * double(m) * n * k}, o.seconds);
}

/// Operands of attention in one type.
template <class T>
struct Attended {
  Tensor q, k, v, out, lse, scratch;
  cuda::TensorMaps maps = {};

  /// bf16's numbers in f32, so that both types compute the same.
  static Tensor operand(const Shape& shape, uint64_t seed) {
    const Tensor x = numbers(shape, DType::bf16, seed);
    if (kType<T> == DType::bf16) return x;
    const Tensor wide = Tensor::zeros(shape, DType::f32);
    ops::accumulate(wide, x);
    return wide;
  }
  explicit Attended(const attention::Shape& x)
      : q(operand({x.samples, x.queries, x.heads, x.width}, 1)),
        k(operand({x.samples, x.keys, x.kv_heads, x.width}, 2)),
        v(operand({x.samples, x.keys, x.kv_heads, x.value_width()}, 3)),
        out(Tensor::empty({x.samples, x.queries, x.heads, x.value_width()}, kType<T>)),
        lse(Tensor::empty({x.samples, x.heads, x.queries}, DType::f32)) {}
};

template <class T>
attention::Problem<T> problem_of(Attended<T>& x, const attention::Shape& shape) {
  const float scale = 1 / std::sqrt(static_cast<float>(shape.width));
  return {shape, at<T>(x.q),           at<T>(x.k), at<T>(x.v), at<T>(x.out), at<float>(x.lse),
          scale, at<float>(x.scratch), &x.maps};
}

/// Adds the rungs of one type that take the shape.
template <class T>
void add_rungs(std::vector<Contender>& all, Card& card, Attended<T>& x,
               std::vector<const attention::Rung<T>*> rungs, const attention::Shape& shape) {
  std::erase_if(rungs, [&](const auto* rung) { return !rung->takes(shape); });
  int64_t bytes = 4;
  for (const auto* rung : rungs) bytes = std::max(bytes, rung->scratch(shape));
  x.scratch = Tensor::empty({bytes / 4}, DType::f32);
  for (const auto* rung : rungs) {
    all.push_back({rung->name, {x.out}, [=, &card, problem = problem_of(x, shape)] {
                     rung->run(card.queue(), problem);
                   }});
  }
}

attention::Shape shape_of(const Options& o) {
  const auto S = static_cast<int>(o.seq_len), heads = static_cast<int>(o.num_heads);
  const attention::Shape shape{1, S, S, heads, heads, static_cast<int>(o.head_dim), o.causal};
  attention::check(shape, attention::kWidestKeys);
  return shape;
}

/// The trainer's operation, and rungs in f32, have values as wide as keys.
bool runs_in_f32(const attention::Shape& shape) { return shape.width <= attention::kWidestValues; }

/// Throws UsageError where none is left.
void check_left(const std::vector<Contender>& all, const Options& o) {
  if (!all.empty()) return;
  usage_error("--rung {} takes no head_dim={}; try --head_dim 128", o.rung, o.head_dim);
}

/// Operations of so many products of attention that go through keys' channels, and through values':
/// 2 d for each pair. A causal mask leaves half of the pairs, and half a diagonal.
double flops_of(const attention::Shape& x, int of_keys, int of_values) {
  const double S = x.queries, pairs = x.causal ? 0.5 * S * (S + 1) : S * S;
  return 2.0 * pairs * x.heads * (of_keys * x.width + of_values * x.value_width());
}

/// The trainer's blockwise attention.
struct BlockwiseOp {
  const attention::Shape& shape;
  Attended<float>& x;
  double scale = 1 / std::sqrt(static_cast<double>(shape.width));
  // Queries behind all keys see all of them.
  Positions keys{0, shape.keys}, queries{shape.causal ? 0 : shape.keys, shape.queries};

  void forward() const {
    ops::attention_forward(x.out, x.lse, {}, x.q, x.k, x.v, scale, queries, keys);
  }
  void backward(std::span<const Tensor> gradients, const Tensor& dout, const Tensor& delta) const {
    ops::attention_delta(delta, dout, x.out);
    ops::attention_backward(gradients[0], gradients[1], gradients[2], dout, {}, x.q, x.k, x.v,
                            x.lse, delta, scale, queries, keys, /*accumulate=*/false);
  }
};

void climb_attention(Card& card, const Options& o) {
  const attention::Shape shape = shape_of(o);
  const auto narrow = choose(attention::bf16_rungs(), o, card.capability());
  const auto wide = choose(attention::f32_rungs(), o, card.capability());
  Attended<float> f32(shape);
  const BlockwiseOp op{shape, f32};
  std::vector<Contender> all;
  if (runs_in_f32(shape)) all.push_back({"blockwise op", {f32.out}, [&] { op.forward(); }});
  add_rungs(all, card, f32, wide, shape);
  std::optional<Attended<ladder::bf16>> bf16;
  if (!narrow.empty()) add_rungs(all, card, bf16.emplace(shape), narrow, shape);
  check_left(all, o);
  race(card, std::move(all), {flops_of(shape, 1, 1)}, o.seconds);
}

/// Backward, from what flash_2 leaves. Five products count, as the field has it; those that a
/// kernel repeats do not.
void climb_backward(Card& card, const Options& o) {
  using Gradients = attention::Gradients<ladder::bf16>;
  const attention::Shape shape = shape_of(o);
  const auto rungs = choose(attention::backward_rungs(), o, card.capability());
  if (rungs.empty()) return;
  Attended<float> f32(shape);
  Attended<ladder::bf16> bf16(shape);
  const auto three = [&](DType dtype) {
    return std::vector<Tensor>{Tensor::empty(f32.q.shape(), dtype),
                               Tensor::empty(f32.k.shape(), dtype),
                               Tensor::empty(f32.v.shape(), dtype)};
  };
  const std::vector<Tensor> wide = three(DType::f32), narrow = three(DType::bf16);
  const Tensor delta = Tensor::empty(f32.lse.shape(), DType::f32);
  const Tensor wide_dout = Attended<float>::operand(f32.out.shape(), 4);
  const Tensor dout = Attended<ladder::bf16>::operand(f32.out.shape(), 4);
  const int64_t rows = int64_t{shape.heads} * Gradients::rows_of(shape.queries);
  const Tensor row = Tensor::empty({rows * int64_t{sizeof(Gradients::Row)} / 4}, DType::f32);
  bf16.scratch = Tensor::empty({1}, DType::f32);
  const attention::Problem<ladder::bf16> forward = problem_of(bf16, shape);
  attention::kFlash2.run(card.queue(), forward);
  const Gradients gradients{forward,
                            at<ladder::bf16>(dout),
                            at<ladder::bf16>(narrow[0]),
                            at<ladder::bf16>(narrow[1]),
                            at<ladder::bf16>(narrow[2]),
                            static_cast<Gradients::Row*>(row.address())};
  const BlockwiseOp op{shape, f32};
  std::vector<Contender> all;
  if (runs_in_f32(shape)) {
    op.forward();
    all.push_back({"blockwise op", wide, [&] { op.backward(wide, wide_dout, delta); }});
  }
  for (const auto* rung : rungs) {
    if (!rung->takes(shape)) continue;
    all.push_back({rung->name, narrow, [&, rung] { rung->run(card.queue(), gradients); }});
  }
  check_left(all, o);
  race(card, std::move(all), {flops_of(shape, 3, 2)}, o.seconds);
}

/// One query: its keys by flash_2, and by flash_decode whole and split over blocks. The rate is
/// that of keys and values, each read once.
void climb_decoding(Card& card, const Options& o) {
  const auto keys = static_cast<int>(o.seq_len), heads = static_cast<int>(o.num_heads);
  const attention::Shape shape{1, 1, keys, heads, heads / kShare, static_cast<int>(o.head_dim)};
  attention::check(shape);
  if (choose(attention::decoding_rungs(), o, card.capability()).empty()) return;
  Attended<ladder::bf16> x(shape);
  const attention::Rung<ladder::bf16>& split = attention::kFlashDecode;
  attention::Shape parts = shape;
  parts.splits = attention::splits_of(shape, cuda::limits_of_this_device().multiprocessors);
  x.scratch = Tensor::empty({std::max<int64_t>(split.scratch(parts) / 4, 1)}, DType::f32);
  std::vector<Contender> all;
  const auto add = [&](std::string name, const auto& rung, const attention::Shape& given) {
    all.push_back({std::move(name), {x.out}, [&, problem = problem_of(x, given)] {
                     rung.run(card.queue(), problem);
                   }});
  };
  add(attention::kFlash2.name, attention::kFlash2, shape);
  add(fmt::format("{}, whole", split.name), split, shape);
  add(fmt::format("{}, {} parts", split.name, parts.splits), split, parts);
  race(card, std::move(all), {2.0 * double(x.k.numel() + x.v.numel()), "gb_per_s", 1e-9},
       o.seconds);
}

// --- the ideas
// --------------------------------------------------------------------------------------

/// Files whose rungs compute one result. The primer's do not: --measure card times those.
std::vector<const ideas::Ideas*> raced_ideas() {
  const auto files = ideas::all();
  std::vector<const ideas::Ideas*> found(files.begin(), files.end());
  std::erase(found, &ideas::kPrimer);
  return found;
}

/// The rungs of a file, each beside the first one. The rate is that of a number in and a number out
/// for each, whatever a rung moves.
void race_ideas(Card& card, const Options& o) {
  for (const ideas::Ideas* file : raced_ideas()) {
    if (!o.rung.empty() && o.rung != file->name) continue;
    const bool sums = file == &ideas::kReduction;
    if (sums && o.m * o.n > kExact) {
      usage_error(
          "m={} and n={} must have a product of {} at most, up to which a sum is exact; try "
          "--m 4096 --n 4096",
          o.m, o.n, kExact);
    }
    const Tensor x = numbers({o.m, o.n}, DType::f32), z = numbers({o.m, o.n}, DType::f32, 2);
    const Tensor y = Tensor::empty({o.m * o.n}, DType::f32);
    const Tensor scratch = Tensor::empty({4 * o.m * o.n}, DType::f32);
    if (sums) ops::fill(x, 1);
    const ideas::Data data{{static_cast<int>(o.m), static_cast<int>(o.n)},
                           at<float>(x),
                           at<float>(z),
                           at<float>(y),
                           at<float>(scratch)};
    std::vector<Contender> all;
    for (const ideas::Rung& rung : file->rungs) {
      all.push_back(
          {rung.name, {sums ? y.narrow(0, 0, 1) : y}, [&] { rung.run(card.queue(), data); }});
    }
    race(card, std::move(all), {(sums ? 4.0 : 8.0) * double(x.numel()), "gb_per_s", 1e-9},
         o.seconds);
  }
}

int run(int argc, char** argv) {
  Options options;
  Args args("Times the rungs of chapter 9's ladders on a GPU.");
  options.bind(args);
  if (!args.parse(argc, argv)) return 0;
  options.validate();
  if (options.measure == "attention") {
    check_name(options, attention::f32_rungs(), attention::bf16_rungs());
  } else if (options.measure == "backward") {
    check_name(options, attention::backward_rungs());
  } else if (options.measure == "decoding") {
    check_name(options, attention::decoding_rungs());
  } else if (options.measure == "ideas") {
    check_name(options, raced_ideas());
  } else {
    check_name(options, ladder::f32_rungs(), ladder::bf16_rungs());
  }
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess || count < 1) {
    usage_error(
        "times need a GPU, and CUDA finds none here: {}; try ./book lab, which counts on the "
        "emulated one",
        cudaGetErrorString(status));
  }
  Runtime runtime(Device::cuda);
  const Runtime::Use use(runtime);
  Card card;
  if (options.measure == "card") show_card(card, options);
  if (options.measure == "matmul") {
    const auto f32 = choose(ladder::f32_rungs(), options, card.capability());
    const auto bf16 = choose(ladder::bf16_rungs(), options, card.capability());
    check_rows(f32, options);
    check_rows(bf16, options);
    climb_product(card, f32, options);
    climb_product(card, bf16, options);
  }
  if (options.measure == "attention") climb_attention(card, options);
  if (options.measure == "backward") climb_backward(card, options);
  if (options.measure == "decoding") climb_decoding(card, options);
  if (options.measure == "ideas") race_ideas(card, options);
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::run, argc, argv); }

// Sequence parallelism as it first was, ring self-attention, beside attention on one rank; and what
// it keeps and sends beside ring attention, which keeps no scores.

#include "ring_self_attention.h"

#include "base/args.h"
#include "base/rng.h"
#include "comm/launch.h"
#include "context_parallel/ring_attention.h"
#include "tensor/console.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

constexpr DType kDType = DType::f32;  // in which both sum gradients

struct Sizes {
  int64_t seq_len = 8192, num_heads = 32, head_dim = 128;  // of Llama 8B, but for its 8 kv heads
};

Tensor random(const char* name, const Shape& shape) {
  const RandomStream stream(1, name);
  std::vector<double> values(shape.numel());
  for (size_t i = 0; i < values.size(); ++i) values[i] = stream.normal(i);
  return Tensor::from_host(values, shape, DType::f64);
}

/// Whether |a - b| <= 1e-10 max |b| everywhere; no NaN is.
bool close(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.items(), y = b.items();
  double scale = 0;
  for (double value : y) scale = std::max(scale, std::abs(value));
  bool all = x.size() == y.size();
  for (size_t i = 0; all && i < x.size(); ++i) all = std::abs(x[i] - y[i]) <= 1e-10 * scale;
  return all;
}

/// Throws Error unless attention over all ranks gives what the serial layer gives.
void check_against_one_rank(const Communicator& world) {
  const int64_t n = world.size(), B = 2, R = 5, S = n * R, N = 3, D = 4;
  const Tensor qkv = random("qkv", {B, S, 3 * N, D}), dout = random("dout", {B, S, N, D});
  const CoreAttention serial(N, N, D, Probabilities::stored);
  Pass pass;
  pass.positions = Positions(0, S);
  CoreAttention::Saved saved_serial;
  const Tensor out = serial.forward(qkv, saved_serial, pass);
  const Tensor dqkv = serial.backward(dout, saved_serial, pass, qkv.dtype());
  const auto own = [&](const Tensor& x) {
    return x.narrow(1, world.rank() * R, R).to_contiguous();
  };
  const auto part = [&](const Tensor& x, int64_t i) { return own(x.narrow(2, i * N, N)); };
  const RingSelfAttention over_ranks(world);
  RingSelfAttention::Saved saved;
  const Tensor y = over_ranks.forward(part(qkv, 0), part(qkv, 1), part(qkv, 2), saved);
  const RingSelfAttention::Gradients d = over_ranks.backward(own(dout), saved);
  const bool same = close(y, own(out)) && close(d.dq, part(dqkv, 0)) &&
                    close(d.dk, part(dqkv, 1)) && close(d.dv, part(dqkv, 2));
  if (world.any(!same)) fail("attention over {} ranks differs from that on one", n);
  print("{} rank{}: outputs and gradients are those of serial attention, to 1e-10\n\n", n,
        n == 1 ? "" : "s");
}

/// What one of this many ranks holds and sends, without data, beside the formulas.
struct Measured {
  int64_t kept = 0, peak = 0, sent = 0, messages = 0;
  AttentionCosts formula{};
};

/// `forward` returns the backward pass, and with it what lives until then.
Measured measure(int ranks, const AttentionCosts& formula,
                 const std::function<std::function<void()>(const Communicator& ring)>& forward) {
  Runtime runtime(Device::meta, /*rank=*/0, ranks);
  const Runtime::Use use(runtime);
  DryEngine engine(/*rank=*/0, ranks);
  Measured found;
  found.formula = formula;
  const std::function<void()> backward = forward(Communicator::world(engine));
  found.kept = runtime.allocator().live_bytes(Category::activations);
  backward();
  found.peak = runtime.allocator().peak_bytes(Category::activations);
  for (const auto& [key, entry] : runtime.ledger().entries()) {
    found.sent += entry.wire_bytes;
    if (key.second != CommKind::recv) found.messages += entry.calls;
  }
  return found;
}

Measured ring_self_attention(const Sizes& sizes, int n) {
  const int64_t S = sizes.seq_len, N = sizes.num_heads, D = sizes.head_dim;
  const auto formula = AttentionCosts::ring_self_attention(1, S, N, D, n, bytes_of(kDType));
  return measure(n, formula, [&](const Communicator& ring) {
    const auto rows = [&] { return Tensor::empty({1, S / n, N, D}, kDType); };
    const RingSelfAttention attention(ring);
    RingSelfAttention::Saved saved;
    const Tensor out = attention.forward(rows(), rows(), rows(), saved);
    return [attention, saved, out] {
      attention.backward(Tensor::empty(out.shape(), out.dtype()), saved);
    };
  });
}

Measured ring_attention(const Sizes& sizes, int n) {
  const int64_t S = sizes.seq_len, N = sizes.num_heads, D = sizes.head_dim;
  ContextParallelConfig config;
  config.cp_size = n;
  const DType acc = accumulate_dtype(kDType);
  const auto formula =
      AttentionCosts::ring_attention(1, S, N, D, n, bytes_of(kDType), bytes_of(acc));
  return measure(n, formula, [&](const Communicator& ring) {
    const ContextGroup group(config, ring);
    const auto attention =
        std::make_shared<RingAttention>(N, N, D, Probabilities::never_whole, group);
    Pass pass;
    pass.num_samples = 1;
    pass.seq_len = S;
    pass.positions = group.positions(S);
    const auto saved = std::make_shared<CoreAttention::Saved>();
    const Tensor out =
        attention->forward(Tensor::empty({1, S / n, 3 * N, D}, kDType), *saved, pass);
    return [attention, saved, out, pass, acc] {
      attention->backward(Tensor::empty(out.shape(), out.dtype()), *saved, pass, acc);
    };
  });
}

std::string mib(double bytes) { return fmt::format("{:.1f}", bytes / (1 << 20)); }

/// A line of the table: what allocator and ledger count, and beside it what the formula says.
void print_line(const std::string& cp, const std::string& way,
                const std::vector<std::string>& cells) {
  print("{:>4}  {:<19} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9}\n", cp, way, cells[0], cells[1],
        cells[2], cells[3], cells[4], cells[5], cells[6]);
}

void print_costs(const Sizes& sizes) {
  print("MiB of attention on a rank: one sample of s = {}, {} heads of {}, {}\n", sizes.seq_len,
        sizes.num_heads, sizes.head_dim, name(kDType));
  print_line("cp", "", {"kept", "formula", "peak", "formula", "sent", "formula", "messages"});
  for (int n : {2, 4, 8, 16}) {
    for (const auto& [way, found] :
         {std::pair{"ring self-attention", ring_self_attention(sizes, n)},
          {"ring attention", ring_attention(sizes, n)}}) {
      std::vector<std::string> cells;
      for (int64_t bytes : {found.kept, found.formula.kept, found.peak, found.formula.peak,
                            found.sent, found.formula.sent}) {
        cells.push_back(mib(double(bytes)));
      }
      cells.push_back(fmt::format("{}", found.messages));
      print_line(fmt::format("{}", n), way, cells);
    }
  }
}

int run(const Communicator& world, int argc, char** argv) {
  Args args("Shows ring self-attention, and what it keeps and sends beside ring attention.");
  Sizes sizes;
  args.bind("seq_len", sizes.seq_len, "tokens of the sample: a multiple of 32");
  args.bind("num_heads", sizes.num_heads, "heads, and kv heads");
  args.bind("head_dim", sizes.head_dim, "channels of a head");
  if (!args.parse(argc, argv)) return 0;
  check_positive("seq_len", sizes.seq_len);
  check_positive("num_heads", sizes.num_heads);
  check_positive("head_dim", sizes.head_dim);
  if (sizes.seq_len % 32 != 0) {
    usage_error("seq_len={} must be a multiple of 32, the pieces of 16 ranks; try {}",
                sizes.seq_len, (sizes.seq_len / 32 + 1) * 32);
  }
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  check_against_one_rank(world);
  print_costs(sizes);
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }

// Attention to some keys and attention to others, merged into attention to all of them: the numbers
// of the chapter's drawing, and random blocks.

#include <cmath>

#include "base/args.h"
#include "base/rng.h"
#include "comm/launch.h"
#include "tensor/console.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

/// Attention to some of the keys: its sums are over these alone.
struct Part {
  Tensor out, lse;
};

/// Every query sees every key: it stands behind all of them.
Part attend(const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t B = q.size(0), S = q.size(1), N = q.size(2), K = k.size(1);
  Part part{Tensor::empty(q.shape(), q.dtype()), Tensor::empty({B, N, S}, q.dtype())};
  ops::attention_forward(part.out, part.lse, /*probs=*/{}, q, k, v, /*scale=*/1, Positions(K, S),
                         Positions(0, K));
  return part;
}

/// Attention to blocks of this many keys each, merged in their order.
Part attend_in_blocks(const Tensor& q, const Tensor& k, const Tensor& v, int64_t block) {
  Part sum;
  for (int64_t first = 0; first < k.size(1); first += block) {
    const Part part = attend(q, k.narrow(1, first, block), v.narrow(1, first, block));
    if (first == 0) {
      sum = part;
    } else {
      ops::attention_merge(sum.out, sum.lse, part.out, part.lse);
    }
  }
  return sum;
}

double largest_difference(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.items(), y = b.items();
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) largest = std::max(largest, std::abs(x[i] - y[i]));
  return largest;
}

void show(const char* what, const Part& part) {
  print("{:<22}  out {:.4f}  lse {:.4f}\n", what, part.out.item(), part.lse.item());
}

/// One query of one channel, so that a key is its score.
void show_drawing() {
  const std::vector<double> one = {1}, scores = {1, 3, 2, 4}, values = {10, 20, 30, 40};
  const Tensor q = Tensor::from_host(one, {1, 1, 1, 1}, DType::f64);
  const Tensor k = Tensor::from_host(scores, {1, 4, 1, 1}, DType::f64);
  const Tensor v = Tensor::from_host(values, {1, 4, 1, 1}, DType::f64);
  show("one rank's keys", attend(q, k.narrow(1, 0, 2), v.narrow(1, 0, 2)));
  show("the other's", attend(q, k.narrow(1, 2, 2), v.narrow(1, 2, 2)));
  show("both, merged", attend_in_blocks(q, k, v, 2));
  show("all keys at once", attend(q, k, v));
}

Tensor random_tensor(const Shape& shape, const char* name, DType dtype) {
  const RandomStream stream(/*seed=*/1, name);
  std::vector<double> numbers(shape.numel());
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = stream.normal(i);
  return Tensor::from_host(numbers, shape, dtype);
}

void show_random(DType dtype, int64_t block) {
  constexpr int64_t kQueries = 16, kKeys = 256, kHeads = 2, kChannels = 8;
  const Tensor q = random_tensor({1, kQueries, kHeads, kChannels}, "q", dtype);
  const Tensor k = random_tensor({1, kKeys, kHeads, kChannels}, "k", dtype);
  const Tensor v = random_tensor({1, kKeys, kHeads, kChannels}, "v", dtype);
  const Part whole = attend(q, k, v), merged = attend_in_blocks(q, k, v, block);
  print("{} random keys in {} blocks, {}: largest difference {:.0e}\n", kKeys, kKeys / block,
        name(dtype), largest_difference(whole.out, merged.out));
}

int run(const Communicator& world, int argc, char** argv) {
  Args args("Merges partial results of a softmax.");
  if (!args.parse(argc, argv)) return 0;
  if (world.size() != 1) {
    usage_error("the example is for one rank, not {}; try --ranks 1", world.size());
  }
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  show_drawing();
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const int64_t block : {128, 16}) show_random(dtype, block);
  }
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }

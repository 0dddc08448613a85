#include <climits>
#include <memory>
#include <optional>
#include <string_view>

#include "attention.h"
#include "cuda/launch.h"

/// The rungs for tensor cores as the trainer's attention: flash_3 and its backward on Hopper,
/// flash_2 and its own elsewhere, and for one query flash_decode. Latent attention's gradients are
/// flash_2's everywhere: no thread has registers for flash_3's.
namespace usp::attention {

namespace {

using cuda::Heads;
using Given = cuda::AttentionProblem<bf16>;
template <class O>
using GivenGradients = cuda::AttentionGradients<bf16, O>;

/// Copies and boxes begin at multiples of 16 bytes, and rungs count with int.
constexpr int64_t kAligned = 16;
constexpr bool fits(int64_t count) { return 0 < count && count <= INT_MAX; }

/// Where heads of `width` channels lie side by side, and rows begin as copies need them: how far
/// apart these are.
template <class T>
std::optional<Pitch> pitch_of(const Heads<T>& x, int64_t width) {
  constexpr auto kElements = static_cast<int64_t>(kAligned / sizeof(T));
  const bool aligned = reinterpret_cast<uintptr_t>(x.data) % kAligned == 0 &&
                       x.row % kElements == 0 && x.sample % kElements == 0;
  if (!aligned || x.head != width || !fits(x.row)) return {};
  return Pitch{static_cast<int>(x.row), x.sample, static_cast<int>(width)};
}

/// Positions as rungs have them: nothing where they do not ascend.
std::optional<Ranges> ranges_of(const Positions& positions) {
  const int64_t count = positions.count(), first = positions.run_from(0);
  if (!fits(positions.end())) return {};
  Ranges ranges{static_cast<int>(positions[0])};
  if (first == count) return ranges;
  ranges.length = static_cast<int>(first);
  ranges.second = static_cast<int>(positions[first]);
  if (positions[first] < positions[0] + first) return {};
  return ranges;
}

std::optional<Shape> shape_of(const Given& x) {
  for (int64_t size : {x.B, x.S, x.N, x.K, x.G, x.B * x.N}) {
    if (!fits(size)) return {};
  }
  const auto queries = ranges_of(x.queries), keys = ranges_of(x.keys);
  if (!queries || !keys) return {};
  const auto number = [](int64_t size) { return static_cast<int>(size); };
  return Shape{number(x.B), number(x.S), number(x.K), number(x.N), number(x.G),
               number(x.D), true,        *queries,    *keys,       x.begins};
}

class Rungs : public cuda::AttentionKernels {
 public:
  using AttentionKernels::forward, AttentionKernels::workspace;  // in f32 there is none

  Rungs(const Rung<bf16>& forward, const BackwardRung& backward, const cuda::DeviceLimits& limits)
      : forward_(forward), backward_(backward), limits_(limits) {}

  bool takes_heads_of(int64_t head_dim, int64_t value_dim) const override {
    if (head_dim != kWidestKeys) return head_dim == 64 || head_dim == 128;
    return value_dim == kWidestValues && limits_.shared_bytes >= kSharedOfWidest;
  }
  std::string_view name_of_forward() const override { return forward_.name; }
  std::string_view name_of_decoding() const override { return kFlashDecode.name; }
  std::string_view name_of_backward(int64_t head_dim) const override {
    return backward_of(head_dim).name;
  }

  int64_t workspace(const Given& given) const override {
    const auto problem = problem_of(given);
    return problem ? kFlashDecode.scratch(*problem) : 0;
  }
  bool forward(cudaStream_t stream, const Heads<bf16>& out, float* lse, const Given& given,
               void* workspace) override {
    return run(stream, out, out.data, nullptr, lse, given, workspace);
  }
  bool forward(cudaStream_t stream, const Heads<float>& out, float* lse, const Given& given,
               void* workspace) override {
    return run(stream, out, nullptr, out.data, lse, given, workspace);
  }

  int64_t workspace(const GivenGradients<bf16>& gradients, const Given& given) const override {
    return bytes_of(gradients_of(gradients, given));
  }
  int64_t workspace(const GivenGradients<float>& gradients, const Given& given) const override {
    return bytes_of(gradients_of(gradients, given));
  }
  void backward(cudaStream_t stream, const GivenGradients<bf16>& gradients, const Given& given,
                void* workspace) override {
    run_backward(stream, *gradients_of(gradients, given), workspace);
  }
  void backward(cudaStream_t stream, const GivenGradients<float>& gradients, const Given& given,
                void* workspace) override {
    run_backward(stream, *gradients_of(gradients, given), workspace);
  }

 private:
  const BackwardRung& backward_of(int64_t head_dim) const {
    return head_dim > backward_.widest ? kFlash2Backward : backward_;
  }

  /// Without out.
  std::optional<Problem<bf16>> problem_of(const Given& x) const {
    const bool decodes = x.S == 1;
    if (!takes_heads_of(x.D, x.value_dim) || (decodes && x.D > kFlashDecode.widest)) return {};
    auto shape = shape_of(x);
    const auto q = pitch_of(x.q, x.D), k = pitch_of(x.k, x.D), v = pitch_of(x.v, x.D);
    if (!shape || !q || !k || !v) return {};
    if (decodes) shape->splits = splits_of(*shape, limits_.multiprocessors);
    const auto scale = static_cast<float>(x.scale);
    return Problem<bf16>{*shape, x.q.data, x.k.data, x.v.data, nullptr, nullptr,
                         scale,  nullptr,  nullptr,  *q,       *k,      *v};
  }

  template <class O>
  bool run(cudaStream_t stream, const Heads<O>& at, bf16* out, float* wide_out, float* lse,
           const Given& given, void* workspace) {
    auto problem = problem_of(given);
    const auto pitch = pitch_of(at, given.D);
    if (!problem || !pitch) return false;
    problem->out = out;
    problem->wide_out = wide_out;
    problem->of_out = *pitch;
    problem->lse = lse;
    problem->scratch = static_cast<float*>(workspace);
    problem->maps = &maps_;
    problem->blocks = limits_.multiprocessors;
    (given.S == 1 ? kFlashDecode : forward_).run(stream, *problem);
    return true;
  }

  /// What the numbers of each row take; -1: there are no such kernels.
  static int64_t bytes_of(const std::optional<Gradients<bf16>>& gradients) {
    if (!gradients) return -1;
    const Problem<bf16>& x = gradients->of;
    return int64_t{x.samples} * x.heads * Gradients<bf16>::rows_of(x.queries) *
           int64_t{sizeof(Gradients<bf16>::Row)};
  }
  void run_backward(cudaStream_t stream, Gradients<bf16> gradients, void* workspace) {
    gradients.rows = static_cast<Gradients<bf16>::Row*>(workspace);
    gradients.of.maps = &maps_;
    backward_of(gradients.of.width).run(stream, gradients);
  }

  /// Without scratch.
  template <class O>
  std::optional<Gradients<bf16>> gradients_of(const GivenGradients<O>& g,
                                              const Given& given) const {
    auto problem = problem_of(given);
    const auto dout = pitch_of(g.dout, given.D), dq = pitch_of(g.dq, given.D);
    const auto dk = pitch_of(g.dk, given.D), dv = pitch_of(g.dv, given.D);
    if (!problem || !dout || !dq || !dk || !dv) return {};
    problem->lse = const_cast<float*>(g.lse);  // which backward reads
    Gradients<bf16> found{*problem, g.dout.data, nullptr, nullptr, nullptr, nullptr, g.delta};
    if constexpr (std::is_same_v<O, bf16>) {
      found.dq = g.dq.data, found.dk = g.dk.data, found.dv = g.dv.data;
    } else {
      found.dq_sums = g.dq.data, found.dk_sums = g.dk.data, found.dv_sums = g.dv.data;
      found.adds = g.accumulate;
    }
    found.of_dout = *dout, found.of_dq = *dq, found.of_dk = *dk, found.of_dv = *dv;
    return found;
  }

  const Rung<bf16>& forward_;
  const BackwardRung& backward_;
  cuda::DeviceLimits limits_;
  cuda::TensorMaps maps_;
};

// [make]
/// Rungs that copy boxes run on their own generation alone. But for latent attention's heads no
/// block asks for more shared memory than every GPU has from kFlash2's capability on: 99 KiB.
std::unique_ptr<cuda::AttentionKernels> make(const cuda::DeviceLimits& limits) {
  if (limits.capability < kFlash2.capability) return nullptr;
  const bool hopper = limits.capability == kFlash3.capability;
  return hopper ? attention_by(kFlash3, kFlash3Backward, limits)
                : attention_by(kFlash2, kFlash2Backward, limits);
}
// [make]

[[maybe_unused]] const bool is_announced = [] {
  cuda::make_attention_kernels = make;
  return true;
}();

}  // namespace

std::unique_ptr<cuda::AttentionKernels> attention_by(const Rung<bf16>& forward,
                                                     const BackwardRung& backward,
                                                     const cuda::DeviceLimits& limits) {
  return std::make_unique<Rungs>(forward, backward, limits);
}

}  // namespace usp::attention

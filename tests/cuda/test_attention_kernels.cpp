#include <regex>

#include "common/attention_case.h"
#include "emulator/emulator.h"
#include "tensor/backend.h"

/// Attention on the kernels for tensor cores that a program adds: of whole samples and of
/// parts of their keys, every access checked.
namespace usp::test {
namespace {

/// Tolerances of outputs and of gradients, as shares of the largest: weights and their gradients
/// are rounded to bf16, and so was out, which delta comes from.
constexpr double kOfOut = 5e-3, kOfLse = 1e-5, kOfGradients = 1e-2;

constexpr int kCapabilities[] = {80, 90};

emulator::Options options_of(int capability) {
  emulator::Options options = emulator::options;
  options.compute_capability = capability;
  return options;
}

/// A GPU whose operations may run on other kernels.
struct FusedGpu : OnDevice {
  explicit FusedGpu(bool fused = true, int64_t value_dim = 0) : OnDevice(Device::cuda) {
    runtime.backend().fuse(fused);
    runtime.backend().promise_values(value_dim);
  }
  std::string remark() const {
    const std::vector<std::string> remarks = runtime.accelerator()->remarks();
    return remarks.empty() ? "" : remarks[0];
  }
};

/// So many calls forward, of one query, backward, and by the blockwise kernels. `of_backward`: its
/// rung, if it is not forward's.
void check_calls(const FusedGpu& gpu, int forward, int decoding, int backward, int blockwise,
                 const char* of_backward = "\\1") {
  const std::string remark = gpu.remark();
  CAPTURE(remark);
  const std::regex expected(
      fmt::format(R"(Attention ran on tensor cores: calls forward {} \((flash_[23])\), decoding )"
                  R"({} \(flash_decode\), backward {} \({}_backward\), and {} on the blockwise )"
                  R"(kernels\.)",
                  forward, decoding, backward, of_backward, blockwise));
  const bool is_said = std::regex_match(remark, expected);
  REQUIRE(is_said);
}

/// Heads that the kernels take: shared ones, two ranges, queries without a key, documents.
std::vector<AttentionCase> taken_cases() {
  return {
      {2, 4, 2, 64, {0, 150}, {0, 150}},
      {1, 2, 1, 128, {0, 70}, {0, 70}},
      {1, 3, 1, 64, {120, 1}, {0, 121}},  // one new token
      {2, 4, 2, 64, {299, 1}, {0, 300}},  // whose keys are split
      {1, 2, 1, 64, {0, 6}, {3, 9}},      // the first queries see no key
      {1, 2, 1, 64, {0, 6}, {6, 5}},      // nobody sees anything
      {2, 2, 1, 64, {0, 50, 150, 49}, {50, 50, 100, 50}},
      with_documents({2, 2, 1, 64, {0, 200}, {0, 200}}, {{96, 192}, {95, 97, 191}}),
      with_documents({2, 2, 2, 128, {0, 50, 150, 49}, {0, 50, 150, 49}}, {{25, 50, 160}, {100}}),
  };
}

/// Zeros behind the first channels of values, and of the gradient of outputs.
void pad(const AttentionRun& run, int64_t value_dim) {
  for (const Tensor& x : {run.v, run.dout}) {
    const Tensor behind = x.narrow(3, value_dim, run.c.D - value_dim);
    ops::copy(behind, Tensor::zeros(behind.shape(), x.dtype()));
  }
}

/// What a case gives on the CPU in f64, of the same bf16 numbers.
struct Expected {
  Values out, lse, delta, dq, dk, dv;

  explicit Expected(const AttentionCase& c, int64_t value_dim = 0) {
    const OnDevice cpu(Device::cpu);
    const AttentionRun rounded(c, DType::bf16, /*naive=*/false, 30);
    if (value_dim > 0) pad(rounded, value_dim);
    AttentionRun exact(c, DType::f64, false, 30);
    for (auto input : {&AttentionRun::q, &AttentionRun::k, &AttentionRun::v, &AttentionRun::dout}) {
      ops::copy(exact.*input, rounded.*input);
    }
    exact.forward();
    const auto gradients = exact.backward();
    out = exact.out.items(), lse = exact.lse.items(), delta = exact.delta.items();
    dq = gradients.dq.items(), dk = gradients.dk.items(), dv = gradients.dv.items();
  }
};

void check_report() {
  try {
    Runtime::current().wait();
  } catch (const Error&) {  // says that something is wrong; the report says what
  }
  const emulator::Report report = emulator::take_report();
  INFO(report.text());
  REQUIRE(report.problems.empty());
}

/// x [B, S, heads, D] as some heads of a wider tensor of ones, in acc dtype.
struct Slice {
  Tensor whole, part;

  explicit Slice(const Shape& shape)
      : whole(Tensor::empty({shape[0], shape[1], shape[2] + 3, shape[3]}, DType::f32)),
        part(whole.narrow(2, 2, shape[2])) {
    ops::fill(whole, 1);
  }
  /// What was added to it; its neighbors have to be as they were.
  Values added() const {
    Values values = part.items();
    for (double& value : values) value -= 1;
    for (const Tensor& beside : {whole.narrow(2, 0, 2), whole.narrow(2, 2 + part.size(2), 1)}) {
      const bool untouched = beside.items() == Values(beside.numel(), 1);
      REQUIRE(untouched);
    }
    return values;
  }
};

TEST_CASE("kernels for tensor cores attend to slices of wider tensors, and add their gradients") {
  for (const int capability : kCapabilities) {
    emulator::Options options = options_of(capability);
    options.every_order = capability == 90;
    const emulator::Use use(options);
    for (const AttentionCase& c : taken_cases()) {
      CAPTURE(capability, c.B, c.N, c.G, c.D, c.S(), c.K(), c.begins.size());
      const Expected expected(c);
      FusedGpu gpu;
      AttentionRun run(c, DType::bf16, /*naive=*/false, 30);
      run.v = run.v.to_contiguous();  // whose rows lie closer than those of keys
      run.forward();
      const Slice dq(c.q_shape()), dk(c.k_shape()), dv(c.k_shape());
      run.backward({dq.part, dk.part, dv.part});
      check_report();
      check_close(run.out, expected.out, kOfOut, "out");
      check_close(run.lse, expected.lse, kOfLse, "lse");
      check_close(dq.added(), expected.dq, kOfGradients, "dq");
      check_close(dk.added(), expected.dk, kOfGradients, "dk");
      check_close(dv.added(), expected.dv, kOfGradients, "dv");
      check_calls(gpu, c.S() > 1 ? 2 : 0, c.S() == 1 ? 2 : 0, 1, 0);
    }
  }
}

TEST_CASE("gradients of all keys take the place of what was there, and in bf16 are rounded once") {
  for (const int capability : kCapabilities) {
    const emulator::Use use(options_of(capability));
    for (const AttentionCase& c : taken_cases()) {
      CAPTURE(capability, c.B, c.N, c.G, c.D, c.S(), c.K(), c.begins.size());
      FusedGpu gpu;
      AttentionRun run(c, DType::bf16, /*naive=*/false, 30);
      check_rounded_once(run);
      check_report();
      check_calls(gpu, c.S() > 1, c.S() == 1, 3, 0);
    }
  }
}

TEST_CASE("values that fill 128 of 192 channels have kernels, which leave zeros behind outputs") {
  const AttentionCase cases[] = {
      {1, 2, 2, 192, {0, 150}, {0, 150}},
      {1, 2, 1, 192, {0, 6}, {3, 9}},  // the first queries see no key
      {1, 2, 1, 192, {0, 50, 150, 49}, {50, 50, 100, 50}},
      with_documents({2, 2, 2, 192, {0, 70}, {0, 70}}, {{25, 50}, {33}}),
  };
  for (const int capability : kCapabilities) {
    const emulator::Use use(options_of(capability));
    for (const AttentionCase& c : cases) {
      CAPTURE(capability, c.B, c.N, c.G, c.S(), c.K(), c.begins.size());
      const Expected expected(c, 128);
      FusedGpu gpu(true, 128);
      AttentionRun run(c, DType::bf16, /*naive=*/false, 30);
      pad(run, 128);
      const Tensor wide = Tensor::empty(c.q_shape(), DType::f32);
      for (const Tensor& out : {run.out, wide}) {
        ops::fill(out, kNaN);
        ops::attention_forward(out, run.lse, {}, run.q, run.k, run.v, run.scale, c.queries, c.keys,
                               run.documents);
        check_close(out, expected.out, kOfOut, "out");
        check_close(run.lse, expected.lse, kOfLse, "lse");
      }
      check_rounded_once(run);
      const auto gradients = run.backward();
      check_report();
      check_close(gradients.dq, expected.dq, kOfGradients, "dq");
      check_close(gradients.dk, expected.dk, kOfGradients, "dk");
      check_close(gradients.dv, expected.dv, kOfGradients, "dv");
      check_calls(gpu, 3, 0, 4, 0, "flash_2");
    }
  }
}

TEST_CASE("kernels for 192 channels want values of 128 and more memory than each GPU has",
          "[emulated]") {
  const auto takes = [](int64_t value_dim) {
    return FusedGpu().runtime.backend().fuses_attention(DType::bf16, 192, value_dim);
  };
  REQUIRE(takes(128));
  REQUIRE(!takes(0));
  REQUIRE(!takes(192));
  emulator::Options small = options_of(86);
  small.shared_bytes = 99 << 10;
  const emulator::Use use(small);
  REQUIRE(!takes(128));
}

TEST_CASE("of parts of the keys they leave f32, and what is merged is rounded once") {
  for (const int capability : kCapabilities) {
    const emulator::Use use(options_of(capability));
    const AttentionCase c{2, 4, 2, 64, {0, 40, 80, 40}, {0, 120}};
    CAPTURE(capability);
    const Expected expected(c);
    FusedGpu gpu;
    AttentionRun whole(c, DType::bf16, /*naive=*/false, 30);
    const Tensor out = Tensor::zeros(c.q_shape(), DType::f32);
    const Tensor lse = Tensor::empty(c.lse_shape(), DType::f32);
    ops::fill(lse, -kInf);
    const Positions parts[] = {{0, 40}, {40, 40}, {80, 40}};
    for (const Positions& keys : parts) {
      const auto of = [&](const Tensor& x) { return x.narrow(1, keys[0], keys.count()); };
      const Tensor part = Tensor::empty(c.q_shape(), DType::f32);
      const Tensor part_lse = Tensor::empty(c.lse_shape(), DType::f32);
      ops::attention_forward(part, part_lse, {}, whole.q, of(whole.k), of(whole.v), whole.scale,
                             c.queries, keys);
      const Tensor rounded = Tensor::empty(c.q_shape(), DType::bf16);
      ops::copy(rounded, part);
      const bool keeps_f32 = rounded.items() != part.items();
      REQUIRE(keeps_f32);
      ops::attention_merge(out, lse, part, part_lse);
    }
    check_close(out, expected.out, 2e-3, "out");
    check_close(lse, expected.lse, kOfLse, "lse");
    ops::copy(whole.out, out);
    ops::attention_delta(whole.delta, whole.dout, whole.out);
    const Slice dq(c.q_shape()), dk(c.k_shape()), dv(c.k_shape());
    for (const Positions& keys : parts) {
      const auto of = [&](const Tensor& x) { return x.narrow(1, keys[0], keys.count()); };
      ops::attention_backward(dq.part, of(dk.part), of(dv.part), whole.dout, {}, whole.q,
                              of(whole.k), of(whole.v), lse, whole.delta, whole.scale, c.queries,
                              keys, /*accumulate=*/true);
    }
    check_report();
    check_close(dq.added(), expected.dq, kOfGradients, "dq");
    check_close(dk.added(), expected.dk, kOfGradients, "dk");
    check_close(dv.added(), expected.dv, kOfGradients, "dv");
    check_calls(gpu, 4, 0, 3, 0);
  }
}

TEST_CASE("backward takes 16 bytes of workspace for each query and head, in whole tiles") {
  FusedGpu gpu;
  const AttentionCase c{2, 4, 2, 64, {0, 130}, {0, 130}};
  AttentionRun run(c, DType::bf16, /*naive=*/false, 30);
  gpu.runtime.allocator().reset_peaks();
  run.backward();
  REQUIRE(gpu.runtime.allocator().peak_bytes(Category::workspace) == 2 * 4 * 256 * 16);
}

TEST_CASE("a query whose keys are split takes f32 outputs and lse of each part as workspace",
          "[emulated]") {
  for (const auto& [keys, parts] : {std::pair(127, 0), {300, 2}, {2000, 8}}) {
    CAPTURE(keys);
    FusedGpu gpu;  // of four multiprocessors, each with room for four blocks
    const AttentionCase c{1, 4, 2, 64, {keys - 1, 1}, {0, keys}};
    AttentionRun run(c, DType::bf16, /*naive=*/false, 30);
    gpu.runtime.allocator().reset_peaks();
    run.forward();
    REQUIRE(gpu.runtime.allocator().peak_bytes(Category::workspace) == parts * 4 * (64 + 1) * 4);
    const Tensor wide = Tensor::empty(c.q_shape(), DType::f32);  // of a part of the keys
    const Tensor rounded = Tensor::empty(c.q_shape(), DType::bf16);
    ops::attention_forward(wide, run.lse, {}, run.q, run.k, run.v, run.scale, c.queries, c.keys);
    ops::copy(rounded, wide);
    REQUIRE(rounded.items() == run.out.items());
    check_report();
  }
}

TEST_CASE("the GPU's capability says which kernels it has", "[emulated]") {
  for (const auto& [capability, forward] :
       {std::pair(75, ""), {80, "flash_2"}, {89, "flash_2"}, {90, "flash_3"}, {100, "flash_2"}}) {
    CAPTURE(capability);
    const emulator::Use use(options_of(capability));
    FusedGpu gpu;
    const AttentionRun run({1, 1, 1, 64, {0, 5}, {0, 5}}, DType::bf16, /*naive=*/false, 30);
    REQUIRE(gpu.runtime.backend().fuses_attention(DType::bf16, 64) == (capability >= 80));
    if (capability >= 80) {
      const bool is_named =
          gpu.remark().find(fmt::format("forward 1 ({})", forward)) != std::string::npos;
      REQUIRE(is_named);
    }
  }
}

TEST_CASE("what they do not take, the blockwise kernels compute as ever, and it is said",
          "[emulated]") {
  const AttentionCase narrow{1, 2, 1, 32, {0, 9}, {0, 9}}, wide{1, 2, 1, 64, {0, 9}, {0, 9}};
  struct Case {
    const char* what;
    AttentionCase attention;
    DType dtype;
    int capability;
  };
  for (const Case& each : {Case{"32 channels", narrow, DType::bf16, 90},
                           {"f32", wide, DType::f32, 90},
                           {"f64", wide, DType::f64, 90},
                           {"an older card", wide, DType::bf16, 75}}) {
    CAPTURE(each.what);
    const emulator::Use use(options_of(each.capability));
    std::vector<Values> found;
    for (const bool fused : {false, true}) {
      FusedGpu gpu(fused);
      AttentionRun run(each.attention, each.dtype, /*naive=*/false, 30);
      const auto gradients = run.backward();
      for (const Tensor& x : {run.out, gradients.dq, gradients.dk, gradients.dv}) {
        found.push_back(x.items());
      }
      const bool takes = gpu.runtime.backend().fuses_attention(each.dtype, each.attention.D);
      REQUIRE(!takes);
      REQUIRE(gpu.remark() ==
              (fused ? "Attention ran on the blockwise kernels: tensor cores need bf16, compute "
                       "capability 8.0 and heads of 64 or 128 channels; with 128 KiB of shared "
                       "memory for a block, also heads of 192 channels with values of 128."
                     : ""));
    }
    for (size_t i = 0; i < 4; ++i) {  // the same bits
      const bool same = found[i] == found[i + 4];
      REQUIRE(same);
    }
  }
}

TEST_CASE("operands that lie as no copy of 16 bytes takes them go to the blockwise kernels") {
  FusedGpu gpu;
  REQUIRE(gpu.runtime.backend().fuses_attention(DType::bf16, 64));
  const int64_t D = 64;
  // Every head has a channel beside it: rows and heads begin at odd places.
  const Tensor q = Random(1).tensor({1, 5, 2, D + 1}, DType::bf16).narrow(3, 0, D);
  const Tensor out = Tensor::empty({1, 5, 2, D}, DType::bf16);
  const Tensor lse = Tensor::empty({1, 2, 5}, DType::f32),
               delta = Tensor::zeros({1, 2, 5}, DType::f32);
  const Tensor dq = Tensor::zeros({1, 5, 2, D}, DType::f32);
  ops::attention_forward(out, lse, {}, q, q, q, 1, {0, 5}, {0, 5});
  ops::attention_backward(dq, dq, dq, out, {}, q, q, q, lse, delta, 1, {0, 5}, {0, 5},
                          /*accumulate=*/true);
  // Positions that do not ascend.
  const Tensor dense = q.to_contiguous();
  ops::attention_forward(out, lse, {}, dense, dense, dense, 1, {3, 2, 0, 3}, {0, 5});
  check_report();
  const bool is_said = gpu.remark().starts_with("Attention ran on the blockwise kernels: ");
  REQUIRE(is_said);
}

}  // namespace
}  // namespace usp::test

// Measures on a GPU what ./book gpu-check shows beside a data sheet: the matrix library's products,
// and memory-bound kernels beside a copy. Prints JSON.

#include <algorithm>
#include <chrono>
#include <functional>

#include "base/args.h"
#include "base/rng.h"
#include "gpu_numbers.h"
#include "tensor/backend.h"
#include "tensor/console.h"
#include "tensor/expert_ops.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"
#include "train/model_config.h"

namespace usp {
namespace {

constexpr int kRounds = 5;

/// How much is measured: on an emulated device, where time means nothing, less.
struct Sizes {
  int64_t tokens = 16384;
  double seconds = 0.05;  ///< that the calls of a round fill; 0: each is called once
};

/// Seconds of one call: the median of rounds.
double seconds_of(const Sizes& sizes, const std::function<void()>& call) {
  const auto time = [&](int64_t calls) {
    Runtime::current().wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    Runtime::current().wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  if (sizes.seconds == 0) return time(1);
  time(2);  // chooses kernels, wakes the GPU
  const int64_t calls = std::max<int64_t>(1, std::llround(sizes.seconds / (time(3) / 3)));
  std::vector<double> rounds;
  for (int i = 0; i < kRounds; ++i) rounds.push_back(time(calls) / double(calls));
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

/// A product c [m, n] = a b of a linear layer: its forward pass (y = x weight^T), or the gradient
/// of its input (dy weight) or of its weight (dy^T x).
struct Product {
  std::string name, kind;
  int64_t m, n, k;
  DType dtype = DType::bf16;
};

/// Squares, and all that the linear layers of a model multiply, in bf16.
std::vector<Product> products_of(const ModelConfig& m, int64_t tokens) {
  const int64_t H = m.hidden_size, qkv = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim();
  const int64_t square = m.hidden_size >= 1024 ? 8192 : 64;
  std::vector<Product> products;
  for (DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    const int64_t n = dtype == DType::f64 ? square / 2 : square;
    products.push_back({"square", "forward", n, n, n, dtype});
  }
  struct Linear {
    const char* name;
    int64_t inputs, outputs;
  };
  for (const Linear& l : {Linear{"qkv", H, qkv}, Linear{"o", m.num_heads * m.head_dim(), H},
                          Linear{"gate_up", H, 2 * m.ffn_hidden_size},
                          Linear{"down", m.ffn_hidden_size, H}, Linear{"head", H, m.vocab_size}}) {
    products.push_back({l.name, "forward", tokens, l.outputs, l.inputs});
    products.push_back({l.name, "input", tokens, l.inputs, l.outputs});
    products.push_back({l.name, "weight", l.outputs, l.inputs, tokens});
  }
  return products;
}

std::string measure_products(const ModelConfig& model, const Sizes& sizes) {
  std::string text;
  for (const Product& p : products_of(model, sizes.tokens)) {
    const bool a_turned = p.kind == "weight", b_turned = p.kind == "forward";
    Tensor a = a_turned ? numbers({p.k, p.m}, p.dtype).transposed() : numbers({p.m, p.k}, p.dtype);
    Tensor b = b_turned ? numbers({p.n, p.k}, p.dtype).transposed() : numbers({p.k, p.n}, p.dtype);
    const Tensor c = Tensor::empty({p.m, p.n}, p.dtype);
    const double seconds = seconds_of(sizes, [&] { ops::matmul(c, a, b); });
    text += fmt::format(
        "{}{{\"product\": \"{}\", \"kind\": \"{}\", \"dtype\": \"{}\", \"m\": {}, \"n\": {}, "
        "\"k\": {}, \"tflops\": {:.4g}, \"library\": \"{}\"}}",
        text.empty() ? "" : ", ", p.name, p.kind, name(p.dtype), p.m, p.n, p.k,
        2e-12 * double(p.m) * double(p.n) * double(p.k) / seconds,
        Runtime::current().accelerator()->matmul_library());
  }
  return text;
}

struct Kernel {
  std::string name;
  int64_t bytes;  ///< that its operands imply, each read or written once
  std::function<void()> run;
  bool held = true;  ///< to a share of the copy's rate: it streams tensors beyond what caches hold
};

/// T rows of 4096 in bf16, as the kernels of a transformer have them.
struct Rows {
  explicit Rows(int64_t tokens) : T(tokens) {}

  static constexpr int64_t H = 4096, V = 32768;
  static constexpr DType dtype = DType::bf16, acc = DType::f32;
  const int64_t T;
  Tensor x = numbers({T, H}, dtype), y = numbers({T, H}, dtype), z = numbers({T, H}, dtype);
  Tensor wide = numbers({T, H}, acc), part = numbers({T, H}, acc);
  Tensor gate_up = numbers({T, 2 * H}, dtype), weight = numbers({H}, dtype);
  Tensor dweight = Tensor::zeros({H}, acc), rstd = Tensor::zeros({T}, acc);
  Tensor heads = x.view({1, T, H / 128, 128}), cos = numbers({T, 64}, acc);
};

std::vector<Kernel> kernels_of_rows(const Rows& r) {
  const int64_t row = r.x.bytes();
  const Tensor x = r.x, y = r.y, z = r.z;
  const RandomStream mask(1, "dropout");
  return {
      {"copy", 2 * row, [=] { ops::copy(y, x); }},
      {"copy of a transpose", 2 * row,
       [=, t = x.view({Rows::H, r.T})] { ops::copy(t, y.transposed()); }, false},
      {"fill", row, [=] { ops::fill(y, 0.5); }},
      {"add", 3 * row, [=] { ops::add(y, x, z); }},
      {"accumulate", 2 * r.wide.bytes() + row, [=, sum = r.wide] { ops::accumulate(sum, x); }},
      {"dropout", 2 * row, [=] { ops::dropout(y, x, 0.1, mask, 0); }},
      {"rmsnorm_forward", 2 * row, [=] { ops::rmsnorm_forward(y, r.rstd, x, r.weight, 1e-5); }},
      {"rmsnorm_backward_input", 3 * row,
       [=] { ops::rmsnorm_backward_input(y, z, x, r.weight, r.rstd, {}); }},
      {"rmsnorm_backward_weight", 2 * row,
       [=] { ops::rmsnorm_backward_weight(r.dweight, z, x, r.rstd, true); }},
      {"rope", 2 * row + 2 * r.cos.bytes(),
       [=] {
         ops::rope(r.heads, r.cos, r.cos, {0, r.T}, false);
       }},
      {"swiglu_forward", 3 * row, [=] { ops::swiglu_forward(y, r.gate_up); }},
      {"swiglu_backward", 5 * row, [=] { ops::swiglu_backward(r.gate_up, y, r.gate_up); }},
      {"sum_squares", row, [=, sum = Tensor::zeros({1}, DType::f64)] { ops::sum_squares(sum, x); }},
  };
}

/// The table, the loss, the optimizer, and parts of attention that are merged.
std::vector<Kernel> kernels_of_the_model(const Rows& r) {
  const int64_t T = r.T, L = std::max<int64_t>(1, T / 4), V = std::min(Rows::V, 64 * T);
  const DType dtype = Rows::dtype, acc = Rows::acc;
  const Tensor logits = numbers({L, V}, dtype), table = numbers({V, Rows::H}, dtype);
  std::vector<int32_t> words(T);
  for (int64_t t = 0; t < T; ++t) words[t] = static_cast<int32_t>(t * 7919 % V);
  const Tensor tokens = Tensor::from_host(words, {T}), targets = tokens.narrow(0, 0, L);
  const Tensor max = Tensor::zeros({L}, acc), sum = Tensor::zeros({L}, acc);
  const Tensor target = Tensor::zeros({L}, acc), lse = Tensor::zeros({L}, acc);
  const Tensor large = Tensor::empty({L}, acc);
  ops::fill(large, 20);  // so that what it overwrites stays finite
  const Tensor loss = Tensor::zeros({1}, DType::f64), dtable = Tensor::zeros({V, Rows::H}, acc);
  const int64_t n = T << 12;
  const Tensor value = Tensor::zeros({n}, dtype), grad = Tensor::zeros({n}, acc);
  const Tensor master = Tensor::zeros({n}, acc), m = Tensor::zeros({n}, acc);
  const Tensor v = Tensor::zeros({n}, acc), one = Tensor::zeros({1}, DType::f64);
  const Tensor norm = Tensor::zeros({1}, DType::f64);
  AdamWSettings settings;
  settings.lr = 1e-3;
  const Tensor out = r.wide.view(r.heads.shape()), part = r.part.view(r.heads.shape());
  const Tensor out_lse = Tensor::zeros({1, Rows::H / 128, T}, acc);
  const Tensor part_lse = Tensor::zeros(out_lse.shape(), acc);
  const Tensor doutput = r.y.view(r.heads.shape());
  const Tensor probs = numbers({1, 1, L, V}, dtype), row_lse = Tensor::zeros({1, 1, L}, acc);
  return {
      {"embedding_forward", 2 * r.y.bytes(),
       [=, y = r.y] { ops::embedding_forward(y, table, tokens); }},
      {"embedding_backward", r.y.bytes() + 2 * T * Rows::H * bytes_of(acc),
       [=, dy = r.y] { ops::embedding_backward(dtable, dy, tokens, 0, true); }, false},
      {"cross_entropy_forward", logits.bytes(),
       [=] { ops::cross_entropy_forward(max, sum, target, logits, targets, 0); }},
      {"cross_entropy_rescale", 3 * sum.bytes(), [=] { ops::cross_entropy_rescale(sum, max, max); },
       false},
      {"cross_entropy_loss", 4 * sum.bytes(),
       [=] { ops::cross_entropy_loss(loss, lse, max, sum, target, 1); }, false},
      {"cross_entropy_backward", 2 * logits.bytes(),
       [=] { ops::cross_entropy_backward(logits, logits, targets, large, 0, 1); }},
      {"clip_coefficient", 24, [=] { ops::clip_coefficient(one, norm, one, 1); }, false},
      {"adamw", value.bytes() + 7 * master.bytes(),
       [=] { ops::adamw(value, master, m, v, grad, one, settings); }},
      {"attention_merge", 3 * out.bytes(),
       [=] { ops::attention_merge(out, out_lse, part, part_lse); }},
      {"attention_delta", 2 * r.x.bytes(),
       [=, heads = r.heads] { ops::attention_delta(out_lse, doutput, heads); }},
      {"attention_rescale", 2 * probs.bytes(),
       [=] { ops::attention_rescale(probs, row_lse, row_lse); }},
  };
}

/// What is one call for all parameters of a layer, here seven of lengths that do not divide.
std::vector<Kernel> kernels_of_several(const Rows& r) {
  const int64_t n = r.T << 12, parameters = 7;
  const DType acc = Rows::acc;
  const Tensor value = Tensor::zeros({n}, Rows::dtype), grad = Tensor::zeros({n}, acc);
  const Tensor master = Tensor::zeros({n}, acc), m = Tensor::zeros({n}, acc);
  const Tensor v = Tensor::zeros({n}, acc), one = Tensor::zeros({1}, DType::f64);
  AdamWSettings settings;
  settings.lr = 1e-3;
  std::vector<AdamWRange> ranges;
  std::vector<Tensor> grads;
  for (int64_t i = 0, begin = 0; i < parameters; ++i) {
    const int64_t end = i + 1 == parameters ? n : begin + n / 28 * (i + 1) / 8 * 8;
    const auto part = [&](const Tensor& of) { return of.narrow(0, begin, end - begin); };
    ranges.push_back({part(value), part(master), part(m), part(v), part(grad)});
    grads.push_back(part(grad));
    begin = end;
  }
  return {
      {"fused adamw", value.bytes() + 7 * master.bytes(),
       [=] { ops::adamw(ranges, one, settings); }},
      {"fused sum_squares", grad.bytes(),
       [=, sum = Tensor::zeros({1}, DType::f64)] { ops::add_squares(sum, grads); }},
  };
}

/// Two experts for each of the rows, of 64; the scores of many tokens.
std::vector<Kernel> kernels_of_experts(const Rows& r) {
  const int64_t T = r.T / 2, k = 2, E = 64, N = 64 * r.T;
  const DType acc = Rows::acc;
  std::vector<int32_t> all(T * k);
  // Every row is one of the slots: by a step that shares no factor with their number.
  for (int64_t i = 0; i < T * k; ++i) all[i] = static_cast<int32_t>(i * 12289 % (T * k));
  const Tensor slots = Tensor::from_host(all, {T, k}), x = r.x.narrow(0, 0, T);
  const Tensor gates = numbers({T, k}, acc), dgates = numbers({T, k}, acc);
  const Tensor logits = numbers({N, E}, acc), scores = numbers({N, E}, acc);
  const Tensor choices = Tensor::empty({N, k}, DType::i32), load = numbers({1, E}, acc);
  const Tensor chosen = numbers({N, k}, acc), dchosen = numbers({N, k}, acc);
  const Tensor counts = Tensor::empty({1, E}, DType::i32), sum = Tensor::zeros({1}, DType::f64);
  const int64_t all_scores = scores.bytes();
  ops::choose_experts(choices, scores, {});
  return {
      {"permute", x.bytes() + r.y.bytes(), [=, rows = r.y] { ops::permute(rows, x, slots); }},
      {"unpermute", x.bytes() + r.y.bytes(),
       [=, rows = r.y] { ops::unpermute(x, rows, slots, gates); }},
      {"unpermute_backward", x.bytes() + 2 * r.y.bytes(),
       [=, rows = r.y] { ops::unpermute_backward(rows, dgates, x, rows, slots, gates); }},
      {"router_scores", 2 * all_scores,
       [=] { ops::router_scores(scores, logits, RouterScore::softmax); }},
      {"router_scores_backward", 3 * all_scores,
       [=] { ops::router_scores_backward(logits, logits, scores, RouterScore::softmax); }},
      {"choose_experts", all_scores, [=] { ops::choose_experts(choices, scores, {}); }, false},
      {"count_choices", choices.bytes(), [=] { ops::count_choices(counts, choices); }, false},
      {"gates_forward", 3 * chosen.bytes(),
       [=] { ops::gates_forward(chosen, scores, choices, true, 1); }, false},
      {"gates_backward", 6 * chosen.bytes(),
       [=] { ops::gates_backward(logits, dchosen, chosen, scores, choices, true, 1); }, false},
      {"balance_loss_forward", all_scores,
       [=] { ops::balance_loss_forward(sum, scores, load, 1, false); }},
      {"balance_loss_backward", 2 * all_scores,
       [=] { ops::balance_loss_backward(logits, scores, load, 1, false); }},
      {"z_loss_forward", all_scores, [=] { ops::z_loss_forward(sum, logits, 1); }},
      {"z_loss_backward", 2 * all_scores, [=] { ops::z_loss_backward(scores, logits, 1); }},
      {"router_entropy", all_scores, [=] { ops::router_entropy(sum, scores); }},
  };
}

/// Every kernel whose time is that of its memory, and a few that have next to nothing to do.
std::string measure_memory(const Sizes& sizes) {
  const Rows rows(sizes.tokens);
  std::string text;
  double copy = 0;
  const auto measure = [&](const std::vector<Kernel>& kernels) {
    for (const Kernel& kernel : kernels) {
      const double seconds = seconds_of(sizes, kernel.run);
      const double rate = 1e-9 * double(kernel.bytes) / seconds;
      if (copy == 0) copy = rate;
      text += fmt::format(
          "{}{{\"kernel\": \"{}\", \"us\": {:.4g}, \"gb_per_s\": {:.4g}, \"of_copy\": {:.3f}, "
          "\"held\": {}}}",
          text.empty() ? "" : ", ", kernel.name, 1e6 * seconds, rate, rate / copy, kernel.held);
    }
  };
  measure(kernels_of_rows(rows));
  measure(kernels_of_the_model(rows));
  Runtime::current().backend().fuse(true);
  measure(kernels_of_several(rows));
  measure(kernels_of_experts(rows));
  return text;
}

int run(int argc, char** argv) {
  std::string measure = "products";
  Sizes sizes;
  ModelConfig model;
  Args args("Times products and kernels of a GPU.");
  args.bind("measure", measure, {"products", "memory"}, "what to measure");
  args.bind("tokens", sizes.tokens, "rows of the tensors");
  args.bind("seconds", sizes.seconds, "that a round of calls takes; 0: one call");
  model.bind(args);
  if (!args.parse(argc, argv)) return 0;
  model.validate(args);
  Runtime runtime(Device::cuda);
  const Runtime::Use use(runtime);
  print("[{}]\n", measure == "products" ? measure_products(model, sizes) : measure_memory(sizes));
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::run, argc, argv); }

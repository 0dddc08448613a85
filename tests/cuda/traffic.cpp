#include <set>

#include "cuda/every_op.h"
#include "emulator/emulator.h"

/// What the kernels move, counted by the emulator in sectors of 32 bytes: the bytes an element that
/// their comments state, and whole sectors in every request of a warp. A read that a cache would
/// serve counts here.
namespace usp::test {
namespace {

struct Traffic {
  double loaded, stored;       ///< bytes an element
  double per_load, per_store;  ///< sectors a request
};

/// Traffic of `run()` alone, for `elements` elements: counting takes most of the time.
Traffic traffic_of(const std::function<void()>& run, int64_t elements) {
  Runtime::current().wait();
  emulator::Options options = emulator::options;
  options.counters = true;
  const emulator::Use use(options);
  run();
  Runtime::current().wait();
  const emulator::Counters total = emulator::take_report().total;
  return {32.0 * double(total.load_sectors) / double(elements),
          32.0 * double(total.store_sectors) / double(elements), total.sectors_per_load(),
          total.sectors_per_store()};
}

/// Within 5 % and a twentieth of a byte, for the numbers of which there is one a row.
void check_traffic(std::string_view what, const Traffic& traffic, double loaded, double stored) {
  INFO(what << ": " << traffic.loaded << " bytes loaded and " << traffic.stored
            << " stored an element, " << traffic.per_load << " sectors a load, "
            << traffic.per_store << " a store");
  CHECK(traffic.loaded >= loaded);
  CHECK(traffic.loaded <= 1.05 * loaded + 0.05);
  CHECK(traffic.stored >= stored);
  CHECK(traffic.stored <= 1.05 * stored + 0.05);
}

/// kernels.cpp checks the accesses of the same kernels.
class UncheckedGpu {
 public:
  UncheckedGpu() : use_(options()) {}

 private:
  static emulator::Options options() {
    emulator::Options options;
    options.checks = false;
    return options;
  }
  emulator::Use use_;
  OnDevice gpu_{Device::cuda};
};

TEST_CASE("what elementwise kernels move is what their comments say") {
  const UncheckedGpu gpu;
  Random random(1);
  const int64_t T = 4, H = 8192, n = T * H;
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    const auto size = static_cast<double>(bytes_of(dtype));
    const auto wide = static_cast<double>(bytes_of(accumulate_dtype(dtype)));
    const Tensor a = random.tensor({T, H}, dtype), b = random.tensor({T, H}, dtype);
    const Tensor sum = random.tensor({T, H}, accumulate_dtype(dtype));
    const Tensor gate_up = random.tensor({T, 2 * H}, dtype);
    const Traffic added = traffic_of([&] { ops::add(b, a, b); }, n);
    check_traffic("add", added, 2 * size, size);
    CHECK(added.per_load == 16);
    CHECK(added.per_store == 16);
    check_traffic("fill", traffic_of([&] { ops::fill(a, 1); }, n), 0, size);
    check_traffic("accumulate", traffic_of([&] { ops::accumulate(sum, a); }, n), size + wide, wide);
    check_traffic("swiglu_forward", traffic_of([&] { ops::swiglu_forward(a, gate_up); }, n),
                  2 * size, size);
    check_traffic("swiglu_backward",
                  traffic_of([&] { ops::swiglu_backward(gate_up, a, gate_up); }, n), 3 * size,
                  2 * size);
    check_traffic("dropout",
                  traffic_of([&] { ops::dropout(a, b, 0.0, RandomStream(1, ""), 0); }, n), size,
                  size);
    check_traffic("copy", traffic_of([&] { ops::copy(a, b); }, n), size, size);
  }
}

TEST_CASE("rows that do not begin on 16 bytes are read element by element, coalesced") {
  const UncheckedGpu gpu;
  Random random(2);
  const Tensor x = random.tensor({32 * 31 + 1}, DType::f32),
               y = Tensor::zeros(x.shape(), DType::f32);
  const Traffic traffic = traffic_of([&] { ops::add(y, x, x); }, x.numel());
  CHECK(traffic.per_load >= 3.9);
  CHECK(traffic.per_load <= 4);
}

TEST_CASE("what kernels of rows move is what their comments say") {
  const UncheckedGpu gpu;
  Random random(3);
  const int64_t T = 4, H = 8192, n = T * H;
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    const DType acc = accumulate_dtype(dtype);
    const auto size = static_cast<double>(bytes_of(dtype));
    const Tensor x = random.tensor({T, H}, dtype), dy = random.tensor({T, H}, dtype);
    const Tensor weight = random.tensor({H}, dtype), rstd = zeros_of(T, acc);
    const Tensor tokens = random.token_tensor(T, T), lse = zeros_of(T, acc);
    // The weight, and the row's second reading, come from caches.
    check_traffic("rmsnorm_forward",
                  traffic_of([&] { ops::rmsnorm_forward(dy, rstd, x, weight, 1e-5); }, n), 3 * size,
                  size);
    check_traffic("rmsnorm_backward_input",
                  traffic_of([&] { ops::rmsnorm_backward_input(dy, dy, x, weight, rstd, dy); }, n),
                  7 * size, size);
    check_traffic("embedding_forward",
                  traffic_of([&] { ops::embedding_forward(dy, x, tokens); }, n), size, size);
    const Tensor max = zeros_of(T, acc), sum = zeros_of(T, acc), target = zeros_of(T, acc);
    check_traffic("cross_entropy_forward",
                  traffic_of([&] { ops::cross_entropy_forward(max, sum, target, x, tokens); }, n),
                  size, 0);
    check_traffic("cross_entropy_backward",
                  traffic_of([&] { ops::cross_entropy_backward(x, x, tokens, lse, 0, 1); }, n),
                  size, size);
    const Tensor many = zeros_of(n, acc), loss = Tensor::zeros({1}, DType::f64);
    const auto number = static_cast<double>(bytes_of(acc));
    check_traffic("cross_entropy_rescale",
                  traffic_of([&] { ops::cross_entropy_rescale(many, many, many); }, n), number, 0);
    ops::fill(many, 1);
    check_traffic("cross_entropy_rescale of what is there",
                  traffic_of([&] { ops::cross_entropy_rescale(many, many, many); }, n), 3 * number,
                  number);
    check_traffic("cross_entropy_loss",
                  traffic_of([&] { ops::cross_entropy_loss(loss, many, many, many, many, 1); }, n),
                  3 * number, number);
    const Tensor squares = Tensor::zeros({1}, DType::f64);
    check_traffic("sum_squares", traffic_of([&] { ops::sum_squares(squares, x); }, n), size, 0);
    const Tensor scores = x.view({1, 1, T, H}), delta = lse.view({1, 1, T});
    Backend& backend = Runtime::current().backend();
    check_traffic(
        "causal_softmax_backward",
        traffic_of([&] { backend.causal_softmax_backward(scores, scores, scores, delta, 1); }, n),
        2 * size, size);
    check_traffic("attention_rescale",
                  traffic_of([&] { ops::attention_rescale(scores, delta, delta); }, n), size, size);
    // cos and sin are read once for each pair of channels, from a cache for all heads but one.
    const Tensor table = Tensor::zeros({T, 32}, acc), heads = x.view({1, T, H / 64, 64});
    const auto wide = static_cast<double>(bytes_of(acc));
    check_traffic("rope",
                  traffic_of(
                      [&] {
                        ops::rope(heads, table, table, {0, T}, false);
                      },
                      n),
                  size + wide, size);
  }
}

TEST_CASE("what gradients of weights and tables move is what their comments say") {
  const UncheckedGpu gpu;
  Random random(5);
  const int64_t T = 128, H = 1024, V = 16, n = T * H;
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    const DType acc = accumulate_dtype(dtype);
    const auto size = static_cast<double>(bytes_of(dtype));
    const auto wide = static_cast<double>(bytes_of(acc));
    const Tensor x = random.tensor({T, H}, dtype), dy = random.tensor({T, H}, dtype);
    const Tensor rstd = zeros_of(T, acc), dweight = zeros_of(H, acc);
    const Tensor tokens = random.token_tensor(T, V), dtable = Tensor::zeros({V, H}, acc);
    for (bool accumulate : {false, true}) {
      // A warp's 32 elements take a sector of rstd, from a cache: one byte an element. Partial sums
      // are written and read again.
      const double partial = wide / 64, in_and_out = wide / double(T);
      check_traffic(
          "rmsnorm_backward_weight",
          traffic_of([&] { ops::rmsnorm_backward_weight(dweight, dy, x, rstd, accumulate); }, n),
          2 * size + 1 + partial + (accumulate ? in_and_out : 0), partial + in_and_out);
      // A warp has 512 bytes of a row of the table. It takes a sector each to see whether its token
      // is the first of its row, for that row, and for each next one.
      const std::vector<double> all = tokens.items();
      const std::set<double> rows(all.begin(), all.end());
      const double first = double(rows.size()) / double(T), sector = 32 * wide / 512;
      check_traffic(
          "embedding_backward",
          traffic_of([&] { ops::embedding_backward(dtable, dy, tokens, 0, accumulate); }, n),
          size + (2 + first) * sector + (accumulate ? first * wide : 0), first * wide);
    }
  }
}

TEST_CASE("what the kernels of experts' rows move is what their comments say") {
  const UncheckedGpu gpu;
  Random random(7);
  const int64_t T = 4, H = 8192, k = 3, n = T * H;
  const Routes routes(random, T, 6, k);  // three rows of each token
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    const auto size = static_cast<double>(bytes_of(dtype));
    const Tensor x = random.tensor({T, H}, dtype), rows = Tensor::zeros({routes.R, H}, dtype);
    const Tensor gates = random.tensor({T, k}, accumulate_dtype(dtype)), dgates = clone(gates);
    // A warp's 512 bytes of a row take a sector of slots, and one of gates, from a cache.
    const double sector = 32 * size / 512;
    check_traffic("permute", traffic_of([&] { ops::permute(rows, x, routes.slots); }, n),
                  size + k * sector, k * size);
    for (bool accumulate : {false, true}) {
      check_traffic(
          "unpermute",
          traffic_of([&] { ops::unpermute(x, rows, routes.slots, gates, accumulate); }, n),
          (accumulate ? k + 1 : k) * size + 2 * k * sector, size);
    }
    const Tensor y = Tensor::empty(x.shape(), dtype);
    Runtime::current().backend().fuse(true);
    check_traffic("unpermute_add",
                  traffic_of([&] { ops::unpermute_onto(y, x, rows, routes.slots, gates); }, n),
                  (k + 1) * size + 2 * k * sector, size);
    Runtime::current().backend().fuse(false);
    check_traffic(
        "unpermute_backward",
        traffic_of([&] { ops::unpermute_backward(rows, dgates, x, rows, routes.slots, gates); }, n),
        2 * k * size, k * size);
  }
}

TEST_CASE("what copies move is what their comments say, by any strides") {
  const UncheckedGpu gpu;
  Random random(8);
  const int64_t T = 32, H = 512, n = T * H;
  for (DType from : kFloatDTypes) {
    const Tensor x = random.tensor({T, H}, from), wide = random.tensor({T, 2 * H}, from);
    for (DType to : kFloatDTypes) {
      INFO(name(from) << " to " << name(to));
      const auto read = static_cast<double>(bytes_of(from));
      const auto written = static_cast<double>(bytes_of(to));
      const Tensor y = Tensor::zeros({T, H}, to), turned = Tensor::zeros({H, T}, to);
      const auto copy = [&](const Tensor& target, const Tensor& source) {
        return traffic_of([&] { ops::copy(target, source); }, n);
      };
      check_traffic("copy", copy(y, x), read, written);
      check_traffic("of slices", copy(y, wide.narrow(1, H, H)), read, written);
      check_traffic("from a transposed one", copy(turned, x.transposed()), 32, written);
      check_traffic("to a transposed one", copy(turned.transposed(), x), read, 32);
    }
  }
}

TEST_CASE("what the router's kernels move is what their comments say") {
  const UncheckedGpu gpu;
  Random random(9);
  const int64_t T = 64, E = 256, k = 8, runs = 2, n = T * E;
  for (DType dtype : kRouterDTypes) {
    INFO(name(dtype));
    const auto size = static_cast<double>(bytes_of(dtype));
    const Tensor x = random.tensor({T, E}, dtype), y = clone(x), dy = clone(x);
    const Tensor load = random.tensor({runs, E}, dtype), bias = random.tensor({E}, dtype);
    const Tensor loss = Tensor::zeros({1}, DType::f64);
    // A term of the loss a row: a sector to write it, 8 bytes to add it up.
    const double term = 32.0 / E, added = 8.0 / E;
    for (bool shares : {false, true}) {
      INFO((shares ? "softmax, or shares" : "sigmoid, or scores"));
      const auto kind = shares ? RouterScore::softmax : RouterScore::sigmoid;
      const double again = shares ? 2 : 1;
      check_traffic("router_scores", traffic_of([&] { ops::router_scores(y, x, kind); }, n),
                    again * size, size);
      check_traffic("router_scores_backward",
                    traffic_of([&] { ops::router_scores_backward(dy, dy, y, kind); }, n),
                    again * 2 * size, size);
      check_traffic("balance_loss_forward",
                    traffic_of([&] { ops::balance_loss_forward(loss, y, load, 1, shares); }, n),
                    (again + 1) * size + added, term);
      check_traffic("balance_loss_backward",
                    traffic_of([&] { ops::balance_loss_backward(dy, y, load, 1, shares); }, n),
                    (shares ? 5 : 2) * size, size);
    }
    check_traffic("z_loss_forward", traffic_of([&] { ops::z_loss_forward(loss, x, 1); }, n),
                  size + added, term);
    check_traffic("z_loss_backward", traffic_of([&] { ops::z_loss_backward(dy, x, 1); }, n),
                  3 * size, size);
    check_traffic("router_entropy", traffic_of([&] { ops::router_entropy(loss, y); }, n),
                  2 * size + added, term);
    // A warp's experts are on one side of the mean; on both sides it would go by itself.
    Values loads(E);
    std::fill(loads.begin(), loads.begin() + E / 2, 1);
    const Tensor of_experts = Tensor::from_host(loads, {E}, dtype);
    check_traffic("balance_bias", traffic_of([&] { ops::balance_bias(bias, of_experts, 1); }, E),
                  3 * size, size);

    const Tensor choices = Tensor::zeros({T, k}, DType::i32);
    const double chosen = 32.0 * k / E;  // a sector for each choice of a row
    check_traffic("choose_experts", traffic_of([&] { ops::choose_experts(choices, x, {}); }, n),
                  k * size, chosen);
    check_traffic("choose_experts by a bias",
                  traffic_of([&] { ops::choose_experts(choices, x, bias); }, n), 2 * k * size,
                  chosen);
    const Tensor gates = random.tensor({T, k}, dtype), dgates = clone(gates);
    for (bool shares : {false, true}) {
      INFO((shares ? "shares" : "scores"));
      check_traffic("gates_forward",
                    traffic_of([&] { ops::gates_forward(gates, y, choices, shares, 1); }, T * k),
                    (shares ? 4 : 2) * 32, 32);
      check_traffic(
          "gates_backward",
          traffic_of([&] { ops::gates_backward(dy, dgates, gates, y, choices, shares, 1); }, T * k),
          (shares ? 7 : 3) * 32, 32);
    }
  }
}

TEST_CASE("what the kernels of experts' choices move is what their comments say") {
  const UncheckedGpu gpu;
  const int64_t T = 1024, E = 8, runs = 2;
  Numbers chosen;  // eight tokens side by side, a sector, have the same expert
  for (int64_t t = 0; t < T; ++t) chosen.push_back(static_cast<int32_t>(t / 8 % E));
  const Tensor choices = Tensor::from_host(chosen, {T, 1}), slots = clone(choices);
  const Tensor counts = Tensor::zeros({runs, E}, DType::i32);
  const std::vector<int64_t> of_experts(E, T / E);
  const double all = 4 * E, of_warps = 32.0 * runs * E / T;
  check_traffic("count_choices", traffic_of([&] { ops::count_choices(counts, choices); }, T), all,
                of_warps);
  // The copy is read and written once. Nobody has room: every choice is dropped.
  check_traffic("drop_choices", traffic_of([&] { ops::drop_choices(slots, Tensor(counts), 0); }, T),
                4 + all + of_warps, 4 + 4);
  check_traffic("assign_slots",
                traffic_of([&] { ops::assign_slots(slots, choices, of_experts); }, T), 2 * all + 4,
                4);
}

TEST_CASE("what naive attention's softmax moves is what its comment says") {
  const UncheckedGpu gpu;
  Random random(6);
  const int64_t K = 4096;
  Backend& backend = Runtime::current().backend();
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    const auto size = static_cast<double>(bytes_of(dtype));
    const Tensor scores = random.tensor({1, 1, 1, K}, dtype);
    const Tensor lse = Tensor::zeros({1, 1, 1}, accumulate_dtype(dtype));
    // Of the keys from 0 or K / 2 on, or from beyond, the query sees all, half, none, and a warp
    // sees alike.
    for (int64_t first : {int64_t{0}, K / 2, 2 * K}) {
      INFO("keys from " << first);
      const double seen = first == 0 ? 1 : first == K / 2 ? 0.5 : 0;
      const auto run = [&] {
        backend.causal_softmax_forward(scores, lse, scores, 1, {K - 1, 1}, {first, K}, {});
      };
      check_traffic("causal_softmax_forward", traffic_of(run, K), 2 * seen * size, size);
    }
  }
}

TEST_CASE("what blockwise attention moves is what its comments say") {
  const UncheckedGpu gpu;
  // All see all; and causal, where 16 queries leave out the tiles of 32 keys that none of them
  // sees: of 4 blocks with 2 tiles each, 6 of 8 remain. Of a document that begins at the second
  // tile, half.
  const AttentionCase all{1, 4, 2, 64, {64, 64}, {0, 64}};
  const AttentionCase cases[] = {all, {1, 4, 2, 64, {0, 64}, {0, 64}}, with_documents(all, {{32}})};
  for (const AttentionCase& c : cases) {
    for (DType dtype : kFloatDTypes) {
      INFO(name(dtype) << ", queries from " << c.queries[0]);
      AttentionRun run(c, dtype, /*naive=*/false, 7);
      const AttentionRun::Gradients gradients = run.backward();
      const auto size = static_cast<double>(bytes_of(dtype));
      const auto wide = static_cast<double>(bytes_of(accumulate_dtype(dtype)));
      const int64_t n = c.S() * c.N * c.D;
      const auto D = static_cast<double>(c.D), K = static_cast<double>(c.K());
      const bool documents = !c.begins.empty();
      const double seen = documents ? 0.5 : c.queries[0] == 0 ? 0.75 : 1;  // of the tiles
      const double tiles = seen * K / 16 * 2 * size;  // keys and values, S / 16 times in all
      const double a_row = 32 / D;                    // a sector for one number a row
      // Of each four rows, a warp reads the begins one by one, and those of its block's 16 at once.
      const double begins = documents ? 1.5 * a_row : 0;
      check_traffic("attention_forward", traffic_of([&] { run.forward(); }, n),
                    size + tiles + begins, size + a_row);
      check_traffic("attention_delta",
                    traffic_of([&] { ops::attention_delta(run.delta, run.dout, run.out); }, n),
                    2 * size, a_row);
      const Tensor merged = Tensor::zeros(c.q_shape(), accumulate_dtype(dtype));
      const auto merge = [&] { ops::attention_merge(merged, run.lse, merged, run.lse); };
      check_traffic("attention_merge", traffic_of(merge, n), 2 * (wide + a_row), wide + a_row);
      // dq: each of a tile's scores needs two numbers of its row, from a cache.
      const double numbers = documents ? 3 : 2, of_block = documents ? a_row / 2 : 0;
      const double dq = 2 * size + tiles + of_block + seen * K / 32 * numbers * a_row + wide;
      // dk and dv: queries and douts K / 16 times, their two numbers for each of 4 warps.
      const double keys = double(c.G) / double(c.N);
      // Whether it skips a tile of queries, each warp finds out from 32 begins.
      const double of_tiles = documents ? K / 16 * 4 * 4 / D : 0;
      const double dkv =
          2 * keys * (size + wide) + of_tiles + seen * K / 16 * (2 * size + 4 * 2 * wide / D);
      check_traffic("attention_backward, with its delta",
                    traffic_of([&] { run.backward(gradients); }, n), 2 * size + dq + dkv,
                    a_row + wide + 2 * keys * wide);
      const AttentionRun::Gradients own = run.backward(dtype);
      check_traffic("attention_backward of all keys, with its delta",
                    traffic_of([&] { run.backward(own, /*accumulate=*/false); }, n),
                    2 * size + dq + dkv - wide - 2 * keys * wide, a_row + size + 2 * keys * size);
    }
  }
}

TEST_CASE("AdamW moves 30 bytes an element of bf16 weights with gradients in f32") {
  const UncheckedGpu gpu;
  Random random(4);
  const int64_t n = 8192;
  const Tensor value = Tensor::zeros({n}, DType::bf16), grad = random.tensor({n}, DType::f32);
  const Tensor master = random.tensor({n}, DType::f32), m = Tensor::zeros({n}, DType::f32);
  const Tensor v = Tensor::zeros({n}, DType::f32), one = Tensor::zeros({1}, DType::f64);
  const auto update = [&] { ops::adamw(value, master, m, v, grad, one, {}); };
  const Traffic traffic = traffic_of(update, n);
  check_traffic("adamw", traffic, 16, 14);
}

}  // namespace
}  // namespace usp::test

#include "comm/launch.h"
#include "technique/case_cover.h"
#include "technique/data_parallel/data_parallel_parity.h"
#include "technique/tiny_llama.h"

#if __has_include("examples/ring.h")
#include "examples/ring.h"
#endif

namespace usp::test {
namespace {

TEST_CASE("data-parallel training is training on one rank, whatever the buckets") {
  for (int ranks : {1, 2, 3, 4, 8}) {
    if (kSanitized && ranks != 4) continue;
    CAPTURE(ranks);
    run_threads(ranks, check_data_parallel_parity);
  }
}

/// One step in f32 or bf16; returns the ledger's gradient entry and the gradients' bytes.
void check_step_traffic(const Communicator& world, const char* dtype, const char* grad_sync,
                        double bucket_mb, int64_t grad_acc_steps) {
  TrainConfig config = tiny_training();
  config.dtype = dtype;
  config.grad_acc_steps = grad_acc_steps;
  config.data_parallel = {world.size(), grad_sync, bucket_mb};
  const RandomText text(config, 400);
  const Mesh mesh(world, {.dp = world.size()});
  Trainer trainer(config, {&text.dataset, mesh});
  trainer.train_step(0);
  const Ledger::Entry entry = Runtime::current().ledger().get("dp", CommKind::all_reduce);
  const int64_t parameters = trainer.model().parameters().numel();
  check_traffic(world, entry, 1, 4 * parameters, fmt::format("{} {}", dtype, grad_sync));
  USP_CHECK(entry.calls == trainer.data_parallel().num_buckets(), "{} calls", entry.calls);
}

TEST_CASE("a step moves one gradient in f32, whatever the buckets, accumulation and dtype",
          "[not_sanitized]") {
  for (const char* dtype : {"f32", "bf16"}) {
    for (int64_t grad_acc_steps : {1, 3}) {
      for (double bucket_mb : {1e-9, 0.0003, 0.0017, 25.0}) {
        run_threads(3, [&](const Communicator& world) {
          check_step_traffic(world, dtype, "bucketed", bucket_mb, grad_acc_steps);
        });
      }
      for (const char* grad_sync : {"naive", "overlapped"}) {
        run_threads(3, [&](const Communicator& world) {
          check_step_traffic(world, dtype, grad_sync, 25, grad_acc_steps);
        });
      }
    }
  }
}

TEST_CASE("a bucket is bucket_mb of gradients, whatever their dtype") {
  struct Case {
    const char *dtype, *grad_accumulation;
    int64_t bytes;  ///< of a gradient that travels
  };
  constexpr int64_t kBucket = 1000;  // bytes, which numbers of 2, 4 and 8 bytes fill
  for (const Case& c : {Case{"f64", "f32", 8}, Case{"f32", "f32", 4}, Case{"bf16", "f32", 4},
                        Case{"bf16", "both", 4}, Case{"bf16", "bf16", 2}}) {
    run_threads(2, [&](const Communicator& world) {
      TrainConfig config = tiny_training();
      config.dtype = c.dtype;
      config.grad_accumulation = c.grad_accumulation;
      config.data_parallel = {2, "bucketed", double(kBucket) / (1 << 20)};
      const RandomText text(config, 400);
      const Mesh mesh(world, {.dp = 2});
      Trainer trainer(config, {&text.dataset, mesh});
      const Tracer& tracer = traced_steps(trainer);
      int64_t full = 0, rest = 0;
      for (const Tracer::Exchange& exchange : tracer.exchanges()) {
        if (exchange.group != "dp") continue;
        (exchange.payload_bytes == kBucket ? full : rest) += exchange.payload_bytes;
      }
      const int64_t total = trainer.model().parameters().numel() * c.bytes;
      USP_CHECK(full == total / kBucket * kBucket && rest == total % kBucket,
                "gradients of {} bytes: {} of {} bytes travel in buckets of {}", c.bytes, full,
                total, kBucket);
    });
  }
}

TEST_CASE("speed and utilisation are of all ranks together") {
  TrainConfig config = tiny_training();
  config.grad_acc_steps = 3;
  const RandomText text(config, 400);
  for (int ranks : {1, 2, 3}) {
    run_threads(ranks, [&](const Communicator& world) {
      TrainConfig own = config;
      own.data_parallel = {world.size(), "bucketed", 25};
      const Mesh mesh(world, {.dp = world.size()});
      Trainer trainer(own, {&text.dataset, mesh});
      const double before = Runtime::current().flops();
      trainer.train_step(0);
      const double carried_out = world.sum(Runtime::current().flops() - before);
      const StepMetrics metrics = trainer.report(0, /*peak_gflops=*/2.5);
      const double possible = 2.5e9 * metrics.step_ms * 1e-3;
      const double tokens = double(world.size() * 2 * 3 * own.seq_len);
      const double needed = world.size() * predict(own).flops;
      expect_close({metrics.tokens_per_s * metrics.step_ms * 1e-3, double(metrics.tokens)},
                   {tokens, tokens}, 1e-12, "tokens of all ranks");
      expect_close({metrics.mfu * possible, metrics.hfu * possible, metrics.flops},
                   {needed, carried_out, carried_out}, 1e-12, "operations of all ranks");
    });
  }
}

/// Gradients (main ones where there are two) of a step of six samples over these ranks.
Values gradients_over(const Communicator& world, TrainConfig config, const Dataset& dataset) {
  config.data_parallel = {world.size(), "bucketed", 0.0007};
  config.micro_batch_size = 6 / (world.size() * config.grad_acc_steps);
  const Mesh mesh(world, {.dp = world.size()});
  Trainer trainer(config, {&dataset, mesh});
  randomize(trainer.model().parameters(), 1);
  trainer.train_step(0);
  return trainer.model().parameters().flat_grads().items();
}

TEST_CASE("ranks that recompute, or sum gradients in bf16, give the gradients of one rank") {
  struct Case {
    const char *dtype, *recompute, *grad_accumulation;
    double tolerance;
    int64_t gradient_bytes;
  };
  // bf16: the ranks' sums are rounded once more than those of a single rank.
  for (const Case& c : {Case{"f64", "full", "f32", 1e-12, 8},
                        {"f64", "selective", "f32", 1e-12, 8},
                        {"bf16", "none", "bf16", 0.02, 2},
                        {"bf16", "full", "both", 0.01, 4}}) {
    CAPTURE(c.dtype, c.recompute, c.grad_accumulation);
    TrainConfig config = tiny_training();
    config.attention = "naive";
    config.dtype = c.dtype;
    config.recompute = c.recompute;
    config.grad_accumulation = c.grad_accumulation;
    const RandomText text(config, 400);
    std::vector<Values> results;
    for (int ranks : {1, 3}) {
      for (int64_t grad_acc_steps : {1, 2}) {
        config.grad_acc_steps = grad_acc_steps;
        std::vector<Values> gradients(ranks);
        int64_t payload = 0, numel = 0;
        run_threads(ranks, [&](const Communicator& world) {
          gradients[world.rank()] = gradients_over(world, config, text.dataset);
          if (world.rank() > 0) return;
          payload = Runtime::current().ledger().get("dp", CommKind::all_reduce).payload_bytes;
          numel = std::ssize(gradients[0]);
        });
        if (ranks > 1) REQUIRE(payload == c.gradient_bytes * numel);
        for (const Values& values : gradients) results.push_back(values);
      }
    }
    for (const Values& values : results) check_close(values, results[0], c.tolerance);
  }
}

/// Gradients become ready slowly, one after the other from the last: a bucket that leaves too early
/// takes with it what stood there before.
void check_slow_backward(const char* grad_sync) {
  run_threads(2, [&](const Communicator& world) {
    TrainConfig config = tiny_training();
    config.data_parallel = {2, grad_sync, 0.0007};
    const Mesh mesh(world, {.dp = 2});
    Model model =
        allocated_model(config.model, config.seq_len, DType::f64, Probabilities::never_whole, 1);
    Grads grads(model.parameters());
    DataParallel data_parallel(config.data_parallel, model.parameters(), grads, mesh);
    const Ledger::Entry none = Runtime::current().ledger().get("dp", CommKind::all_reduce);
    USP_CHECK(none.calls == 0, "nothing sent");
    grads.begin_window(1);
    std::vector<Parameter*> order;
    for (size_t i = model.parameters().size(); i-- > 0;) order.push_back(&model.parameters()[i]);
    ops::fill(model.parameters().flat_grads(), 1000);
    for (Parameter* parameter : order) {
      grads.add({parameter}, [&](bool) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        ops::fill(parameter->grad, world.rank() + 1);
      });
    }
    grads.end_window();
    data_parallel.finish();
    const Ledger::Entry sent = Runtime::current().ledger().get("dp", CommKind::all_reduce);
    USP_CHECK(sent.calls == data_parallel.num_buckets(), "{} messages", sent.calls);
    for (double value : model.parameters().flat_grads().items()) {
      USP_CHECK(value == 3, "{}: {} is not the sum of 1 and 2", grad_sync, value);
    }
  });
}

TEST_CASE("a bucket leaves when the last gradient in it is final, not before") {
  for (const char* grad_sync : {"naive", "overlapped", "bucketed"}) check_slow_backward(grad_sync);
}

TEST_CASE("nothing waits for a bucket until the backward pass is over") {
  for (const char* grad_sync : {"overlapped", "bucketed"}) {
    run_threads(2, [&](const Communicator& world) {
      TrainConfig config = tiny_training();
      config.data_parallel = {2, grad_sync, 0.0007};
      const RandomText text(config, 400);
      const Mesh mesh(world, {.dp = 2});
      Trainer trainer(config, {&text.dataset, mesh});
      const Tracer& tracer = traced_steps(trainer);
      int64_t backward_ends = 0, under_way = 0;
      for (const Tracer::Span& span : tracer.spans()) {
        if (span.name == "backward") backward_ends = span.end_ns;
      }
      int64_t gradients = 0;
      for (const Tracer::Exchange& exchange : tracer.exchanges()) {
        if (exchange.group == "dp") ++gradients;
        USP_CHECK(exchange.wait_begin_ns >= backward_ends,
                  "{}: bucket {} is waited for under the backward pass", grad_sync,
                  exchange.number);
        if (exchange.queued_ns < backward_ends) ++under_way;
      }
      USP_CHECK(gradients == trainer.data_parallel().num_buckets(), "traced");
      USP_CHECK(under_way >= 8, "{}: {} buckets leave under the backward pass", grad_sync,
                under_way);
    });
  }
}

TEST_CASE("a tied embedding's gradient is sent once, after its second contribution") {
  run_threads(2, [](const Communicator& world) {
    TrainConfig config = tiny_training();
    config.model.tie_word_embeddings = true;
    config.data_parallel = {2, "overlapped", 25};
    const RandomText text(config, 400);
    const Mesh mesh(world, {.dp = 2});
    Trainer trainer(config, {&text.dataset, mesh});
    trainer.train_step(0);
    config.data_parallel.dp_size = 1;
    config.micro_batch_size *= 2;
    SoloTrainer solo(config, &text.dataset);
    solo.train_step(0);
    expect_close(trainer.model().parameters().flat_grads().items(),
                 solo.model().parameters().flat_grads().items(), 1e-10, "gradients");
    const int64_t calls = Runtime::current().ledger().get("dp", CommKind::all_reduce).calls;
    USP_CHECK(calls == std::ssize(trainer.model().parameters()), "{} calls", calls);
  });
}

#if __has_include("examples/ring.h")
TEST_CASE("the ring by hand: the sum, and the bytes of all_reduce") {
  for (int ranks : {1, 2, 3, 5, 8}) {
    CAPTURE(ranks);
    run_threads(ranks, [](const Communicator& world) {
      constexpr int64_t kCount = 10007;
      const Tensor x =
          Tensor::from_host(Random(world.rank()).normals(kCount), {kCount}, DType::f64);
      const Tensor y = clone(x);
      ring_all_reduce(world, x);
      world.all_reduce(y);
      expect_close(x.items(), y.items(), 1e-14, "ring");
      const Ledger& ledger = Runtime::current().ledger();
      const Ledger::Entry sent = ledger.get("world", CommKind::send);
      USP_CHECK(sent.calls == 2 * (world.size() - 1), "{} steps", sent.calls);
      const double wire = double(sent.wire_bytes);
      const double total = world.sum(wire);
      USP_CHECK(total == 2.0 * (world.size() - 1) * double(kCount * 8), "{} bytes", total);
    });
  }
}

TEST_CASE("reduce, gather and scatter by hand") {
  run_threads(3, [](const Communicator& world) {
    const double mine = world.rank() + 1;
    const Tensor x = Tensor::from_host(Values{mine, 10 * mine}, {2}, DType::f64);
    reduce(world, x, 1);
    USP_CHECK(x.items() == (world.rank() == 1 ? Values{6, 60} : Values{mine, 10 * mine}), "reduce");
    const Tensor own = Tensor::from_host(Values{mine, -mine}, {2}, DType::f64);
    const Tensor all = Tensor::zeros({3, 2}, DType::f64);
    gather(world, all, own, 2);
    USP_CHECK(all.items() == (world.rank() == 2 ? Values{1, -1, 2, -2, 3, -3} : Values(6)),
              "gather");
    const Tensor back = Tensor::zeros({2}, DType::f64);
    scatter(world, back, all, 2);
    USP_CHECK(back.items() == own.items(), "scatter");
  });
}
#endif

TEST_CASE("finish() before the backward pass has ended is an error") {
  run_threads(1, [](const Communicator& world) {
    TrainConfig config = tiny_training();
    const Mesh mesh(world, {});
    Model model =
        allocated_model(config.model, config.seq_len, DType::f64, Probabilities::never_whole, 1);
    Grads grads(model.parameters());
    DataParallel data_parallel(config.data_parallel, model.parameters(), grads, mesh);
    bool thrown = false;
    try {
      data_parallel.finish();
    } catch (const Error&) {
      thrown = true;
    }
    USP_CHECK(thrown, "an open bucket went unnoticed");
  });
}

TEST_CASE("rank 17 of 64 on the dry engine: shapes and bytes without data") {
  OnDevice meta(Device::meta);
  TrainConfig config = tiny_training();
  config.data_parallel = {64, "bucketed", 25};
  DryEngine engine(17, 64);
  const Communicator world = Communicator::world(engine);
  const Mesh mesh(world, {.dp = 64});
  Trainer trainer(config, {nullptr, mesh});
  trainer.train_step(0);
  trainer.train_step(1);
  const int64_t bytes = trainer.model().parameters().flat_grads().bytes();
  const Ledger::Entry entry = meta.runtime.ledger().get("dp", CommKind::all_reduce);
  REQUIRE(entry.payload_bytes == 2 * bytes);
  // The elements do not divide by 64: rank 17 may hold one more or less than its share.
  const double share = 2 * 2 * 63.0 / 64 * double(bytes);
  REQUIRE(std::abs(double(entry.wire_bytes) - share) < 0.05 * share);
}

TEST_CASE("the dry engine's ledger is the real one's") {
  TrainConfig config = tiny_training();
  config.grad_acc_steps = 2;
  config.data_parallel = {4, "bucketed", 0.0017};
  const RandomText text(config, 400);
  const auto after_two_steps = [&](const Communicator& world, const Dataset* dataset) {
    const Mesh mesh(world, {.dp = 4});
    Trainer trainer(config, {dataset, mesh});
    const Ledger before = Runtime::current().ledger();
    trainer.train_step(0);
    trainer.train_step(1);
    return Runtime::current().ledger().get("dp", CommKind::all_reduce) -
           before.get("dp", CommKind::all_reduce);
  };
  std::vector<Ledger::Entry> real(4);
  run_threads(4, [&](const Communicator& world) {
    real[world.rank()] = after_two_steps(world, &text.dataset);
  });
  for (int rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    const OnDevice meta(Device::meta);
    DryEngine engine(rank, 4);
    const Ledger::Entry dry = after_two_steps(Communicator::world(engine), nullptr);
    REQUIRE(dry.calls == real[rank].calls);
    REQUIRE(dry.payload_bytes == real[rank].payload_bytes);
    REQUIRE(dry.wire_bytes == real[rank].wire_bytes);
    REQUIRE(dry.header_bytes == real[rank].header_bytes);
  }
}

}  // namespace
}  // namespace usp::test

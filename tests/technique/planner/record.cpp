#include "planner/record.h"

#include <mutex>

#include "accounting/memory.h"
#include "comm/launch.h"
#include "planner/timed.h"
#include "proof/compositions.h"
#include "technique/planner/layouts.h"
#include "technique/tiny_llama.h"
#include "train_step.h"

/// A record is what a run does.
namespace usp::test {
namespace {

/// What a rank sent and computed in its second step.
struct Step {
  Ledger::Entries sent;
  double flops = 0;
};

std::vector<Step> second_steps(const TrainConfig& config) {
  const RandomText text(config, 4000);
  std::vector<Step> steps(config.mesh().ranks());
  std::mutex mutex;
  run_threads(static_cast<int>(config.mesh().ranks()), [&](const Communicator& world) {
    world.engine().set_node_size(config.communication->node_size);
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    trainer.train_step(0);
    const Ledger before = Runtime::current().ledger();
    const double flops = Runtime::current().flops();
    trainer.train_step(1);
    Step step;
    step.flops = Runtime::current().flops() - flops;
    for (const auto& [key, entry] : Runtime::current().ledger().entries()) {
      const Ledger::Entry since = entry - before.get(key.first, key.second);
      if (since.calls > 0) step.sent[key] = since;
    }
    const std::lock_guard lock(mutex);
    steps[world.rank()] = step;
  });
  return steps;
}

const std::vector<std::string> kRuns = {
    "--dp_size 2 --grad_acc_steps 2",
    "--dp_size 3 --zero_stage 1 --grad_acc_steps 2 --node_size 3",
    "--dp_size 2 --zero_stage 3 --grad_acc_steps 2",
    "--dp_size 2 --tp_size 2 --sequence_parallel --zero_stage 2 --grad_acc_steps 2 --node_size 2",
    "--pp_size 2 --dp_size 2 --grad_acc_steps 4 --node_size 2",
    "--pp_size 2 --pp_schedule zb_h1 --tp_size 2 --grad_acc_steps 4",
    "--pp_size 2 --pp_schedule dualpipe --grad_acc_steps 4",
    "--cp_size 2 --dp_size 2 --zero_stage 1",
    "--cp_size 3 --cp_layout contiguous --seq_len 24",
    "--tp_size 2 --tp_overlap batch_halves --sequence_parallel",
};

TEST_CASE("a record has what a run sends and computes, on every rank") {
  for (const std::string& flags : kRuns) {
    if (kSanitized && &flags != &kRuns[3]) continue;
    const TrainConfig config = layout_of_flags(instead(kSmall, flags));
    const std::vector<Step> steps = second_steps(config);
    for (int rank = 0; rank < std::ssize(steps); ++rank) {
      CAPTURE(flags, rank);
      const Program program = record(config, rank);
      const Ledger recorded = program.ledger();
      CHECK(program.flops() == steps[rank].flops);
      REQUIRE(recorded.entries().size() == steps[rank].sent.size());
      for (const auto& [key, entry] : steps[rank].sent) {
        const Ledger::Entry own = recorded.get(key.first, key.second);
        CAPTURE(key.first, name(key.second));
        CHECK(own.calls == entry.calls);
        CHECK(own.payload_bytes == entry.payload_bytes);
        CHECK(own.wire_bytes == entry.wire_bytes);
        CHECK(own.net_bytes == entry.net_bytes);
      }
    }
  }
}

/// Notes how many allocations and releases there were when each op began.
class OpsAmongEvents : public Recorder {
 public:
  std::vector<size_t> begins;

  void op(std::string_view, int64_t, int64_t, std::span<const Tensor* const>, bool) override {
    begins.push_back(Runtime::current().allocator().events().size());
  }
  int64_t post(const Posted&) override { return 0; }
  void wait(int64_t) override {}
  void begin_phase(std::string_view, int64_t, int64_t) override {}
  void end_phase() override {}
};

/// The most bytes alive at a time, workspace of kernels aside: what is taken for it when an op has
/// begun is given back before the next one begins.
int64_t peak_without_kernels(const Allocator& allocator, const OpsAmongEvents& ops) {
  const std::vector<Allocator::Event>& events = allocator.events();
  std::vector<bool> is_kernels(events.size());
  for (size_t i = 0; i < ops.begins.size(); ++i) {
    const size_t end = i + 1 < ops.begins.size() ? ops.begins[i + 1] : events.size();
    std::vector<size_t> taken;
    for (size_t at = ops.begins[i]; at < end; ++at) {
      if (events[at].tag.category != Category::workspace) continue;
      const auto of = std::ranges::find_if(
          taken, [&](size_t before) { return events[before].bytes == -events[at].bytes; });
      if (of == taken.end()) {
        taken.push_back(at);
      } else {
        is_kernels[*of] = is_kernels[at] = true;
        taken.erase(of);
      }
    }
  }
  int64_t live = 0, peak = 0;
  for (size_t at = 0; at < events.size(); ++at) {
    if (!is_kernels[at]) live += events[at].bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

/// What a rank of a run reaches.
struct Reached {
  int64_t peak = 0;  ///< without what its kernels want
  Simulation of;     ///< of each category
};

std::vector<Reached> reached_in_a_run(const TrainConfig& config) {
  const RandomText text(config, 40 * config.tokens_per_step());
  std::vector<Reached> ranks(config.mesh().ranks());
  run_threads(static_cast<int>(config.mesh().ranks()), [&](const Communicator& world) {
    Runtime& runtime = Runtime::current();
    OpsAmongEvents ops;
    runtime.allocator().record_events(true);
    runtime.tell(&ops);
    world.engine().set_node_size(config.communication->node_size);
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    const Simulation of = simulate_steps(trainer);
    runtime.tell(nullptr);
    ranks[world.rank()] = {peak_without_kernels(runtime.allocator(), ops), of};
  });
  return ranks;
}

/// By category what formulas or a run say. The scratch of reductions, which sums of others share,
/// is no formula's.
template <class Found>
std::map<std::string, int64_t> categories_of(const Found& found) {
  std::map<std::string, int64_t> bytes{{"weights", found.states.weights},
                                       {"gradients", found.states.gradients},
                                       {"optimizer", found.states.optimizer},
                                       {"activations", found.peak_activations}};
  for (const LiveBytes& buffer : found.buffers) bytes[std::string(buffer.name)] += buffer.bytes;
  bytes.erase("scratch of reductions");
  std::erase_if(bytes, [](const auto& part) { return part.second == 0; });
  return bytes;
}

/// A drawn layout whose memory is no matter of data: every token goes to all experts, and no
/// document ends, which would hide steps of a ring.
TrainConfig without_data(TrainConfig config) {
  ExpertShape& experts = config.model.experts;
  experts.num_experts_per_tok = experts.num_experts;
  experts.route_nodes = 0;
  config.context_parallel.document_separator = -1;
  return config;
}

TEST_CASE("a search's memory is that of a run on every rank, to the byte", "[not_sanitized]") {
  const int wanted = is_full() ? 50 : 4;
  SegmentRecords records;
  int of_experts = 0, of_cp = 0, of_pp = 0, of_zero = 0;
  uint64_t number = 6'000'000 + 400 * turn();
  for (int compared = 0; compared < wanted; ++number) {
    const Twin layout = CompositionDraw(number, /*most_ranks=*/is_full() ? 16 : 8).draw().first;
    const TrainConfig config = without_data(layout.config);
    if (!goes_together(config)) continue;
    INFO("composition " << number << ", every token to all experts, no separator\n"
                        << layout.flags);
    const bool in_turns =
        config.tensor_parallel.halves() > 1 ||
        std::ranges::any_of(config.pipeline.schedule(config.grad_acc_steps).actions,
                            [](const std::vector<Action>& actions) {
                              return std::ranges::any_of(actions, &Action::with_next);
                            });
    const std::vector<Reached> ranks = reached_in_a_run(config);
    records.programs(config, each_for_itself(config));  // so that they are written the next time
    const std::vector<Program> programs = records.programs(config, each_for_itself(config));
    for (int rank = 0; rank < std::ssize(ranks); ++rank) {
      CAPTURE(rank);
      const Reached& run = ranks[rank];
      CHECK(record(config, rank).peak == run.peak);
      CHECK(programs[rank].peak == run.peak);
      const Prediction formulas = predict(config, rank);
      auto expected = categories_of(formulas), found = categories_of(run.of);
      if (in_turns) {  // then it is a bound
        CHECK(found.at("activations") <= expected.at("activations"));
        found.erase("activations"), expected.erase("activations");
      }
      CHECK(found == expected);
    }
    const auto fullest = std::ranges::max_element(ranks, {}, &Reached::peak);
    CHECK(time_step({config, 0, 0, "", 0}, round_cluster(4)).gib() ==
          double(fullest->peak) / (1 << 30));
    ++compared;
    of_experts += config.model.experts.num_experts > 0;
    of_cp += config.context_parallel.cp_size > 1;
    of_pp += config.pipeline.pp_size > 1;
    of_zero += config.data_parallel.zero_stage > 0;
  }
  CAPTURE(of_experts, of_cp, of_pp, of_zero, records.written());
  if (is_full()) CHECK(std::min({of_experts, of_cp, of_pp, of_zero}) >= 10);
}

TEST_CASE("a record's peak is that of the simulation, and its passes are those of the schedule") {
  for (const std::string& flags : random_layouts(kSanitized ? 3 : 30, 3 + turn())) {
    const TrainConfig config = layout_of_flags(flags);
    const int rank = static_cast<int>(config.mesh().ranks()) - 1;
    const Program program = record(config, rank);
    CAPTURE(flags);
    CHECK(program.peak == simulate<Trainer>(config, rank).peak);
    const Schedule schedule = config.pipeline.schedule(config.grad_acc_steps);
    const auto stage = config.mesh().place_of(rank).pp;
    std::vector<ProgramSegment> seen;
    for (const Event& event : program.events) {
      const ProgramSegment& segment = program.segments[event.segment];
      if (segment.work == '-' || segment.work == 'U') continue;
      if (std::ranges::find(seen, segment) == seen.end()) seen.push_back(segment);
    }
    size_t at = 0;
    for (const Action& action : schedule.actions[stage]) {
      const char work = action.work == Work::F ? 'F' : action.work == Work::W ? 'W' : 'B';
      const ProgramSegment expected{work, schedule.stages.stage_of({int(stage), action.chunk}),
                                    action.chunk, action.micro_batch};
      // A stage without a layer has no weights to compute.
      if (at >= seen.size() || seen[at] != expected) {
        CHECK(work == 'W');
        continue;
      }
      ++at;
    }
    CHECK(at == seen.size());
  }
}

TEST_CASE("a record knows what the step before has left to it") {
  const auto waits = [](const std::string& flags) {
    const Program program = record(layout_of_flags(instead(kSmall, flags)), 0);
    std::vector<int> times(program.posts);
    int64_t wait_last = 0;
    for (const Event& event : program.events) {
      if (event.kind != Event::wait && event.kind != Event::wait_last) continue;
      ++times[event.what];
      wait_last += event.kind == Event::wait_last;
    }
    CAPTURE(flags);
    CHECK(std::ranges::count(times, 1) == program.posts);  // each is waited for once
    return wait_last;
  };
  CHECK(waits("--dp_size 2 --zero_stage 1 --gather_overlap none") == 0);
  const int64_t wait_last = waits("--dp_size 2 --zero_stage 1");
  CHECK(wait_last == 6);  // weights of the embedding, four layers and the head
  CHECK(waits("--dp_size 2 --pp_size 2 --grad_acc_steps 4") == 0);
  CHECK(waits("--dp_size 2 --zero_stage 3 --grad_acc_steps 2") == 0);
}

TEST_CASE("a product's kernel has its three lengths") {
  const Program program = record(layout_of_flags(kSmall), 0);  // 32 tokens, 24 wide, 31 words
  const auto has = [&](const char* op, int64_t m, int64_t n, int64_t k) {
    return std::ranges::count_if(program.kernels, [&](const Kernel& kernel) {
      return kernel.op == op && kernel.m == m && kernel.n == n && kernel.k == k;
    });
  };
  CHECK(has("linear_forward", 32, 31, 24) == 1);
  CHECK(has("linear_backward_input", 32, 24, 31) == 1);
  CHECK(has("linear_backward_weight", 31, 24, 32) == 1);
  for (const Kernel& kernel : program.kernels) {
    CAPTURE(kernel.op);
    if (kernel.kind != KernelKind::matmul) continue;
    CHECK(kernel.flops == 2 * kernel.groups * kernel.m * kernel.n * kernel.k);
  }
  const Program experts = record(layout_of_flags(instead(kSmall, "--num_experts 4")), 0);
  int64_t grouped = 0;
  for (const Kernel& kernel : experts.kernels) {
    if (!kernel.op.starts_with("grouped_linear_")) continue;
    ++grouped;
    CAPTURE(kernel.op, kernel.m, kernel.n, kernel.k);
    CHECK(kernel.groups == 4);
    CHECK(kernel.k >= 8);  // rows of an expert, or a width
    CHECK(kernel.flops == 2 * kernel.groups * kernel.m * kernel.n * kernel.k);
  }
  CHECK(grouped > 0);
}

}  // namespace
}  // namespace usp::test

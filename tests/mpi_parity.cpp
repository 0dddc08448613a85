// What holds for rank threads, under mpiexec: one process per rank. Exit code 0: it does.

#include "comm/launch.h"
#include "ranks/memory_in_flight.h"
#include "technique/data_parallel/zero_parity.h"

#if __has_include("expert_parallel/group.h")
#include "technique/expert_parallel/expert_parity.h"
#endif

namespace usp {
namespace {

/// Each value of each setting once; technique/data_parallel/zero.cpp has their combinations, with
/// threads as ranks. Where these are four or eight, half of the cases are of hybrid sharding.
std::vector<test::ZeroCase> cases_of_zero(int ranks) {
  const int64_t half = ranks % 4 == 0 ? ranks / 2 : 0;
  return {{1, half, 1, "none", false, "optimizer"},
          {2, 0, 3, "full", true, "forward", "step"},
          {2, half, 1, "selective", false, "none"},
          {3, 0, 3, "none", true, "none", "micro_batch", "step"},
          {3, half, 3, "selective", false, "forward", "step", "chunk"}};
}

/// Trains over all ranks of `world`, and on one. Throws Error on the first difference, and where a
/// step sends other than predict_traffic() bytes.
void check_zero(const Communicator& world) {
  constexpr int64_t kSteps = 3;
  const TrainConfig parity = test::parity_config();
  const test::RandomTokens tokens(parity.model.vocab_size);
  const TokenFile file(tokens.path(), 2, parity.model.vocab_size);
  const Dataset dataset(file, parity.seq_len, 0.1, DataOrder::shuffled, parity.seed);
  const Mesh mesh(world, {.dp = world.size()});
  for (const test::ZeroCase& c : cases_of_zero(world.size())) {
    test::SoloTrainer solo(zero_config(c, 1), &dataset);
    const test::TrainedState expected = test::train(solo, kSteps);
    const TrainConfig config = zero_config(c, world.size());
    Trainer trainer(config, {&dataset, mesh});
    const ZeroTraffic before = test::sent_by_all(world);
    expect_close(test::train(trainer, kSteps, &world), expected, 1e-10, c.name(world.size()));
    test::check_zero_traffic(world, config, before, kSteps, c.name(world.size()));
  }
}

int run(const Communicator& world, int, char**) {
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  test::check_overwriting(world);
  test::check_overwriting_in_pieces(world);
  test::check_pieces(world);
  test::check_data_parallel_parity(world);
  check_zero(world);
#if __has_include("expert_parallel/group.h")
  test::check_experts_in_stages(world);
#endif
  if (speaks_for_all()) fmt::print("{} ranks: equal\n", world.size());
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }

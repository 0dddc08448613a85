// What holds for rank threads, under mpiexec: one process per rank. Exit code 0: it does.

#include "comm/launch.h"
#include "ranks/memory_in_flight.h"
#include "technique/zero_parity.h"

#if __has_include("expert_parallel.h")
#include "technique/expert_parity.h"
#endif

namespace usp {
namespace {

int run(const Communicator& world, int, char**) {
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  test::check_overwriting(world);
  test::check_pieces(world);
  test::check_data_parallel_parity(world);
  test::check_zero_parity(world);
#if __has_include("expert_parallel.h")
  test::check_experts_in_stages(world);
#endif
  if (speaks_for_all()) fmt::print("{} ranks: equal\n", world.size());
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }

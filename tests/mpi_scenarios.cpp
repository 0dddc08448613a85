// A run of several ranks that goes wrong on request. test_ranks.py starts it under mpiexec and
// looks at what becomes of it.

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "comm/launch.h"
#include "run/comm_config.h"
#include "tensor/console.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

Tensor zeros(int64_t count) { return Tensor::zeros({count}, DType::f32); }

void sleep_seconds(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

/// What the culprit does in the middle of the run, the others being in an all-reduce.
void misbehave(const std::string& scenario, const Communicator& dp) {
  sleep_seconds(0.2);  // until they are
  if (scenario == "throw") fail("the loss of rank {} is beyond words", dp.rank());
  if (scenario == "kill") kill(getpid(), SIGKILL);
  if (scenario == "segv") kill(getpid(), SIGSEGV);
  if (scenario == "exit") std::exit(0);
  if (scenario == "_exit") _exit(0);
  if (scenario == "shape") dp.all_reduce(zeros(1001));
  if (scenario == "dtype") dp.all_reduce(Tensor::zeros({1000}, DType::f64));
  if (scenario == "kind") dp.all_gather(zeros(4000), zeros(1000));
  if (scenario == "deadlock") dp.recv(zeros(3), (dp.rank() + 1) % dp.size());
  if (scenario == "usage") usage_error("flags that only this rank minds");
  if (scenario == "stuck") sleep_seconds(1e6);  // outside communication
}

int run(const Communicator& world, int argc, char** argv) {
  std::string scenario = "none", run_dir_path = "run";
  int64_t culprit = 2, steps = 20;
  CommConfig comm;
  Args args("Goes wrong on request.");
  args.bind("scenario", scenario, "what to do");
  args.bind("culprit", culprit, "the rank that does it");
  args.bind("steps", steps, "all-reduces");
  args.bind("run_dir", run_dir_path, "for the flight records");
  comm.bind(args);
  if (!args.parse(argc, argv)) return 0;
  comm.validate(args);
  if (scenario == "usage_everywhere") usage_error("flags that every rank minds");
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  const RunDir run_dir(run_dir_path, true);
  watch(world, comm, run_dir);
  run_dir.write("run.json", "{}");
  const Communicator dp = world.split("dp", [](int) { return 0; });
  for (int64_t step = 0; step < steps; ++step) {
    world.engine().flight().set_step(step);
    if (step == 7 && world.rank() == culprit) {
      if (scenario == "leave") return 0;
      misbehave(scenario, dp);
    }
    dp.all_reduce(zeros(1000));
    sleep_seconds(0.002);
  }
  world.barrier();
  run_dir.finish("finished");
  print("finished\n");
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }

#include <fmt/format.h>

#include "cuda/gpu_counts.h"
#include "emulator/emulator.h"
#include "tensor/runtime.h"

namespace usp::test {

void run_counted(std::string_view kernel, const std::function<void()>& run) {
  emulator::Options options;
  options.checks = false;
  options.counters = true;
  const emulator::Use use(options);
  emulator::take_report();
  run();
  Runtime::current().wait();
  const emulator::Counters total = emulator::take_report().total;
  fmt::print("{{\"kernel\": \"{}\", \"per_load\": {:.4g}, \"per_store\": {:.4g}}}\n", kernel,
             total.sectors_per_load(), total.sectors_per_store());
}

}  // namespace usp::test

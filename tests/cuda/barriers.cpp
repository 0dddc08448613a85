#include <map>
#include <set>
#include <string>

#include "cuda/every_op.h"
#include "emulator/emulator.h"

/// Every barrier of the kernels is needed, and its absence is found whatever the order of threads.
namespace usp::test {

namespace {

std::set<const void*> places, left_out;  // where kernels call a barrier

bool leaves_out(const char* /*call*/, const void* place) {
  places.insert(place);
  return left_out.contains(place);
}

/// All operations with barriers.
void run_all() {
  const OnDevice gpu(Device::cuda);
  run_loss(DType::f32, 2, 301);
  run_optimizer(DType::f32, 17000);
  run_attention(DType::f32, /*naive=*/false, {1, 2, 1, 20, {0, 70}, {0, 70}});
  run_router(DType::f32, 1, 12, 4, 4, 2);
  run_parts(DType::f32, /*naive=*/false, {1, 2, 1, 20, {0, 5}, {0, 5}});
  emulator::Options options = emulator::options;
  options.cublas_lacks = [](const emulator::MatmulAsked&) { return true; };
  const emulator::Use use(options);
  run_matmuls(DType::f32, 5, 40, 17);
  Runtime::current().wait();
}

}  // namespace

TEST_CASE("a barrier that is left out is a race under every order of threads") {
  emulator::Options options;
  options.leaves_out = leaves_out;
  const emulator::Use use(options);
  run_all();
  REQUIRE(emulator::take_report().problems.empty());
  // One line of a template is several places.
  std::map<std::string, std::set<const void*>> lines;
  for (const void* place : places) lines[emulator::line_of(place)].insert(place);
  REQUIRE(lines.size() >= 14);
  for (const auto& [line, of_line] : lines) {
    for (auto order :
         {emulator::Order::forward, emulator::Order::reverse, emulator::Order::shuffled}) {
      options.threads = order;
      const emulator::Use in_order(options);
      left_out = of_line;
      try {
        run_all();
      } catch (const Error&) {  // a wait says that something is wrong; the report says what
      }
      left_out.clear();
      const emulator::Report report = emulator::take_report();
      INFO(line << " left out: " << report.text());
      CHECK((report.has("race") || report.has("uninitialised")));
    }
  }
}

}  // namespace usp::test

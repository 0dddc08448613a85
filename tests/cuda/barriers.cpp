#include "cuda/barriers.h"

#include <filesystem>
#include <set>

#include "cuda/every_op.h"
#include "emulator/emulator.h"

/// Every barrier of the kernels is needed, and its absence is found whatever the order of threads.
namespace usp::test {

namespace {

using Place = std::pair<std::string, int>;
bool watching = false;
std::map<std::pair<const char*, int>, Place> places;  // by where the compiler keeps the file's name
Place left_out;

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

bool leaves_out(const char* file, int line) {
  if (!watching) return false;
  auto place = places.find({file, line});
  if (place == places.end()) {
    const std::string name = std::filesystem::path(file).filename().string();
    place = places.insert({{file, line}, {name, line}}).first;
  }
  return place->second == left_out;
}

TEST_CASE("a barrier that is left out is a race under every order of threads") {
  const ScopedValue on(watching, true);
  run_all();
  REQUIRE(emulator::take_report().problems.empty());
  std::set<Place> all;
  for (const auto& [where, place] : places) all.insert(place);
  REQUIRE(all.size() >= 14);
  for (const Place& place : all) {
    for (auto order :
         {emulator::Order::forward, emulator::Order::reverse, emulator::Order::shuffled}) {
      emulator::Options options;
      options.threads = order;
      const emulator::Use use(options);
      left_out = place;
      try {
        run_all();
      } catch (const Error&) {  // a wait says that something is wrong; the report says what
      }
      left_out = {};
      const emulator::Report report = emulator::take_report();
      INFO(place.first << ":" << place.second << " left out: " << report.text());
      CHECK((report.has("race") || report.has("uninitialised")));
    }
  }
}

}  // namespace usp::test

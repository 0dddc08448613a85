// Listeners are no part of what catch.h includes.
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/interfaces/catch_interfaces_config.hpp>
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
#else
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>
#endif

#include <iostream>

#include "cuda/kernels_in.h"
#include "emulator/emulator.h"
#include "technique/case_cover.h"
#include "tensor/ops.h"
#include "testing.h"

/// Linked into an executable, makes the emulated GPU the device of its tests, with every access of
/// every kernel checked, in the order of threads whose turn it is, with --full in every one. A case
/// in which the emulator finds a problem fails, and so does a run of all cases that leaves out a
/// kernel.
namespace usp::test {

namespace {

bool failed = false;

[[maybe_unused]] const bool on_checked = [] {
  emulator::options.protect = false;
  emulator::options.every_order = is_full() && !is_full_in_turns();
  emulator::options.threads = emulator::order_of(turn());
  emulator::options.seed = turn();
  one_pass = true;
  std::atexit([] {
    if (failed) std::_Exit(EXIT_FAILURE);
  });
  return setenv("USP_TEST_DEVICE", "cuda", /*replace=*/0) == 0;
}();

#if __has_include(<catch2/catch_test_macros.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

class Checks : public Listener {
 public:
  using Listener::Listener;

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const std::string problems = emulator::take_report().text();
    if (!problems.empty()) {
      std::cout << "the emulator found in this case:\n" << problems;
      failed = true;
    }
    Listener::testCaseEnded(stats);
  }

  void testRunEnded(const Catch::TestRunStats& stats) override {
    if (!m_config->hasTestFilters()) count_kernels();
    Listener::testRunEnded(stats);
  }

 private:
  static void count_kernels() {
    const std::set<std::string> kernels = kernels_in(USP_KERNELS);
    const std::map<std::string, int64_t> checked = emulator::checked_kernels();
    int64_t shapes = 0;
    for (const auto& [kernel, shapes_of_kernel] : checked) shapes += shapes_of_kernel;
    for (const std::string& kernel : kernels) {
      if (checked.contains(kernel)) continue;
      std::cout << kernel << ": no case launches this kernel\n";
      failed = true;
    }
    if (kernels.empty()) failed = true;
    std::cout << fmt::format("{} of {} kernels checked, {} grids and blocks\n", checked.size(),
                             kernels.size(), shapes);
  }
};
CATCH_REGISTER_LISTENER(Checks)

TEST_CASE("matmul, where the library has no kernel for it") {
  emulator::Options options = emulator::options;
  options.cublas_lacks = [](const emulator::MatmulAsked&) { return true; };
  const emulator::Use use(options);
  const OnDevice gpu(Device::cuda);
  for (DType dtype : kFloatDTypes) {
    const Tensor a = Tensor::zeros({19, 33}, dtype), b = Tensor::zeros({33, 17}, dtype);
    const Tensor c = Tensor::zeros({19, 17}, dtype);
    ops::fill(a, 2);
    ops::fill(b, 0.5);
    ops::matmul(c, a, b);
    REQUIRE(c.items() == Values(19 * 17, 33));
  }
}

}  // namespace
}  // namespace usp::test

#include "cuda/kernels_in.h"
#include "lab/attention_case.h"
#include "lab/ideas_case.h"

/// No kernel of the chapter is left out of the lists of rungs that the other tests go through.
namespace usp::lab {
namespace {

/// Runs the rung on x, whose memory goes afterwards.
template <class Rung, class Given>
void run(const Rung& rung, const Given& x) {
  rung.run(nullptr, x);
  const emulator::Report report = emulator::take_report();
  INFO(rung.name << "\n" << report.text());
  REQUIRE(report.problems.empty());
}

void run_each() {
  const auto product = []<class T>(const ladder::Rung<T>* rung) {
    const Case<T> x(33, 40, 50);
    run(*rung, x.product);
  };
  for (const auto* rung : ladder::f32_rungs()) product(rung);
  for (const auto* rung : ladder::bf16_rungs()) product(rung);
  for (const ideas::Ideas* file : ideas::all()) {
    for (const ideas::Rung& rung : file->rungs) {
      const IdeasCase x({33, 70});
      run(rung, x.data);
    }
  }
  const auto attention = []<class T>(const Rung<T>* rung, const Shape& shape) {
    const Attended<T> x(*rung, shape);
    run(*rung, x.problem);
  };
  const Shape shape{1, 33, 47, 2, 1, 64};
  Shape decoded{1, 1, 300, 2, 1, 64};
  decoded.splits = 2;
  for (const auto* rung : attention::f32_rungs()) attention(rung, shape);
  for (const auto* rung : attention::bf16_rungs()) attention(rung, shape);
  for (const auto* rung : attention::decoding_rungs()) attention(rung, decoded);
  for (const auto* rung : attention::backward_rungs()) {
    const Differentiated x(shape);
    x.forward();
    run(*rung, x.gradients);
  }
}

TEST_CASE("every kernel of the chapter is on a list of rungs, and runs with all checks") {
  run_each();
  const std::map<std::string, int64_t> checked = emulator::checked_kernels();
  size_t kernels = 0;
  for (const char* folder : {USP_SOURCES "/kernels", USP_SOURCES "/fusion"}) {
    for (const std::string& kernel : test::kernels_in(folder)) {
      ++kernels;
      if (!checked.contains(kernel)) FAIL_CHECK(kernel << ": no rung launches this kernel");
    }
  }
  REQUIRE(kernels > 30);
}

}  // namespace
}  // namespace usp::lab

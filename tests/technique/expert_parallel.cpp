#include "expert_parallel.h"

#include "expert_parity.h"

namespace usp::test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitizedExperts = true;
#else
constexpr bool kSanitizedExperts = false;
#endif

bool all_expert_cases() { return std::getenv("USP_TEST_FULL") != nullptr && !kSanitizedExperts; }

/// Random tokens, cut into samples of eight.
struct ExpertText {
  ExpertText() : tokens(parity_config().model.vocab_size), file(tokens.path(), 2, 61) {}

  RandomTokens tokens;
  TokenFile file;
  Dataset dataset{file, 8, 0.1, DataOrder::shuffled, 0};
};

void check_parity(const ExpertCase& c, const ExpertText& text) {
  CAPTURE(c.name());
  const ExpertResult expected = expert_reference(c, text.dataset);
  run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
    check_expert_parity(world, c, text.dataset, expected);
  });
}

TEST_CASE("experts over ranks are experts on one rank, in every layout") {
  const ExpertText text;
  const std::vector<ExpertCase> cases = expert_cases(all_expert_cases() ? 300 : 0);
  const size_t step = kSanitizedExperts ? 6 : 1;
  for (size_t i = 0; i < cases.size(); i += step) {
    check_parity(cases[i], text);
  }
}

}  // namespace
}  // namespace usp::test

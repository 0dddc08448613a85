#include "moe.h"
#include "pipeline_parity.h"

/// What a mixture of experts asks of memory: formulas beside a step on shapes alone.
namespace usp::test {
namespace {

/// Experts for the n-th layout, every kind of them in turn.
TrainConfig with_experts(const PipelineCase& c, int64_t n) {
  TrainConfig config = pipeline_config(c);
  ExpertShape& shape = config.model.experts;
  shape.num_experts = 4 << (n % 2);
  shape.num_experts_per_tok = 1 + n % 3;
  shape.num_shared_experts = n / 2 % 2;
  shape.first_dense_layers = n / 3 % 2;
  shape.moe_ffn_hidden_size = n % 5 == 0 ? 8 : 0;
  shape.router_score = n % 3 == 0 ? "sigmoid" : "softmax";
  ExpertConfig& experts = config.expert_parallel;
  experts.expert_tp = n / 4 % 2 == 1;
  const int64_t ranks = config.mesh().expert_ranks();
  experts.ep_size = n / 8 % 2 == 0 ? 1 : std::gcd(ranks, int64_t{4});
  const char* kinds[] = {"none", "sample", "batch", "bias"};
  experts.balance = kinds[n % 4];
  experts.capacity_factor = n % 7 == 0 ? 1.25 : 0;
  return config;
}

TEST_CASE("the activations of a stage with experts are those of the formula, to the byte") {
  int compared = 0;
  int64_t n = 0;
  for (PipelineCase c : pipeline_cases(100)) {
    ++n;
    if (c.tp > 1 && c.sequence == std::string_view("off")) c.sequence = "again";
    const TrainConfig config = with_experts(c, n);
    const int64_t T = 8 / c.cp, R = T * config.model.experts.num_experts_per_tok;
    for (int rank = 0; rank < c.pp; ++rank) {
      CAPTURE(n, c.name(), rank, config.expert_parallel.ep_size, config.expert_parallel.expert_tp,
              config.expert_parallel.balance, config.model.experts.num_shared_experts,
              config.model.experts.num_experts, R);
      const int64_t predicted = predict(config, rank).peak_activations;
      const int64_t made = simulate(config, rank).peak_activations;
      if (c.in_turns) {
        CHECK(made <= predicted);
      } else {
        CHECK(made == predicted);
      }
      ++compared;
    }
  }
  REQUIRE(compared > 200);
}

}  // namespace
}  // namespace usp::test

#include "accounting/distinct_ranks.h"
#include "accounting/plan.h"
#include "comm/launch.h"
#include "run/session.h"
#include "train_step.h"

namespace usp {
namespace {

// [run]
/// One run, on one of the ranks of `world`.
int run(const Communicator& world, int argc, char** argv) {
  TrainConfig config;
  Session session(config, world);
  if (!session.parse(argc, argv)) return 0;  // --help
  if (config.estimate) return session.estimate(estimate_ranks(config));
  if (config.planning.plan > 0) return session.answer(plan_batch(config));
  // [show]
  const PipelineConfig& pipeline = config.pipeline;
  if (!pipeline.pp_show.empty()) return session.answer(pipeline.show(config.grad_acc_steps));
  // [show]
  session.open([&] { return predict_fullest(config); });
  return session.train(
      [&](const RunContext& context) { return std::make_unique<Trainer>(config, context); });
}
// [run]

}  // namespace
}  // namespace usp

// [main]
int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }
// [main]

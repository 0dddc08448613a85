// PipeDream as it first was: a pipeline whose stages update their weights after each backward pass.

#include "pipedream.h"

#include "accounting/distinct_ranks.h"
#include "comm/launch.h"
#include "run/session.h"

namespace usp {
namespace {

/// The chapter's flags, for what this program does.
struct PipeDreamConfig : TrainConfig {
  PipeDreamConfig() {
    optimizer.grad_clip = 0;
    run_dir = "runs/" + chapter + "_pipedream";
  }

  std::unique_ptr<RunConfig> fresh() const override { return std::make_unique<PipeDreamConfig>(); }
  void validate(const Args& args) override {
    TrainConfig::validate(args);
    if (!args.typed("run_dir")) overwrite = true;  // its own last run, and no other
    check_updates_of_a_stage(*this);
    for (const char* flag : {"checkpoint_interval", "resume", "plan", "pp_show"}) {
      if (args.typed(flag)) usage_error("{} is for the chapter's own program; leave it out", flag);
    }
  }
};

std::vector<RankEstimate> estimate(const TrainConfig& config) {
  std::vector<RankEstimate> estimates;
  for (const auto& [rank, ranks, what] : distinct_ranks(config)) {
    estimates.push_back(
        {predict_pipedream(config, rank), simulate<PipeDream>(config, rank), ranks, what});
  }
  return estimates;
}

Prediction fullest(const TrainConfig& config) {
  Prediction fullest;
  for (const RankClass& of : distinct_ranks(config)) {
    Prediction prediction = predict_pipedream(config, of.rank);
    if (prediction.needed() > fullest.needed()) fullest = std::move(prediction);
  }
  return fullest;
}

int run(const Communicator& world, int argc, char** argv) {
  PipeDreamConfig config;
  Session session(config, world);
  if (!session.parse(argc, argv)) return 0;  // --help
  if (config.estimate) return session.estimate(estimate(config));
  session.open([&] { return fullest(config); });
  return session.train(
      [&](const RunContext& context) { return std::make_unique<PipeDream>(config, context); });
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }

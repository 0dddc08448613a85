#include "accounting/distinct_ranks.h"

#include "technique/tiny_llama.h"

/// Which ranks of a run differ, and of which one an estimate speaks.
namespace usp::test {
namespace {

/// Ranks that shard units which they do not divide, and so pad.
TrainConfig padded(int64_t ranks, int64_t stage) {
  TrainConfig config = tiny_training();
  config.model.vocab_size = 61;
  config.data_parallel.dp_size = ranks;
  config.data_parallel.zero_stage = stage;
  return config;
}

TEST_CASE("what the last ranks of ZeRO do not update, since it is padding, has no moments") {
  for (int64_t ranks : {2, 5, 7}) {
    for (int64_t stage : {0, 1, 2, 3}) {
      const TrainConfig config = padded(ranks, stage);
      std::map<int64_t, int64_t> of_all, of_classes;  // ranks, by bytes
      for (int rank = 0; rank < ranks; ++rank) {
        CAPTURE(ranks, stage, rank);
        const Prediction predicted = predict(config, rank);
        const Simulation simulated = simulate<Trainer>(config, rank);
        CHECK(predicted.rank == rank);
        CHECK(predicted.states.weights == simulated.states.weights);
        CHECK(predicted.states.gradients == simulated.states.gradients);
        CHECK(predicted.states.optimizer == simulated.states.optimizer);
        CHECK(predicted.peak_activations == simulated.peak_activations);
        ++of_all[simulated.states.total()];
      }
      for (const RankEstimate& of : estimate_ranks(config)) {
        of_classes[of.simulation.states.total()] += of.ranks;
      }
      CAPTURE(ranks, stage);
      CHECK(of_classes == of_all);
      CHECK((of_all.size() > 1) == (stage > 0 && ranks > 2));
    }
  }
}

#if __has_include("tensor_parallel/region.h")
TEST_CASE(
    "ranks of tp whose parts of MLPs differ are apart, and the longest part's is the fullest") {
  for (int64_t stage : {0, 3}) {
    TrainConfig config = padded(2, stage);
    config.tensor_parallel.tp_size = 2;
    config.model.vocab_size = 60;
    config.model.ffn_hidden_size = 31;              // 15 columns and 16
    std::map<int64_t, int64_t> of_all, of_classes;  // ranks, by peak
    for (int rank = 0; rank < 4; ++rank) ++of_all[simulate<Trainer>(config, rank).peak];
    for (const RankEstimate& of : estimate_ranks(config)) {
      of_classes[of.simulation.peak] += of.ranks;
      CHECK(of.prediction.peak_activations == of.simulation.peak_activations);
    }
    CAPTURE(stage);
    CHECK(of_classes == of_all);
    CHECK(of_all.size() > 1);
    CHECK(simulate_fullest(config).peak == of_all.rbegin()->first);
  }
}
#endif

TEST_CASE("an estimate speaks of the rank whose peak is highest, and lists those that differ") {
  const TrainConfig config = padded(2, 0);
  const RankEstimate one{predict(config), simulate<Trainer>(config), 1, ""};
  std::vector<RankEstimate> ranks(3, one);
  for (int64_t i = 0; i < 3; ++i) {
    ranks[i].prediction.rank = 10 + i;
    ranks[i].ranks = 100 + i;
    ranks[i].what = fmt::format("of kind {}", i);
  }
  ranks[1].simulation.peak += 4;
  const std::string text = estimate_text(config, ranks), alone = estimate_text(config, {one});
  CAPTURE(text, alone);
  CHECK(text.find("rank 11 of 2, the fullest: dp 2") != std::string::npos);
  for (int64_t i = 0; i < 3; ++i) {
    const std::string peak = fmt::format("{}  of kind {}\n", ranks[i].simulation.peak, i);
    CHECK(text.find(peak) != std::string::npos);
  }
  CHECK(alone.find("rank 0 of 2: dp 2") != std::string::npos);
  CHECK(alone.find("ranks that differ") == std::string::npos);
}

TEST_CASE("an estimate of several ranks says what the fullest sends in a step, by group and link") {
  TrainConfig config = padded(2, 0);
  RankEstimate one{predict(config), simulate<Trainer>(config), 1, ""};
  one.simulation.sent = Ledger();
  std::vector<RankEstimate> ranks(2, one);
  ranks[1].simulation.peak += 4;
  ranks[0].simulation.sent.add("dp", CommKind::all_reduce, {.wire_bytes = 5000});
  Ledger& sent = ranks[1].simulation.sent;  // in two steps
  REQUIRE(ranks[1].simulation.steps == 2);
  sent.add("dp", CommKind::all_gather, {.payload_bytes = 9, .wire_bytes = 700, .net_bytes = 200});
  sent.add("dp", CommKind::reduce_scatter, {.wire_bytes = 100, .net_bytes = 40, .header_bytes = 8});
  sent.add("tp", CommKind::all_reduce, {.wire_bytes = 60});
  sent.add("world", CommKind::barrier, {.calls = 3});
  const std::string text = estimate_text(config, ranks);
  const std::string expected = fmt::format(
      "\nsent in a step, bytes:   inside its node    to other nodes\n"
      "dp{:>38}{:>18}\ntp{:>38}{:>18}\n\nranks that differ",
      280, 120, 30, 0);
  CAPTURE(text, expected);
  CHECK(text.find(expected) != std::string::npos);
  config.data_parallel.dp_size = 1;
  CHECK(estimate_text(config, {one}).find("sent in a step") == std::string::npos);
}

TEST_CASE("a place on a mesh is that of a rank's communicators") {
  for (const MeshSizes& sizes : {MeshSizes{.dp = 6, .pp = 3, .cp = 2, .tp = 4, .ep = 4},
                                 MeshSizes{.dp = 2, .cp = 3, .tp = 2, .ep = 6, .ep_over_tp = true},
                                 MeshSizes{.dp = 4, .pp = 2, .ep = 2}}) {
    for (int rank = 0; rank < sizes.ranks(); ++rank) {
      const DryMesh dry(sizes, EngineKind::host, rank);
      const MeshPlace at = sizes.place_of(rank);
      CAPTURE(describe(sizes), rank);
      CHECK(at.dp == dry.mesh.dp().rank());
      CHECK(at.pp == dry.mesh.pp().rank());
      CHECK(at.cp == dry.mesh.cp().rank());
      CHECK(at.tp == dry.mesh.tp().rank());
      CHECK(at.ep == dry.mesh.ep().rank());
      CHECK(at.dp_cp == dry.mesh.dp_cp().rank());
      CHECK(at.edp == dry.mesh.edp().rank());
    }
  }
}

}  // namespace
}  // namespace usp::test

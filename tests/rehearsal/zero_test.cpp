#include "compare.h"

/// Chapter 2's ZeRO as it is, composed with every other kind of parallelism: each stage equals the
/// model on one process.
namespace usp::rehearsal {
namespace {

/// Buffers of this kind that were alive at once, at most, on this rank.
int64_t most_alive(std::string_view name) {
  int64_t count = 0, most = 0;
  for (const Allocator::Event& event : Runtime::current().allocator().events()) {
    if (event.tag.name != name) continue;
    count += event.bytes > 0 ? 1 : -1;
    most = std::max(most, count);
  }
  return most;
}

/// Each stage that shards something. `units`: that are unsharded, and whose gradients there
/// are, at once.
void check_stages(Setting setting, const MeshSizes& sizes, const State& expected,
                  const std::string& what, int64_t units) {
  for (int64_t stage : {1, 2, 3}) {
    setting.zero_stage = stage;
    const std::string name = fmt::format("stage {} {}", stage, what);
    check(setting, sizes, expected, name, [&](RehearsalTrainer& trainer) {
      const int64_t weights = most_alive("gathered weights");
      const int64_t gradients = most_alive("gradients to reduce");
      USP_CHECK(weights <= (stage == 3 ? units : 0), "{}: {} units unsharded", name, weights);
      USP_CHECK(gradients <= (stage >= 2 ? units : 0), "{}: {} units' gradients", name, gradients);
      const bool overlaps = weights >= 2 && gradients >= 2;  // a chunk may be one block
      USP_CHECK(stage < 3 || setting.chunks > 1 || overlaps, "{}: nothing overlaps", name);
      for (size_t i = 0; i < trainer.parameters().size() && stage == 3; ++i) {
        USP_CHECK(!trainer.parameters()[i].value.defined(), "{}: {} is whole", name,
                  trainer.parameters()[i].name);
      }
    });
  }
}

/// Sizes that tensor parallelism cuts evenly.
Setting even(bool tied = false) {
  Setting setting = small(tied);
  setting.model.vocab_size = 64;
  setting.model.ffn_hidden_size = 24;
  return setting;
}

TEST_CASE("ZeRO alone, with copies, and over the ranks of context parallelism") {
  for (bool tied : {false, true}) {
    const Setting setting = small(tied);
    const int64_t units = tied ? 3 : 2;
    check_stages(setting, {.dp = 3}, whole_model(setting, 3), "dp 3", units);
    check_stages(setting, {.dp = 2, .cp = 2}, whole_model(setting, 2), "dp 2 cp 2", units);
  }
  Setting copies = small();
  copies.shard_size = 2;
  check_stages(copies, {.dp = 2, .cp = 2}, whole_model(copies, 2), "shard 2 of dp 2 cp 2", 2);
}

TEST_CASE("ZeRO and tensor parallelism, with shared kv heads and sequence shards") {
  for (bool sequence_parallel : {false, true}) {
    Setting setting = even(sequence_parallel);
    setting.plan.sequence_parallel = sequence_parallel;
    const State expected = whole_model(setting, 2);
    const int64_t units = sequence_parallel ? 3 : 2;  // that one is tied, too
    check_stages(setting, {.dp = 2, .tp = 2}, expected, "dp 2 tp 2", units);
    check_stages(setting, {.dp = 2, .tp = 4}, expected, "dp 2 tp 4", units);
  }
}

TEST_CASE("ZeRO and weights that tensor parallelism cuts unevenly, beside copies of norms") {
  Setting setting = even();
  setting.model.vocab_size = 61;
  setting.model.ffn_hidden_size = 17;  // 8 and 9: these weights are units of their own
  setting.plan.sequence_parallel = true;
  const State expected = whole_model(setting, 3);
  check_stages(setting, {.dp = 3, .tp = 2}, expected, "dp 3 tp 2", /*units=*/4);
}

TEST_CASE("ZeRO and pipelines: 1F1B, weight gradients held back, several chunks to a stage") {
  for (const char* schedule : {"1f1b", "zb_h1", "breadth_first"}) {
    for (bool tied : {false, true}) {
      Setting setting = small(tied);
      setting.schedule = schedule;
      setting.micro_batches = 4;
      setting.chunks = std::string(schedule) == "breadth_first" ? 2 : 1;
      const State expected = whole_model(setting, 2);
      const int64_t units = tied ? 3 : 2;
      check_stages(setting, {.dp = 2, .pp = 2}, expected,
                   fmt::format("dp 2 pp 2 {} tied {}", schedule, tied), units);
    }
  }
  Setting copies = small(true);
  copies.shard_size = 2;
  copies.micro_batches = 2;
  check_stages(copies, {.dp = 4, .pp = 2}, whole_model(copies, 4), "shard 2 of dp 4 pp 2", 3);
}

TEST_CASE("ZeRO and all of it at once") {
  const Setting setting = with_all_techniques(even(true));
  check_stages(setting, {.dp = 2, .pp = 2, .tp = 2}, alone(setting, 2), "dp 2 pp 2 tp 2", 3);
  check_stages(setting, {.dp = 1, .pp = 2, .cp = 2, .tp = 2}, alone(setting, 1), "pp 2 cp 2 tp 2",
               3);
}

}  // namespace
}  // namespace usp::rehearsal

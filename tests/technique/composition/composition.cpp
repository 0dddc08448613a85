#include "composition/composition.h"

#include <fmt/ranges.h>

#include "base/rules.h"
#include "comm/launch.h"
#include "expert_parallel/node_dispatch.h"
#include "technique/case_cover.h"
#include "technique/expert_parallel/expert_parity.h"

namespace usp::test {
namespace {

/// All 24, as the flag has them.
std::vector<std::string> orders() {
  std::vector<std::string_view> names = {"cp", "dp", "pp", "tp"};
  std::vector<std::string> orders;
  do {
    orders.push_back(fmt::format("{}", fmt::join(names, ",")));
  } while (std::ranges::next_permutation(names).found);
  return orders;
}

/// Two ranks on three of the four axes, another one left out each time, and on each of them what
/// has groups inside it.
ExpertCase composition(size_t number) {
  ExpertCase c = plain_experts(/*dp=*/2, /*ep=*/2);
  c.grad_acc_steps = 2;
  c.pp = number % 4 == 0 ? 1 : 2;
  c.cp = number % 4 == 1 ? 1 : 2;
  c.tp = number % 4 == 2 ? 1 : 2;
  c.dp = number % 4 == 3 ? 1 : 2;
  c.sequence = c.tp == 1 ? "off" : "again";
  c.num_kv_heads = c.tp == 2 && number % 3 == 0 ? 1 : 2;
  c.tied = number % 2 == 1;
  c.zero_stage = int64_t(number % 3);
  // Biases are on all ranks: where ZeRO and no tp leave other copies on none, these are compared.
  c.balance = number % 5 == 0 && c.tp == 2 ? "sample" : "bias";
  c.expert_tp = c.tp == 2 && number % 7 > 3;
  return c;
}

TEST_CASE("training is one rank's whatever the order of the mesh") {
  const Text text;
  const std::vector<std::string> all = orders();
  for (size_t i = 0; i < all.size(); ++i) {
    if (!is_full() && i % 6 != turn() % 6) continue;
    const ExpertCase c = composition(i);
    INFO(all[i] << ": " << c.name());
    const ExpertResult expected = expert_reference(c, text.dataset, /*steps=*/2);
    run_threads(int(c.ranks()), [&](const Communicator& world) {
      check_expert_parity(world, c, text.dataset, expected, [&](TrainConfig& config) {
        config.composition.mesh_order = all[i];
        config.composition.check_copies = 1;
      });
    });
  }
}

TEST_CASE("the rank that stands for a stage works on it whatever the order of the mesh") {
  for (const std::string& order : orders()) {
    ExpertCase c = composition(1);
    c.pp = 4;
    TrainConfig config = expert_config(c);
    const auto peaks = [&] {
      std::vector<int64_t> bytes;
      for (int stage = 0; stage < 4; ++stage) {
        bytes.push_back(simulate<Trainer>(config, config.mesh().first_of_stage(stage)).peak);
        REQUIRE(config.mesh().coordinates(config.mesh().first_of_stage(stage))[1] == stage);
      }
      return bytes;
    };
    const std::vector<int64_t> usual = peaks();
    config.composition.mesh_order = order;
    INFO(order);
    REQUIRE(peaks() == usual);
  }
}

TEST_CASE("nodes are taken by dispatch=by_node where each has as many ranks of every ep group") {
  ExpertCase c = plain_experts(/*dp=*/3, /*ep=*/3);
  c.experts = 6;
  c.tp = c.pp = 2;
  c.sequence = "again";
  int64_t taken = 0, refused = 0;
  for (const std::string& order : orders()) {
    for (const int64_t node_size : {1, 2, 3, 4, 6, 12}) {
      for (const bool expert_tp : {false, true}) {
        c.expert_tp = expert_tp;
        TrainConfig config = expert_config(c);
        config.composition.mesh_order = order;
        config.expert_parallel.dispatch = "by_node";
        config.communication->node_size = node_size;
        INFO(order << " nodes of " << node_size << " expert_tp " << expert_tp);
        bool is_taken = true;
        try {
          config.expert_parallel.check(config);
        } catch (const Refusal& refusal) {
          is_taken = false;
          int64_t others = 0;
          for (const std::string& remedy : refusal.remedies()) {
            config.communication->node_size = std::stoll(remedy.substr(remedy.rfind(' ')));
            try {
              config.expert_parallel.check(config);
              ++others;
            } catch (const Refusal&) {
            }
          }
          REQUIRE(others > 0);  // of what it proposes
          config.communication->node_size = node_size;
        }
        std::set<int64_t> in_node;  // by the groups themselves; 0: ranks of ep lie unevenly
        for (int rank = 0; rank < 12; ++rank) {
          const OnDevice meta(Device::meta);
          const DryMesh dry(config.mesh(), EngineKind::host, rank);
          dry.mesh.world().engine().set_node_size(node_size);
          try {
            const NodeGroups groups(config.expert_parallel, dry.mesh.ep());
            in_node.insert(groups.within.size());
          } catch (const Error&) {
            in_node.insert(0);
          }
        }
        REQUIRE(is_taken == (in_node.size() == 1 && !in_node.contains(0)));
        if (is_taken) {
          REQUIRE(config.expert_parallel.ranks_in_node(config) == *in_node.begin());
        }
        ++(is_taken ? taken : refused);
      }
    }
  }
  REQUIRE(taken > 0);
  REQUIRE(refused > 0);
}

TEST_CASE("flags of the composition are refused with what would do") {
  const auto refused = [](std::vector<const char*> flags, const std::vector<std::string>& parts) {
    TrainConfig config;
    Args args("test");
    config.bind(args);
    flags.insert(flags.begin(), "program");
    args.parse(int(flags.size()), flags.data());
    check_throws<UsageError>([&] { config.validate(args); }, parts);
  };
  refused({"--mesh_order", "pp,dp,tp"}, {"'pp,dp,tp'", "once each", "pp,dp,cp,tp"});
  refused({"--mesh_order", "pp,dp,tp,tp"}, {"once each"});
  refused({"--check_copies", "-1"}, {"check_copies=-1"});
}

}  // namespace
}  // namespace usp::test

#include "composition/layout.h"

#include <fmt/ranges.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "comm/launch.h"
#include "technique/expert_parallel/expert_parity.h"
#include "technique/layout_of_flags.h"

namespace usp::test {
namespace {

/// Experts, tied ends, kv heads that several ranks hold, and ZeRO's shards among them.
std::vector<ExpertCase> layouts() {
  const auto with = [](auto change) {
    ExpertCase c = plain_experts(/*dp=*/2, /*ep=*/2);
    change(c);
    return c;
  };
  return {
      plain_experts(1, 1),
      with([](ExpertCase& c) { c.pp = c.cp = c.tp = 2, c.sequence = "again"; }),
      with([](ExpertCase& c) { c.pp = 2, c.tied = true, c.zero_stage = 1; }),
      with([](ExpertCase& c) { c.pp = 2, c.schedule = "dualpipe", c.grad_acc_steps = 4; }),
      with([](ExpertCase& c) { c.tp = 4, c.sequence = "kept", c.zero_stage = 3; }),
      with([](ExpertCase& c) { c.tp = 2, c.sequence = "again", c.expert_tp = true, c.cp = 2; }),
      with([](ExpertCase& c) { c.dp = 4, c.zero_stage = 2, c.shard_size = 2, c.balance = "bias"; }),
  };
}

int64_t numel_of(const PlacedPart& part) {
  Shape shape = part.global_shape;
  for (const Slice& slice : part.slices) shape[slice.axis] = slice.length;
  return shape.numel();
}

TEST_CASE("by a layout every element lies somewhere and one rank saves it") {
  for (const ExpertCase& c : layouts()) {
    INFO(c.name());
    std::map<std::string, int64_t> held, of_model;
    for (const PlacedPart& part : place_parameters(expert_config(c))) {
      held[part.name] += numel_of(part);
      of_model[part.name] = part.global_shape.numel();
      INFO(part.name);
      std::vector<int> saved(numel_of(part)), updated(saved.size());
      for (const auto& owner : part.owners) {
        for (int64_t i = owner.begin; i < owner.end; ++i) saved[i] += owner.saves, ++updated[i];
      }
      REQUIRE(saved == std::vector<int>(saved.size(), 1));
      // Every copy of it is updated by somebody, and no copy more often than another.
      REQUIRE(updated == std::vector<int>(updated.size(), updated.front()));
    }
    REQUIRE(held == of_model);
  }
}

TEST_CASE("by a layout the groups that a part is copied over are all ranks that hold it") {
  for (const ExpertCase& c : layouts()) {
    const TrainConfig config = expert_config(c);
    for (const PlacedPart& part : place_parameters(config)) {
      INFO(c.name() << ": " << part.name);
      std::set<int> reached = {part.ranks.front()};
      for (const std::string& group : part.copied_over) {
        for (const int rank : std::set<int>(reached)) {
          for (const int other : config.mesh().members(group, rank)) reached.insert(other);
        }
      }
      REQUIRE(std::vector<int>(reached.begin(), reached.end()) == part.ranks);
    }
  }
}

using Names = std::vector<std::string>;

/// The first part whose name ends so.
PlacedPart part_named(const ExpertCase& c, std::string_view end) {
  for (const PlacedPart& part : place_parameters(expert_config(c))) {
    if (part.name.ends_with(end)) return part;
  }
  fail("no {}", end);
}

TEST_CASE("by a layout groups have the names by which gradients are summed") {
  ExpertCase all = plain_experts(/*dp=*/2, /*ep=*/2);
  all.pp = all.cp = all.tp = 2;
  all.sequence = "again";
  const PlacedPart q = part_named(all, "q_proj.weight");
  REQUIRE(q.sharded_over == Names{"pp", "tp"});
  REQUIRE(q.copied_over == Names{"dp_cp"});
  REQUIRE(q.summed_over == Names{"dp_cp"});
  const PlacedPart norm = part_named(all, "input_layernorm.weight");
  REQUIRE(norm.sharded_over == Names{"pp"});
  REQUIRE(norm.copied_over == Names{"stage"});
  REQUIRE(norm.summed_over == Names{"dp_cp", "tp"});
  const PlacedPart expert = part_named(all, "experts.0.up_proj.weight");
  REQUIRE(expert.sharded_over == Names{"pp", "ep"});
  REQUIRE(expert.copied_over == Names{"edp"});
  REQUIRE(expert.ranks == std::vector{0, 2, 4, 6});

  ExpertCase ends = plain_experts(/*dp=*/1, /*ep=*/1);
  ends.pp = 4;
  ends.tied = true;
  const PlacedPart table = part_named(ends, "embed_tokens.weight");
  REQUIRE(table.ranks == std::vector{0, 3});
  REQUIRE(table.sharded_over == Names{"pp"});
  REQUIRE(table.copied_over == Names{"embedding"});
  REQUIRE(table.summed_over == Names{"embedding"});

  ExpertCase heads = plain_experts(/*dp=*/1, /*ep=*/1);
  heads.tp = 4;  // two kv heads
  heads.sequence = "again";
  const PlacedPart k = part_named(heads, "k_proj.weight");
  REQUIRE(k.sharded_over == Names{"tp"});
  REQUIRE(k.copied_over == Names{"tp_kv"});
  REQUIRE(k.ranks == std::vector{0, 1});
}

TEST_CASE("what a rank holds on paper is what it holds in a run") {
  for (ExpertCase c : layouts()) {
    if (c.ranks() == 1) continue;
    TrainConfig config = expert_config(c);
    config.composition.mesh_order = "tp,dp,pp,cp";
    const std::vector<PlacedPart> parts = place_parameters(config);
    const Text text;
    INFO(c.name());
    run_threads(int(c.ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      for (size_t i = 0; i < trainer.parameters().size(); ++i) {
        const Parameter& parameter = trainer.parameters()[i];
        const auto is_it = [&](const PlacedPart& part) {
          return part.name == parameter.name && std::ranges::count(part.ranks, world.rank()) == 1;
        };
        const auto part = std::ranges::find_if(parts, is_it);
        USP_CHECK(part != parts.end(), "{} of rank {}", parameter.name, world.rank());
        USP_CHECK(numel_of(*part) == parameter.local_shape().numel(), "{}", parameter.name);
        USP_CHECK(
            part->slices.empty() == parameter.slices.empty() &&
                (part->slices.empty() || part->slices[0].offset == parameter.slices[0].offset),
            "{} of rank {}", parameter.name, world.rank());
        const auto owner = std::ranges::find(part->owners, world.rank(), &PlacedPart::Owner::rank);
        const Shard& shard = parameter.shard;
        USP_CHECK((owner != part->owners.end()) == (shard.numel() > 0), "{}", parameter.name);
        USP_CHECK(shard.numel() == 0 || (owner->begin == shard.begin && owner->end == shard.end &&
                                         owner->saves == parameter.counted),
                  "{} of rank {}", parameter.name, world.rank());
      }
    });
  }
}

TEST_CASE("groups say on how many nodes their ranks lie") {
  ExpertCase c = plain_experts(/*dp=*/2, /*ep=*/2);
  c.cp = c.tp = c.pp = 2;
  c.sequence = "again";
  TrainConfig config = expert_config(c);
  config.communication->node_size = 4;
  const auto nodes_of = [&](const std::string& order) {
    config.composition.mesh_order = order;
    std::map<std::string, int64_t> nodes;
    for (const PlacedGroups& kind : place_groups(config)) nodes[kind.name] = kind.most_nodes;
    return nodes;
  };
  const auto usual = nodes_of("pp,dp,cp,tp");
  REQUIRE(usual ==
          std::map<std::string, int64_t>{
              {"cp", 1}, {"dp", 2}, {"dp_cp", 2}, {"edp", 2}, {"ep", 1}, {"pp", 2}, {"tp", 1}});
  REQUIRE(nodes_of("tp,pp,dp,cp").at("tp") == 2);
  REQUIRE(nodes_of("tp,pp,dp,cp").at("dp_cp") == 1);
  REQUIRE(nodes_of("pp,dp,cp,tp") == usual);
}

TEST_CASE("groups inside groups lie on neighbors in these, and say on how many nodes") {
  const auto first_of = [](const std::string& flags, const std::string& name) {
    for (const PlacedGroups& kind : place_groups(layout_of_flags(flags))) {
      if (kind.name == name) return std::pair(kind.groups.front(), kind.most_nodes);
    }
    fail("{}: no group {}", flags, name);
  };
  using Placed = std::pair<std::vector<int>, int64_t>;
  const std::string heads =
      "--num_heads 4 --num_kv_heads 2 --hidden_size 16 --dp_size 4 --tp_size 4 "
      "--zero_stage 1 --shard_size 2 --node_size 2 ";
  REQUIRE(first_of(heads, "tp_kv") == Placed({0, 1}, 1));
  REQUIRE(first_of(heads, "shard") == Placed({0, 4}, 2));
  const std::string turned = heads + "--mesh_order tp,pp,cp,dp";
  REQUIRE(first_of(turned, "tp_kv") == Placed({0, 4}, 2));
  REQUIRE(first_of(turned, "shard") == Placed({0, 1}, 1));
  const std::string ring =
      "--num_heads 4 --num_kv_heads 4 --hidden_size 16 --dp_size 2 --cp_size 4 "
      "--cp_method ring_ulysses --ulysses_size 2 --node_size 2 ";
  REQUIRE(first_of(ring, "cp_heads") == Placed({0, 1}, 1));
  REQUIRE(first_of(ring, "cp") == Placed({0, 1, 2, 3}, 2));
  REQUIRE(first_of(ring + "--mesh_order pp,cp,tp,dp", "cp_heads") == Placed({0, 2}, 2));
}

TEST_CASE("every group over which a gradient is summed is listed, with the ranks of its part") {
  std::vector<TrainConfig> configs;
  for (const ExpertCase& c : layouts()) configs.push_back(expert_config(c));
  for (const char* flags :
       {"--num_layers 4 --pp_size 4 --dp_size 2 --tie_word_embeddings --node_size 4",
        "--num_layers 4 --pp_size 2 --pp_schedule zb_v --tie_word_embeddings --grad_acc_steps 4",
        "--num_layers 4 --pp_size 4 --pp_schedule dualpipe --grad_acc_steps 8 --dp_size 2",
        "--num_heads 4 --num_kv_heads 2 --hidden_size 16 --tp_size 4"}) {
    configs.push_back(layout_of_flags(flags));
  }
  std::set<std::string> seen;
  for (const TrainConfig& config : configs) {
    std::set<std::string> listed, summed;
    for (const PlacedGroups& kind : place_groups(config)) {
      listed.insert(kind.name);
      for (const auto& group : kind.groups) REQUIRE(group.size() == kind.groups.front().size());
    }
    for (const PlacedPart& part : place_parameters(config)) {
      summed.insert(part.summed_over.begin(), part.summed_over.end());
    }
    INFO(fmt::format("listed {}; summed over {}", fmt::join(listed, " "), fmt::join(summed, " ")));
    REQUIRE(std::ranges::includes(listed, summed));
    for (const char* name : {"embedding", "mirror"}) {
      REQUIRE(listed.contains(name) == summed.contains(name));
    }
    seen.insert(listed.begin(), listed.end());
  }
  for (const char* name : {"embedding", "mirror", "tp_kv", "edp"}) REQUIRE(seen.contains(name));
  for (const PlacedGroups& kind : place_groups(configs[layouts().size()])) {
    if (kind.name != "embedding") continue;
    REQUIRE(kind.groups == std::vector<std::vector<int>>{{0, 6}, {1, 7}});
    REQUIRE(kind.most_nodes == 2);
  }
}

TEST_CASE("by a layout's JSON a rank of tp has a share of each half of a micro-batch") {
  TrainConfig config = layout_of_flags(
      "--hidden_size 16 --num_heads 4 --num_layers 2 --seq_len 8 --micro_batch_size 4 --tp_size 2 "
      "--sequence_parallel --tp_overlap batch_halves --mesh_show json");
  const auto batch = nlohmann::json::parse(show_layout(config, "{}"))["batch"];
  REQUIRE(batch["rows"] == 32);
  REQUIRE(batch["ranks"][0]["rows"] == nlohmann::json({{0, 8}, {16, 24}}));
  REQUIRE(batch["ranks"][1]["rows"] == nlohmann::json({{8, 16}, {24, 32}}));
}

TEST_CASE("by a layout's JSON every token of a batch is taken once by each stage and rank of tp") {
  for (ExpertCase c : layouts()) {
    INFO(c.name());
    c.grad_acc_steps = 2 * c.pp;
    TrainConfig config = expert_config(c);
    config.composition.mesh_show = "json";
    const auto json = nlohmann::json::parse(show_layout(config, "{}"));
    const auto& batch = json["batch"];
    const auto numbers = [](const nlohmann::json& stretches) {
      std::vector<int64_t> found;
      for (const auto& stretch : stretches) {
        for (int64_t i = stretch[0]; i < stretch[1]; ++i) found.push_back(i);
      }
      return found;
    };
    std::map<std::pair<int64_t, int64_t>, int> tokens;  // how often, of samples and their tokens
    std::map<int64_t, int> rows;
    for (int rank = 0; rank < config.mesh().ranks(); ++rank) {
      const auto& own = batch["ranks"][rank];
      for (int64_t sample : numbers(own["samples"])) {
        for (int64_t token : numbers(own["tokens"])) ++tokens[{sample, token}];
      }
      for (int64_t row : numbers(own["rows"])) ++rows[row];
      // The first micro-batches are those of the first samples, in the order of dp.
      const int64_t first = config.micro_batch_size * int64_t(json["ranks"][rank]["dp"]);
      REQUIRE(own["samples"][0][0] == first);
    }
    REQUIRE(int64_t(tokens.size()) == config.global_batch_size() * config.seq_len);
    REQUIRE(int64_t(rows.size()) == batch["rows"].get<int64_t>());
    const MeshSizes mesh = config.mesh();
    for (const auto& [token, times] : tokens) REQUIRE(times == mesh.tp * mesh.pp);
    const int64_t shares = config.tensor_parallel.row_shares();
    for (const auto& [row, times] : rows) REQUIRE(times == mesh.ranks() / shares);
  }
}

TEST_CASE(
    "a row of the table names the ranks that own a weight, of which one of each tp group saves a "
    "norm") {
  TrainConfig config = layout_of_flags("--tp_size 2 --dp_size 4 --zero_stage 1 --mesh_show table");
  std::istringstream lines(show_layout(config, "{}"));
  std::string norm, row;
  while (std::getline(lines, row)) {
    if (row.starts_with("norm ")) norm = row;
  }
  const std::vector<PlacedPart> parts = place_parameters(config);
  const auto part = std::ranges::find(parts, "model.norm.weight", &PlacedPart::name);
  std::set<int> owners, savers;
  for (const auto& owner : part->owners) {
    owners.insert(owner.rank);
    if (owner.saves) savers.insert(owner.rank);
  }
  REQUIRE((owners == std::set{0, 1} && savers == std::set{0}));
  REQUIRE(norm.find("0-1") < norm.rfind(" 0"));
}

TEST_CASE("the table of a layout and its JSON say the same") {
  ExpertCase c = plain_experts(/*dp=*/2, /*ep=*/2);
  c.pp = c.tp = 2;
  c.sequence = "again";
  TrainConfig config = expert_config(c);
  config.communication->node_size = 1;
  config.composition.mesh_show = "table";
  const std::string table = show_layout(config, "{}");
  for (const char* part : {"8 ranks: dp 2 x pp 2 x tp 2, ep 2", "pp,dp,cp,tp",
                           "tp leaves the node: its 2 ranks lie on 2 nodes of 1",
                           "layers.*.mlp.experts.*.down_proj"}) {
    INFO(table);
    REQUIRE(table.find(part) != std::string::npos);
  }
  config.composition.mesh_show = "json";
  const auto json = nlohmann::json::parse(show_layout(config, "{}"));
  REQUIRE(json["ranks"].size() == 8);
  REQUIRE(json["ranks"][5] == nlohmann::json{{"dp", 0}, {"pp", 1}, {"cp", 0}, {"tp", 1}});
  REQUIRE(json["groups"][0]["ranks"][0] == std::vector{0, 1});
  int64_t elements = 0;
  for (const auto& part : json["parameters"]) {
    for (const auto& owner : part["owners"]) {
      if (owner["saves"]) elements += owner["end"].get<int64_t>() - owner["begin"].get<int64_t>();
    }
  }
  REQUIRE(elements == num_parameters(config.model));
  config.composition.mesh_show = "flags";
  config.model.num_layers = 5;
  config.data_parallel.dp_size = 4096;
  const auto flags = nlohmann::json::parse(show_layout(config, R"({"pp_size": 2})"));
  REQUIRE(flags["flags"] == nlohmann::json{{"pp_size", 2}});
  REQUIRE(flags["ranks"] == 4096 * 4);
  REQUIRE(flags["layers_of_stages"] == std::vector{3, 2});

  config.composition.mesh_show = "json";
  config.data_parallel.dp_size = 2048;
  check_throws<UsageError>([&] { show_layout(config, "{}"); }, {"mesh_show=json", "4096 at most"});
}

}  // namespace
}  // namespace usp::test

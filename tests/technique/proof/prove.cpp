#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <set>
#include <sstream>

#include "accounting/zero_accountant.h"
#include "comm/launch.h"
#include "pipeline_parallel/generators.h"
#include "proof/compositions.h"
#include "proof/rounding.h"
#include "technique/case_cover.h"
#include "technique/layout_of_flags.h"
#include "technique/tiny_llama.h"
#include "testing.h"
#if __has_include("fusion/fusion.h")
#include "technique/fusion/fused_calls.h"
#endif

namespace usp::test {
namespace {

/// Layouts of many ranks: each has a class that axes of two and powers of two do not have.
const std::vector<std::string> kLayouts = {
    // stages between the first and the last
    "--model 70B --tp_size 8 --dp_size 4 --pp_size 8 --cp_size 2 --sequence_parallel "
    "--zero_stage 1 --seq_len 8192 --micro_batch_size 1 --grad_acc_steps 8 --node_size 8",
    // more ranks of tp than kv heads
    "--hidden_size 8192 --num_layers 80 --num_heads 64 --num_kv_heads 2 --ffn_hidden_size 28672 "
    "--vocab_size 152064 --tp_size 8 --dp_size 2 --sequence_parallel --seq_len 4096 "
    "--micro_batch_size 1 --grad_acc_steps 3",
    // several experts on a rank
    "--hidden_size 4096 --num_layers 32 --num_heads 32 --num_kv_heads 8 --ffn_hidden_size 14336 "
    "--num_experts 32 --num_experts_per_tok 2 --norm_topk_prob --ep_size 8 --tp_size 2 --dp_size 8 "
    "--sequence_parallel --zero_stage 2 --seq_len 4096 --micro_batch_size 1 --grad_acc_steps 8 "
    "--balance bias",
    // a vocabulary with a rest that moves where parts begin
    "--hidden_size 4608 --num_layers 31 --num_heads 36 --num_kv_heads 12 --ffn_hidden_size 12288 "
    "--vocab_size 32000 --tp_size 3 --dp_size 5 --seq_len 4095 --micro_batch_size 1 "
    "--grad_acc_steps 3 --sequence_parallel",
};

TEST_CASE("twins keep every class of a layout, and compute what one process does") {
  for (size_t i = 0; i < kLayouts.size(); ++i) {
    INFO(kLayouts[i]);
    const TwinFamily family = shrink(layout_of_flags(kLayouts[i]), /*most_ranks=*/16);
    for (const LostClass& lost : family.lost) FAIL(lost.name << ": " << lost.real);
    REQUIRE(family.twins.size() <= 5);
    for (const Twin& twin : family.twins) {
      INFO(twin.flags);
      REQUIRE(twin.config.mesh().ranks() <= 16);
      const TwinResult result = run_twin(twin);
      REQUIRE(result.failure == "");
      REQUIRE(result.largest > 0);  // it has compared something
    }
  }
}

/// Layouts that few draws meet.
const std::vector<std::string> kRare = {
    // Bytes of the norms' gradients of mirrored stages, over tp.
    "--num_heads 3 --num_kv_heads 1 --hidden_size 6 --ffn_hidden_size 21 --vocab_size 38 "
    "--num_layers 2 --seq_len 18 --micro_batch_size 1 --grad_acc_steps 4 --pp_size 2 "
    "--pp_schedule dualpipe --dp_size 1 --tp_size 3 --sequence_parallel",
    // Units of ZeRO on paper, where a tied embedding lies in the head's block.
    "--num_heads 2 --num_kv_heads 2 --hidden_size 4 --ffn_hidden_size 7 --vocab_size 58 "
    "--num_layers 8 --seq_len 2 --tie_word_embeddings --micro_batch_size 1 --grad_acc_steps 12 "
    "--pp_size 4 --pp_schedule dualpipe --dp_size 3 --zero_stage 2 --reduce_after step",
    // Shared experts that ranks of tp cut unevenly, beside norms that all of these hold.
    "--num_heads 3 --num_kv_heads 3 --hidden_size 12 --ffn_hidden_size 12 --vocab_size 30 "
    "--num_layers 1 --seq_len 12 --micro_batch_size 1 --tp_size 3 --sequence_parallel --dp_size 4 "
    "--zero_stage 2 --ep_size 2 --num_experts 4 --num_shared_experts 1 --moe_ffn_hidden_size 7",
    // Experts that ranks of tp cut unevenly.
    "--num_heads 3 --num_kv_heads 3 --hidden_size 12 --ffn_hidden_size 12 --vocab_size 31 "
    "--num_layers 2 --seq_len 12 --micro_batch_size 1 --tp_size 3 --sequence_parallel --dp_size 2 "
    "--zero_stage 3 --ep_size 2 --num_experts 4 --moe_ffn_hidden_size 7 --expert_tp",
    // MLPs that ranks of tp cut unevenly.
    "--num_heads 3 --num_kv_heads 3 --hidden_size 12 --ffn_hidden_size 13 --vocab_size 31 "
    "--num_layers 2 --seq_len 12 --micro_batch_size 1 --grad_acc_steps 2 --tp_size 3 "
    "--sequence_parallel --dp_size 2 --zero_stage 3 --tp_overlap chunks --recompute full",
    "--num_heads 4 --num_kv_heads 2 --hidden_size 16 --ffn_hidden_size 7 --vocab_size 31 "
    "--num_layers 3 --seq_len 12 --micro_batch_size 2 --tp_size 4 --dp_size 2 --zero_stage 2 "
    "--num_experts 2 --first_dense_layers 2 --moe_ffn_hidden_size 5 --sequence_parallel",
    // The fewest micro-batches with which a pipeline from both ends works.
    "--num_heads 2 --hidden_size 8 --ffn_hidden_size 12 --vocab_size 31 --num_layers 4 "
    "--seq_len 8 --micro_batch_size 1 --grad_acc_steps 6 --pp_size 4 --pp_schedule dualpipe",
    "--num_heads 2 --hidden_size 8 --ffn_hidden_size 12 --vocab_size 31 --num_layers 6 "
    "--seq_len 8 --micro_batch_size 1 --grad_acc_steps 5 --pp_size 3 --pp_schedule dualpipe_v",
    // A schedule made action by action, of three stages a rank.
    "--num_heads 2 --hidden_size 8 --ffn_hidden_size 12 --vocab_size 31 --num_layers 7 "
    "--seq_len 8 --micro_batch_size 1 --grad_acc_steps 5 --pp_size 2 --pp_schedule auto "
    "--pp_chunks 3 --dp_size 2 --zero_stage 3",
    // The documents of the second half of a micro-batch.
    "--num_heads 4 --num_kv_heads 2 --hidden_size 16 --ffn_hidden_size 12 --vocab_size 31 "
    "--num_layers 2 --seq_len 16 --micro_batch_size 4 --cp_size 2 --tp_size 2 --document_mask "
    "--tp_overlap batch_halves",
    // A rank's rows of a half, in which samples begin elsewhere than in its rows of the whole.
    "--num_heads 4 --hidden_size 8 --ffn_hidden_size 8 --vocab_size 31 --num_layers 2 --seq_len 28 "
    "--micro_batch_size 6 --tp_size 4 --sequence_parallel --tp_overlap batch_halves "
    "--num_experts 2 --num_experts_per_tok 2 --ep_size 2 --balance sample",
    // Dropout of rows that tp and cp both cut.
    "--num_heads 4 --hidden_size 16 --ffn_hidden_size 12 --vocab_size 31 --num_layers 2 --seq_len "
    "16 --micro_batch_size 2 --cp_size 2 --tp_size 2 --sequence_parallel --dropout 0.2",
    // Scores of latents that travel round a ring, which YaRN makes larger.
    "--num_heads 2 --hidden_size 8 --ffn_hidden_size 12 --vocab_size 31 --num_layers 2 "
    "--seq_len 16 --micro_batch_size 1 --cp_size 2 --attention_kind mla --kv_lora_rank 6 "
    "--qk_nope_head_dim 2 --qk_rope_head_dim 4 --v_head_dim 3 --rope_type yarn --rope_factor 4 "
    "--rope_mscale 1 --rope_mscale_all_dim 0.7 --rope_original_max_position_embeddings 8",
    // The same where heads travel, and attention is computed by the one inside.
    "--num_heads 2 --hidden_size 8 --ffn_hidden_size 12 --vocab_size 31 --num_layers 2 "
    "--seq_len 16 --micro_batch_size 1 --cp_size 2 --cp_method ulysses --attention_kind mla "
    "--kv_lora_rank 6 --qk_nope_head_dim 2 --qk_rope_head_dim 4 --v_head_dim 3 --rope_type yarn "
    "--rope_factor 4 --rope_mscale 1 --rope_mscale_all_dim 0.7 "
    "--rope_original_max_position_embeddings 8",
    // The one process beside it clips no gradients either.
    "--hidden_size 12 --num_heads 2 --ffn_hidden_size 7 --vocab_size 29 --num_layers 1 --seq_len 8 "
    "--micro_batch_size 2 --dp_size 2 --grad_clip 0",
};

TEST_CASE("layouts that few draws meet compute what one process does") {
  for (const std::string& flags : kRare) {
    INFO(flags);
    std::istringstream stream(flags + " --dtype f64 --device cpu");
    const std::optional<Twin> twin = read_twin(
        {std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()});
    REQUIRE(twin.has_value());
    const TwinResult result = run_twin(*twin);
    REQUIRE(result.failure == "");
    REQUIRE(result.compared == 2);
  }
}

TEST_CASE("layouts drawn at random compute what one process does, and go on in each other") {
  const uint64_t all = is_full_in_turns() ? 50 : 300;
  const uint64_t count = kSanitized ? 2 : is_full() ? all : 10;
  const uint64_t begin = 1'000'000 + turn() * count;
  size_t went_on = 0, rounded = 0;
  for (uint64_t number = begin; number < begin + count; ++number) {
    CompositionDraw draw(number, /*most_ranks=*/kSanitized ? 4 : 16);
    const Composition of = draw.draw();
    INFO("composition " << number << "\n" << of.first.flags);
    INFO((of.second ? of.second->flags : "ends here"));
    const TwinResult result = run_twin(of.first, of.second ? &*of.second : nullptr);
    REQUIRE(result.failure == "");
    REQUIRE(result.compared == (of.second ? 3 : 2));
    went_on += of.second.has_value();
    rounded += result.largest > 0;
  }
  REQUIRE(2 * went_on > count);
  REQUIRE(2 * rounded > count);  // a pipeline of one micro-batch gives the bits of one process
}

/// What a rank sends, holds, keeps and reaches in two steps, by name. Where experts are, less what
/// follows from how many rows the routers send to whom.
std::map<std::string, int64_t> counts_of(Trainer& trainer, bool has_experts) {
  const Ledger before = Runtime::current().ledger();
  const Simulation of = simulate_steps(trainer);
  std::map<std::string, int64_t> counts{{"weights", of.states.weights},
                                        {"gradients", of.states.gradients},
                                        {"optimizer states", of.states.optimizer}};
  for (const auto& [key, all] : of.sent.entries()) {
    if (has_experts && key.first.starts_with("ep")) continue;
    const Ledger::Entry entry = all - before.get(key.first, key.second);
    const std::string what = fmt::format("{} of {}: ", name(key.second), key.first);
    counts[what + "calls"] = entry.calls;
    counts[what + "payload"] = entry.payload_bytes;
    counts[what + "on the wire"] = entry.wire_bytes;
    counts[what + "to other nodes"] = entry.net_bytes;
    counts[what + "headers"] = entry.header_bytes;
  }
  if (has_experts) return counts;
  counts["peak activations"] = of.peak_activations;
  for (const LiveBytes& part : of.saved) {
    counts[fmt::format("kept by block {}: {}", part.block, part.name)] += part.bytes;
  }
  for (const LiveBytes& buffer : of.buffers) {
    counts[fmt::format("buffer: {}", buffer.name)] += buffer.bytes;
  }
  return counts;
}

std::map<std::string, int64_t> counts_on_paper(const TrainConfig& config, int rank,
                                               bool has_experts) {
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  const DryMesh dry(config.mesh(), config.engine(), rank, config.communication->node_size);
  Trainer trainer(config, {/*dataset=*/nullptr, dry.mesh});
  return counts_of(trainer, has_experts);
}

TEST_CASE("in a run of any layout every rank sends, holds, keeps and reaches what it does on paper",
          "[not_sanitized]") {
  const uint64_t count = is_full() ? 50 : 4, begin = 4'000'000 + turn() * count;
  std::atomic<int64_t> compared = 0;
  for (uint64_t number = begin; number < begin + count; ++number) {
    const Twin layout = CompositionDraw(number, /*most_ranks=*/16).draw().first;
    const TrainConfig& config = layout.config;
    const bool has_experts = config.model.experts.num_experts > 0;
    INFO("composition " << number << "\n" << layout.flags);
    const RandomText text(config, 40 * config.tokens_per_step());
    run_threads(int(config.mesh().ranks()), [&](const Communicator& world) {
      world.engine().set_node_size(config.communication->node_size);
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const auto found = counts_of(trainer, has_experts);
      const auto expected = counts_on_paper(config, world.rank(), has_experts);
      for (const auto& counts : {found, expected}) {
        for (const auto& [what, unused] : counts) {
          const auto of = [&](const auto& in) { return in.contains(what) ? in.at(what) : 0; };
          USP_CHECK(of(found) == of(expected), "rank {}, {}: {}, on paper {}", world.rank(), what,
                    of(found), of(expected));
        }
      }
      const StateBytes states = predict(config, world.rank()).states;
      USP_CHECK(states.weights == found.at("weights") &&
                    states.gradients == found.at("gradients") &&
                    states.optimizer == found.at("optimizer states"),
                "rank {}: states by formula", world.rank());
      ++compared;
    });
  }
  REQUIRE(compared > int64_t(2 * count));
}

#if __has_include("fusion/fusion.h")
TEST_CASE("whatever the layout, a fused step has as many calls as the layout asks for",
          "[not_sanitized]") {
  const int64_t wanted = is_full() ? 50 : 8;
  int64_t compared = 0;
  for (uint64_t number = 5'000'000 + turn() * 400; compared < wanted; ++number) {
    const Twin layout = CompositionDraw(number, /*most_ranks=*/16).draw().first;
    const TrainConfig& config = layout.config;
    if (!config.fusion.fused()) continue;
    INFO("composition " << number << "\n" << layout.flags);
    CallCounts all;
    int64_t summing = 0;
    for (int rank = 0; rank < int(config.mesh().ranks()); ++rank) {
      const OnDevice meta(Device::meta);
      const DryMesh dry(config.mesh(), config.engine(), rank, config.communication->node_size);
      Trainer trainer(config, {/*dataset=*/nullptr, dry.mesh});
      for (const auto& [name, count] : count_calls(trainer)) all[name] += count;
      summing += sums_squares(trainer);
    }
    REQUIRE(differences(all, fused_calls(config, summing)) == "");
    ++compared;
  }
}
#endif

TEST_CASE("whatever a chapter can do is drawn", "[not_sanitized]") {
  std::vector<std::string> wanted = {"--attention_kind mla",
                                     "--num_experts",
                                     "--expert_tp",
                                     "--dispatch by_node",
                                     "--balance bias",
                                     "--capacity_factor",
                                     "--route_nodes",
                                     "--num_shared_experts 2",
                                     "--head_dim",
                                     "--tie_word_embeddings",
                                     "--document_mask",
                                     "--rope_type linear",
                                     "--rope_type llama3",
                                     "--rope_type yarn",
                                     "--rope_mscale_all_dim",
                                     "--dropout",
                                     "--sequence_parallel",
                                     "--gathered_input kept",
                                     "--tp_overlap chunks",
                                     "--tp_overlap batch_halves",
                                     "--cp_layout contiguous",
                                     "--cp_recompute keep",
                                     "--ulysses_size",
                                     "--shard_size",
                                     "--reshard_after step",
                                     "--reduce_after step",
                                     "--gather_overlap none",
                                     "--grad_sync overlapped",
                                     "--overlap_dispatch",
                                     "--recompute selective",
                                     "--mesh_order",
                                     "--node_size",
                                     "--zero_stage 3",
                                     "--pp_run_length",
                                     "--pp_in_flight",
                                     "--pp_layers",
                                     "--pp_schedule /"};
  for (const std::string& name : schedule_names()) wanted.push_back("--pp_schedule " + name + " ");
  for (const char* name : {"ring", "all_gather", "ulysses", "ring_ulysses"})
    wanted.push_back(fmt::format("--cp_method {} ", name));
#if __has_include("fusion/fusion.h")
  wanted.push_back("--kernels fused");
#endif
  for (uint64_t number = 0; number < 400 && !wanted.empty(); ++number) {
    const Composition of = CompositionDraw(number, /*most_ranks=*/16).draw();
    std::erase_if(wanted, [&](const std::string& text) {
      return of.first.flags.find(text) != std::string::npos ||
             (of.second && of.second->flags.find(text) != std::string::npos);
    });
  }
  for (const std::string& text : wanted) FAIL_CHECK(text << " was not drawn");
  SUCCEED();
}

TEST_CASE("a schedule drawn at random is one that the rules take, and is told apart from others") {
  using enum Placement;
  std::set<std::string> tables;
  bool has_cuts = false, has_turns = false;
  for (uint64_t number = 0; number < 60; ++number) {
    Draws draws(number, "test");
    const auto placement = std::vector{loop, fold, mirror}[draws.index(3)];
    const int64_t ranks = placement == mirror ? 2 * draws.between(1, 2) : draws.between(1, 4);
    const Stages stages{placement, ranks, placement == loop ? draws.between(1, 3) : 2};
    const int64_t m = 2 * draws.between(1, 3);
    const Schedule drawn = draw_schedule(stages, m, draws);
    const std::string table = to_text(drawn);
    INFO(table);
    check_schedule(drawn, "drawn");
    REQUIRE(to_text(parse_schedule(table, "drawn")) == table);
    has_cuts = has_cuts || table.find(" W") != std::string::npos;
    has_turns = has_turns || table.find('&') != std::string::npos;
    tables.insert(table);
  }
  REQUIRE(tables.size() > 55);
  REQUIRE(has_cuts);
  REQUIRE(has_turns);
}

TEST_CASE("a file with passes in turns does not go with weights that are gathered block by block") {
  const std::string file =
      keep_drawn("turns.txt", "placement loop\n0: F0 F1&BW0 BW1\n1: F0 BW0 F1 BW1\n");
  const std::string flags =
      "--num_layers 2 --pp_size 2 --dp_size 2 --grad_acc_steps 2 --pp_schedule " + file;
  REQUIRE(layout_of_flags(flags + " --zero_stage 2").pipeline.pp_schedule == file);
  check_throws<UsageError>([&] { layout_of_flags(flags + " --zero_stage 3"); },
                           {"passes in turns", "zero_stage=3", "try --zero_stage 2"});
}

/// The file of a named schedule's table.
std::string file_of(const std::string& name, int64_t p, int64_t m) {
  PipelineConfig config;
  config.pp_schedule = name;
  config.pp_size = p;
  return keep_drawn(fmt::format("{}_of_{}.txt", name, p), to_text(config.schedule(m)));
}

TEST_CASE("twins of a schedule file have its ranks and micro-batches") {
  const std::string sizes =
      "--model 8B --seq_len 4096 --micro_batch_size 1 --tp_size 4 --sequence_parallel --dp_size 8 "
      "--zero_stage 2 ";
  const auto flags_of = [&](int64_t p, int64_t m) {
    return sizes + fmt::format("--pp_size {} --grad_acc_steps {} --pp_schedule {}", p, m,
                               file_of("1f1b", p, m));
  };
  for (const auto& [p, m] : {std::pair<int64_t, int64_t>{2, 4}, {4, 5}}) {
    const TwinFamily family = shrink(layout_of_flags(flags_of(p, m)), /*most_ranks=*/16);
    REQUIRE(family.twins.size() > 0);
    for (const Twin& twin : family.twins) {
      INFO(twin.flags);
      REQUIRE(twin.config.pipeline.pp_size == p);
      REQUIRE(twin.config.grad_acc_steps == m);
      REQUIRE(run_twin(twin).failure == "");
    }
    const MeshSizes first = family.twins.front().config.mesh();
    REQUIRE((first.dp > 1 && first.tp > 1));
  }
  const TrainConfig deep = layout_of_flags(flags_of(32, 32));
  check_throws<UsageError>([&] { shrink(deep, 16); },
                           {"prove=16 must be at least the 32 ranks", "try --prove 32"});
  // What is advised has a twin, and so has a file whose stages leave the others no room at once.
  for (const auto& [p, most] : {std::pair<int64_t, int64_t>{32, 32}, {8, 16}}) {
    const TwinFamily family = shrink(layout_of_flags(flags_of(p, p)), most);
    REQUIRE(family.twins.front().config.pipeline.pp_size == p);
    REQUIRE(!family.without.empty());
  }
}

TEST_CASE("every twin has several ranks, however few it may have") {
  const std::string flags =
      "--model 8B --seq_len 4096 --micro_batch_size 2 --tp_size 8 --cp_size 2 --pp_size 4 "
      "--dp_size 4 --sequence_parallel --zero_stage 1 --grad_acc_steps 8 --num_experts 8 --ep_size "
      "4";
  for (const int64_t most : {2, 3, 5, 16}) {
    const TwinFamily family = shrink(layout_of_flags(flags), most);
    for (const Twin& twin : family.twins) {
      INFO(twin.flags);
      REQUIRE(twin.config.mesh().ranks() > 1);
      REQUIRE(twin.config.mesh().ranks() <= most);
    }
    REQUIRE(family.without.empty() == (most == 16));  // 16 ranks have room for two on each axis
  }
  const TrainConfig plain = layout_of_flags("--tp_size 2 --dp_size 2");
  check_throws<UsageError>([&] { shrink(plain, 1); },
                           {"prove=1 leaves room for no twin of 2 ranks or more; try --prove 16"});
}

TEST_CASE("twins have the layout's rotary embedding, and clip no gradients where it does not") {
  const TrainConfig real = layout_of_flags(
      "--model 8B --seq_len 4096 --micro_batch_size 1 --tp_size 4 --cp_size 2 --grad_clip 0 "
      "--rope_type llama3 --rope_factor 16 --rope_original_max_position_embeddings 2048");
  for (const Twin& twin : shrink(real, 16).twins) {
    INFO(twin.flags);
    REQUIRE(twin.config.model.rope_scaling == real.model.rope_scaling);
    REQUIRE(twin.config.model.rope_theta == real.model.rope_theta);
    REQUIRE(twin.config.optimizer.grad_clip == 0);
    REQUIRE(run_twin(twin).failure == "");
  }
}

TEST_CASE("layers drawn for stages are all of the model's, and leave no inner stage empty") {
  for (uint64_t number = 0; number < 60; ++number) {
    Draws draws(number, "test");
    const int64_t stages = draws.between(1, 6), layers = stages + draws.between(0, 5);
    const std::vector<int64_t> drawn = draw_layers(layers, stages, draws);
    INFO(fmt::format("{}", fmt::join(drawn, ",")));
    REQUIRE(std::ssize(drawn) == stages);
    int64_t sum = 0;
    for (int64_t of : drawn) sum += of;
    REQUIRE(sum == layers);
    for (size_t stage = 1; stage + 1 < drawn.size(); ++stage) REQUIRE(drawn[stage] > 0);
  }
}

/// What each of these ranks says of a composition that it trains together with the others.
std::vector<TwinResult> results_of_ranks(int ranks, const Twin& first, const Twin& second) {
  std::vector<TwinResult> results(ranks);
  run_threads(ranks, [&](const Communicator& world) {
    results[world.rank()] = run_twin(first, &second, world);
  });
  return results;
}

TEST_CASE("on ranks that are there a composition takes all of them, and all say the same") {
  for (int ranks : {3, 4}) {
    Composition of;
    for (uint64_t number = 1; !of.second; ++number) {
      of = CompositionDraw(number, ranks, /*exactly=*/true).draw();
    }
    INFO(of.first.flags << "\n" << of.second->flags);
    REQUIRE(of.first.config.mesh().ranks() == ranks);
    REQUIRE(of.second->config.mesh().ranks() == ranks);
    for (const TwinResult& result : results_of_ranks(ranks, of.first, *of.second)) {
      REQUIRE(result.failure == "");
      REQUIRE(result.largest > 0);
      REQUIRE(result.compared == 3);
    }
    of.second->config.optimizer.weight_decay += 0.5;
    const std::vector<TwinResult> wrong = results_of_ranks(ranks, of.first, *of.second);
    for (const TwinResult& result : wrong) {
      REQUIRE(result.failure.find("after it went on:\nthe first that differs: weight of") == 0);
      REQUIRE(result.failure == wrong.front().failure);
    }
  }
}

TEST_CASE("a number draws the same composition again, and others draw others") {
  std::set<std::string> flags;
  for (uint64_t number : {5, 6, 7, 5, 6, 7})
    flags.insert(CompositionDraw(number, 8).draw().first.flags);
  REQUIRE(flags.size() == 3);
}

TEST_CASE("a layout whose types do not fit is refused before a twin trains") {
  TrainConfig config = layout_of_flags(
      "--hidden_size 16 --num_heads 4 --ffn_hidden_size 12 --seq_len 8 --vocab_size 32 "
      "--num_layers 2 --micro_batch_size 1 --tp_size 2 --dtype f64 --device cpu");
  config.composition.prove = 4;
  config.composition.mesh_show = "types";
  REQUIRE(prove(config) == 0);
  REQUIRE(prove(config, {types::Mutation::What::left_out, 1}) == 1);
}

TEST_CASE("sizes of units are those of the model") {
  const std::vector<std::string> flags = {
      "--tp_size 2 --dp_size 2 --zero_stage 1 --num_kv_heads 2 --vocab_size 37",
      "--dp_size 3 --zero_stage 3 --tie_word_embeddings",
      "--tp_size 2 --dp_size 2 --zero_stage 3 --ffn_hidden_size 61",
      "--tp_size 2 --dp_size 2 --zero_stage 2 --num_experts 4 --num_shared_experts 3 "
      "--moe_ffn_hidden_size 7 --sequence_parallel",
      "--dp_size 4 --zero_stage 1 --num_experts 4 --ep_size 2 --num_shared_experts 2 "
      "--first_dense_layers 1 --moe_ffn_hidden_size 40",
      "--tp_size 2 --dp_size 4 --cp_size 2 --zero_stage 2 --num_experts 4 --ep_size 2 --expert_tp "
      "--sequence_parallel",
      "--dp_size 2 --zero_stage 1 --attention_kind mla --q_lora_rank 9 --kv_lora_rank 8 "
      "--qk_nope_head_dim 4 --qk_rope_head_dim 4 --v_head_dim 6",
  };
  for (const std::string& of : flags) {
    INFO(of);
    const TrainConfig config = layout_of_flags(of + " --num_layers 2");
    DryRank rank(config, 0);
    std::set<std::pair<int64_t, int64_t>> held, expected;  // elements, ranks
    for (const UnitShape& unit : unit_shapes(config, rank)) held.insert({unit.held, unit.ranks});
    for (const UnitSizes& unit : unit_sizes(config)) {
      int64_t sum = 0;
      for (int64_t size : unit.sizes) sum += size;
      expected.insert({sum, unit.ranks});
    }
    REQUIRE(held == expected);
  }
}

/// Flags of twins with every axis, experts and ZeRO among them.
const std::vector<std::string> kRounded = {
    "--num_heads 4 --num_kv_heads 2 --hidden_size 32 --ffn_hidden_size 48 --vocab_size 40 "
    "--num_layers 2 --seq_len 16 --micro_batch_size 1 --grad_acc_steps 8 --tp_size 2 "
    "--sequence_parallel",
    "--num_heads 4 --num_kv_heads 2 --hidden_size 32 --ffn_hidden_size 48 --vocab_size 40 "
    "--num_layers 2 --seq_len 16 --micro_batch_size 1 --grad_acc_steps 4 --dp_size 2 --pp_size 2 "
    "--zero_stage 2 --tie_word_embeddings",
    "--num_heads 4 --num_kv_heads 2 --hidden_size 32 --ffn_hidden_size 48 --vocab_size 40 "
    "--num_layers 2 --seq_len 16 --micro_batch_size 1 --grad_acc_steps 4 --dp_size 2 --cp_size 2 "
    "--ep_size 2 --num_experts 4",
};

Twin twin_of(const std::string& flags) {
  std::istringstream stream(flags + " --dtype f64 --device cpu");
  std::optional<Twin> twin =
      read_twin({std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()});
  REQUIRE(twin.has_value());
  return *twin;
}

TEST_CASE("in bf16 a layout is about as far from one process as five orders from each other",
          "[not_sanitized]") {
  for (const std::string& flags : kRounded) {
    INFO(flags);
    const RoundingResult result = compare_rounding(in_bf16(twin_of(flags)));
    INFO(table_of(result));
    REQUIRE(result.failure == "");
    REQUIRE(result.orders.size() == 5);
    REQUIRE(result.ratio <= kMostOfRounding);
    // What is compared is there: all have rounded, and each in its own way.
    REQUIRE(result.of_layout.loss > 1e-6);
    REQUIRE(result.of_orders.loss > 1e-6);
    REQUIRE(result.of_orders.loss < 0.1);
  }
}

TEST_CASE("two runs are as far apart as the second half of their steps") {
  const TrainedSeries one{"", {9, 9, 2, 4}, {1, 1, 1, 1}}, other{"", {1, 1, 1, 4}, {1, 1, 1, 2}};
  REQUIRE(distance_of(one, other).loss == std::sqrt(0.5));
  REQUIRE(distance_of(one, other).norm == std::sqrt(0.125));
  REQUIRE(distance_of(one, one).loss == 0);
}

TEST_CASE("a layout is judged by the larger ratio of losses and norms, which must be numbers") {
  RoundingResult right;
  right.layout = {"the layout", {1, 2}, {1, 2.5}};
  right.orders = {{"one", {1, 2}, {1, 2}}, {"other", {1, 2}, {1, 4}}};
  const auto judged = [&](std::vector<double> norms) {
    RoundingResult result = right;
    result.layout.norms = std::move(norms);
    judge(result);
    return result;
  };
  const RoundingResult near = judged({1, 2.5});
  REQUIRE(near.failure.empty());
  REQUIRE(near.ratio == 0.25);  // of norms: 2.5 / 2 - 1, over 4 / 2 - 1; losses are equal
  REQUIRE(judged({1, 0.5}).failure.empty());
  REQUIRE(judged({1, 16}).failure.find("3.0 times") == 0);
  for (double none : {kNaN, kInf}) {
    REQUIRE(judged({1, none}).failure.find("the layout: a loss or a gradient norm") == 0);
  }
  right.orders[1] = right.orders[0];
  REQUIRE(judged({1, 2}).failure.find("differ in no bit") != std::string::npos);
}

TEST_CASE("a twin in bf16 has micro-batches enough for other orders, and no dropout") {
  const std::string sizes =
      "--num_heads 2 --num_kv_heads 2 --hidden_size 8 --ffn_hidden_size 8 --vocab_size 16 "
      "--num_layers 2 --seq_len 4 --micro_batch_size 1 ";
  const TrainConfig few = in_bf16(twin_of(sizes + "--dp_size 3 --dropout 0.1")).config;
  REQUIRE(few.dtype == "bf16");
  REQUIRE(few.grad_acc_steps == 3);
  REQUIRE(few.tensor_parallel.dropout == 0);
  REQUIRE(in_bf16(twin_of(sizes + "--tp_size 2 --grad_acc_steps 12")).config.grad_acc_steps == 12);
}

TEST_CASE("what cannot be proven is refused") {
  const auto refused = [](const std::string& flags, const std::vector<std::string>& parts) {
    check_throws<UsageError>([&] { prove(layout_of_flags(flags)); }, parts);
  };
  refused("--prove 65", {"prove=65"});
  refused("--prove 16", {"one process", "--dp_size 2"});
  refused("--prove_dtype bf16 --dp_size 2",
          {"prove_dtype=bf16 is the dtype of a proof's twins", "--prove 16"});
}

TEST_CASE("the types of a proof's layout are no second question") {
  REQUIRE_NOTHROW(layout_of_flags("--dp_size 2 --prove 16 --mesh_show types"));
}

}  // namespace
}  // namespace usp::test

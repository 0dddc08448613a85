#include "proof/compositions.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "base/clock.h"
#include "pipeline_parallel/generators.h"
#include "tensor/console.h"

namespace usp {

namespace {

constexpr int64_t kDrawnRanks = 16;
constexpr int kDrawsOfSecond = 300;

}  // namespace

CompositionDraw::CompositionDraw(uint64_t number, int64_t most_ranks, bool exactly)
    : number_(number),
      draws_(number, "composition"),
      pipeline_(number, "pipeline"),
      rope_(number, "rope"),
      most_ranks_(most_ranks),
      exactly_(exactly) {}

void CompositionDraw::add(Words& words, const char* flag, int64_t value) const {
  words.insert(words.end(), {flag, std::to_string(value)});
}

void CompositionDraw::add(Words& words, const char* flag, const std::vector<const char*>& of) {
  words.insert(words.end(), {flag, of[draws_.index(of.size())]});
}

/// With its value.
void CompositionDraw::leave_out(Words& words, const char* flag) {
  const auto at = std::ranges::find(words, flag);
  if (at != words.end()) words.erase(at, at + 2);
}

/// All ranks, split among the axes in any order.
MeshSizes CompositionDraw::mesh_of_all() {
  MeshSizes mesh;
  std::vector<int64_t*> axes = {&mesh.dp, &mesh.pp, &mesh.cp, &mesh.tp};
  int64_t left = most_ranks_;
  while (axes.size() > 1) {
    const auto axis = axes.begin() + between(0, std::ssize(axes) - 1);
    **axis = pick(divisors(left));
    left /= **axis;
    axes.erase(axis);
  }
  *axes.front() = left;
  return mesh;
}

MeshSizes CompositionDraw::mesh() {
  if (exactly_) return mesh_of_all();
  const std::vector<int64_t> sizes = {1, 1, 1, 2, 2, 3, 4};
  MeshSizes mesh;
  do {
    mesh.dp = pick(sizes), mesh.pp = pick(sizes), mesh.cp = pick(sizes), mesh.tp = pick(sizes);
  } while (mesh.ranks() == 1 || mesh.ranks() > most_ranks_);
  return mesh;
}

/// What a run that goes on has to have, too: the model, what it is fed, and what changes results.
CompositionDraw::Words CompositionDraw::model(const MeshSizes& mesh) {
  Words words;
  const int64_t heads = mesh.tp * mesh.cp * between(1, 2), width = pick({2, 4, 4, 6, 8});
  const bool apart = chance(0.2), latent = chance(0.25);
  add(words, "--num_heads", heads);
  if (!latent) add(words, "--num_kv_heads", pick(divisors(heads)));
  add(words, "--hidden_size", heads * width + (apart ? 4 : 0));
  if (apart && !latent) add(words, "--head_dim", width);
  add(words, "--ffn_hidden_size", between(2 * mesh.tp, 9 * mesh.tp));
  add(words, "--vocab_size", std::max(mesh.tp, between(11, 70)));
  add(words, "--num_layers", mesh.pp + between(0, 5));
  add(words, "--seq_len", 2 * mesh.cp * mesh.tp * between(1, 3) + 2 * mesh.cp * between(0, 2));
  if (chance(0.3)) words.emplace_back("--tie_word_embeddings");
  if (chance(0.2)) words.emplace_back("--document_mask");
  if (chance(0.2)) add(words, "--dropout", {"0.1", "0.4"});
  if (chance(0.2)) add(words, "--grad_clip", 0);
  const auto append = [&](const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
  };
  if (latent) append(latent_attention());
  if (chance(0.5)) append(experts(mesh));
  append(rotary_embedding(latent));
  return words;
}

CompositionDraw::Words CompositionDraw::latent_attention() {
  Words words = {"--attention_kind", "mla"};
  add(words, "--q_lora_rank", pick({0, 3, 6}));
  add(words, "--kv_lora_rank", between(3, 8));
  add(words, "--qk_nope_head_dim", pick({2, 3, 4}));
  add(words, "--qk_rope_head_dim", pick({2, 4}));
  add(words, "--v_head_dim", between(2, 6));
  return words;
}

/// Some beyond a context that a sample may be longer than.
CompositionDraw::Words CompositionDraw::rotary_embedding(bool latent) {
  if (!rope_.chance(0.3)) return {};
  const std::string type = std::vector{"linear", "llama3", "yarn"}[rope_.index(3)];
  Words words = {"--rope_type", type, "--rope_factor", "4"};
  if (type != "linear") {
    add(words, "--rope_original_max_position_embeddings", rope_.between(4, 64));
  }
  if (type == "yarn" && latent) {
    words.insert(words.end(), {"--rope_mscale", "1", "--rope_mscale_all_dim", "0.7"});
  }
  return words;
}

CompositionDraw::Words CompositionDraw::experts(const MeshSizes& mesh) {
  Words words;
  const int64_t count =
      std::max<int64_t>(2, pick(divisors(mesh.dp_cp() * mesh.tp))) * between(1, 3);
  add(words, "--num_experts", count);
  add(words, "--num_experts_per_tok", between(1, std::min<int64_t>(4, count)));
  add(words, "--moe_ffn_hidden_size", pick({0, mesh.tp, 2 * mesh.tp + 1, 3 * mesh.tp}));
  add(words, "--num_shared_experts", pick({0, 0, 1, 2}));
  add(words, "--first_dense_layers", pick({0, 0, 1, 2}));
  add(words, "--router_score", {"softmax", "sigmoid"});
  add(words, "--balance", {"none", "sample", "batch", "bias"});
  add(words, "--router_z_loss_coef", {"0", "0.01"});
  add(words, "--routed_scaling_factor", {"1", "2.5"});
  if (chance(0.5)) words.emplace_back("--norm_topk_prob");
  if (chance(0.2)) add(words, "--capacity_factor", {"1", "1.5"});
  if (chance(0.3)) {
    const int64_t nodes = pick(divisors(count));
    add(words, "--expert_nodes", nodes);
    add(words, "--route_nodes", between(0, nodes));
  }
  return words;
}

CompositionDraw::Words CompositionDraw::pipeline(int64_t stages) {
  Words words;
  add(words, "--pp_size", stages);
  if (chance(0.2)) words.emplace_back("--overlap_dispatch");
  if (stages == 1) return words;
  std::vector<const char*> names;
  for (const std::string& name : schedule_names()) names.push_back(name.c_str());
  add(words, "--pp_schedule", names);
  const std::string name = words.back();
  if (name == "interleaved" || name == "breadth_first" || name == "llama3" || name == "auto")
    add(words, "--pp_chunks", between(1, 3));
  if (name == "llama3" && chance(0.5)) add(words, "--pp_run_length", between(1, 2 * stages));
  if (name == "auto") add(words, "--pp_in_flight", between(0, 2 * stages));
  return words;
}

CompositionDraw::Words CompositionDraw::layout(const MeshSizes& mesh, bool has_experts) {
  Words words = pipeline(mesh.pp);
  add(words, "--dp_size", mesh.dp);
  add(words, "--tp_size", mesh.tp);
  add(words, "--cp_size", mesh.cp);
  add(words, "--attention", {"naive", "blockwise"});
  add(words, "--recompute", {"none", "none", "selective", "full"});
  add(words, "--zero_stage", pick({0, 0, 1, 2, 3}));
  if (words.back() == "0") {
    add(words, "--grad_sync", {"naive", "overlapped", "bucketed"});
    if (words.back() == "bucketed") add(words, "--bucket_mb", {"0.002", "25"});
  } else {
    const bool weights = words.back() == "3", gradients = weights || words.back() == "2";
    if (chance(0.3)) add(words, "--shard_size", pick(divisors(mesh.dp_cp())));
    if (!weights) add(words, "--gather_overlap", {"none", "optimizer", "forward"});
    if (gradients) add(words, "--reduce_after", {"micro_batch", "step"});
    if (weights) add(words, "--reshard_after", {"block", "chunk", "step"});
  }
  if (mesh.tp > 1) {
    if (chance(0.6)) {
      words.emplace_back("--sequence_parallel");
      if (chance(0.3)) add(words, "--gathered_input", {"kept"});
    }
    add(words, "--tp_overlap", {"none", "weight_grad", "chunks", "batch_halves"});
  }
  if (mesh.cp > 1) {
    add(words, "--cp_method", {"ring", "all_gather", "ulysses", "ring_ulysses"});
    if (words.back() == "ring_ulysses") add(words, "--ulysses_size", pick(divisors(mesh.cp)));
    add(words, "--cp_layout", {"zigzag", "contiguous"});
    add(words, "--cp_overlap", {"none", "compute"});
    add(words, "--cp_recompute", {"exchange", "keep"});
  }
  if (has_experts) {
    add(words, "--ep_size", pick(divisors(mesh.dp_cp() * mesh.tp)));
    add(words, "--dispatch", {"direct", "direct", "by_node"});
    if (mesh.tp > 1 && chance(0.3)) words.emplace_back("--expert_tp");
  }
  if (chance(0.4)) {
    std::vector<const char*> axes = {"pp", "dp", "cp", "tp"};
    for (size_t i = axes.size(); i-- > 1;) std::swap(axes[i], axes[between(0, int64_t(i))]);
    words.insert(words.end(), {"--mesh_order", fmt::format("{}", fmt::join(axes, ","))});
  }
  if (chance(0.5)) add(words, "--node_size", pick(divisors(mesh.ranks())));
  return words;
}

/// Each layer in any stage: few or many, and in the first and the last one perhaps none.
CompositionDraw::Words CompositionDraw::with_layers(Words words, const TrainConfig& of) {
  const int64_t stages = of.pipeline.schedule(of.grad_acc_steps).stages.count();
  const std::vector<int64_t> layers = draw_layers(of.model.num_layers, stages, pipeline_);
  words.insert(words.end(), {"--pp_layers", fmt::format("{}", fmt::join(layers, ","))});
  return words;
}

/// The same stages, and an order that no name stands for.
CompositionDraw::Words CompositionDraw::with_file(Words words, const TrainConfig& of) {
  const Schedule named = of.pipeline.schedule(of.grad_acc_steps);
  for (const char* flag : {"--pp_schedule", "--pp_chunks", "--pp_run_length", "--pp_in_flight"}) {
    leave_out(words, flag);
  }
  const Schedule drawn = draw_schedule(named.stages, named.micro_batches, pipeline_);
  const std::string name = fmt::format("schedule_{}_{}_{}.txt", most_ranks_, number_, files_++);
  words.insert(words.end(), {"--pp_schedule", keep_drawn(name, to_text(drawn))});
  return words;
}

/// Half of what has stages gets layers of its own, a schedule of its own or both, where the rules
/// take that.
std::optional<Twin> CompositionDraw::with_own_pipeline(const Words& words, const Twin& named) {
  if (named.config.pipeline.pp_size == 1) return {};
  const int64_t which = pipeline_.between(0, 5);
  if (which > 2) return {};
  Words own = words;
  if (which != 1) own = with_layers(own, named.config);
  if (which != 0) own = with_file(own, named.config);
  return read_twin(own);
}

/// A layout of these axes for a model and a step of this many samples; nothing where a rule refuses
/// it.
std::optional<Twin> CompositionDraw::composed(const MeshSizes& mesh, int64_t samples, Words model) {
  ++drawn_;
  if (samples % mesh.dp != 0) return {};
  const int64_t micro = pick(divisors(samples / mesh.dp));
  add(model, "--micro_batch_size", micro);
  add(model, "--grad_acc_steps", samples / mesh.dp / micro);
  const bool has_experts = std::ranges::count(model, "--num_experts") > 0;
  const Words words = layout(mesh, has_experts);
  model.insert(model.end(), words.begin(), words.end());
  model.insert(model.end(), {"--dtype", "f64", "--device", "cpu"});
  const std::optional<Twin> twin = read_twin(model);
  if (!twin) return {};
  const std::optional<Twin> own = with_own_pipeline(model, *twin);
  return own ? own : twin;
}

Composition CompositionDraw::draw() {
  Composition drawn;
  while (true) {
    const MeshSizes sizes = mesh();
    const Words model = this->model(sizes);
    const int64_t samples = sizes.dp * pick({1, 2, 2, 3, 4}) * pick({1, 2, 3, 4, 6, 8});
    const std::optional<Twin> first = composed(sizes, samples, model);
    if (!first) continue;
    drawn.first = *first;
    for (int i = 0; i < kDrawsOfSecond && !drawn.second; ++i) {
      drawn.second = composed(mesh(), samples, model);
    }
    return drawn;
  }
}

namespace {

/// The flags of a layout, with the schedule of its file if it has one.
std::string text_of(const Twin& layout) {
  const std::string& schedule = layout.config.pipeline.pp_schedule;
  if (schedule.find('/') == std::string::npos) return layout.flags;
  std::stringstream table;
  table << std::ifstream(schedule).rdbuf();
  return fmt::format("{}\nand the file of its schedule\n{}", layout.flags, table.str());
}

/// What the compositions of a run have come to.
struct Tally {
  int64_t done = 0, resumed = 0, failed = 0, drawn = 0;
  double largest = 0;
  std::set<std::string> classes;

  void say(int64_t first) const {
    print(
        "{} compositions, numbers {} to {}, of {} lists of flags that were drawn; {} went on in "
        "another one from a checkpoint; {} classes met\n",
        done, first, first + done - 1, drawn, resumed, classes.size());
    if (failed == 0) print("all are equal to one process within {:.1e}\n", largest);
    if (failed > 0) print("{} differ\n", failed);
  }
};

void say_that_differs(uint64_t number, const Composition& of, const std::string& failure) {
  print("composition {}, {} ranks ({})\n{}\n", number, of.first.config.mesh().ranks(),
        describe(of.first.config.mesh()), indented(text_of(of.first)));
  if (of.second) print("  and from its first step on\n{}\n", indented(text_of(*of.second)));
  print("  DIFFERS\n{}\n", indented(failure));
}

/// On threads in a world of one. What a rank throws ends all, and says of which composition it is.
TwinResult run_composition(uint64_t number, const Composition& of, const Communicator& world) {
  const Twin* then = of.second ? &*of.second : nullptr;
  if (world.size() == 1) return run_twin(of.first, then);
  try {
    return run_twin(of.first, then, world);
  } catch (const PeerFailed&) {
    throw;
  } catch (const std::exception& error) {
    fail("composition {}: {}\n{}", number, error.what(), indented(text_of(of.first)));
  }
}

}  // namespace

int fuzz(const TrainConfig& config, const Communicator& world) {
  const int64_t begin = clock_ns();
  const auto minutes = [&] { return seconds_since(begin) / 60; };
  const bool has_ranks = world.size() > 1;
  double said = 0;
  Tally tally;
  do {
    const uint64_t number = uint64_t(config.seed) + uint64_t(tally.done);
    CompositionDraw draw(number, has_ranks ? world.size() : kDrawnRanks, /*exactly=*/has_ranks);
    const Composition of = draw.draw();
    tally.drawn += draw.drawn();
    ++tally.done;
    if (of.second) ++tally.resumed;
    for (const RemainderClass& each : of.first.classes) {
      tally.classes.insert(each.name + ": " + each.label);
    }
    const TwinResult result = run_composition(number, of, world);
    tally.largest = std::max(tally.largest, result.largest);
    if (!result.failure.empty()) {
      ++tally.failed;
      say_that_differs(number, of, result.failure);
    }
    if (minutes() - said > 0.25) {
      said = minutes();
      print("{:.1f} of {} min: {} compositions, {} differ\n", said, config.composition.fuzz,
            tally.done, tally.failed);
    }
  } while (!world.any(minutes() >= config.composition.fuzz));
  tally.say(config.seed);
  return tally.failed == 0 ? 0 : 1;
}

}  // namespace usp

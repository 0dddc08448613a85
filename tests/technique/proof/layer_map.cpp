#include "proof/layer_map.h"

#include <map>
#include <set>

#include "comm/launch.h"
#include "technique/layout_of_flags.h"
#include "technique/pipeline_parallel/pipeline_parity.h"
#include "tensor/recorder.h"

namespace usp::test::of_layers {
namespace {

constexpr const char* kModel =
    "--hidden_size 24 --num_heads 4 --ffn_hidden_size 20 --vocab_size 61 --num_layers 2 --seq_len "
    "8 "
    "--micro_batch_size 3 --grad_acc_steps 2 --steps 2 ";

/// The flags win over those of kModel.
TrainConfig config_of(const std::string& own) {
  std::string model = kModel;
  const std::string layers = "--num_layers";
  if (own.find(layers) != std::string::npos) model.erase(model.find(layers), layers.size() + 3);
  return layout_of_flags(model + own);
}

/// All dimensions at once, and each technique that changes what a layer sends.
const std::vector<std::string> kLayouts = {
    "--num_kv_heads 2 --dp_size 2 --cp_size 2 --tp_size 2 --pp_size 2 --sequence_parallel "
    "--num_experts 4 --ep_size 4 --zero_stage 3",
    "--num_kv_heads 2 --tp_size 2 --dp_size 2 --sequence_parallel --num_experts 4 --ep_size 2 "
    "--expert_tp",
    "--num_kv_heads 2 --tp_size 2",
    "--num_kv_heads 4 --tp_size 2 --sequence_parallel --pp_size 2 --recompute full",
    "--num_kv_heads 4 --cp_size 4 --cp_method ring_ulysses --ulysses_size 2",
    "--num_kv_heads 2 --cp_size 2 --cp_method all_gather --dp_size 2 --zero_stage 2",
    "--tp_size 2 --cp_size 2 --attention_kind mla --q_lora_rank 6 --kv_lora_rank 8 "
    "--qk_nope_head_dim 4 --qk_rope_head_dim 4 --v_head_dim 4",
};

TEST_CASE("by the map of a layer the parts of all ranks make up the whole") {
  const TrainConfig config = config_of(kLayouts.front());
  const ModelConfig& m = config.model;
  const int64_t samples = config.micro_batch_size * config.data_parallel.dp_size;
  const int64_t T = samples * config.seq_len, k = m.experts.num_experts_per_tok;
  const int64_t H = m.hidden_size, F = m.ffn_hidden_size, E = m.experts.num_experts;
  const int64_t d = m.head_dim(), qkv = (m.num_heads + 2 * m.num_kv_heads) * d;
  const std::map<std::pair<std::string, std::string>, Shape> wholes = {
      {{"rmsnorm_forward", "input_layernorm"}, {T, H}},
      {{"linear_forward", "self_attn.q_proj"}, {T, qkv}},
      {{"rope", ""}, {samples, config.seq_len, m.num_heads + m.num_kv_heads, d}},
      {{"attention_forward", ""}, {samples, config.seq_len, m.num_heads, d}},
      {{"linear_forward", "self_attn.o_proj"}, {T, H}},
      {{"reduce_scatter over tp", ""}, {T, H}},
      {{"linear_forward", "mlp.gate"}, {T, E}},
      {{"permute", ""}, {k * T, H}},
      {{"grouped_linear_forward", "mlp.experts.0.gate_proj"}, {k * T, 2 * F}},
      {{"swiglu_forward", ""}, {k * T, F}},
      {{"grouped_linear_forward", "mlp.experts.0.down_proj"}, {k * T, H}},
      {{"unpermute", ""}, {T, H}},
      {{"grouped_linear_backward_weight", "mlp.experts.0.gate_proj"}, {E, 2 * F, H}},
      {{"grouped_linear_backward_weight", "mlp.experts.0.down_proj"}, {E, H, F}},
      {{"linear_backward_weight", "mlp.gate"}, {E, H}},
      {{"attention_delta", ""}, {samples, m.num_heads, config.seq_len}},
      {{"linear_backward_weight", "self_attn.o_proj"}, {H, m.num_heads * d}},
      {{"linear_backward_weight", "self_attn.q_proj"}, {qkv, H}},
      {{"rmsnorm_backward_weight", "input_layernorm"}, {H}},
  };
  std::set<std::pair<std::string, std::string>> met;
  for (const LayerPoint& point : map_layer(config)) {
    const auto found = wholes.find({point.operation, point.parameter});
    if (found == wholes.end()) continue;
    INFO(point.operation << " " << point.parameter << " makes " << point.made.to_string() << " of "
                         << point.whole.to_string() << ", expected " << found->second.to_string());
    met.insert(found->first);
    REQUIRE(point.whole == found->second);
  }
  REQUIRE(met.size() == wholes.size());
}

/// What a rank does in the first micro-batch of its first step, by block.
class RunLog : public Recorder {
 public:
  struct Entry {
    std::string phase, operation;
    Shape taken, made;

    bool operator==(const Entry&) const = default;
  };

  void op(std::string_view name, int64_t, int64_t, std::span<const Tensor* const> operands,
          bool) override {
    add(std::string(name), {}, operands.front());
  }
  int64_t post(const Posted& operation) override {
    add(fmt::format("{} over {}", usp::name(operation.kind), operation.group), operation.input,
        operation.output);
    return 0;
  }
  void wait(int64_t) override {}
  void begin_phase(std::string_view name, int64_t, int64_t micro_batch) override {
    auto now = phases_.back();
    if (name == "forward" || name == "backward" || name == "recompute") now.first = name;
    if (micro_batch >= 0) now.second = micro_batch;
    phases_.push_back(now);
  }
  void end_phase() override { phases_.pop_back(); }

  const std::vector<Entry>& of_block(int block) { return blocks_[block]; }

 private:
  void add(std::string operation, const Tensor* taken, const Tensor* made) {
    const auto& [phase, micro_batch] = phases_.back();
    if (micro_batch != 0) return;
    const auto shape = [](const Tensor* x) { return x && x->defined() ? x->shape() : Shape(); };
    blocks_[Runtime::current().block()].push_back(
        {std::string(phase), std::move(operation), shape(taken), shape(made)});
  }

  std::vector<std::pair<std::string_view, int64_t>> phases_ = {{"", -1}};
  std::map<int, std::vector<Entry>> blocks_;
};

/// Whether both are of one operation. How many rows a router sends is not known before a run.
bool is_like(const LayerPoint& point, const RunLog::Entry& entry) {
  const bool is_message = point.operation.find(" over ") != std::string::npos;
  const auto equal = [](Shape a, Shape b, bool has_rows_of_router) {
    if (a.rank() == 0 || b.rank() == 0) return a.rank() == b.rank();
    if (has_rows_of_router) a[0] = b[0] = 0;
    return a == b;
  };
  const bool exchanges = point.operation == "all_to_all over ep";
  return point.phase == entry.phase && point.operation == entry.operation &&
         equal(point.made, entry.made, point.is_routed || exchanges) &&
         (!is_message || equal(point.taken, entry.taken, exchanges));
}

TEST_CASE("each row of the map of a layer is what a rank of a run does") {
  const std::set<std::string> left_out = {
      "fill",         "copy",       "count_choices",  "choose_experts",
      "assign_slots", "accumulate", "router_entropy", "all_to_all over ep_counts"};
  for (const std::string& own : kLayouts) {
    const TrainConfig config = config_of(own);
    const MeshSizes mesh_sizes = config.mesh();
    const int followed = mesh_sizes.first_of_stage(int(config.pipeline.pp_size / 2));
    RunLog log;
    const Text text;
    run_threads(int(mesh_sizes.ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, mesh_sizes);
      Trainer trainer(config, {&text.dataset, mesh});
      if (world.rank() == followed) Runtime::current().tell(&log);
      trainer.train_step(0);
      Runtime::current().tell(nullptr);
    });
    const std::vector<LayerPoint> points = map_layer(config);
    size_t next = 0;
    std::optional<RunLog::Entry> last;
    for (const RunLog::Entry& entry : log.of_block(int(config.model.num_layers))) {
      if (left_out.contains(entry.operation) || (last && entry == *last)) continue;
      while (next < points.size() && points[next].operation.ends_with(" over pp")) ++next;
      INFO(own << ": " << entry.phase << " " << entry.operation << " makes "
               << entry.made.to_string() << " in the run");
      REQUIRE(next < points.size());
      INFO("and on the map " << points[next].phase << " " << points[next].operation << " makes "
                             << points[next].made.to_string());
      REQUIRE(is_like(points[next], entry));
      last = entry;
      ++next;
    }
    while (next < points.size() && points[next].operation.ends_with(" over pp")) ++next;
    REQUIRE(next == points.size());
    REQUIRE(next > 20);
  }
}

/// The messages between stages, such as "forward recv over pp".
std::vector<std::string> crossings_of(const std::string& own) {
  std::vector<std::string> found;
  for (const LayerPoint& point : map_layer(config_of(own))) {
    if (!point.operation.ends_with(" over pp")) continue;
    found.push_back(point.phase + " " + point.operation);
    const Shape& here = point.made.rank() > 0 ? point.made : point.taken;
    INFO(own << ": " << found.back() << " " << here.to_string());
    REQUIRE(here == Shape({3 * 8, 24}));
    REQUIRE((point.whole.rank() == 0 || point.whole == here));
  }
  return found;
}

TEST_CASE("the map of a layer has the messages of its micro-batch, forward and backward") {
  const std::string in = "forward recv over pp", out = "forward send over pp",
                    back_in = "backward recv over pp", back_out = "backward send over pp";
  const std::string three = "--num_layers 3 --num_kv_heads 2 --pp_size 3 ";
  for (const char* own : {"", "--recompute full", "--pp_schedule zb_h1", "--pp_schedule afab"}) {
    REQUIRE(crossings_of(three + own) == std::vector{in, out, back_in, back_out});
  }
  REQUIRE(crossings_of("--num_kv_heads 2 --pp_size 2") == std::vector{in, back_out});
  const std::string chunks = "--num_kv_heads 2 --pp_size 2 --num_layers 4 --pp_chunks 2 ";
  REQUIRE(crossings_of(chunks + "--pp_schedule interleaved") == std::vector{in, back_out});
  REQUIRE(crossings_of("--num_kv_heads 2") == std::vector<std::string>());
}

TEST_CASE("the table of a layer has a row for each operation and ends where the layer does") {
  const std::string table = table_of_layer(config_of(kLayouts.front()));
  INFO(table);
  for (const char* row :
       {"a layer on 16 ranks: dp 2 x pp 2 x cp 2 x tp 2, ep 4\n", "\nforward\n", "\nbackward\n",
        "\nrecv over pp ", "\nall_gather over tp ", "o_proj [24, 12] ", "[252] -> [1008]\n"}) {
    const bool is_there = table.find(row) != std::string::npos;
    INFO(row);
    CHECK(is_there);
  }
}

}  // namespace
}  // namespace usp::test::of_layers

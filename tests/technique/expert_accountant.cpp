#include "expert_accountant.h"

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

/// The same experts, whose tokens go by node.
TrainConfig with_nodes(TrainConfig config, int64_t node_size) {
  ExpertConfig& experts = config.expert_parallel;
  experts.ep_size = std::gcd(config.mesh().expert_ranks(), int64_t{8});
  config.model.experts.num_experts = 8;
  experts.dispatch = "by_node";
  config.communication->node_size = node_size * (experts.expert_tp ? config.mesh().tp : 1);
  return config;
}

/// In f64 all tensors of a pass have as many bytes an element; in bf16 sums have twice as many.
std::vector<std::pair<const char*, int>> dtypes_and_ranks(int64_t ranks) {
  std::vector<std::pair<const char*, int>> both;
  for (const char* dtype : {"f64", "bf16"}) {
    for (int rank = 0; rank < ranks; ++rank) both.emplace_back(dtype, rank);
  }
  return both;
}

TEST_CASE("the activations of a stage with experts are those of the formula, to the byte",
          "[no_races]") {
  int compared = 0;
  int64_t n = 0;
  for (PipelineCase c : pipeline_cases(20)) {
    ++n;
    if (c.tp > 1 && c.sequence == std::string_view("off")) c.sequence = "again";
    TrainConfig config = with_experts(c, n);
    const int64_t T = 8 / c.cp, R = T * config.model.experts.num_experts_per_tok;
    for (const auto& [dtype, rank] : dtypes_and_ranks(c.pp)) {
      config.dtype = dtype;
      CAPTURE(n, c.name(), dtype, rank, config.expert_parallel.ep_size,
              config.expert_parallel.expert_tp, config.expert_parallel.balance,
              config.model.experts.num_shared_experts, config.model.experts.num_experts, R);
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
  REQUIRE(compared > (kSanitized ? 10 : 400));
}

TEST_CASE("the activations of tokens that go by node are those of the formula, to the byte",
          "[no_races]") {
  int compared = 0, between_nodes = 0;
  int64_t n = 0;
  for (PipelineCase c : pipeline_cases(20)) {
    ++n;
    if (c.tp > 1 && c.sequence == std::string_view("off")) c.sequence = "again";
    TrainConfig config = with_nodes(with_experts(c, n), 1 << n % 3);
    const ExpertConfig& experts = config.expert_parallel;
    if (experts.ep_size == 1) continue;
    const int64_t in_node = experts.ranks_in_node(config, config.tensor_parallel);
    between_nodes += in_node < experts.ep_size;
    for (const auto& [dtype, rank] : dtypes_and_ranks(c.pp)) {
      config.dtype = dtype;
      CAPTURE(n, c.name(), dtype, rank, experts.ep_size, in_node, experts.expert_tp,
              experts.balance, config.model.experts.num_shared_experts,
              config.model.experts.num_experts_per_tok);
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
  REQUIRE(compared > (kSanitized ? 0 : 120));
  REQUIRE(between_nodes > (kSanitized ? 0 : 20));
}

int64_t sum_of(const std::vector<NamedBytes>& parts) {
  int64_t sum = 0;
  for (const NamedBytes& part : parts) sum += part.bytes;
  return sum;
}

/// Bytes of activations that come and go while segments run.
class Watched {
 public:
  explicit Watched(Allocator& allocator) : allocator_(allocator) { begin(); }
  void begin() {
    allocator_.reset_peaks();
    live_ = allocator_.live_bytes(Category::activations);
  }
  int64_t grown() const { return allocator_.live_bytes(Category::activations) - live_; }
  int64_t peak() const { return allocator_.peak_bytes(Category::activations) - live_; }

 private:
  Allocator& allocator_;
  int64_t live_ = 0;
};

/// Runs a block forward and backward on meta, segment by segment; with `split`, the gradients of
/// weights wait.
void check_segments(const TrainConfig& config, bool split) {
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  const DryMesh dry(config.mesh());
  dry.mesh.world().engine().set_node_size(config.communication->node_size);
  Trainer trainer(config, nullptr, dry.mesh);
  const DType dtype = parse_dtype(config.dtype);
  const PassShape shape{config.micro_batch_size, config.seq_len, dtype,
                        config.tensor_parallel.row_shares()};
  Grads grads(trainer.model().parameters());
  grads.begin_window(1);
  Grads::Deferred deferred;
  if (split) grads.defer_to(&deferred);
  Pass pass;
  pass.num_samples = shape.num_samples;
  pass.seq_len = shape.seq_len;
  pass.positions = Positions(0, shape.seq_len);
  pass.loss_scale = 1;
  Watched watched(runtime.allocator());
  Block& block = trainer.model().chunk(0)[1];
  const int64_t H = config.model.hidden_size;
  Watched whole(runtime.allocator());
  Tensor x = Tensor::empty({shape.rows(), H}, dtype);
  const int64_t boundary = x.bytes();
  BlockSaved saved;
  int64_t handed = 0;
  for (const auto& segment : block) {
    CAPTURE(segment->name());
    const Footprint expected = segment->footprint(shape);
    watched.begin();
    const Tensor y = segment->forward(x, saved, pass);
    CHECK(watched.grown() ==
          sum_of(expected.kept) + expected.output.bytes + expected.handed - handed);
    CHECK(watched.peak() == sum_of(expected.kept) + expected.forward_peak);
    handed = expected.handed;
    x = y;
  }
  Tensor dy = std::exchange(x, {});
  int64_t held = 0;
  for (size_t s = block.size(); s-- > 0;) {
    CAPTURE(block[s]->name(), split);
    const Footprint expected = block[s]->footprint(shape);
    watched.begin();
    dy = block[s]->backward(dy, saved, grads, pass);
    const int64_t most = std::max(expected.backward_peak, split ? expected.split_peak : 0);
    CHECK(watched.peak() == expected.recomputed + most);
    held += expected.held;
  }
  CHECK(whole.grown() == (split ? held : 0) + boundary);
}

TEST_CASE("a segment of a mixture of experts asks for the bytes that its footprint says") {
  for (int64_t n = 0; n < 64; ++n) {
    PipelineCase c{};
    c.dp = 1 + n % 2;
    c.tp = 1 + n / 32 % 2;
    c.sequence = c.tp == 1 ? "off" : n / 2 % 2 == 0 ? "again" : "kept";
    c.num_kv_heads = 2;
    c.recompute = "none";
    c.attention = "blockwise";
    c.overlap = "weight_grad";
    c.grad_acc_steps = 1;
    TrainConfig config = with_experts(c, n);
    config.model.experts.first_dense_layers = 0;
    config.expert_parallel.ep_size = std::gcd(config.mesh().expert_ranks(), int64_t{1 + n / 4 % 4});
    for (const auto& [dtype, split] :
         {std::pair("f64", false), {"f64", true}, {"bf16", false}, {"bf16", true}}) {
      config.dtype = dtype;
      CAPTURE(n, dtype, split, c.tp, c.sequence, config.expert_parallel.ep_size,
              config.expert_parallel.expert_tp, config.expert_parallel.balance,
              config.model.experts.num_shared_experts);
      check_segments(config, split);
      if (n % 4 != 3 || config.mesh().expert_ranks() == 1) continue;
      for (int64_t node_size : {1, 2, 4}) {
        const TrainConfig by_node = with_nodes(config, node_size);
        if (by_node.expert_parallel.ep_size == 1) continue;
        CAPTURE(node_size, by_node.expert_parallel.ep_size);
        check_segments(by_node, split);
      }
    }
  }
}

}  // namespace
}  // namespace usp::test

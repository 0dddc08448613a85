// What a model's cache of keys and values holds of a position, and what attention of new tokens to
// it computes: by dry runs, and for a small model while it continues a text.

#include <algorithm>
#include <cmath>

#include "base/args.h"
#include "comm/launch.h"
#include "run/sample.h"
#include "tensor/console.h"
#include "tensor/runtime.h"
#include "train_step.h"

namespace usp {
namespace {

/// A run's flags, of which seq_len says how many positions the cache has room for.
struct Setting {
  TrainConfig config;
  int64_t new_tokens = 1;
  bool sampling = false;

  Setting() { config.sample.sample_tokens = 32; }
  void bind(Args& args) {
    config.bind(args);
    args.group("Cache");
    args.bind("new_tokens", new_tokens, "tokens of the pass whose operations are counted");
    args.bind("while_sampling", sampling, "count bytes on the CPU, while a text is continued");
  }
  void validate(const Args& args) {
    config.validate(args);
    check_range("new_tokens", double(new_tokens), 1, double(config.seq_len));
    const MeshSizes mesh = config.mesh();
    if (mesh.pp > 1 || mesh.ep > 1) {
      usage_error("pp_size={} and ep_size={} must be 1: a cache is of one stage; leave them out",
                  mesh.pp, mesh.ep);
    }
    if (sampling && mesh.tp * mesh.cp > 1) {
      usage_error("tp_size={} cp_size={}: while_sampling is for one rank; leave one of them out",
                  mesh.tp, mesh.cp);
    }
  }
};

/// Numbers cached of a position in one layer, on one rank.
int64_t cached_numbers(const TrainConfig& config) {
  const ModelConfig& m = config.model;
  if (m.mla.on()) return m.mla.cached();
  return 2 * std::max<int64_t>(1, m.num_kv_heads / config.tensor_parallel.tp_size) * m.head_dim();
}

int64_t bytes_by_formula(const TrainConfig& config) {
  const int64_t cp = config.context_parallel.cp_size, positions = (config.seq_len + cp - 1) / cp;
  return config.model.num_layers * positions * cached_numbers(config) *
         bytes_of(parse_dtype(config.dtype));
}

int64_t live_bytes() { return Runtime::current().allocator().live_bytes(Category::activations); }

Pass pass_over(int64_t begin, int64_t count, KvCache* cache) {
  Pass pass;
  pass.mode = Pass::Mode::decode;
  pass.num_samples = 1;
  pass.positions = Positions(begin, count);
  pass.tokens = Tensor::empty({count}, DType::i32);
  pass.kv_cache = cache;
  return pass;
}

/// Bytes of the cache, after a pass over the first position.
int64_t bytes_on_shapes(Trainer& trainer, int64_t positions) {
  const int64_t before = live_bytes();
  KvCache cache(positions);
  trainer.logits(pass_over(0, 1, &cache));
  return live_bytes() - before;
}

/// Bytes of what lives between two tokens of a text that is continued.
int64_t bytes_while_sampling(const TrainConfig& config, const Communicator& world) {
  Runtime runtime(Device::cpu);
  const Runtime::Use use(runtime);
  const Mesh mesh(world, config.mesh());
  Trainer trainer(config, {/*dataset=*/nullptr, mesh});
  const int64_t before = live_bytes();
  int64_t most = 0;
  const auto watched = [&](const Pass& pass) {
    most = std::max(most, live_bytes() - before - pass.tokens.bytes());
    return trainer.logits(pass);
  };
  sample_tokens(watched, config.sample, config.seq_len, {1}, /*seed=*/1, [] { return false; });
  return most;
}

// ---- operations of the first layer's attention

class Attention {
 public:
  Attention(const TrainConfig& config, Trainer& trainer)
      : model_(config.model),
        dtype_(parse_dtype(config.dtype)),
        segment_(*trainer.model().chunk(0)[1][0]) {}

  /// Operations of `count` new tokens, the last of this many keys, by the cache.
  double cached(int64_t count, int64_t keys) const {
    KvCache cache(keys);
    if (keys > count) forward(0, keys - count, &cache);
    return operations([&] { forward(keys - count, count, &cache); });
  }
  /// The same, if keys and values of all heads are made of the cached latents anew: a pass over the
  /// new tokens alone, and then what older ones add to it.
  double expanded(int64_t count, int64_t keys) const {
    return operations([&] {
      forward(0, count, nullptr);
      if (keys > count) expand_and_attend(count, keys - count);
    });
  }

 private:
  static double operations(const std::function<void()>& work) {
    const double before = Runtime::current().flops();
    work();
    return Runtime::current().flops() - before;
  }
  void forward(int64_t begin, int64_t count, KvCache* cache) const {
    BlockSaved saved;
    segment_.forward(Tensor::empty({count, model_.hidden_size}, dtype_), saved,
                     pass_over(begin, count, cache));
  }
  void expand_and_attend(int64_t count, int64_t older) const {
    const MlaShape& m = model_.mla;
    const int64_t N = model_.num_heads, D = m.head_dim(), C = m.kv_lora_rank;
    const int64_t width = N * (m.qk_nope_head_dim + m.v_head_dim);
    const auto empty = [&](const Shape& shape) { return Tensor::empty(shape, dtype_); };
    ops::linear_forward(empty({older, width}), empty({older, C}), empty({width, C}));
    ops::attention_forward(
        empty({1, count, N, D}), Tensor::empty({1, N, count}, accumulate_dtype(dtype_)),
        /*probs=*/{}, empty({1, count, N, D}), empty({1, older, N, D}), empty({1, older, N, D}),
        /*scale=*/1, Positions(older, count), Positions(0, older));
  }

  ModelConfig model_;
  DType dtype_;
  Segment& segment_;
};

/// The most new tokens for which the cached latents themselves cost no more; 0 if one costs more.
int64_t crossover(const Attention& attention, int64_t keys) {
  int64_t below = 0, above = keys + 1;
  while (above - below > 1) {
    const int64_t middle = below + (above - below) / 2;
    const bool less = attention.cached(middle, keys) <= attention.expanded(middle, keys);
    (less ? below : above) = middle;
  }
  return below;
}

void count_operations(const Setting& s, Trainer& trainer) {
  const Attention attention(s.config, trainer);
  print("a layer's attention, the last {} of {} positions\n", s.new_tokens, s.config.seq_len);
  print("{:<28}{:>22.0f} operations\n", "  by the cache",
        attention.cached(s.new_tokens, s.config.seq_len));
  if (!s.config.model.mla.on()) return;
  print("{:<28}{:>22.0f} operations\n", "  by keys and values again",
        attention.expanded(s.new_tokens, s.config.seq_len));
  print("{:<28}{:>22} new tokens\n", "  the first is less up to",
        crossover(attention, s.config.seq_len));
}

int run(const Communicator& world, int argc, char** argv) {
  Setting s;
  Args args("Counts what a cache of keys and values holds, and what attention to it computes.");
  s.bind(args);
  if (!args.parse(argc, argv)) return 0;
  s.validate(args);
  const TrainConfig& config = s.config;
  print("{}: {} numbers of a position in each of {} layers, {} positions, {}\n",
        config.model.mla.attention_kind, cached_numbers(config), config.model.num_layers,
        config.seq_len, config.dtype);
  print("{:<28}{:>22} bytes\n", "cache by formula", bytes_by_formula(config));
  if (s.sampling) {
    print("{:<28}{:>22} bytes\n", "cache while sampling", bytes_while_sampling(config, world));
    return 0;
  }
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  const DryMesh dry(config.mesh());
  Trainer trainer(config, {/*dataset=*/nullptr, dry.mesh});
  print("{:<28}{:>22} bytes\n", "cache in a dry run", bytes_on_shapes(trainer, config.seq_len));
  const MeshSizes mesh = config.mesh();
  if (mesh.tp * mesh.cp == 1) count_operations(s, trainer);
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_alone_main(usp::run, argc, argv); }

#include "technique/accounting/kept.h"
#include "technique/tiny_llama.h"

/// What each segment says that it keeps, beside what the allocator counts while it runs.
namespace usp::test {
namespace {

/// Runs a block forward on meta, segment by segment.
void check_block(const Model::BuildBlock& build, int64_t block, const PassShape& shape, int64_t H) {
  OnDevice meta(Device::meta);
  Model model(build, {{block, block + 1}});
  model.parameters().allocate(shape.dtype, 1);
  Random random(1);
  const Tensor loss = Tensor::zeros({1}, DType::f64);
  const Pass pass = random_pass(random, tiny_model(), shape.num_samples, shape.seq_len, 1, loss);
  Tensor x = block == 0 ? Tensor() : Tensor::empty({shape.tokens(), H}, shape.dtype);
  BlockSaved saved;
  meta.allocator().record_events(true);
  std::vector<Footprint> footprints;
  for (const auto& segment : model.chunk(0)[0]) {
    CAPTURE(segment->name());
    footprints.push_back(segment->footprint(shape));
    x = segment->forward(x, saved, pass);
    REQUIRE(live_by_name(meta.allocator()) == kept_by_name(footprints));
  }
}

constexpr Probabilities kProbabilities[] = {Probabilities::never_whole, Probabilities::stored,
                                            Probabilities::recomputed};

TEST_CASE("a segment keeps what its footprint says, by name and to the byte") {
  ModelConfig wide_heads = tiny_model(), wide_mlp = tiny_model(), one_kv_head_each = tiny_model();
  wide_heads.given_head_dim = 20;
  wide_mlp.ffn_hidden_size = 70;
  one_kv_head_each.num_kv_heads = one_kv_head_each.num_heads;
  for (DType dtype : kFloatDTypes) {
    for (Probabilities probabilities : kProbabilities) {
      for (const ModelConfig& m : {tiny_model(), wide_heads, wide_mlp, one_kv_head_each}) {
        for (int64_t seq_len : {1, 5, 40}) {
          CAPTURE(name(dtype), int(probabilities), m.head_dim(), m.ffn_hidden_size, m.num_kv_heads,
                  seq_len);
          const auto build = [&](int64_t block, ParameterList& list) {
            return Llama(m, {seq_len, dtype, probabilities}).build(block, list);
          };
          for (int64_t block : {int64_t{0}, int64_t{1}, m.num_layers + 1}) {
            check_block(build, block, {3, seq_len, dtype}, m.hidden_size);
          }
        }
      }
    }
  }
}

/// Half of the heads, of the MLP's channels and of the vocabulary.
Block half_a_block(int64_t block, ParameterList& list, DType dtype, Probabilities probabilities) {
  const int64_t H = 12, N = 4, G = 2, D = 6, F = 10, V = 22;
  const auto weight = [&](const char* name, const Shape& shape, int axis) -> Parameter& {
    return list.add(name, shape, 0.02, {{axis, shape[axis] / 2, shape[axis] / 2}});
  };
  const auto linear = [](std::vector<Parameter*> weights, std::string_view output) {
    return std::make_unique<Linear>(std::move(weights), output);
  };
  Block segments;
  if (block == 0) {
    segments.push_back(std::make_unique<Embedding>(weight("embedding", {V, H}, 0)));
    return segments;
  }
  const RmsNorm norm(list.add("norm", {H}, 0), 1e-5);
  if (block == 2) {
    Parameter& head = weight("head", {V, H}, 0);
    segments.push_back(std::make_unique<Head>(norm, linear({&head}, "logits"),
                                              std::make_unique<CrossEntropy>(head.offset(0))));
    return segments;
  }
  Parameter &q = weight("q", {N * D, H}, 0), &k = weight("k", {G * D, H}, 0);
  Parameter &v = weight("v", {G * D, H}, 0), &o = weight("o", {H, N * D}, 1);
  segments.push_back(std::make_unique<Attention>(
      norm, linear({&q, &k, &v}, "qkv"), RopeTable(tiny_model(), 40, dtype),
      std::make_unique<CoreAttention>(N / 2, G / 2, D, probabilities), linear({&o}, "residual")));
  Parameter &gate = weight("gate", {F, H}, 0), &up = weight("up", {F, H}, 0);
  Parameter& down = weight("down", {H, F}, 1);
  segments.push_back(std::make_unique<Mlp>(
      RmsNorm(list.add("second norm", {H}, 0), 1e-5),
      FeedForward(linear({&gate, &up}, "gate_up"), linear({&down}, "residual"))));
  return segments;
}

TEST_CASE("a footprint is of the part of the weights that the rank holds") {
  for (DType dtype : kFloatDTypes) {
    for (Probabilities probabilities : kProbabilities) {
      CAPTURE(name(dtype), int(probabilities));
      const auto build = [&](int64_t block, ParameterList& list) {
        return half_a_block(block, list, dtype, probabilities);
      };
      for (int64_t block : {0, 1, 2}) check_block(build, block, {2, 7, dtype}, 12);
    }
  }
}

}  // namespace
}  // namespace usp::test

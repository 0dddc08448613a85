#include "technique/tiny_llama.h"

/// Logits of models that are not one chunk of the shipped segments alone.
namespace usp::test {
namespace {

constexpr int64_t kTextLength = 5;

Pass random_text(uint64_t seed) {
  Random random(seed);
  return random_pass(random, tiny_model(), 2, kTextLength, 1, {});
}

/// Does nothing but count; what gathers weights before a block and frees them after it looks so.
class PassOn : public Segment {
 public:
  explicit PassOn(int64_t& calls) : calls_(calls) {}
  std::string_view name() const override { return "pass_on"; }
  Tensor forward(const Tensor& x, BlockSaved&, const Pass&) override {
    ++calls_;
    return x;
  }
  Tensor backward(const Tensor& dy, BlockSaved&, Grads&, const Pass&) override { return dy; }

 private:
  int64_t& calls_;
};

TEST_CASE("logits come from between whatever segments were put around a block's own") {
  const OnDevice cpu;
  Model model =
      allocated_model(tiny_model(), kTextLength, DType::f64, Probabilities::never_whole, 1);
  Pass pass = random_text(2);
  for (Pass::Mode mode : {Pass::Mode::eval, Pass::Mode::decode}) {
    pass.mode = mode;
    const Values expected = model.logits(pass).items();
    int64_t first = 0, last = 0;
    for (Block& block : model.chunk(0)) {
      block.insert(block.begin(), std::make_unique<PassOn>(first));
      block.push_back(std::make_unique<PassOn>(last));
    }
    REQUIRE(model.logits(pass).items() == expected);
    REQUIRE(first == std::ssize(model.chunk(0)));
    REQUIRE(last == first);
    for (Block& block : model.chunk(0)) {
      block.erase(block.begin());
      block.pop_back();
    }
  }
}

TEST_CASE("a shard of the vocabulary gives its columns of the logits") {
  const OnDevice cpu;
  const ModelConfig m = tiny_model();
  const Pass pass = random_text(2);
  Model whole = allocated_model(m, kTextLength, DType::f64, Probabilities::never_whole, 1);
  const Tensor expected = whole.logits(pass);
  const Llama llama(m, {kTextLength, DType::f64, Probabilities::never_whole});
  for (const Slice& columns : {Slice{0, 0, 4}, Slice{0, 4, 7}}) {
    const auto build = [&](int64_t block, ParameterList& list) {
      if (block <= m.num_layers) return llama.build(block, list);
      const RmsNorm norm(list.add("model.norm.weight", {m.hidden_size}, 0), m.rms_norm_eps);
      Parameter& head = list.add("lm_head.weight", {m.vocab_size, m.hidden_size}, 0.02, {columns});
      Block segments;
      segments.push_back(std::make_unique<Head>(norm, std::make_unique<Linear>(std::vector{&head}),
                                                std::make_unique<CrossEntropy>(columns.offset)));
      return segments;
    };
    Model shard(build, {{0, llama.num_blocks()}});
    shard.parameters().allocate(DType::f64, 1);
    const Tensor logits = shard.logits(pass);
    REQUIRE(logits.shape() == Shape{2 * kTextLength, columns.length});
    check_close(logits, expected.narrow(1, columns.offset, columns.length).items(), 1e-13);
  }
}

TEST_CASE("a part of a model has no logits, and says so before it computes anything") {
  const OnDevice cpu;
  const Llama llama(tiny_model(), {kTextLength, DType::f64, Probabilities::never_whole});
  using Chunks = std::vector<BlockRange>;
  for (const Chunks& chunks : {Chunks{{0, 3}}, Chunks{{2, 4}}, Chunks{{0, 2}, {2, 4}}}) {
    CAPTURE(chunks.size(), chunks[0].begin);
    Model part([&](int64_t block, ParameterList& list) { return llama.build(block, list); },
               chunks);
    check_throws<Error>([&] { part.logits(random_text(2)); },
                        {"one chunk from the embedding to the head", "the first of blocks"});
  }
}

}  // namespace
}  // namespace usp::test

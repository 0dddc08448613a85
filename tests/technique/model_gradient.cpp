#include "technique/window.h"

namespace usp::test {
namespace {

TEST_CASE("the model's gradient agrees with finite differences in every parameter",
          "[not_sanitized]") {
  const OnDevice cpu;
  ModelConfig tied = tiny_model(), one_kv_head_each = tiny_model(), wide_heads = tiny_model();
  tied.tie_word_embeddings = true;
  one_kv_head_each.num_kv_heads = one_kv_head_each.num_heads;
  wide_heads.given_head_dim = 8;  // 2 * 8 is not the hidden size
  wide_heads.rope_scaling.rope_type = "llama3";
  wide_heads.rope_scaling.rope_original_max_position_embeddings = 64;
  for (const ModelConfig& config : {tiny_model(), tied, one_kv_head_each, wide_heads}) {
    for (bool naive : {true, false}) {
      for (int64_t micro_batches : {1, 2}) {
        CAPTURE(config.tie_word_embeddings, config.num_kv_heads, config.head_dim(), naive,
                micro_batches);
        Window window(config, naive, micro_batches);
        window.backward();
        for (size_t i = 0; i < window.parameters().size(); ++i) {
          const Parameter& parameter = window.parameters()[i];
          check_gradient(
              parameter.grad, parameter.value, [&] { return window.loss(); }, parameter.name,
              /*samples=*/6, /*tolerance=*/1e-8);
        }
      }
    }
  }
}

TEST_CASE("naive and blockwise attention give the model the same loss and gradient in f64") {
  const OnDevice cpu;
  Window naive(tiny_model(), true, 2), blockwise(tiny_model(), false, 2);
  check_close(Values{blockwise.loss()}, Values{naive.loss()}, 1e-13, "loss");
  naive.backward();
  blockwise.backward();
  const auto expected = gradients_of(naive.parameters());
  const auto actual = gradients_of(blockwise.parameters());
  for (size_t i = 0; i < expected.size(); ++i) {
    check_close(actual[i].second, expected[i].second, 1e-12, expected[i].first);
  }
}

TEST_CASE("a tied embedding is one parameter with two gradient contributions") {
  const OnDevice cpu;
  ModelConfig config = tiny_model();
  Model untied = allocated_model(config, kSeqLen, DType::f32, Probabilities::never_whole, 1);
  config.tie_word_embeddings = true;
  Model tied = allocated_model(config, kSeqLen, DType::f32, Probabilities::never_whole, 1);
  REQUIRE(tied.parameters().size() == untied.parameters().size() - 1);
  REQUIRE(tied.parameters().find("model.embed_tokens.weight").uses == 2);
  REQUIRE(untied.parameters().find("model.embed_tokens.weight").uses == 1);
  REQUIRE(untied.parameters().find("lm_head.weight").uses == 1);
  REQUIRE_THROWS_AS(tied.parameters().find("lm_head.weight"), Error);
}

TEST_CASE("the loss of an untrained model is that of a uniform guess") {
  const OnDevice cpu;
  const ModelConfig config = tiny_model();
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    Model model = allocated_model(config, kSeqLen, dtype, Probabilities::never_whole, 1);
    Random random(4);
    const Tensor loss = Tensor::zeros({1}, DType::f64);
    model.evaluate(random_pass(random, config, 3, kSeqLen, 1 / double(3 * kSeqLen), loss));
    check_close(Values{loss.item()}, Values{std::log(11.0)}, 0.02);
  }
}

TEST_CASE("a sample's loss does not depend on what is trained on beside it") {
  const OnDevice cpu;
  const ModelConfig config = tiny_model();
  Model model = allocated_model(config, kSeqLen, DType::f64, Probabilities::never_whole, 1);
  randomize(model.parameters(), 5);
  Random random(6);
  const Tensor together = Tensor::zeros({1}, DType::f64), apart = Tensor::zeros({1}, DType::f64);
  const Pass batch = random_pass(random, config, 3, kSeqLen, 1, together);
  model.evaluate(batch);
  for (int64_t i = 0; i < 3; ++i) {
    Pass sample = batch;
    sample.num_samples = 1;
    sample.tokens = batch.tokens.narrow(0, i * kSeqLen, kSeqLen);
    sample.targets = batch.targets.narrow(0, i * kSeqLen, kSeqLen);
    sample.loss = apart;
    model.evaluate(sample);
  }
  check_close(Values{apart.item()}, Values{together.item()}, 1e-13);
}

}  // namespace
}  // namespace usp::test

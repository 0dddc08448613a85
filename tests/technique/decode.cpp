#include <algorithm>

#include "run/sample.h"
#include "technique/tiny_llama.h"

/// Decoding: logits of a text that grows, from a cache of its keys and values.
namespace usp::test {
namespace {

constexpr int64_t kSamples = 2, kPositions = 9;

Model tiny_decoder(DType dtype, bool store_probabilities, int64_t num_kv_heads) {
  ModelConfig config = tiny_model();
  config.num_kv_heads = num_kv_heads;
  return allocated_model(config, kPositions, dtype, probabilities_of(store_probabilities), 1);
}

/// Positions [begin, end) of every sample.
Pass pass_over(const std::vector<Values>& samples, int64_t begin, int64_t end) {
  std::vector<int32_t> tokens;
  for (const Values& sample : samples) {
    tokens.insert(tokens.end(), sample.begin() + begin, sample.begin() + end);
  }
  Pass pass;
  pass.num_samples = std::ssize(samples);
  pass.positions = Positions(begin, end - begin);
  pass.tokens = Tensor::from_host(tokens, {std::ssize(tokens)});
  return pass;
}

std::vector<Values> random_samples(uint64_t seed) {
  Random random(seed);
  std::vector<Values> samples;
  for (int64_t i = 0; i < kSamples; ++i) {
    const std::vector<int32_t> tokens = random.tokens(kPositions, tiny_model().vocab_size);
    samples.emplace_back(tokens.begin(), tokens.end());
  }
  return samples;
}

/// Logits after position `end - 1` of every sample, from a pass over all positions before `end`.
Values uncached(Model& model, const std::vector<Values>& samples, int64_t end) {
  const Tensor all = model.logits(pass_over(samples, 0, end));
  const int64_t V = all.size(1);
  Values last;
  for (int64_t i = 0; i < kSamples; ++i) {
    const Values row = all.narrow(0, (i + 1) * end - 1, 1).items();
    REQUIRE(std::ssize(row) == V);
    last.insert(last.end(), row.begin(), row.end());
  }
  return last;
}

Tensor decode(Model& model, KvCache& cache, const std::vector<Values>& samples, int64_t begin,
              int64_t end) {
  Pass pass = pass_over(samples, begin, end);
  pass.mode = Pass::Mode::decode;
  pass.kv_cache = &cache;
  return model.logits(pass);
}

TEST_CASE("logits from cached keys and values are those of a pass over the whole text") {
  const OnDevice cpu;
  struct Case {
    DType dtype;
    double tolerance;
  };
  // Measured: below 3e-15, 1e-6 and 2e-2.
  for (const Case& c : {Case{DType::f64, 1e-12}, {DType::f32, 1e-5}, {DType::bf16, 0.05}}) {
    for (bool store_probabilities : {false, true}) {
      for (int64_t num_kv_heads : {1, 2}) {
        for (int64_t prompt : {1, 4}) {
          CAPTURE(name(c.dtype), store_probabilities, num_kv_heads, prompt);
          Model model = tiny_decoder(c.dtype, store_probabilities, num_kv_heads);
          randomize(model.parameters(), 2);
          const std::vector<Values> samples = random_samples(3);
          KvCache cache(kPositions);
          for (int64_t begin = 0, end = prompt; end <= kPositions; begin = end, ++end) {
            CAPTURE(begin, end);
            const Tensor logits = decode(model, cache, samples, begin, end);
            REQUIRE(logits.shape() == Shape{kSamples, tiny_model().vocab_size});
            check_close(logits, uncached(model, samples, end), c.tolerance);
          }
        }
      }
    }
  }
}

TEST_CASE("a cache that starts again at position 0 knows nothing of the text before") {
  const OnDevice cpu;
  Model model = tiny_decoder(DType::f64, false, 1);
  randomize(model.parameters(), 2);
  const std::vector<Values> old_text = random_samples(3), new_text = random_samples(4);
  KvCache cache(kPositions);
  decode(model, cache, old_text, 0, kPositions);
  check_close(decode(model, cache, new_text, 0, 5), uncached(model, new_text, 5), 1e-12);
  check_close(decode(model, cache, new_text, 5, 6), uncached(model, new_text, 6), 1e-12);
}

TEST_CASE("a sample is the same with the cache and without, also where it outgrows seq_len") {
  const OnDevice cpu;
  for (bool store_probabilities : {false, true}) {
    for (int64_t seq_len : {1, 2, 7, 8, 64}) {
      for (double temperature : {0.0, 1.0}) {
        CAPTURE(store_probabilities, seq_len, temperature);
        Model model = allocated_model(tiny_model(), seq_len, DType::f64,
                                      probabilities_of(store_probabilities), 1);
        randomize(model.parameters(), 2);
        SampleConfig config;
        config.sample_tokens = 30;
        config.temperature = temperature;
        const auto sample = [&](bool no_kv_cache) {
          config.no_kv_cache = no_kv_cache;
          return sample_tokens(logits_of(model), config, seq_len, {3, 1, 4, 1, 5, 9, 2, 6, 5}, 1,
                               [] { return false; });
        };
        const std::vector<int32_t> cached = sample(false);
        REQUIRE(cached.size() == 39);
        REQUIRE(cached == sample(true));
      }
    }
  }
}

TEST_CASE(
    "the cache's memory is 2 layers B capacity G D numbers of activations, and is given back") {
  OnDevice meta(Device::meta);
  for (DType dtype : {DType::bf16, DType::f64}) {
    Model model = tiny_decoder(dtype, false, 1);
    const int64_t before = meta.allocator().live_bytes(Category::activations);
    {
      KvCache cache(100);
      decode(model, cache, random_samples(3), 0, 5);
      const int64_t layers = 2, G = 1, D = 6;
      REQUIRE(meta.allocator().live_bytes(Category::activations) - before ==
              2 * layers * kSamples * 100 * G * D * bytes_of(dtype));
      decode(model, cache, random_samples(3), 5, 6);
      REQUIRE(meta.allocator().live_bytes(Category::activations) - before ==
              2 * layers * kSamples * 100 * G * D * bytes_of(dtype));
    }
    REQUIRE(meta.allocator().live_bytes(Category::activations) == before);
  }
}

}  // namespace
}  // namespace usp::test

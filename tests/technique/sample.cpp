#include "run/sample.h"

#include <algorithm>
#include <set>

#include "base/rng.h"
#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

using Tokens = std::vector<int32_t>;

bool never() { return false; }

/// A model with opinions, and the logits it gives after a prompt.
struct Sampler {
  explicit Sampler(int64_t seq_len = 8)
      : seq_len(seq_len),
        model(allocated_model(tiny_model(), seq_len, DType::f64, Probabilities::never_whole, 1)) {
    randomize(model.parameters(), 2);
    config.sample_tokens = 20;
    config.temperature = 1;
    config.top_k = 0;
  }

  Tokens sample(uint64_t seed, const Tokens& prompt = {3}) {
    return sample_tokens(logits_of(model), config, seq_len, prompt, seed, never);
  }
  Values logits_after(const Tokens& tokens) {
    Pass pass;
    pass.num_samples = 1;
    pass.positions = Positions(0, std::ssize(tokens));
    pass.tokens = Tensor::from_host(tokens, {std::ssize(tokens)});
    return model.logits(pass).narrow(0, std::ssize(tokens) - 1, 1).items();
  }

  const int64_t seq_len;
  Model model;
  SampleConfig config;
};

TEST_CASE("temperature 0 and top_k 1 always take the likeliest token") {
  const OnDevice cpu;
  for (const int64_t seq_len : {8, 7}) {
    Sampler sampler(seq_len);
    Tokens expected = {3};
    int64_t first = 0;  // of the tokens that the model still sees
    for (int i = 0; i < 20; ++i) {
      if (std::ssize(expected) - first > seq_len) {
        first = std::ssize(expected) - (seq_len + 1) / 2;  // the later half, rounded up
      }
      const Values logits = sampler.logits_after(Tokens(expected.begin() + first, expected.end()));
      const auto best = std::max_element(logits.begin(), logits.end());
      expected.push_back(static_cast<int32_t>(best - logits.begin()));
    }
    sampler.config.temperature = 0;
    REQUIRE(sampler.sample(1) == expected);
    REQUIRE(sampler.sample(2) == expected);
    sampler.config.temperature = 50;
    sampler.config.top_k = 1;
    REQUIRE(sampler.sample(3) == expected);
  }
}

TEST_CASE("a sample is a function of the seed") {
  const OnDevice cpu;
  Sampler sampler;
  REQUIRE(sampler.sample(1) == sampler.sample(1));
  REQUIRE(sampler.sample(1) != sampler.sample(2));
}

/// How often each token followed the prompt, over many seeds.
Values frequencies(Sampler& sampler, int draws) {
  sampler.config.sample_tokens = 1;
  Values counts(tiny_model().vocab_size);
  for (int seed = 0; seed < draws; ++seed) counts[sampler.sample(seed)[1]] += 1.0 / draws;
  return counts;
}

TEST_CASE("tokens are drawn from softmax(logits / temperature), from its top_k alone if asked",
          "[not_sanitized]") {
  const OnDevice cpu;
  constexpr int kDraws = 1500;
  for (double temperature : {0.7, 3.0}) {
    for (int64_t top_k : {0, 3, 100}) {
      CAPTURE(temperature, top_k);
      Sampler sampler;
      sampler.config.temperature = temperature;
      sampler.config.top_k = top_k;
      Values weights = sampler.logits_after({3});
      Values sorted = weights;
      std::sort(sorted.rbegin(), sorted.rend());
      const double least = top_k == 3 ? sorted[2] : -kInf;
      double total = 0;
      for (double& w : weights)
        total += w = w < least ? 0 : std::exp((w - sorted[0]) / temperature);
      const Values drawn = frequencies(sampler, kDraws);
      for (size_t token = 0; token < weights.size(); ++token) {
        const double p = weights[token] / total;
        CAPTURE(token, p, drawn[token]);
        REQUIRE(std::abs(drawn[token] - p) <= 5 * std::sqrt(p * (1 - p) / kDraws));
      }
    }
  }
}

TEST_CASE("every token is drawn with a random number of its own") {
  // Of a model to which all tokens are equally likely, the i-th token tells the i-th number.
  const OnDevice cpu;
  constexpr int64_t kVocab = 64, kTokens = 400;
  const Logits even = [&](const Pass&) { return Tensor::zeros({1, kVocab}, DType::f64); };
  SampleConfig config;
  config.sample_tokens = kTokens;
  config.temperature = 1;
  config.top_k = 0;
  const RandomStream stream(7, "sample");
  Tokens expected = {0};
  for (int64_t i = 0; i < kTokens; ++i) {
    expected.push_back(static_cast<int32_t>(stream.uniform(i) * kVocab));
  }
  const Tokens drawn = sample_tokens(even, config, /*seq_len=*/16, {0}, 7, never);
  REQUIRE(drawn == expected);
  REQUIRE(std::set<int32_t>(drawn.begin(), drawn.end()).size() > kVocab / 2);
}

TEST_CASE("the model sees the last seq_len tokens of a prompt and no more") {
  const OnDevice cpu;
  Sampler sampler;
  const Tokens visible = {1, 2, 3, 4, 5, 6, 7, 8};
  Tokens longer = {9, 9, 9};
  longer.insert(longer.end(), visible.begin(), visible.end());
  Tokens expected = sampler.sample(4, visible);
  expected.insert(expected.begin(), {9, 9, 9});
  REQUIRE(sampler.sample(4, longer) == expected);
}

TEST_CASE("sampling stops when it is asked to") {
  const OnDevice cpu;
  Sampler sampler;
  const auto at_once = [] { return true; };
  REQUIRE(sample_tokens(logits_of(sampler.model), sampler.config, 8, {3, 4}, 1, at_once) ==
          Tokens{3, 4});
}

TEST_CASE("sampled bytes become text that a terminal can be shown") {
  const auto text = [](const std::string& bytes) {
    Tokens tokens;
    for (char byte : bytes) tokens.push_back(static_cast<uint8_t>(byte));
    return tokens_to_text(tokens, /*as_bytes=*/true);
  };
  // Whole characters of one to four bytes, the first and last of each length among them.
  for (const char* valid : {"plain\n", "a\ttab", " ~", "é", "\u00A0\u07FF", "\u0800\uFFFF",
                            "\uD7FF\uE000", "\U00010000\U0010FFFF", "日本語 🙂"}) {
    REQUIRE(text(valid) == valid);
  }
  // No other control character, of either kind, gets through.
  for (int byte = 0; byte < 0xA0; ++byte) {
    if (byte == '\n' || byte == '\t' || (byte >= 0x20 && byte < 0x7F)) continue;
    const std::string raw =
        byte < 0x80 ? std::string(1, char(byte)) : "\xC2" + std::string(1, char(byte));
    const std::string shown = fmt::format("{}\\x{:02X}", byte < 0x80 ? "" : "\\xC2", byte);
    REQUIRE(text("a" + raw + "z") == "a" + shown + "z");
  }
  REQUIRE(text("\x1B[2J") == R"(\x1B[2J)");
  REQUIRE(text("a\x80z") == R"(a\x80z)");      // no lead byte
  REQUIRE(text("\xC3") == R"(\xC3)");          // cut off at the end
  REQUIRE(text("\xE2\x82") == R"(\xE2\x82)");  // the same, of three
  REQUIRE(text("\xC3(") == R"(\xC3()");        // no continuation
  REQUIRE(text("\xE2\x82\x28") == R"(\xE2\x82()");
  REQUIRE(text("\xC0\xAF") == R"(\xC0\xAF)");                  // '/' in two bytes
  REQUIRE(text("\xE0\x80\xAF") == R"(\xE0\x80\xAF)");          // '/' in three
  REQUIRE(text("\xF0\x8F\xBF\xBF") == R"(\xF0\x8F\xBF\xBF)");  // U+FFFF in four
  REQUIRE(text("\xED\xA0\x80") == R"(\xED\xA0\x80)");          // a surrogate
  REQUIRE(text("\xF4\x90\x80\x80") == R"(\xF4\x90\x80\x80)");  // beyond U+10FFFF
  REQUIRE(text("\xF5\x80\xFF\xFE") == R"(\xF5\x80\xFF\xFE)");
  REQUIRE(tokens_to_text({'a', 256, 70000, 'b'}, true) == "a\uFFFD\uFFFDb");
  REQUIRE(tokens_to_text({0xC3, 256, 0xA9}, true) == "\\xC3\uFFFD\\xA9");  // not one character
  REQUIRE(tokens_to_text({}, true).empty());
  REQUIRE(tokens_to_text({5, 70000, 0}, /*as_bytes=*/false) == "5 70000 0");
}

}  // namespace
}  // namespace usp::test

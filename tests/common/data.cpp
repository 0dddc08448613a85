#include "files/data.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "testing.h"

namespace usp::test {
namespace {

/// The tokens as a little-endian .bin file.
std::string binary(const std::vector<uint32_t>& tokens, int token_bytes) {
  std::string bytes;
  for (uint32_t token : tokens) {
    for (int i = 0; i < token_bytes; ++i) bytes += static_cast<char>(token >> (8 * i));
  }
  return bytes;
}

/// A text of n bytes in which token i is i mod 251: a sample's first token says where it starts.
std::string counting_text(int n) {
  const std::string header =
      fmt::format("{{'descr': '|u1', 'fortran_order': False, 'shape': ({},), }}\n", n);
  std::string text =
      std::string("\x93NUMPY\1\0", 8) + static_cast<char>(header.size()) + '\0' + header;
  for (int i = 0; i < n; ++i) text += static_cast<char>(i % 251);
  return text;
}

struct Sample {
  std::vector<int32_t> inputs, targets;
};

Sample train_sample(const Dataset& dataset, int64_t seq_len, int64_t index) {
  Sample sample{std::vector<int32_t>(seq_len), std::vector<int32_t>(seq_len)};
  dataset.train_sample(index, sample.inputs, sample.targets);
  return sample;
}

TEST_CASE("a text file is a sequence of bytes") {
  const TempDir dir;
  const TokenFile file(dir.write("text", "ab\xC3\xA9"), 2, 256);
  REQUIRE(file.is_text());
  REQUIRE(file.size() == 4);
  REQUIRE(file[0] == 'a');
  REQUIRE(file[3] == 0xA9);
  REQUIRE(file.path() == dir.file("text"));
}

TEST_CASE("a .bin file is a sequence of little-endian 16-bit or 32-bit tokens") {
  const TempDir dir;
  const std::vector<uint32_t> tokens = {0, 1, 258, 65535, 40000};
  const TokenFile narrow(dir.write("16.bin", binary(tokens, 2)), 2, 65536);
  const TokenFile wide(dir.write("32.bin", binary({70000, 3, 2147483646}, 4)), 4, 2147483647);
  REQUIRE(!narrow.is_text());
  REQUIRE(narrow.size() == 5);
  for (int i = 0; i < 5; ++i) REQUIRE(narrow[i] == static_cast<int32_t>(tokens[i]));
  REQUIRE(wide.size() == 3);
  REQUIRE(wide[0] == 70000);
  REQUIRE(wide[2] == 2147483646);
}

TEST_CASE("the digest of a file is its SHA-256") {
  const TempDir dir;
  REQUIRE(TokenFile(dir.write("abc", "abc"), 2, 256).sha256() ==
          "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST_CASE("a file that cannot be used is refused with its name and the reason") {
  const TempDir dir;
  const auto open = [&](const std::string& path, int token_bytes = 2, int64_t vocab_size = 256) {
    return [=] { TokenFile(path, token_bytes, vocab_size); };
  };
  const std::string missing = dir.file("missing.txt");
  check_throws<UsageError>(open(missing), {missing, "No such file"});
  check_throws<UsageError>(open(dir.write("empty.txt", "")), {"empty.txt", "is empty"});
  check_throws<UsageError>(open(dir.write("empty.bin", "")), {"empty.bin", "is empty"});
  check_throws<UsageError>(open(dir.write("half.bin", "x")), {"half.bin"});
  check_throws<UsageError>(open(dir.write("odd.bin", "123")), {"odd.bin", "3 bytes", "2-byte"});
  check_throws<UsageError>(open(dir.file("")), {"regular file"});
}

TEST_CASE("a token that the vocabulary lacks is refused with its value and position") {
  const TempDir dir;
  const std::string narrow = dir.write("16.bin", binary({3, 9, 12, 10}, 2));
  check_throws<UsageError>([&] { TokenFile(narrow, 2, 12); },
                           {narrow, "token 12", "position 2", "vocab_size=12"});
  REQUIRE(TokenFile(narrow, 2, 13).size() == 4);
  const std::string wide = dir.write("32.bin", binary({1, 4294967295}, 4));
  check_throws<UsageError>([&] { TokenFile(wide, 4, 2147483647); },
                           {"token 4294967295", "position 1"});
  const std::string text = dir.write("text", "abcz");
  check_throws<UsageError>([&] { TokenFile(text, 2, 'z'); },
                           {"token 122", "position 3", "try --vocab_size 256"});
  REQUIRE(TokenFile(text, 2, 'z' + 1).size() == 4);
}

TEST_CASE("sequential samples follow one another and wrap at the end of the training split") {
  const TempDir dir;
  const TokenFile file(dir.write("text", counting_text(100)), 2, 256);
  const int64_t seq_len = 7;
  const Dataset dataset(file, seq_len, /*val_fraction=*/0.2, DataOrder::sequential, 1);
  REQUIRE(dataset.train_tokens() == 80);
  for (int64_t i : {0, 1, 5, 11, 12, 79, 80, 1234567}) {
    const Sample sample = train_sample(dataset, seq_len, i);
    for (int64_t j = 0; j < seq_len; ++j) {
      REQUIRE(sample.inputs[j] == (i * seq_len + j) % 80);
      REQUIRE(sample.targets[j] == (i * seq_len + j + 1) % 80);
    }
  }
}

TEST_CASE("a shuffled epoch reads every window once, at an offset of its own") {
  const TempDir dir;
  const TokenFile file(dir.write("text", counting_text(250)), 2, 256);
  const int64_t seq_len = 6, windows = 250 / 6;
  const Dataset dataset(file, seq_len, 0, DataOrder::shuffled, 3);
  std::set<int64_t> offsets;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    std::set<int64_t> starts;
    for (int64_t i = 0; i < windows; ++i) {
      const Sample sample = train_sample(dataset, seq_len, epoch * windows + i);
      const int64_t start = sample.inputs[0];
      starts.insert(start);
      for (int64_t j = 0; j < seq_len; ++j) {
        REQUIRE(sample.inputs[j] == (start + j) % 250);
        REQUIRE(sample.targets[j] == (start + j + 1) % 250);
      }
    }
    REQUIRE(std::ssize(starts) == windows);
    // All windows are whole steps of seq_len from one offset, which some start shows.
    const auto steps_from = [&](int64_t offset) {
      return std::all_of(starts.begin(), starts.end(), [&](int64_t start) {
        const int64_t distance = (start - offset + 250) % 250;
        return distance % seq_len == 0 && distance / seq_len < windows;
      });
    };
    const auto offset = std::find_if(starts.begin(), starts.end(), steps_from);
    REQUIRE(offset != starts.end());
    offsets.insert(*offset);
  }
  REQUIRE(offsets.size() > 1);
}

TEST_CASE("the order of the samples is a function of the seed") {
  const TempDir dir;
  const TokenFile file(dir.write("text", counting_text(250)), 2, 256);
  const auto starts = [&](uint64_t seed) {
    const Dataset dataset(file, 5, 0, DataOrder::shuffled, seed);
    std::vector<int32_t> starts;
    for (int64_t i = 0; i < 30; ++i) starts.push_back(train_sample(dataset, 5, i).inputs[0]);
    return starts;
  };
  REQUIRE(starts(1) == starts(1));
  REQUIRE(starts(1) != starts(2));
}

TEST_CASE("the tail of the file is held out for validation") {
  const TempDir dir;
  const TokenFile file(dir.write("text", counting_text(109)), 2, 256);
  const Dataset dataset(file, 5, 0.2, DataOrder::shuffled, 1);
  REQUIRE(dataset.train_tokens() == 88);  // 109 - floor(21.8)
  REQUIRE(dataset.val_tokens() == 21);
  REQUIRE(dataset.val_samples() == 4);  // 4 * 5 + 1 tokens
  std::vector<int32_t> inputs(5), targets(5);
  for (int64_t i = 0; i < 4; ++i) {
    dataset.val_sample(i, inputs, targets);
    for (int j = 0; j < 5; ++j) {
      REQUIRE(inputs[j] == 88 + 5 * i + j);
      REQUIRE(targets[j] == 88 + 5 * i + j + 1);
    }
  }
  for (int64_t i = 0; i < 200; ++i) {
    const Sample sample = train_sample(dataset, 5, i);
    REQUIRE(*std::max_element(sample.inputs.begin(), sample.inputs.end()) < 88);
    REQUIRE(*std::max_element(sample.targets.begin(), sample.targets.end()) < 88);
  }
  REQUIRE(Dataset(file, 21, 0.2, DataOrder::shuffled, 1).val_samples() == 0);  // no target left
  REQUIRE(Dataset(file, 5, 0, DataOrder::shuffled, 1).val_samples() == 0);
}

TEST_CASE("a training split shorter than a sample is refused with a length that works") {
  const TempDir dir;
  const TokenFile file(dir.write("text", counting_text(20)), 2, 256);
  const auto make = [&](int64_t seq_len, double val_fraction) {
    return [&file, seq_len, val_fraction] {
      Dataset(file, seq_len, val_fraction, DataOrder::sequential, 1);
    };
  };
  make(19, 0)();
  check_throws<UsageError>(make(20, 0), {"20 training tokens", "seq_len+1=21", "--seq_len 19"});
  check_throws<UsageError>(make(15, 0.5), {"10 training tokens", "--seq_len 9"});
  for (double val_fraction : {-0.1, 1.0, 1.5, kNaN}) {
    check_throws<UsageError>(make(5, val_fraction), {"val_fraction", "0.1"});
  }
}

TEST_CASE("a training split of one token is refused with what works, if anything does") {
  const TempDir dir;
  const auto make = [&](const std::string& text, int64_t seq_len, double val_fraction) {
    const TokenFile file(dir.write("text", text), 2, 256);
    Dataset(file, seq_len, val_fraction, DataOrder::sequential, 1);
  };
  check_throws<UsageError>([&] { make("a", 1, 0); }, {"of 1 tokens 1 are", "to predict"});
  check_throws<UsageError>([&] { make("ab", 7, 0.5); },
                           {"of 2 tokens 1 are", "try --val_fraction 0 --seq_len 1"});
  make("ab", 1, 0);  // it works
  check_throws<UsageError>([&] { make("ab", 1, 0.5); }, {"try --val_fraction 0"});
}

TEST_CASE("a split that samples divide without a rest loses none, and none reads beyond it") {
  const TempDir dir;
  const TokenFile file(dir.write("text", counting_text(40)), 2, 256);
  const Dataset dataset(file, 8, /*val_fraction=*/0.2, DataOrder::shuffled, 5);
  std::multiset<int32_t> read;  // the inputs of an epoch: each of 32 tokens once
  for (int64_t i = 0; i < 4; ++i) {
    for (int32_t token : train_sample(dataset, 8, i).inputs) read.insert(token);
  }
  REQUIRE(read.size() == 32);
  for (int32_t token = 0; token < 32; ++token) REQUIRE(read.count(token) == 1);
  REQUIRE(dataset.val_tokens() == 8);
  REQUIRE(dataset.val_samples() == 0);  // the eighth has no token behind it to predict
  REQUIRE(Dataset(file, 7, 0.2, DataOrder::shuffled, 5).val_samples() == 1);
  REQUIRE(Dataset(file, 4, 0.2, DataOrder::shuffled, 5).val_samples() == 1);
}

TEST_CASE("the unigram entropy is that of the training split's token frequencies") {
  const TempDir dir;
  // Training split: 4 a, 2 b, 2 c; the validation split would change it.
  const TokenFile file(dir.write("text", "aabcaabczzzzzzzz"), 2, 256);
  const Dataset dataset(file, 3, 0.5, DataOrder::sequential, 1);
  check_close(Values{dataset.unigram_entropy(256)}, Values{1.5 * std::log(2.0)}, 1e-15);
}

}  // namespace
}  // namespace usp::test

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "base/rng.h"

namespace usp {

/// A file of tokens, mapped into memory: a text file's bytes, or the little-endian uint16 or uint32
/// of a pre-tokenised `.bin`.
class TokenFile {
 public:
  /// Throws UsageError if the file is missing, unreadable, empty, or holds a token >= vocab_size
  /// (naming the token and where it stands). `token_bytes` (2 or 4) applies to `.bin` files.
  TokenFile(const std::string& path, int token_bytes, int64_t vocab_size);

  int64_t size() const { return size_; }  ///< tokens
  int32_t operator[](int64_t index) const;
  bool is_text() const { return token_bytes_ == 1; }
  const std::string& path() const { return path_; }
  std::string sha256() const;  ///< of the file's bytes, in hexadecimal

 private:
  void check_tokens(int64_t vocab_size) const;

  std::string path_;
  int token_bytes_ = 1;
  int64_t size_ = 0;
  MappedFile file_;
};

/// The token ids in a flag's value, separated by blanks or commas: "1 15043" or "1,15043". Throws
/// UsageError unless there is at least one and each lies in [0, vocab_size).
std::vector<int32_t> parse_token_ids(const char* flag, const std::string& text, int64_t vocab_size);

/// Which samples follow each other: --data_order.
enum class DataOrder { sequential, shuffled };
/// Which part of the text samples come from.
enum class Split { train, validation };

/// Training and validation samples of a token file. Sample i is a function of (seed, i) alone,
/// whatever the number of ranks, micro-batches or accumulation steps; docs/reproducibility.md has
/// the rules.
class Dataset {
 public:
  /// The last floor(val_fraction * size) tokens are the validation split. Throws UsageError if the
  /// training split is shorter than seq_len + 1 tokens, or val_fraction is not in [0, 1).
  Dataset(const TokenFile& file, int64_t seq_len, double val_fraction, DataOrder order,
          uint64_t seed);

  /// Writes seq_len inputs and as many targets: the target of an input is the token after it.
  void train_sample(int64_t sample, std::span<int32_t> inputs, std::span<int32_t> targets) const;
  /// The same of the validation split; sample < val_samples().
  void val_sample(int64_t sample, std::span<int32_t> inputs, std::span<int32_t> targets) const;

  /// Both for as many consecutive samples as there is room for.
  void read(Split split, int64_t first_sample, std::span<int32_t> inputs,
            std::span<int32_t> targets) const;

  int64_t train_tokens() const { return train_tokens_; }
  int64_t val_tokens() const { return file_.size() - train_tokens_; }
  int64_t val_samples() const;  ///< that fit without overlap
  /// The entropy of the training split's token frequencies, in nats per token: the loss of the best
  /// model that ignores context.
  double unigram_entropy(int64_t vocab_size) const;

 private:
  int64_t train_start(int64_t sample) const;

  const TokenFile& file_;
  int64_t seq_len_;
  int64_t train_tokens_;
  DataOrder order_;
  Permutation order_of_windows_;
  RandomStream offsets_;
};

}  // namespace usp

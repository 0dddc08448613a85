#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/rules.h"
#include "files/token_format.h"

namespace usp {

/// A file of tokens, mapped into memory: the bytes of a text, or ids in one of the formats of
/// read_token_format().
class TokenFile {
 public:
  /// Throws UsageError if the file is missing, unreadable, empty, of another kind, or holds a token
  /// >= vocab_size (naming the token and where it stands; Refusal). `token_bytes` (2 or 4) is the
  /// width of tokens in a file that does not say it; `given`: the command line does.
  TokenFile(const std::string& path, int token_bytes, int64_t vocab_size, bool given = false);
  /// The same of a file whose format has been read.
  TokenFile(const std::string& path, TokenFormat format, int64_t vocab_size);

  int64_t size() const { return size_; }  ///< tokens
  int32_t operator[](int64_t index) const;
  bool is_text() const { return format_.is_text; }
  bool has_documents() const { return !format_.document_starts.empty(); }
  /// Whether a document begins with this token, by the file's own word: it has documents.
  bool begins_document(int64_t index) const;
  const std::string& path() const { return path_; }
  /// What a reader may not expect of how the file is read; empty if there is nothing.
  const std::string& note() const { return format_.note; }
  /// SHA-256 of the file's bytes, in hexadecimal; with an index of documents, of its digest and the
  /// index's.
  std::string sha256() const;

 private:
  void check_tokens(int64_t vocab_size) const;
  Remedies other_vocabularies() const;
  void check_width() const;
  bool halves_are_alike() const;
  bool upper_halves_vary_more() const;

  std::string path_;
  TokenFormat format_;
  int64_t size_ = 0;
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
  /// The last floor(val_fraction * size) tokens are the validation split. Throws UsageError if
  /// val_fraction is not in [0, 1), and Refusal if the training split is shorter than seq_len + 1
  /// tokens.
  Dataset(const TokenFile& file, int64_t seq_len, double val_fraction, DataOrder order,
          uint64_t seed);

  /// Writes seq_len inputs and as many targets: the target of an input is the token after it.
  void train_sample(int64_t sample, std::span<int32_t> inputs, std::span<int32_t> targets) const;
  /// The same of the validation split; sample < val_samples().
  void val_sample(int64_t sample, std::span<int32_t> inputs, std::span<int32_t> targets) const;

  /// Both for as many consecutive samples as there is room for.
  void read(Split split, int64_t first_sample, std::span<int32_t> inputs,
            std::span<int32_t> targets) const;

  /// Position at which each token's document begins, for so many consecutive samples, where the
  /// file says so; otherwise nothing.
  std::vector<int32_t> document_begins(Split split, int64_t first_sample,
                                       int64_t num_samples) const;

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

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mapped_file.h"

namespace usp {

/// Where in a file its tokens are, and what they are made of.
struct TokenFormat {
  std::unique_ptr<MappedFile> file;      ///< of the tokens
  std::unique_ptr<MappedFile> index;     ///< Megatron's, beside it; or none
  std::unique_ptr<std::string> decoded;  ///< the tokens, where they do not stand in the file itself
  std::span<const std::byte> tokens;
  int width = 1;                ///< bytes of a token
  bool is_signed = false;       ///< a negative number is no token
  bool is_text = false;         ///< tokens are the bytes of a text
  bool is_raw = false;          ///< nothing in the file says what its tokens are
  bool width_is_given = false;  ///< of raw tokens: --token_dtype says it
  std::string note;             ///< what a reader may not expect of how it is read; or empty
  /// The tokens with which documents begin, ascending from 0; empty where the file does not say.
  std::vector<int64_t> document_starts;
};

/// What the file holds; its content decides, and its name only hints:
/// - tokens with a header of llm.c's or modded-nanogpt's, or in an array of NumPy's;
/// - Megatron's tokens, whose index lies beside them (`NAME.bin` and `NAME.idx`, either may be
///   given) and names their documents;
/// - lines of JSON with a "text" each, of which the texts are taken, each ended by a byte of 0;
/// - other tokens, little-endian and of `token_bytes` (2 or 4), where the name ends in `.bin` or,
///   with `given`, --token_dtype says that they are tokens;
/// - text.
/// Throws UsageError for anything else, with the command that makes text or tokens of it, and where
/// a --token_dtype that was given is not the file's.
TokenFormat read_token_format(const std::string& path, int token_bytes, bool given);

}  // namespace usp

#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace usp {

/// What a file is that was not asked for.
struct FileKind {
  std::string what;    ///< with its article: "a zip archive"
  std::string remedy;  ///< a clause: how to get what was asked for, with a command
  bool is_safetensors = false;
};

/// What a file is by its first bytes, where these say so: a pointer or page in the place of a
/// download, packed or columnar data, a pickle, weights, a document, a picture, UTF-16. Nothing for
/// text and for what begins like nothing in particular. `path` is for the commands; whoever calls
/// decides whether the file was asked for.
std::optional<FileKind> recognize(std::span<const std::byte> bytes, const std::string& path);

/// What is wrong with a file that should be `wanted`, such as "safetensors", if it is of another
/// kind, or text although `wanted` is none; otherwise an empty text.
std::string other_kind_than(std::string_view wanted, std::span<const std::byte> bytes,
                            const std::string& path);

/// What a directory has in the place of model.safetensors and config.json, as the end of a message:
/// weights in another format, an adapter, safetensors of another name. Empty if nothing of these.
std::string found_instead(const std::string& directory);

/// The bytes as characters.
std::string_view text_of(std::span<const std::byte> bytes);

/// Whether the bytes are text in UTF-8 (so, too, in ASCII), as far as the beginning shows.
bool is_utf8_text(std::span<const std::byte> bytes);

/// The first byte that is none of UTF-8, as far as the beginning shows; nothing if all are.
std::optional<size_t> first_not_utf8(std::span<const std::byte> bytes);

/// Why bytes can be no text in any encoding whose letters are bytes, as a clause with the remedy:
/// they have more zeros and control characters than text has, at their beginning or in one of some
/// places farther on, or are UTF-16 without a byte order mark. Empty where they may be text.
std::string why_no_text(std::span<const std::byte> bytes, const std::string& path);

/// Where the text is a table of values that commas or tabs separate, the command that writes its
/// longest column as lines of JSON; otherwise empty.
std::string command_of_column(std::string_view text, const std::string& path);

}  // namespace usp

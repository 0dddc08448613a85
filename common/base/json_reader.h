#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace usp {

/// The byte of a file at which each name of the outermost object ends.
using KeyPositions = std::map<std::string, int64_t, std::less<>>;

/// Parses a JSON document from a file that nobody vouches for. Refuses more than the parser itself
/// does: an object that holds a name twice, of which the parser would silently keep the last;
/// nesting deeper than 32; more than 4 million values, each of which takes some hundred bytes of
/// memory. Throws Error, which names `file` and the byte; `first_byte` is where in the file the
/// text begins.
nlohmann::json parse_json(std::string_view text, const std::string& file, int64_t first_byte = 0,
                          KeyPositions* positions = nullptr);

/// A name from a file as a message shows it: in quotes, on one line, in ASCII, shortened if it is
/// long.
std::string in_quotes(std::string_view name);

}  // namespace usp

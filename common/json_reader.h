#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace usp {

/// The byte of a file at which each name of the outermost object ends.
using KeyPositions = std::map<std::string, int64_t, std::less<>>;

/// Parses a JSON document from a file that nobody vouches for. Beyond what the parser itself
/// demands, a name may stand in an object once (the parser alone would keep the last silently),
/// objects and arrays nest 32 deep at most, and there are 4 million values at most, so that memory
/// stays within some hundred bytes for each. Throws Error naming `file` and the byte; `first_byte`
/// is where in the file the text begins.
nlohmann::json parse_json(std::string_view text, const std::string& file, int64_t first_byte = 0,
                          KeyPositions* positions = nullptr);

/// A name out of a file, for a message: in quotes, one line, ASCII, shortened if it is long.
std::string in_quotes(std::string_view name);

}  // namespace usp

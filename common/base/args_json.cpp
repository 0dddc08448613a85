#include <nlohmann/json.hpp>

#include "base/args.h"

/// The members of Args that read and write JSON. They have a file of their own, because the library
/// for JSON and the one for command lines take seconds to compile, each in one file.
namespace usp {

namespace {

/// A path or a prompt need not be valid UTF-8; whatever is not becomes U+FFFD.
std::string to_text(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

template <class Field>
Args::Flag& Args::add(const char* flag, Field& field, bool once) {
  Flag& added = flags_.emplace_back();
  added.name_ = flag;
  added.group_ = group_;
  added.once_ = once;
  added.to_json_ = [&field] { return to_text(field); };
  added.from_json_ = [&field](const std::string& json) {
    field = nlohmann::json::parse(json).get<Field>();
  };
  return added;
}
template Args::Flag& Args::add(const char*, int64_t&, bool);
template Args::Flag& Args::add(const char*, double&, bool);
template Args::Flag& Args::add(const char*, std::string&, bool);
template Args::Flag& Args::add(const char*, bool&, bool);
template Args::Flag& Args::add(const char*, std::vector<std::string>&, bool);

void Args::take(const std::string& flag, const std::string& json, bool always) {
  Flag* const found = find(flag);
  if (found == nullptr || typed(flag)) return;
  const std::string before = found->to_json_();
  try {
    found->from_json_(json);
  } catch (const nlohmann::json::exception&) {
    return;
  }
  found->taken_ = always || found->to_json_() != before;
}

std::string Args::to_json() const {
  nlohmann::ordered_json json;
  for (const Flag& flag : flags_) json[flag.name_] = nlohmann::json::parse(flag.to_json_());
  return json.dump();
}

}  // namespace usp

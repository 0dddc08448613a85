#include "base/json_reader.h"

#include <iterator>
#include <set>
#include <vector>

#include "base/check.h"
#include "base/mapped_file.h"

namespace usp {

namespace {

using Json = nlohmann::json;

constexpr size_t kMaxDepth = 32;
constexpr int64_t kMaxValues = 4'000'000;

/// Counts the characters that the parser has taken; all copies count together.
struct CountingIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  int64_t* count;

  reference operator*() const { return *at; }
  CountingIterator& operator++() {
    ++at;
    ++*count;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at == other.at; }
  bool operator!=(const CountingIterator& other) const { return at != other.at; }
};

/// Builds the document out of the parser's events.
class Builder {
 public:
  Builder(std::string file, int64_t first_byte, KeyPositions* positions)
      : file_(std::move(file)), first_byte_(first_byte), positions_(positions) {}

  int64_t* count() { return &count_; }
  Json take() { return std::move(root_); }

  bool null() { return value(nullptr); }
  bool boolean(bool v) { return value(v); }
  bool number_integer(Json::number_integer_t v) { return value(v); }
  bool number_unsigned(Json::number_unsigned_t v) { return value(v); }
  bool number_float(Json::number_float_t v, const Json::string_t&) { return value(v); }
  bool string(Json::string_t& v) { return value(std::move(v)); }
  bool binary(Json::binary_t& v) { return value(std::move(v)); }
  bool start_object(size_t) { return open(Json::object()); }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(Json::string_t& name) {
    Json& object = *open_.back();
    if (object.contains(name)) {
      fail("{}: byte {}: the name {} stands twice in one object", file_, byte(), in_quotes(name));
    }
    if (open_.size() == 1 && positions_ != nullptr) positions_->emplace(name, byte());
    member_ = &object[name];
    return true;
  }

  bool parse_error(size_t position, const std::string&, const Json::exception& error) {
    std::string reason = error.what();
    if (const size_t begin = reason.find("syntax error"); begin != std::string::npos) {
      reason = reason.substr(begin);
    }
    reason.resize(std::min<size_t>(reason.size(), 200));
    for (char& c : reason) c = c < ' ' || c > '~' ? '?' : c;
    // The parser counts from 1, what it was reading included.
    fail("{}: byte {}: no JSON: {}", file_, first_byte_ + int64_t(position) - 1, reason);
  }

 private:
  int64_t byte() const { return first_byte_ + count_; }

  Json* add(Json&& json) {
    if (++values_ > kMaxValues) {
      fail("{}: byte {}: more than {} JSON values", file_, byte(), kMaxValues);
    }
    if (open_.empty()) {
      root_ = std::move(json);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(json));
      return &open_.back()->back();
    }
    *member_ = std::move(json);
    return member_;
  }
  bool value(Json json) {
    add(std::move(json));
    return true;
  }
  bool open(Json json) {
    if (open_.size() == kMaxDepth) {
      fail("{}: byte {}: JSON nested more than {} deep", file_, byte(), kMaxDepth);
    }
    open_.push_back(add(std::move(json)));  // stays where it is until it is closed
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string file_;
  int64_t first_byte_, count_ = 0, values_ = 0;
  KeyPositions* positions_;
  Json root_;
  std::vector<Json*> open_;
  Json* member_ = nullptr;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& file, int64_t first_byte,
                KeyPositions* positions) {
  Builder builder(file, first_byte, positions);
  const CountingIterator begin{text.data(), builder.count()};
  const CountingIterator end{text.data() + text.size(), builder.count()};
  Json::sax_parse(begin, end, &builder);  // ends by an exception unless all is well
  return builder.take();
}

std::string in_quotes(std::string_view name) {
  constexpr size_t kMaxLength = 200;
  const std::string shown(name.substr(0, kMaxLength));
  return Json(shown).dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) +
         (name.size() > kMaxLength ? "..." : "");
}

}  // namespace usp

#include "base/args.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <utility>

#include "base/machine.h"

namespace usp {

namespace {

std::string option_name(const char* flag) { return fmt::format("--{}", flag); }

/// How many letters have to be added, left out or replaced to make one word of the other.
size_t edits_between(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row[b.size()];
}

/// What a help text says behind this is the default that --help shows, as the field's own value
/// only stands for it.
constexpr std::string_view kDefault = "; default: ";

/// Empty if `text` is a whole number that fits in 64 bits, else what is wrong. The library itself
/// turns a larger number into the largest one.
std::string check_integer(const std::string& text) {
  int64_t value = 0;
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error == std::errc{} && stop == end) return "";
  return fmt::format("{} is no whole number below 2^63; try 1", text);
}

/// The same of any number. One that is too large is infinite, which a range refuses.
std::string check_number(const std::string& text) {
  double value = 0;
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error != std::errc::invalid_argument && stop == end) return "";
  return fmt::format("'{}' is no number; try one such as 0.5 or 1e-3", text);
}

}  // namespace

void Args::Flag::is_question(std::function<bool()> is_asked) {
  may_differ_ = true;
  is_asked_ = std::move(is_asked);
  if (is_asked_) return;
  is_asked_ = [to_json = to_json_, before = to_json_()] { return to_json() != before; };
}

Args::Args(std::string description) : app_(std::make_unique<CLI::App>(std::move(description))) {
  app_->set_version_flag("--version", [] { return build_report(); });
  app_->get_formatter()->column_width(34);
}

Args::~Args() = default;

Args::Flag& Args::bind(const char* flag, int64_t& field, const char* help) {
  const std::string_view text = help;
  const size_t end = std::min(text.find(kDefault), text.size());
  CLI::Option* option = app_->add_option(option_name(flag), field, std::string(text.substr(0, end)))
                            ->capture_default_str()
                            ->group(group_)
                            ->check(CLI::Validator(check_integer, ""));
  if (end < text.size()) option->default_str(std::string(text.substr(end + kDefault.size())));
  return add(flag, field);
}

Args::Flag& Args::bind(const char* flag, double& field, const char* help) {
  app_->add_option(option_name(flag), field, help)
      ->capture_default_str()
      ->group(group_)
      ->check(CLI::Validator(check_number, ""));
  return add(flag, field);
}

Args::Flag& Args::bind(const char* flag, std::string& field, const char* help) {
  app_->add_option(option_name(flag), field, help)->capture_default_str()->group(group_);
  return add(flag, field);
}

Args::Flag& Args::bind(const char* flag, bool& field, const char* help) {
  app_->add_flag(option_name(flag), field, help)->group(group_);
  return add(flag, field, /*once=*/false);
}

Args::Flag& Args::bind(const char* flag, std::vector<std::string>& field, const char* help) {
  app_->add_option(option_name(flag), field, help)
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false)
      ->group(group_);
  return add(flag, field, /*once=*/false);
}

Args::Flag& Args::bind(const char* flag, std::string& field, std::vector<std::string> choices,
                       const char* help) {
  app_->add_option(option_name(flag), field, help)
      ->capture_default_str()
      ->group(group_)
      ->check(CLI::IsMember(std::move(choices)));
  return add(flag, field);
}

bool Args::typed(const std::string& flag) const {
  const CLI::Option* option = app_->get_option_no_throw(option_name(flag.c_str()));
  return option != nullptr && option->count() > 0;
}

bool Args::given(const char* flag) const {
  const bool taken = std::ranges::any_of(
      flags_, [&](const Flag& known) { return known.taken_ && known.name_ == flag; });
  return taken || app_->count(option_name(flag)) > 0;
}

std::vector<std::string> Args::questions() const {
  std::vector<std::string> asked;
  for (const CLI::Option* option : app_->parse_order()) {
    const auto flag = std::ranges::find_if(flags_, [&](const Flag& known) {
      return option_name(known.name_.c_str()) == option->get_name();
    });
    if (flag == flags_.end() || !flag->is_asked_ || !flag->is_asked_()) continue;
    if (std::ranges::find(asked, flag->name_) == asked.end()) asked.push_back(flag->name_);
  }
  return asked;
}

Args::Flag* Args::find(const std::string& flag) {
  const auto found = std::ranges::find(flags_, flag, &Flag::name_);
  return found == flags_.end() ? nullptr : &*found;
}

std::string Args::group_of(const std::string& flag) const {
  const auto found = std::ranges::find(flags_, flag, &Flag::name_);
  return found == flags_.end() ? "" : found->group_;
}

void Args::refuse_repeated(int argc, const char* const* argv) const {
  std::map<std::string, std::string> values;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const size_t equals = word.find('=');
    const auto flag = std::ranges::find_if(flags_, [&](const Flag& known) {
      return known.once_ && option_name(known.name_.c_str()) == word.substr(0, equals);
    });
    if (flag == flags_.end() || (equals == word.npos && i + 1 == argc)) continue;
    const std::string value = equals == word.npos ? argv[++i] : word.substr(equals + 1);
    const auto [before, first] = values.emplace(flag->name_, value);
    if (first) continue;
    usage_error("{} is given twice, as {} and as {}; leave one of them out", flag->name_,
                before->second, value);
  }
}

bool Args::parse(int argc, const char* const* argv) {
  refuse_repeated(argc, argv);
  try {
    app_->parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    app_->exit(success);
    return false;
  } catch (const CLI::ExtrasError&) {
    usage_error("unknown flag {};{} --help lists the flags", fmt::join(app_->remaining(), " "),
                suggestion(app_->remaining().front()));
  } catch (const CLI::ParseError& error) {
    throw UsageError(fmt::format("{}; --help lists the flags", error.what()));
  }
  // As of a shell's variable that is not set: the default would be taken for what was asked for.
  for (const Flag& flag : flags_) {
    const CLI::Option* option = app_->get_option(option_name(flag.name_.c_str()));
    if (!flag.once_ || option->count() == 0 || !option->results().front().empty()) continue;
    usage_error("{} is empty; give it a value, or leave it out", flag.name_);
  }
  return true;
}

std::string Args::suggestion(const std::string& unknown) const {
  const size_t begin = std::min(unknown.find_first_not_of('-'), unknown.size());
  const std::string word = unknown.substr(begin, unknown.find('=') - begin);
  std::string best;
  size_t fewest = word.size() / 3 + 2;  // so many edits make another word
  for (const Flag& flag : flags_) {
    const bool begins = word.size() > 1 && flag.name_.starts_with(word);
    const size_t edits = begins ? 1 : edits_between(word, flag.name_);
    if (edits >= fewest) continue;
    best = flag.name_;
    fewest = edits;
  }
  return best.empty() ? "" : fmt::format(" did you mean --{}?", best);
}

std::set<std::string> Args::may_differ_on_resume() const {
  std::set<std::string> names;
  for (const Flag& flag : flags_) {
    if (flag.may_differ_) names.insert(flag.name_);
  }
  return names;
}

std::vector<std::string> Args::decisive() const {
  std::vector<std::string> names;
  for (const auto& flags : decide_result_) {
    for (std::string& name : flags()) names.push_back(std::move(name));
  }
  return names;
}

void check_range(const char* flag, double value, double minimum, double maximum) {
  if (value >= minimum && value <= maximum && value < HUGE_VAL) return;
  if (value == HUGE_VAL) usage_error("{}={} must be finite; try {}", flag, value, minimum);
  if (maximum == HUGE_VAL) usage_error("{}={} must be at least {}", flag, value, minimum);
  usage_error("{}={} must lie in [{}, {}]", flag, value, minimum, maximum);
}

void check_positive(const char* flag, int64_t value) {
  check_range(flag, double(value), 1, HUGE_VAL);
}

}  // namespace usp

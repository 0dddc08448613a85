#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

namespace usp {

/// The run has failed, whatever the reason: exit code 1.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The user asked for something impossible: exit code 2. The message names the rule, the value
/// and a value that works.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws Error with a formatted message.
template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws UsageError with a formatted message.
template <class... Args>
[[noreturn]] void usage_error(fmt::format_string<Args...> format, Args&&... args) {
  throw UsageError(fmt::format(format, std::forward<Args>(args)...));
}

/// The divisors of n that lie in [1, limit], as "1, 2, 4 or 8", for the end of an error message.
std::string list_divisors(int64_t n, int64_t limit = INT64_MAX);

/// Runs body() as the whole of main: an exception becomes one line `error: ...` on stderr and the
/// exit code, 2 for UsageError and 1 for any other. So does output that could not be written.
/// Returns the exit code.
int run_main(int (*body)(int, char**), int argc, char** argv);
/// The same for any body; an exception is printed only if `speak`.
int run_guarded(const std::function<int()>& body, bool speak);

}  // namespace usp

/// Throws Error with file, line and a formatted message unless `condition` holds. It guards what
/// the program itself must get right; usage_error() refuses wrong input.
#define USP_CHECK(condition, ...)                                                                \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      ::usp::fail("{}:{}: {} (violated: {})", __FILE_NAME__, __LINE__, fmt::format(__VA_ARGS__), \
                  #condition);                                                                   \
    }                                                                                            \
  } while (false)

#include "base/check.h"

#include <csignal>
#include <vector>

#include "base/machine.h"
#include "base/output.h"

namespace usp {

std::string list_divisors(int64_t n, int64_t limit) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= n && d <= limit; ++d) {
    if (n % d == 0) divisors.push_back(d);
  }
  std::string text;
  for (size_t i = 0; i < divisors.size(); ++i) {
    const char* separator = i == 0 ? "" : i + 1 == divisors.size() ? " or " : ", ";
    text += fmt::format("{}{}", separator, divisors[i]);
  }
  return text;
}

int run_main(int (*body)(int, char**), int argc, char** argv) {
  return run_guarded(
      [&] {
        settle_threads(/*ranks=*/1, /*speak=*/true);
        return body(argc, argv);
      },
      /*speak=*/true);
}

int run_guarded(const std::function<int()>& body, bool speak) {
  int code = 0;
  std::signal(SIGXFSZ, SIG_IGN);  // a file that grows beyond its limit is a writer's error
  try {
    code = body();
    finish_output();
    return code;
  } catch (const UsageError& error) {
    if (speak) print_error(error.what());
    code = 2;
  } catch (const std::exception& error) {
    if (speak) print_error(error.what());
    code = 1;
  }
  return code;
}

}  // namespace usp

#include "base/check.h"

#include <cstdio>
#include <system_error>
#include <vector>

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
  return run_guarded([&] { return body(argc, argv); }, /*speak=*/true);
}

int run_guarded(const std::function<int()>& body, bool speak) {
  int code = 0;
  try {
    code = body();
    finish_output();
    return code;
  } catch (const UsageError& error) {
    if (speak) fmt::print(stderr, "error: {}\n", error.what());
    code = 2;
  } catch (const std::exception& error) {
    // Printing throws where its buffer is full and does not reach the file.
    const auto* of_system = dynamic_cast<const std::system_error*>(&error);
    const bool printing = of_system != nullptr && std::ferror(stdout) != 0;
    const std::string why = printing ? output_error(of_system->code().value()) : error.what();
    if (speak) fmt::print(stderr, "error: {}\n", why);
    code = 1;
  }
  return code;
}

}  // namespace usp

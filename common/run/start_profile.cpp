#include "run/start_profile.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>

#include "base/clock.h"

namespace usp {

namespace {

/// Nanoseconds that all threads of this process have spent on cores.
int64_t process_cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

/// To so many parts of one.
double rounded(double value, double parts) { return std::round(value * parts) / parts; }

/// Seconds that the file tells apart. Of less, the time between reading the two clocks would decide
/// how many cores were at work.
constexpr double kResolution = 1e-3;

}  // namespace

StartProfile::StartProfile() : since_ns_(clock_ns()), cpu_since_ns_(process_cpu_ns()) {}

void StartProfile::ended(std::string what) {
  const int64_t now = clock_ns(), cpu_now = process_cpu_ns();
  parts_.push_back(
      {std::move(what), 1e-9 * double(now - since_ns_), 1e-9 * double(cpu_now - cpu_since_ns_)});
  since_ns_ = now;
  cpu_since_ns_ = cpu_now;
}

std::string StartProfile::to_json() const {
  nlohmann::ordered_json json;
  double seconds = 0;
  for (const Part& part : parts_) seconds += part.seconds;
  json["seconds"] = rounded(seconds, 1 / kResolution);
  for (const auto& [what, wall, cpu] : parts_) {
    json["parts"].push_back({{"what", what},
                             {"seconds", rounded(wall, 1 / kResolution)},
                             {"cores", rounded(cpu / std::max(wall, kResolution), 100)}});
  }
  return json.dump(2) + "\n";
}

}  // namespace usp

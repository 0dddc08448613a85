#include "comm/links.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "base/check.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::duration<double, std::nano>;

/// Median seconds of sending a message of this many elements there and back, halved.
double one_way_seconds(const Communicator& world, int peer, int64_t count, int rounds) {
  const HostScope on_host;
  const Tensor tensor = Tensor::zeros({count}, DType::f32);
  const bool first = world.rank() < peer;
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const Clock::time_point begin = Clock::now();
    if (first) world.send(tensor, peer);
    world.recv(tensor, peer);
    if (!first) world.send(tensor, peer);
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count() / 2);
  }
  std::ranges::sort(times);
  return times[times.size() / 2];
}

double parse_positive(std::string_view text, const std::string& whole) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !(value > 0 && value < 1e12)) {
    usage_error(
        "link {}: '{}' must be a number above 0; try node=100,2 for 100 microseconds and 2 GB/s",
        whole, text);
  }
  return value;
}

}  // namespace

std::chrono::nanoseconds Link::latency() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Nanoseconds(1e3 * latency_us));
}

std::chrono::nanoseconds Link::transmission(int64_t bytes) const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      Nanoseconds(double(bytes) / gb_per_s));  // bytes / (GB/s) = nanoseconds
}

bool Links::same_node(int rank, int other) const {
  return node_size == 0 || rank / node_size == other / node_size;
}

EmulatedLinks::Times EmulatedLinks::transmit(int to, int64_t bytes, Clock::time_point time) {
  const Link& link = links_.between(rank_, to);
  if (link.gb_per_s == 0) return {};
  Clock::time_point& free = free_[links_.same_node(rank_, to) ? 0 : 1];
  free = std::max(free, time) + link.transmission(bytes);
  return {free, free + std::max(link.latency() - links_.wake_up, std::chrono::nanoseconds(0))};
}

void parse_link(const std::string& text, Links& links) {
  const size_t equals = text.find('='), comma = text.find(',');
  const std::string kind = text.substr(0, equals);
  if ((kind != "node" && kind != "net") || equals == std::string::npos ||
      comma == std::string::npos || comma < equals) {
    usage_error(
        "link {} must be node=LATENCY,BANDWIDTH or net=LATENCY,BANDWIDTH in microseconds and "
        "GB/s; try node=100,2",
        text);
  }
  Link& link = kind == "node" ? links.node : links.net;
  link.latency_us =
      parse_positive(std::string_view(text).substr(equals + 1, comma - equals - 1), text);
  link.gb_per_s = parse_positive(std::string_view(text).substr(comma + 1), text);
}

Link measure_host_link(const Communicator& world) {
  constexpr int64_t kLargeBytes = 4 << 20;
  double latency = 0, seconds = 0;
  const int peer = world.rank() ^ 1;
  world.barrier();
  if (peer < world.size()) {
    one_way_seconds(world, peer, 1, 10);  // warm
    latency = one_way_seconds(world, peer, 1, 50);
    const double large = one_way_seconds(world, peer, kLargeBytes / 4, 7);
    seconds = std::max(large - latency, large / 2);  // a disturbed latency may be the longer one
  }
  const HostScope on_host;
  const Tensor worst = Tensor::from_host(std::vector<double>{latency, seconds}, {2}, DType::f64);
  world.all_reduce(worst, ReduceOp::max);
  const std::vector<double> values = worst.items();
  return {1e6 * values[0], double(kLargeBytes) / std::max(values[1], 1e-9) * 1e-9};
}

std::chrono::nanoseconds measure_wake_up(const Communicator& world) {
  constexpr Link kProbe{500, 1};
  world.engine().emulate({0, kProbe, kProbe, {}});
  const int peer = world.rank() ^ 1;
  world.barrier();
  double excess = 0;
  if (peer < world.size()) {
    excess = 1e6 * one_way_seconds(world, peer, 1, 40) - kProbe.latency_us;
  }
  const double pairs = double(world.size() / 2 * 2);
  return Link{world.sum(excess) / pairs, 1}.latency();
}

}  // namespace usp

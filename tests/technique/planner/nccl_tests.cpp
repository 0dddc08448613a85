#include "planner/nccl_tests.h"

#include "planner/calibrate.h"
#include "planner/cost.h"
#include "technique/planner/edited_cluster.h"

/// What nccl-tests prints, written with times of a known cluster.
namespace usp::test {
namespace {

/// A cluster of H100s on links that no fit begins with.
Cluster linked() {
  Cluster cluster = read_cluster("h100_nvl8");
  cluster.node.latency_us.value = 4, cluster.node.gbs.value = 280;
  cluster.net.latency_us.value = 9, cluster.net.gbs.value = 37;
  return cluster;
}

/// What such a program prints on these hosts, rank by rank; in place it takes a tenth longer.
std::string printed(const std::string& program, CommKind kind,
                    const std::vector<std::string>& hosts, const Cluster& cluster) {
  std::string text = fmt::format(
      "# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807\n"
      "# Collective test starting: {}\n"
      "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 8(factor) "
      "warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0\n#\n# Using devices\n",
      program);
  int64_t in_first = 0, nodes = 0;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    in_first += hosts[rank] == hosts[0];
    nodes += rank == 0 || hosts[rank] != hosts[rank - 1];
    text += fmt::format(
        "#  Rank {:>2} Group  0 Pid  {} on {:>10} device {:>2} [0000:19:00] NVIDIA H100\n", rank,
        62767 + rank, hosts[rank], rank % 8);
  }
  text +=
      "#\n#                                            out-of-place                    in-place\n"
      "#  size      count type redop root  time  algbw  busbw #wrong  time  algbw  busbw #wrong\n"
      "#   (B) (elements)                  (us) (GB/s) (GB/s)         (us) (GB/s) (GB/s)\n";
  Cost cost(cluster);
  const auto ranks = static_cast<int64_t>(hosts.size());
  for (int64_t bytes = 8; bytes <= 1 << 30; bytes *= 8) {
    const double us = 1e6 * cost.of(kind, double(bytes), {ranks, nodes, in_first}).busy;
    text += fmt::format(
        "{:>12} {:>12}    float     sum      -1 {:>8.2f}    1.00    1.00       0"
        " {:>8.2f}    1.00    1.00       0\n",
        bytes, bytes / 4, us, 1.1 * us);
  }
  return text + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100.0\n#\n";
}

std::vector<std::string> on_hosts(int nodes, int ranks) {
  std::vector<std::string> hosts;
  for (int node = 0; node < nodes; ++node) {
    hosts.insert(hosts.end(), ranks, fmt::format("host-{}", node));
  }
  return hosts;
}

std::string all_reduces(int nodes, int ranks) {
  return printed("all_reduce_perf", CommKind::all_reduce, on_hosts(nodes, ranks), linked());
}

TEST_CASE("an output of nccl-tests says which collective took how long among which ranks") {
  const TempDir dir;
  const RunTimes times = read_nccl_tests(dir.write("out.txt", all_reduces(2, 4)));
  CHECK(times.on_device);
  CHECK(times.ranks_per_node == 4);
  REQUIRE(times.sent.size() == 10);
  const RunTimes::Sent& largest = times.sent.back();
  CHECK(largest.exchange.kind == CommKind::all_reduce);
  CHECK(largest.exchange.payload_bytes == 1 << 30);
  CHECK(largest.group.members->size() == 8);
  CHECK(largest.events == 40);
  const GroupLayout layout{8, 2, 4};
  const Cluster cluster = linked();
  CHECK(largest.seconds ==
        Approx(Cost(cluster).of(CommKind::all_reduce, 1 << 30, layout).busy).epsilon(1e-3));

  // Programs of before 2.16 do not say their names, and mpirun may put a tag before each line.
  std::string text = all_reduces(1, 2), tagged;
  text.erase(text.find("# Collective"), text.find("# nThread") - text.find("# Collective"));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) tagged += "[1,0]<stdout>:" + line + "\n";
  const RunTimes other = read_nccl_tests(dir.write("reduce_scatter_1.txt", tagged));
  CHECK(other.sent.front().exchange.kind == CommKind::reduce_scatter);
  CHECK(other.ranks_per_node == 2);
  check_throws<UsageError>([&] { read_nccl_tests(dir.write("out.txt", tagged)); },
                           {"does not say which collective", "all_reduce.txt"});
}

Calibration calibrated_by(const std::vector<std::string>& texts) {
  const TempDir dir;
  std::vector<RunTimes> runs;
  for (const std::string& text : texts) runs.push_back(read_nccl_tests(dir.write("out.txt", text)));
  return calibrate(read_cluster("h100_nvl8"), runs);
}

TEST_CASE("outputs of nccl-tests decide the links that they cross, and nothing else") {
  const Cluster start = read_cluster("h100_nvl8"), truth = linked();
  // Half of each node's ranks: a GPU's share of the NICs is that of a full node.
  const Calibration both =
      calibrated_by({all_reduces(1, 8), all_reduces(2, 4),
                     printed("all_gather_perf", CommKind::all_gather, on_hosts(2, 8), truth)});
  CHECK(both.cluster.node.gbs.value == Approx(truth.node.gbs.value).epsilon(0.05));
  CHECK(both.cluster.node.latency_us.value == Approx(truth.node.latency_us.value).epsilon(0.05));
  CHECK(both.cluster.net.gbs.value == Approx(truth.net.gbs.value).epsilon(0.05));
  CHECK(both.cluster.net.latency_us.value == Approx(truth.net.latency_us.value).epsilon(0.05));
  CHECK(both.cluster.net.gbs.origin == Origin::fitted);
  CHECK(both.unknown.empty());
  CHECK(both.numbers.size() == 4);
  for (const Sourced Cluster::*const kept :
       {&Cluster::launch_us, &Cluster::memory_gbs, &Cluster::matmul, &Cluster::half_width}) {
    CHECK((both.cluster.*kept).value == (start.*kept).value);
    CHECK((both.cluster.*kept).origin == (start.*kept).origin);
  }
  const Calibration inside = calibrated_by({all_reduces(1, 8)});
  CHECK(inside.unknown == std::vector<std::string>{"links.net.latency_us", "links.net.gbs"});
  CHECK(inside.cluster.peak_tflops.at(DType::bf16).origin ==
        start.peak_tflops.at(DType::bf16).origin);
}

TEST_CASE("an output of nccl-tests writes a cluster's file, which says what its links rest on") {
  const TempDir dir;
  TrainConfig config;
  config.search.cluster = "h100_nvl8";
  config.search.plan_runs = dir.write("one.txt", all_reduces(1, 8));
  config.search.plan_out = dir.file("mine.json");
  const std::string said = calibrate_cluster(config);
  CHECK(said.starts_with("1 table of nccl-tests\n"));
  CHECK(said.find("400 exchanges inside a node") != std::string::npos);
  CHECK(said.find("ops") == std::string::npos);
  const Cluster mine = read_cluster(config.search.plan_out);
  CHECK(mine.node.gbs.from == "400 exchanges inside a node of 1 run");
  CHECK(mine.net.gbs.origin == Origin::unknown);
  CHECK(mine.launch_us.from == read_cluster("h100_nvl8").launch_us.from);
  config.search.cluster = "two_cores";
  check_throws<UsageError>([&] { calibrate_cluster(config); },
                           {"two_cores", "of GPUs", "--cluster h100_nvl8"});
}

TEST_CASE("what is no output of nccl-tests is refused in a line") {
  const TempDir dir;
  const std::string text = all_reduces(2, 2);
  const auto refused = [&](const std::string& from, const std::string& to,
                           const std::vector<std::string>& parts) {
    std::string changed = text;
    REQUIRE(changed.find(from) != std::string::npos);
    changed.replace(changed.find(from), from.size(), to);
    check_throws<UsageError>([&] { read_nccl_tests(dir.write("out.txt", changed)); }, parts);
  };
  refused("all_reduce_perf", "gather_perf", {"out.txt, line 2", "gather_perf is no collective"});
  refused("Rank  1", "Rank  5", {"line 7", "rank 1 is expected"});
  refused("Group  0 Pid  62768", "Group  1 Pid  62768", {"line 7", "group 1", "measure one group"});
  refused("0\n          64", "3\n          64", {"3 values are wrong"});
  refused("1.00       0\n          64", "1.00\n          64", {"12 columns in place of 13"});
  refused("62768 on     host-0", "62768 on     host-1", {"rank 2 is on host-1", "--map-by slot"});
  const std::string with_words = text + "8 2 float sum -1 soon 1 1 0 1 1 1 0\n";
  check_throws<UsageError>([&] { read_nccl_tests(dir.write("out.txt", with_words)); },
                           {"\"soon\" is no time in microseconds"});
  check_throws<UsageError>([&] { read_nccl_tests(dir.write("out.txt", "nothing\n")); },
                           {"0 ranks and 0 sizes", "all_reduce_perf -b 8"});
  for (size_t end = 0; end < text.size(); end += 5) {  // cut off anywhere
    const std::string file = dir.write("out.txt", text.substr(0, end));
    try {
      const RunTimes times = read_nccl_tests(file);
      CHECK(times.sent.size() <= 10);
    } catch (const UsageError&) {
    }
  }
}

}  // namespace
}  // namespace usp::test

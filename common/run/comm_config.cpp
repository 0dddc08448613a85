#include "run/comm_config.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "base/rules.h"
#include "run/run_config.h"
#include "tensor/device_group.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// Nothing where no link is to be emulated. A kind of link that is not named stays as it is.
std::optional<Links> parse_links(const CommConfig& config) {
  if (config.link.empty()) return std::nullopt;
  Links links;
  links.node_size = config.node_size;
  for (const std::string& text : config.link) parse_link(text, links);
  if (links.net.gb_per_s > 0 && config.node_size == 0) {
    usage_error("link net=... needs nodes to lie between; try --node_size 1");
  }
  return links;
}

void check_slower(const char* kind, const Link& link, const Link& host) {
  if (link.gb_per_s == 0) return;  // not asked for
  if (link.latency_us >= host.latency_us && link.gb_per_s <= host.gb_per_s) return;
  usage_error(
      "link {}={},{} would be faster than this machine, whose ranks exchange messages in {:.0f} us "
      "and at {:.2f} GB/s; try {}={:.0f},{:.2g}",
      kind, link.latency_us, link.gb_per_s, host.latency_us, host.gb_per_s, kind,
      std::max(link.latency_us, std::ceil(2 * host.latency_us / 100) * 100),
      std::min(link.gb_per_s, host.gb_per_s / 2));
}

}  // namespace

void CommConfig::bind(Args& args) {
  args.group("Communication");
  args.bind("comm_timeout", comm_timeout,
            "seconds until a stuck operation, or a slow checkpoint, ends the run")
      .may_differ_on_resume();
  args.bind("comm", comm, {"mpi", "nccl"}, "what carries tensors of GPUs: mpi goes by the host")
      .may_differ_on_resume();
  args.bind("world_size", world_size,
            "ranks of a dry run or a plan, none of which is started; 0: those that run")
      .may_differ_on_resume();
  args.bind("node_size", node_size, "ranks in a node of the emulated machine; 0: all of them")
      .may_differ_on_resume();
  args.bind("link", link,
            "emulate links: node=MICROSECONDS,GB/S inside of a node, net=... between nodes")
      .may_differ_on_resume();
}

void CommConfig::validate(const Args&) const {
  check_range("comm_timeout", comm_timeout, 0.1, 1e6);
  check_range("world_size", double(world_size), 0, HUGE_VAL);
  check_range("node_size", double(node_size), 0, HUGE_VAL);
  parse_links(*this);
  if (comm == "nccl" && !link.empty()) {
    usage_error(
        "link={} slows messages that go by the host, and comm=nccl sends none; try --comm mpi",
        link.front());
  }
}

void CommConfig::check(const RunConfig& run) const {
  const MeshSizes sizes = run.mesh();
  check_mesh(sizes, ranks > 0 ? ranks : sizes.ranks());
  if (node_size == 0 || sizes.ranks() % node_size == 0) return;
  refuse_silent("nodes_of_equal_size", divisors_of("node_size", sizes.ranks()),
                "node_size={} must divide the {} ranks of the run", node_size, sizes.ranks());
}

void watch(const Communicator& world, const CommConfig& config, const RunDir& run_dir) {
  world.engine().set_timeout(std::chrono::duration<double>(config.comm_timeout));
  if (world.size() == 1) return;
  const std::filesystem::path folder = run_dir.path() / "flight";
  // Rank 0 first: it is the one that clears away what an earlier run has left there. The others
  // find the folder, unless their file system is another one.
  std::error_code error;
  if (world.rank() == 0) std::filesystem::create_directories(folder, error);
  world.barrier();
  if (world.rank() != 0) std::filesystem::create_directories(folder, error);
  refuse_together(world, [&] {
    if (error) usage_error("cannot create {}: {}", folder.string(), error.message());
    world.engine().flight().open((folder / fmt::format("rank_{:04}.txt", world.rank())).string());
  });
}

namespace {

/// Slurm's --gpus-per-task shows each rank its own GPU alone, and then NCCL cannot map the memory
/// of the others on that host.
void refuse_hidden_gpus(const Communicator& world, const std::string& host,
                        const std::vector<std::string>& places) {
  const char *shown = std::getenv("CUDA_VISIBLE_DEVICES"),
             *no_maps = std::getenv("NCCL_P2P_DISABLE");
  const bool one = shown != nullptr && *shown != '\0' && std::strchr(shown, ',') == nullptr;
  const bool maps = no_maps == nullptr || std::string_view(no_maps) != "1";
  const std::vector<std::string> hosts = world.all_gather_text(host);
  const std::vector<std::string> sees_one = world.all_gather_text(one && maps ? "yes" : "no");
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    for (size_t first = 0; first < rank; ++first) {
      if (hosts[first] != hosts[rank] || places[first] == places[rank]) continue;
      if (sees_one[first] == "no" || sees_one[rank] == "no") continue;
      throw RefusedTogether(fmt::format(
          "comm=nccl: ranks {} and {} of a host see one GPU each, and NCCL maps the memory of "
          "both; "
          "try srun --gpus-per-node in place of --gpus-per-task, NCCL_P2P_DISABLE=1, or --comm mpi",
          first, rank));
    }
  }
}

}  // namespace

void use_nccl(const Communicator& world) {
  Accelerator* const device = Runtime::current().accelerator();
  auto& library = dynamic_cast<DeviceLibrary&>(*device);
  refuse_together(world, [&] { library.require(); });
  std::string host;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> host;
  const std::string place = host + " " + dynamic_cast<SideCopies&>(*device).address();
  const std::vector<std::string> places = world.all_gather_text(place);
  refuse_hidden_gpus(world, host, places);
  const std::vector<std::string> why_not = world.all_gather_text(library.why_not_shared());
  for (size_t rank = 0; rank < places.size(); ++rank) {
    const size_t first = std::ranges::find(places, places[rank]) - places.begin();
    if (first == rank) continue;
    const std::string& why = why_not[first].empty() ? why_not[rank] : why_not[first];
    if (why.empty()) continue;
    throw RefusedTogether(fmt::format(
        "comm=nccl: ranks {} and {} share a GPU, {}; try --comm mpi, or as many ranks as there are "
        "GPUs",
        first, rank, why));
  }
  world.engine().set_device_kind(EngineKind::nccl);
}

Connection connect(const Communicator& world, const CommConfig& config, bool measure) {
  Connection connection;
  connection.ranks = world.size();
  connection.node_size = config.node_size;
  world.engine().set_node_size(config.node_size);
  std::optional<Links> links = parse_links(config);
  if (world.size() == 1 || (!links && !measure)) return connection;
  const UncountedTraffic uncounted;
  connection.host = measure_host_link(world);
  if (links) {
    if (!on_one_machine(world)) usage_error("links are emulated among ranks of one machine only");
    check_slower("node", links->node, connection.host);
    check_slower("net", links->net, connection.host);
    links->wake_up = measure_wake_up(world);
    world.engine().emulate(*links);
    connection.links = links;
  }
  return connection;
}

}  // namespace usp

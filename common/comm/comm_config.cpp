#include "comm/comm_config.h"

#include <filesystem>

namespace usp {

void CommConfig::bind(Args& args) {
  args.group("Communication");
  args.bind("comm_timeout", comm_timeout, "seconds until a stuck operation ends the run");
}

void CommConfig::validate(const Args&) const {
  check_range("comm_timeout", comm_timeout, 0.1, 1e6);
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
  if (error) fail("cannot create {}: {}", folder.string(), error.message());
  world.engine().flight().open((folder / fmt::format("rank_{:04}.txt", world.rank())).string());
}

}  // namespace usp

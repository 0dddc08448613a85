#include "run/memory_check.h"

#include "base/machine.h"
#include "testing.h"

/// What a machine's kernel says of cores and memory, and whether a run fits into these.
namespace usp::test {
namespace {

/// A machine's /proc and /sys, of which the test writes what it wants.
class FakeMachine {
 public:
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string root() const { return dir_.file("root"); }
  int64_t available() const { return available_memory(root()); }

 private:
  TempDir dir_;
};

constexpr const char* kMeminfo =
    "MemTotal:        8000 kB\nMemFree:          500 kB\nMemAvailable:    6000 kB\n";

TEST_CASE("available memory is what the kernel says where no control group limits it") {
  const FakeMachine machine;
  machine.write("/proc/meminfo", kMeminfo);
  REQUIRE(machine.available() == 6000 * 1024);
  machine.write("/proc/self/cgroup", "0::/user.slice\n");
  REQUIRE(machine.available() == 6000 * 1024);
  machine.write("/sys/fs/cgroup/user.slice/memory.max", "max\n");
  machine.write("/sys/fs/cgroup/user.slice/memory.current", "1000000\n");
  REQUIRE(machine.available() == 6000 * 1024);
  REQUIRE(available_memory() > 1 << 20);  // this machine
}

TEST_CASE("a control group's limit counts, and that of every group above it") {
  const FakeMachine machine;
  machine.write("/proc/meminfo", kMeminfo);
  machine.write("/proc/self/cgroup", "0::/batch/job7\n");
  machine.write("/sys/fs/cgroup/batch/job7/memory.max", "5000000\n");
  machine.write("/sys/fs/cgroup/batch/job7/memory.current", "3000000\n");
  REQUIRE(machine.available() == 2000000);
  // Pages of files are given up on demand.
  machine.write("/sys/fs/cgroup/batch/job7/memory.stat",
                "anon 100\ninactive_file 700000\nactive_file 200000\nslab 5\n");
  REQUIRE(machine.available() == 2900000);
  machine.write("/sys/fs/cgroup/batch/memory.max", "4000000\n");
  machine.write("/sys/fs/cgroup/batch/memory.current", "3500000\n");
  REQUIRE(machine.available() == 500000);
  machine.write("/sys/fs/cgroup/batch/memory.current", "4500000\n");
  REQUIRE(machine.available() == 0);
}

TEST_CASE("in a container the limit is that of the folder's top, in both versions") {
  const FakeMachine second, first;
  for (const FakeMachine* machine : {&second, &first}) {
    machine->write("/proc/meminfo", kMeminfo);
  }
  second.write("/proc/self/cgroup", "0::/\n");
  second.write("/sys/fs/cgroup/memory.max", "900000\n");
  second.write("/sys/fs/cgroup/memory.current", "100000\n");
  REQUIRE(second.available() == 800000);
  first.write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/of-the-host\n0::/\n");
  first.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "900000\n");
  first.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "300000\n");
  first.write("/sys/fs/cgroup/memory/memory.stat",
              "inactive_file 1\ntotal_inactive_file 50000\ntotal_active_file 50000\n");
  REQUIRE(first.available() == 700000);
  first.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");  // none
  REQUIRE(first.available() == 6000 * 1024);
}

TEST_CASE("cores are those of the affinity mask, or of the smallest quota of a control group") {
  const int cores = available_cores();
  const FakeMachine none, second, below_one;
  none.write("/proc/self/cgroup", "3:cpu,cpuacct:/x\n0::/y\n");
  none.write("/sys/fs/cgroup/y/cpu.max", "max 100000\n");
  none.write("/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "-1\n");
  none.write("/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n");
  REQUIRE(available_cores(none.root()) == cores);
  second.write("/proc/self/cgroup", "0::/batch/job\n");
  second.write("/sys/fs/cgroup/batch/cpu.max", "190000 100000\n");
  second.write("/sys/fs/cgroup/batch/job/cpu.max", "900000 100000\n");
  REQUIRE(available_cores(second.root()) == 1);
  for (const char* folder : {"/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpu"}) {
    for (const char* group : {"", "/docker/x"}) {  // a container shows its own group at the top
      const FakeMachine machine;
      machine.write("/proc/self/cgroup", "4:memory:/\n3:cpu,cpuacct:/docker/x\n");
      machine.write(std::string(folder) + group + "/cpu.cfs_quota_us", "190000\n");
      machine.write(std::string(folder) + group + "/cpu.cfs_period_us", "100000\n");
      CAPTURE(folder, group);
      REQUIRE(available_cores(machine.root()) == 1);
    }
  }
  below_one.write("/proc/self/cgroup", "0::/\n");
  below_one.write("/sys/fs/cgroup/cpu.max", "50000 100000\n");
  REQUIRE(available_cores(below_one.root()) == 1);
}

/// A run whose step needs 1000 bytes for each token of a micro-batch, and `states` of the model.
struct FakeRun : RunConfig {
  FakeRun() : RunConfig("a_chapter") {}
  std::unique_ptr<RunConfig> fresh() const override { return std::make_unique<FakeRun>(); }
  void bind(Args&) override {}
  void validate(const Args&) override {}

  Prediction predict() const {
    Prediction prediction;
    prediction.states = {model.hidden_size, 0, 0};
    prediction.peak_activations = 1000 * micro_batch_size * seq_len;
    prediction.buffers = {{-1, "gathered weights", 50}};
    return prediction;
  }
  void check(int64_t available, const Peers& peers = alone()) {
    setenv("USP_AVAILABLE_MEMORY", std::to_string(available).c_str(), 1);
    const auto put_back = [](void*) { unsetenv("USP_AVAILABLE_MEMORY"); };
    const std::unique_ptr<RunConfig, decltype(put_back)> guard(this, put_back);
    check_memory(
        *this, [&] { return predict(); }, peers);
  }
};

/// So many ranks, all of them on this machine.
struct Neighbours : Peers {
  explicit Neighbours(int size) : ranks(size) {}
  int rank() const override { return 0; }
  int size() const override { return ranks; }
  std::vector<std::string> all_gather_text(const std::string& text) const override {
    return std::vector<std::string>(ranks, text);
  }
  int ranks;
};

TEST_CASE("a run is refused exactly where it needs more than there is, and stays as it was") {
  FakeRun run;
  run.model.hidden_size = 192;
  run.seq_len = 1000;
  run.micro_batch_size = 8;
  constexpr int64_t kNeed = 192 + 1000 * 8 * 1000 + 50;
  run.check(kNeed);
  run.check(2 * kNeed, Neighbours(2));
  check_throws<UsageError>([&] { run.check(kNeed - 1); },
                           {"needs 7.6 MiB", "7.6 MiB are available", "--allow_oversize",
                            "try --micro_batch_size 4 --grad_acc_steps 2,"});
  check_throws<UsageError>([&] { run.check(2 * kNeed - 1, Neighbours(2)); },
                           {"needs 15.3 MiB", "7.6 MiB on each of 2 ranks"});
  REQUIRE(run.micro_batch_size == 8);
  REQUIRE(run.grad_acc_steps == 1);
  REQUIRE(run.seq_len == 1000);
  run.allow_oversize = true;
  run.check(0);
}

TEST_CASE("the table of the rotary embedding counts where it is the largest of all") {
  FakeRun run;
  run.model.hidden_size = 1 << 20;
  run.model.num_heads = run.model.num_kv_heads = 1;
  run.seq_len = 8;
  run.micro_batch_size = 1;
  run.check(8 * (1 << 20) * 8);
  check_throws<UsageError>([&] { run.check(8 * (1 << 20) * 8 - 1); }, {"needs 64.0 MiB"});
}

TEST_CASE(
    "the flags that are named fit: a smaller micro-batch, a shorter sample, a smaller model") {
  FakeRun run;
  run.model.hidden_size = 1000;
  run.seq_len = 1000;
  run.micro_batch_size = 12;
  run.grad_acc_steps = 2;
  run.model.given_head_dim = 2;
  const auto refused = [&](int64_t available, const std::string& remedy) {
    check_throws<UsageError>([&] { run.check(available); }, {"try " + remedy});
  };
  refused(1'050 + 3'000'000, "--micro_batch_size 3 --grad_acc_steps 8,");
  refused(1'050 + 2'999'999, "--micro_batch_size 1 --grad_acc_steps 24,");
  refused(1'050 + 999'999, "--micro_batch_size 1 --seq_len 500,");
  refused(1'050 + 1'000, "--micro_batch_size 1 --seq_len 1,");
  refused(192 + 50 + 256'000, "--micro_batch_size 1 --seq_len 250,");
  run.model.hidden_size = 1'000'000;
  refused(192 + 50 + 256'000, "--model tiny --micro_batch_size 1 --seq_len 256,");
  refused(10, "a machine with more memory,");
  run.model.pretrained = true;
  refused(192 + 50 + 256'000, "a machine with more memory,");
}

}  // namespace
}  // namespace usp::test

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "base/machine.h"
#include "base/output.h"
#include "comm/launch.h"
#include "comm/mpi_transport.h"

namespace usp {

namespace {

using std::chrono::milliseconds;

/// For ranks that fail at the same time to say so, before the first of them ends them all.
constexpr milliseconds kAbortGrace{300};
/// A peer's abort is on its way: this rank ends the run only if it does not come.
constexpr milliseconds kPeerGrace{5000};
/// For every rank to arrive at the same usage error.
/// Less than the grace after which the others miss this rank.
constexpr milliseconds kUsageGrace{700};

/// Ends the whole run from a rank that cannot go on.
[[noreturn]] void end_run(QueueEngine& engine, int code, milliseconds grace) {
  engine.abort_after(grace, code);
  while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
}

/// The end that all ranks have agreed upon, however far apart a busy machine lets them arrive.
int end_together(QueueEngine& engine, const std::string& message) {
  if (engine.rank() == 0) print_error(message);
  engine.flight().failed(message);
  if (!engine.leave(kPeerGrace)) end_run(engine, 2, kAbortGrace);
  return 2;
}

/// Ranks that were given the same impossible flags all arrive here: rank 0 speaks, and they end
/// together. A rank that arrives alone speaks for itself and ends the others.
int end_with_usage_error(QueueEngine& engine, const std::string& message) {
  if (engine.rank() == 0) print_error(message);
  engine.flight().failed(message);
  if (engine.leave(kUsageGrace)) return 2;
  if (engine.rank() != 0) print_error(fmt::format("rank {}: {}", engine.rank(), message));
  engine.fail_run(message);
  end_run(engine, 2, kAbortGrace);
}

/// The engine while the rank's program runs, nullptr before and after.
QueueEngine* running = nullptr;

/// What exit() calls. In the middle of a run it would look like success to some launchers. MPI
/// itself exits too, when the run is aborted, but on the communication thread.
void on_exit_called() {
  static const std::thread::id main_thread = std::this_thread::get_id();  // see run_ranks_main()
  if (running == nullptr || std::this_thread::get_id() != main_thread) return;
  const char* message = "exit() was called in the middle of the run";
  print_error(fmt::format("rank {}: {}", running->rank(), message));
  running->fail_run(message);
  _exit(1);
}

int run_rank(QueueEngine& engine, int (*body)(const Communicator&, int, char**), int argc,
             char** argv) {
  try {
    int code = body(Communicator::world(engine), argc, argv);
    if (const int lost = run_guarded([] { return 0; }, /*speak=*/true); lost != 0) code = lost;
    if (!engine.leave(std::chrono::hours(24))) end_run(engine, 1, kPeerGrace);
    engine.leave_devices();
    engine.flight().left();
    return code;
  } catch (const RefusedTogether& error) {
    return end_together(engine, error.what());
  } catch (const UsageError& error) {
    return end_with_usage_error(engine, error.what());
  } catch (const PeerFailed& error) {
    engine.flight().failed(error.what());
    end_run(engine, 1, kPeerGrace);
  } catch (const std::exception& error) {
    const std::string rank = engine.size() > 1 ? fmt::format("rank {}: ", engine.rank()) : "";
    print_error(rank + error.what());
    engine.fail_run(error.what());
    if (engine.size() == 1) return 1;
    end_run(engine, 1, kAbortGrace);
  }
}

}  // namespace

int run_ranks_main(int (*body)(const Communicator&, int, char**), int argc, char** argv) {
  std::unique_ptr<MpiProcess> mpi;
  const int code = run_guarded(
      [&] {
        mpi = std::make_unique<MpiProcess>(&argc, &argv);
        return 0;
      },
      MpiProcess::launched_rank() == 0);
  if (code != 0) return code;
  // Ranks of one machine share its cores.
  settle_threads(mpi->local_size(), MpiProcess::launched_rank() == 0);
  const std::unique_ptr<Transport> transport = mpi->make_transport();
  QueueEngine engine(*transport);
  engine.flight().on_open([&](const std::string& path) {
    mpi->testify((std::filesystem::path(path).parent_path() / "deaths.jsonl").string());
  });
  on_exit_called();  // so that it knows the main thread
  running = &engine;
  std::atexit(on_exit_called);
  const int end_code = run_rank(engine, body, argc, argv);
  running = nullptr;
  return end_code;
}

}  // namespace usp

#include "comm/mpi_transport.h"

#include <fmt/ranges.h>
#include <mpi.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "base/check.h"
#include "base/machine.h"
#include "comm/engine.h"

namespace usp {

namespace {

constexpr int kNoticeTag = 0;  // groups have ids from 1, so their tags begin at 4

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail("{}: {}", call, std::string_view(text, length));
}

/// The number of ranks that a launcher says it has started, and which of them this is.
struct Launched {
  const char* variable = nullptr;
  int size = 1, rank = 0;
};

Launched launched() {
  // In this order: inside a SLURM job, mpiexec's own variables are the ones that count.
  constexpr const char* kVariables[][2] = {{"PMI_SIZE", "PMI_RANK"},
                                           {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                           {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}};
  for (const auto& [size, rank] : kVariables) {
    const char* value = std::getenv(size);
    if (value == nullptr) continue;
    const char* own = std::getenv(rank);
    return {size, std::atoi(value), own == nullptr ? 0 : std::atoi(own)};
  }
  return {};
}

/// What MPICH lays down in /dev/shm for each rank of a node, rounded up: 4.2 MB over UCX.
constexpr int64_t kSharedBytesOfRank = 4'400'000;

/// Ranks of a node meet in /dev/shm; where it is too small, MPI dies of a bus error without a word.
/// A container often has 64 MB of it.
void check_shared_memory() {
  for (const char* variable : {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    const char* ranks = std::getenv(variable);
    struct statvfs shared {};
    if (ranks == nullptr || statvfs("/dev/shm", &shared) != 0) continue;
    const auto bytes = static_cast<int64_t>(shared.f_blocks * shared.f_frsize);
    const int64_t needed = std::atoi(ranks) * kSharedBytesOfRank;
    if (bytes == 0 || bytes >= needed) continue;
    usage_error(
        "{} ranks of one node need {:.1f} MB in /dev/shm, which has {:.1f}; start the container "
        "with "
        "--shm-size={}m, or run at most {} ranks",
        ranks, double(needed) * 1e-6, double(bytes) * 1e-6, 2 * needed / 1'000'000,
        std::max<int64_t>(1, bytes / kSharedBytesOfRank));
  }
}

class MpiTransport : public Transport {
 public:
  MpiTransport() {
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(world_, &rank_);
    MPI_Comm_size(world_, &size_);
    int* bound = nullptr;
    int found = 0;
    MPI_Comm_get_attr(world_, MPI_TAG_UB, &bound, &found);
    if (found != 0) max_tag_ = *bound;
    expect_notice();
  }

  ~MpiTransport() override {
    MPI_Cancel(&notice_request_);
    MPI_Wait(&notice_request_, MPI_STATUS_IGNORE);
    for (Outgoing& notice : outgoing_) MPI_Wait(&notice.request, MPI_STATUS_IGNORE);
    MPI_Comm_free(&world_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Request send(int rank, int64_t tag, const void* data, int64_t bytes) override {
    MPI_Request request;
    check_mpi(
        MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, rank, checked(tag), world_, &request),
        "MPI_Isend");
    return pack(request);
  }

  Request receive(int rank, int64_t tag, void* data, int64_t capacity) override {
    MPI_Request request;
    check_mpi(
        MPI_Irecv(data, static_cast<int>(capacity), MPI_BYTE, rank, checked(tag), world_, &request),
        "MPI_Irecv");
    return pack(request);
  }

  bool test(Request& request) override {
    if (request.done) return true;
    MPI_Request mpi;
    std::memcpy(&mpi, &request.id, sizeof(mpi));
    int done = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&mpi, &done, &status), "MPI_Test");
    if (done == 0) return false;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    request.bytes = bytes;
    request.done = true;
    return true;
  }

  void announce(const Notice& notice) override {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) continue;
      Outgoing& outgoing = outgoing_.emplace_back(Outgoing{std::make_unique<Notice>(notice), {}});
      check_mpi(MPI_Isend(outgoing.notice.get(), sizeof(Notice), MPI_BYTE, rank, kNoticeTag, world_,
                          &outgoing.request),
                "MPI_Isend");
    }
  }

  std::optional<Notice> next_notice() override {
    std::erase_if(outgoing_, [](Outgoing& outgoing) {
      int done = 0;
      MPI_Test(&outgoing.request, &done, MPI_STATUS_IGNORE);
      return done != 0;
    });
    int done = 0;
    check_mpi(MPI_Test(&notice_request_, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done == 0) return std::nullopt;
    const Notice notice = notice_;
    expect_notice();
    return notice;
  }

  Bell& bell() override { return bell_; }
  bool rings() const override { return false; }
  std::chrono::microseconds patience() const override { return std::chrono::microseconds(1000); }
  bool ranks_are_processes() const override { return true; }
  bool cancel() override { return false; }  // the library may still write what it has begun
  [[noreturn]] void abort(int code) override {
    // Under some launchers MPI_Abort waits for ranks that are gone, forever.
    signal(SIGALRM, SIG_DFL);
    alarm(3);
    MPI_Abort(world_, code);
    std::_Exit(code);
  }

 private:
  struct Outgoing {
    std::unique_ptr<Notice> notice;
    MPI_Request request;
  };

  static Request pack(MPI_Request mpi) {
    static_assert(sizeof(mpi) <= sizeof(Request::id));
    Request request;
    std::memcpy(&request.id, &mpi, sizeof(mpi));
    return request;
  }

  int checked(int64_t tag) const {
    USP_CHECK(tag <= max_tag_, "tag {} is beyond this MPI's largest, {}: too many communicators",
              tag, max_tag_);
    return static_cast<int>(tag);
  }

  void expect_notice() {
    check_mpi(MPI_Irecv(&notice_, sizeof(Notice), MPI_BYTE, MPI_ANY_SOURCE, kNoticeTag, world_,
                        &notice_request_),
              "MPI_Irecv");
  }

  MPI_Comm world_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  int64_t max_tag_ = 32767;
  Bell bell_;
  Notice notice_;
  MPI_Request notice_request_ = MPI_REQUEST_NULL;
  std::vector<Outgoing> outgoing_;
};

}  // namespace

MpiProcess::MpiProcess(int* argc, char*** argv) {
  check_shared_memory();
  const Launched launch = launched();
  // Whatever happens to the launcher, its ranks do not live on without it.
  if (launch.variable != nullptr) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    witness_.emplace();
  }
  int provided = 0;
  MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided);
  // Libraries below MPI catch crashes and take their time over a report; a crash here ends at once,
  // so that the first rank to crash is the first to be gone.
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) signal(number, SIG_DFL);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &size_);
  if (launch.size != size_) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(library, &length);
    const int world = size_;
    MPI_Finalize();
    usage_error(
        "{}={}, but this program's MPI library sees a world of {}: the launcher belongs to "
        "another MPI; use the mpiexec of {}",
        launch.variable, launch.size, world,
        std::string_view(library, std::string_view(library, length).find_first_of("\n,")));
  }
  if (provided < MPI_THREAD_SERIALIZED) {
    fail(
        "this MPI library does not let another thread than main communicate "
        "(MPI_THREAD_SERIALIZED)");
  }
  check_same_program();
  meet_neighbours();
}

/// Refuses ranks that are other programs, or that other sources were built from: they may exchange
/// messages that fit and mean something else. Sources that are not committed are known by what the
/// linker made of them. This is the first that ranks say to each other, and needs no agreement on
/// what a message looks like.
void MpiProcess::check_same_program() {
  std::array<char, 256> own{};
  fmt::format_to_n(own.data(), own.size() - 1, "{} of commit {}, message format {}{}",
                   program_invocation_short_name, build_commit(), Engine::kMessageFormat,
                   is_built_from_commit() ? "" : ", build " + build_id());
  std::vector<std::array<char, 256>> all(size_);
  MPI_Allgather(own.data(), int(own.size()), MPI_BYTE, all.data(), int(own.size()), MPI_BYTE,
                MPI_COMM_WORLD);
  std::map<std::string, std::vector<int>> others;
  for (int rank = 1; rank < size_; ++rank) {
    if (all[rank] != all[0]) others[all[rank].data()].push_back(rank);
  }
  if (others.empty()) return;
  MPI_Finalize();
  std::string text;
  for (const auto& [program, ranks] : others) {
    text += fmt::format("rank{} {} run{} {}, ", ranks.size() > 1 ? "s" : "", fmt::join(ranks, ", "),
                        ranks.size() > 1 ? "" : "s", program);
  }
  usage_error("{}and rank 0 {}; start the same program on all ranks", text, all[0].data());
}

/// Counts the ranks of this machine and gives them one witness, the first one's.
void MpiProcess::meet_neighbours() {
  MPI_Comm local;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &local);
  MPI_Comm_size(local, &local_size_);
  int first = getpid();
  MPI_Bcast(&first, 1, MPI_INT, 0, local);
  MPI_Comm_free(&local);
  if (witness_) witness_->join(first, rank_);
}

int MpiProcess::launched_rank() { return launched().rank; }

MpiProcess::~MpiProcess() {
  witness_.reset();
  MPI_Finalize();
}

void MpiProcess::testify(const std::string& path) {
  if (witness_) witness_->testify(path);
}

std::unique_ptr<Transport> MpiProcess::make_transport() { return std::make_unique<MpiTransport>(); }

}  // namespace usp

/// NCCL: ranks meet where all their streams have come to a call; then the last one does the work.
/// The host waits where NCCL's host code does: to join, to connect, and to leave.

#include <cuda_bf16.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <list>
#include <map>
#include <set>
#include <thread>

#include "streams.h"

namespace usp::emulator {
namespace {

/// What one rank brings to a meeting.
struct Part {
  const void* send = nullptr;
  void* receive = nullptr;
  size_t received = 0;  // bytes
  bool here = false;
};

/// What all ranks of a call have to say alike, or it never ends: a real one hangs, or worse.
struct Terms {
  size_t bytes = 0;
  int type = 0, op = 0;

  bool operator==(const Terms&) const = default;
};

struct Meeting {
  Terms terms;  // of the rank that called first
  bool disagreed = false;
  std::vector<Part> parts;
  std::vector<std::shared_ptr<Moment>> waiting;  // until it is over
  bool given_up = false;                         // by a rank, so that it never is
};

/// The kind of call, root or peers, and how many of the kind the rank has made.
using Key = std::array<int64_t, 4>;

struct Group {
  int ranks;
  int64_t number;  // for messages
  int joined = 0;
  int leaving = 0;  // ranks that destroy their communicator, or abort it
  std::set<Key> have_come =
      {};  // whose host has made a first call: of a pair's end, of collectives
  std::map<Key, std::shared_ptr<Meeting>> meetings = {};
};

std::map<std::string, std::shared_ptr<Group>>& groups() {
  static auto* groups = new std::map<std::string, std::shared_ptr<Group>>;
  return *groups;
}

/// A GPU has room for one collective of a rank, whatever communicator it belongs to: the worst that
/// may happen on a real one. The rank is the thread that has joined.
struct Room {
  std::shared_ptr<Moment> last;     // end of the collective that was queued last
  std::shared_ptr<Moment> running;  // end of the one that has begun last

  bool free() const { return running == nullptr || running->passed; }
};
thread_local const std::shared_ptr<Room> room_of_this_rank = std::make_shared<Room>();

struct Wait {
  cudaStream_t stream;
  std::shared_ptr<Moment> until;
};

/// A thread of the host that stands in a call until other ranks have made theirs.
struct Standing {
  std::string call;
  const ncclComm* comm;
  bool given_up = false;
};
std::list<Standing>& standing() {
  static auto* standing = new std::list<Standing>;
  return *standing;
}

/// What NCCL says of the last call that failed.
std::string& last_failure() {
  static auto* text = new std::string;
  return *text;
}

/// The call's host thread waits until `done`. False where the communicator is aborted meanwhile, or
/// where no rank does anything any more: then a problem names all threads that stand like this one.
bool stand(const std::string& call, const ncclComm* comm, const std::function<bool()>& done) {
  if (done()) return true;
  const auto here = standing().insert(standing().end(), {call, comm});
  const auto all = [] {
    std::string text = "host threads wait for each other in NCCL: ";
    for (const Standing& each : standing()) {
      text += (&each == &standing().front() ? "" : "; ") + each.call;
    }
    return last_failure() = text;
  };
  const bool came = run_until([&] { return here->given_up || done(); }, all);
  if (!came) {
    for (Standing& each : standing()) each.given_up = true;
  }
  const bool fine = came && !here->given_up;
  standing().erase(here);
  return fine;
}

/// The first call of a pair's end, or of a communicator's collectives.
struct First {
  ncclComm* comm;
  std::string call;
  std::vector<Key> awaited;  // those of the other ranks
};
thread_local int open_groups = 0;
thread_local std::vector<Wait> waits;  // of the calls of a group: all begin before one must end
thread_local std::vector<First> firsts;

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclFloat64:
      return 8;
  }
  return 0;
}

template <class T, class Sum>
void reduce(const Meeting& meeting, size_t first, size_t count, ncclRedOp_t op, void* to) {
  for (size_t i = 0; i < count; ++i) {
    Sum result{};
    for (size_t rank = 0; rank < meeting.parts.size(); ++rank) {
      const Sum value =
          static_cast<Sum>(static_cast<const T*>(meeting.parts[rank].send)[first + i]);
      if (rank == 0)
        result = value;
      else if (op == ncclMax)
        result = std::max(result, value);
      else if (op == ncclMin)
        result = std::min(result, value);
      else if (op == ncclProd)
        result = result * value;
      else
        result = result + value;
    }
    if (op == ncclAvg) result = result / static_cast<Sum>(meeting.parts.size());
    static_cast<T*>(to)[i] = static_cast<T>(result);
  }
}

std::vector<char> reduced(const Meeting& meeting, size_t first, size_t count, ncclDataType_t type,
                          ncclRedOp_t op) {
  std::vector<char> result(count * bytes_of(type));
  switch (type) {
    case ncclInt8:
      reduce<int8_t, int8_t>(meeting, first, count, op, result.data());
      break;
    case ncclUint8:
      reduce<uint8_t, uint8_t>(meeting, first, count, op, result.data());
      break;
    case ncclInt32:
      reduce<int32_t, int32_t>(meeting, first, count, op, result.data());
      break;
    case ncclInt64:
      reduce<int64_t, int64_t>(meeting, first, count, op, result.data());
      break;
    case ncclFloat32:
      reduce<float, float>(meeting, first, count, op, result.data());
      break;
    case ncclFloat64:
      reduce<double, double>(meeting, first, count, op, result.data());
      break;
    case ncclBfloat16:
      reduce<__nv_bfloat16, float>(meeting, first, count, op, result.data());
      break;
  }
  return result;
}

void store(void* to, const void* from, size_t bytes) {
  if (!is_allocated(to, bytes)) {
    problem("out of bounds", "NCCL writes what is not one block of device memory", nullptr);
    return;
  }
  std::memmove(to, from, bytes);
  allocation_at(to)->set_initialised(to, bytes, true);
}

}  // namespace
}  // namespace usp::emulator

using namespace usp::emulator;

struct ncclComm {
  std::shared_ptr<Group> group;
  int rank;
  std::shared_ptr<Room> room;
  bool in_order;                 // collectives begin as the host has queued them
  bool connected;                // for collectives, since its ranks joined
  std::map<Key, int64_t> calls;  // of each kind so far
  struct Wait {
    std::shared_ptr<Meeting> meeting;
    std::shared_ptr<Moment> over;
  };
  std::vector<Wait> under_way;
};

namespace {

enum Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kPair };
constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                  "ncclBroadcast"};

/// As "ncclRecv from rank 1 by rank 0 of communicator 3".
std::string text_of(const std::string& call, const ncclComm& comm) {
  return call + " by rank " + std::to_string(comm.rank) + " of communicator " +
         std::to_string(comm.group->number);
}

/// NCCL connects ranks when they first need it, in the call that does, and each waits for the
/// others there: the two ends of a pair, or all ranks of a communicator unless
/// NCCL_RUNTIME_CONNECT=0.
void connect(ncclComm* comm, const Key& key, int mine) {
  std::set<Key>& have_come = comm->group->have_come;
  if (key[0] == kPair) {
    if (key[1] == key[2]) return;
    const auto end = [&](int which) { return Key{kPair, key[1], key[2], which}; };
    if (!have_come.insert(end(mine)).second) return;
    const int64_t peer = mine == 0 ? key[2] : key[1];
    const std::string name = mine == 0 ? "ncclSend to rank " : "ncclRecv from rank ";
    firsts.push_back({comm, text_of(name + std::to_string(peer), *comm), {end(1 - mine)}});
  } else if (!comm->connected) {
    comm->connected = true;
    First first{comm, text_of(kNames[key[0]], *comm), {}};
    const auto of_rank = [](int64_t rank) { return Key{kAllReduce, rank, 0, 0}; };
    have_come.insert(of_rank(comm->rank));
    for (int rank = 0; rank < comm->group->ranks; ++rank) first.awaited.push_back(of_rank(rank));
    firsts.push_back(std::move(first));
  }
}

/// Queues a call: the stream waits until all `parts` are there and `finish` has run, once.
template <class F>
ncclResult_t meet(const Work& work, ncclComm_t comm, Key key, int parts, int mine, const Part& part,
                  const Terms& terms, cudaStream_t stream, F finish) {
  std::this_thread::sleep_for(std::chrono::duration<double>(options.nccl_starts_late));
  const Locked locked(lock());
  if (!is_stream(stream)) return ncclInvalidArgument;
  if (!of_this_device(stream, "a call of NCCL")) return ncclInvalidUsage;
  connect(comm, key, mine);
  Key counted = key;
  counted[3] = mine;  // a rank's message to itself has both of its ends here
  key[3] = comm->calls[counted]++;
  std::shared_ptr<Meeting>& meeting = comm->group->meetings[key];
  if (meeting == nullptr) {
    meeting = std::make_shared<Meeting>();
    meeting->terms = terms;
  }
  meeting->disagreed = meeting->disagreed || terms != meeting->terms || options.nccl_hangs;
  meeting->parts.resize(parts);
  // A rank that gives up waits no longer, whatever the others do.
  auto over = std::make_shared<Moment>();
  const size_t bytes_read = terms.bytes;
  const auto begin = [group = comm->group, meeting = meeting, over, work, key, mine, part,
                      bytes_read, finish] {
    meeting->parts[mine] = part;
    meeting->parts[mine].here = true;
    const auto here = [](const Part& other) { return other.here; };
    if (meeting->given_up || meeting->disagreed) return;
    over->known = known_here();
    begin_call(work);  // until this stream has waited for the others, who may come later
    check_call(part.send, bytes_read, false);
    size_t first = 0;
    if (key[0] == kAllGather && part.send == static_cast<char*>(part.receive) + mine * bytes_read) {
      check_call(part.receive, mine * bytes_read, true);  // in place: its own part stays
      first = (mine + 1) * bytes_read;
    }
    check_call(static_cast<char*>(part.receive) + first, part.received - first, true);
    if (!std::all_of(meeting->parts.begin(), meeting->parts.end(), here)) return;
    for (const Part& each : meeting->parts) {  // which nobody reads before: it may be given up
      if (each.send != nullptr) check_read(each.send, bytes_read, "NCCL");
    }
    finish(*meeting);
    for (const auto& over : meeting->waiting) over->passed = true;
    group->meetings.erase(key);
  };
  if (key[0] == kPair) {
    enqueue(stream, bytes_read, begin);
  } else {
    if (comm->in_order) enqueue_wait(stream, comm->room->last);
    comm->room->last = over;
    enqueue_when(
        stream, bytes_read, [room = comm->room] { return room->free(); },
        [room = comm->room, over, begin] {
          room->running = over;
          begin();
        });
  }
  meeting->waiting.push_back(over);
  std::erase_if(comm->under_way, [](const auto& wait) { return wait.over->passed; });
  comm->under_way.push_back({meeting, over});
  waits.push_back({stream, std::move(over)});
  return open_groups > 0 ? ncclSuccess : ncclGroupEnd();
}

}  // namespace

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) {
  const Locked locked(lock());
  thread_local std::string text;
  return (text = last_failure()).c_str();
}

ncclResult_t ncclGetVersion(int* version) {
  *version = options.nccl_version > 0 ? options.nccl_version : NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Locked locked(lock());
  static int count = 0;
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "emulated %d", ++count);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  const Locked locked(lock());
  if (ready() != cudaSuccess) return ncclUnhandledCudaError;
  if (ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  std::shared_ptr<Group>& known = groups()[id.internal];
  if (known == nullptr) known = std::make_shared<Group>(Group{ranks, std::ssize(groups())});
  const std::shared_ptr<Group> group = known;
  if (group->ranks != ranks) return ncclInvalidUsage;
  const auto is = [](const char* name, char value) {
    const char* text = std::getenv(name);
    return text != nullptr && *text == value;
  };
  auto joined = std::make_unique<ncclComm>(ncclComm{group,
                                                    rank,
                                                    room_of_this_rank,
                                                    is("NCCL_LAUNCH_ORDER_IMPLICIT", '1'),
                                                    is("NCCL_RUNTIME_CONNECT", '0'),
                                                    {},
                                                    {}});
  ++group->joined;
  const bool all_here = stand(text_of("ncclCommInitRank", *joined), joined.get(),
                              [group] { return group->joined >= group->ranks; });
  if (!all_here) return ncclSystemError;
  if (rank > 0 && options.nccl_joins_late > 0) {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::duration<double>(options.nccl_joins_late);
    run_until([until] { return Clock::now() >= until; });
  }
  *comm = joined.release();
  return ncclSuccess;
}

namespace {

/// Streams go on as if what they wait for were over, and the host knows that it is.
void give_up(ncclComm_t comm) {
  for (const auto& wait : comm->under_way) {
    if (wait.over->passed) continue;
    wait.meeting->given_up = wait.over->passed = true;
    tell_host(wait.over->known);
  }
}

/// Both ends of a communicator's connections have to be let go, so whoever leaves it waits for the
/// rest.
bool leave(ncclComm_t comm, const char* call) {
  const std::shared_ptr<Group> group = comm->group;
  ++group->leaving;
  return stand(text_of(call, *comm), nullptr, [group, comm] {
    const auto over = [](const ncclComm::Wait& wait) { return wait.over->passed; };
    return group->leaving >= group->ranks && std::ranges::all_of(comm->under_way, over);
  });
}

}  // namespace

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Locked locked(lock());
  const bool all_left = leave(comm, "ncclCommDestroy");
  give_up(comm);
  delete comm;
  return all_left ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Locked locked(lock());
  give_up(comm);
  for (Standing& each : standing()) each.given_up = each.given_up || each.comm == comm;
  // Not deleted: another thread of this rank may be on its way out of a call.
  return leave(comm, "ncclCommAbort") ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->group->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = static_cast<ncclResult_t>(options.nccl_error);
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * bytes_of(type);
  return meet({"ncclAllReduce", USP_PLACE}, comm, {kAllReduce}, comm->group->ranks, comm->rank,
              {send, receive, bytes}, {bytes, type, op}, stream, [=](const Meeting& meeting) {
                const std::vector<char> result = reduced(meeting, 0, count, type, op);
                for (const Part& part : meeting.parts)
                  store(part.receive, result.data(), result.size());
              });
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  const size_t ranks = comm->group->ranks;
  const size_t bytes = count * bytes_of(type);
  return meet({"ncclReduceScatter", USP_PLACE}, comm, {kReduceScatter}, comm->group->ranks,
              comm->rank, {send, receive, bytes}, {ranks * bytes, type, op}, stream,
              [=](const Meeting& meeting) {
                const std::vector<char> result = reduced(meeting, 0, ranks * count, type, op);
                for (size_t rank = 0; rank < ranks; ++rank) {
                  store(meeting.parts[rank].receive, result.data() + rank * bytes, bytes);
                }
              });
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * bytes_of(type);
  return meet({"ncclAllGather", USP_PLACE}, comm, {kAllGather}, comm->group->ranks, comm->rank,
              {send, receive, bytes * comm->group->ranks}, {bytes, type}, stream,
              [=](const Meeting& meeting) {
                std::vector<char> all;
                for (const Part& part : meeting.parts) {
                  const char* from = static_cast<const char*>(part.send);
                  all.insert(all.end(), from, from + bytes);
                }
                for (const Part& part : meeting.parts) store(part.receive, all.data(), all.size());
              });
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * bytes_of(type);
  const void* from = comm->rank == root ? send : nullptr;
  return meet({"ncclBroadcast", USP_PLACE}, comm, {kBroadcast, root}, comm->group->ranks,
              comm->rank, {from, receive, bytes}, {bytes, type}, stream,
              [=](const Meeting& meeting) {
                for (const Part& part : meeting.parts)
                  store(part.receive, meeting.parts[root].send, bytes);
              });
}

namespace {

ncclResult_t pair(const Work& work, const void* send, void* receive, size_t count,
                  ncclDataType_t type, int from, int to, ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * bytes_of(type);
  return meet(work, comm, {kPair, from, to}, 2, receive != nullptr, {send, receive, bytes},
              {bytes, type}, stream, [=](const Meeting& meeting) {
                store(meeting.parts[1].receive, meeting.parts[0].send, bytes);
              });
}

}  // namespace

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return pair({"ncclSend", USP_PLACE}, send, nullptr, count, type, comm->rank, peer, comm, stream);
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return pair({"ncclRecv", USP_PLACE}, nullptr, receive, count, type, peer, comm->rank, comm,
              stream);
}

ncclResult_t ncclGroupStart() {
  ++open_groups;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const Locked locked(lock());
  if (open_groups > 0 && --open_groups > 0) return ncclSuccess;
  bool connected = true;
  for (const First& first : std::exchange(firsts, {})) {
    connected = connected && stand(first.call, first.comm, [&] {
                  return std::ranges::all_of(first.awaited, [&](const Key& key) {
                    return first.comm->group->have_come.contains(key);
                  });
                });
    if (!connected) give_up(first.comm);
  }
  for (const Wait& wait : std::exchange(waits, {})) enqueue_wait(wait.stream, wait.until);
  return connected ? ncclSuccess : ncclSystemError;
}

#include "comm/device_exchange.h"

#include <utility>

#include "comm/communicator.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// What the first rank of the group takes from the library: as many ids, of which all learn.
std::vector<std::string> agree_on_ids(Engine& engine, const Group& group, DeviceLibrary& library,
                                      int which, int count) {
  std::string own;
  for (int i = 0; group.rank == 0 && i < count; ++i) own += library.new_group_id();
  const std::string all = Communicator::beside(engine, group, which).all_gather_text(own)[0];
  std::vector<std::string> ids;
  const size_t length = all.size() / count;
  for (int i = 0; i < count; ++i) ids.push_back(all.substr(i * length, length));
  return ids;
}

Pairs all_pairs(int ranks) {
  Pairs pairs;
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (from != to) pairs.emplace_back(from, to);
    }
  }
  return pairs;
}

/// The main thread is in a call that may wait for other ranks: who asks what it does is told so.
class InCall {
 public:
  InCall(Engine& engine, const std::string& what) : flight_(engine.flight()) {
    flight_.main_calls(what);
  }
  ~InCall() { flight_.main_computes(); }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  Flight& flight_;
};

}  // namespace

DeviceGroup* DeviceGroups::find(const Operation& operation) {
  const std::lock_guard lock(mutex);
  if (operation.peer < 0) return collectives.get();
  const auto& peers = operation.kind == CommKind::send ? sends : recvs;
  const auto found = peers.find(operation.peer);
  return found == peers.end() ? nullptr : found->second.get();
}

DeviceExchange::~DeviceExchange() {
  for (std::thread& thread : aborting_) thread.join();
}

/// nullptr where tensors lie in memory of the host.
DeviceLibrary* DeviceExchange::library() {
  if (device_ == nullptr) {
    Runtime& runtime = Runtime::current();
    // The allocator of the runtime keeps the device alive.
    device_ = {runtime.allocator_in_force(), runtime.accelerator()};
  }
  return dynamic_cast<DeviceLibrary*>(device_.get());
}

std::shared_ptr<DeviceGroup> DeviceExchange::keep(
    const std::string& name, const std::function<std::unique_ptr<DeviceGroup>()>& join) {
  const InCall call(engine_, "joining " + name);
  std::shared_ptr<DeviceGroup> group = join();
  const std::lock_guard lock(mutex_);
  joined_.push_back({name, group});
  if (aborted_) give_up(group);  // the others have done so meanwhile, and wait for this rank
  return group;
}

/// It waits for the ranks of its communicator, of which others may be in another order.
void DeviceExchange::give_up(const std::shared_ptr<DeviceGroup>& group) {
  aborting_.emplace_back([group] { group->abort(); });
}

DeviceGroups& DeviceExchange::groups_of(Group& group) {
  if (group.on_device == nullptr) group.on_device = std::make_shared<DeviceGroups>();
  return *group.on_device;
}

void DeviceExchange::connect(const std::shared_ptr<Group>& group) {
  DeviceGroups& groups = groups_of(*group);
  if (library() == nullptr || groups.collectives != nullptr) return;
  const std::string id = agree_on_ids(engine_, *group, *library(), /*which=*/0, 1)[0];
  const auto joined = keep("the communicator of " + group->name,
                           [&] { return library()->join(id, group->size(), group->rank); });
  const std::lock_guard lock(groups.mutex);
  groups.collectives = joined;
}

/// One for each pair and direction, in the same order on all ranks.
void DeviceExchange::connect_pairs(const std::shared_ptr<Group>& group, const Pairs& pairs) {
  DeviceGroups& groups = groups_of(*group);
  if (library() == nullptr || !groups.sends.empty() || !groups.recvs.empty()) return;
  const std::vector<std::string> ids =
      agree_on_ids(engine_, *group, *library(), /*which=*/1, static_cast<int>(pairs.size()));
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto [from, to] = pairs[i];
    if (group->rank != from && group->rank != to) continue;
    const bool sends = group->rank == from;
    const std::string name =
        fmt::format("the communicator from rank {} to rank {} of {}", from, to, group->name);
    const auto joined = keep(name, [&] { return library()->join_pair(ids[i], sends); });
    const std::lock_guard lock(groups.mutex);
    (sends ? groups.sends[to] : groups.recvs[from]) = joined;
  }
}

DeviceGroup* DeviceExchange::group_for(const Operation& operation) {
  USP_CHECK(library() != nullptr, "{}: this device has no library to send by",
            operation.to_string());
  DeviceGroups& groups = groups_of(*operation.group);
  if (operation.peer < 0) {
    connect(operation.group);
  } else if (groups.find(operation) == nullptr) {
    connect_pairs(operation.group, all_pairs(operation.group->size()));
  }
  DeviceGroup* found = groups.find(operation);
  USP_CHECK(found != nullptr, "{}: no messages were announced between these ranks",
            operation.to_string());
  return found;
}

void DeviceExchange::start(std::span<const std::shared_ptr<Operation>> operations) {
  std::vector<DeviceLibrary::Start> calls;
  for (const std::shared_ptr<Operation>& operation : operations) {
    const Elements input = operation->memory.input, output = operation->memory.output;
    DeviceLibrary::Start& start = calls.emplace_back();
    start.group = group_for(*operation);
    DeviceGroup::Call& call = start.call;
    call.kind = operation->kind;
    call.input = input.data;
    call.output = output.data;
    call.input_count = input.numel;
    call.output_count = output.numel;
    call.dtype = operation->dtype;
    call.maximum = operation->reduce == ReduceOp::max;
    call.peer = operation->root;
    if (operation->kind == CommKind::send) call.peer = 1;  // of the two
    if (operation->kind == CommKind::recv) call.peer = 0;
    call.input_counts = operation->input_counts;
    call.output_counts = operation->output_counts;
  }
  // It may wait for the other ranks, where the library connects them in this call.
  const InCall call(engine_, operations[0]->to_string());
  const auto over = library()->start(calls);
  for (size_t i = 0; i < over.size(); ++i) operations[i]->memory.over = over[i];
}

void DeviceExchange::end(const Operation& operation) {
  dynamic_cast<SideCopies&>(*device_).hold_work_until(*operation.memory.over);
}

void DeviceExchange::leave() {
  while (true) {
    Joined last;
    {
      const std::lock_guard lock(mutex_);
      if (aborted_ || joined_.empty()) return;
      last = std::move(joined_.back());
      joined_.pop_back();
    }
    const InCall call(engine_, "leaving " + last.name);
    last.group->leave();
  }
}

void DeviceExchange::check(const Operation& operation) {
  DeviceGroup* group = operation.group->on_device->find(operation);
  const std::string error = group == nullptr ? "" : group->error();
  if (!error.empty()) fail("{}: {}", operation.to_string(), error);
}

void DeviceExchange::abort() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(aborted_, true)) return;
  for (const Joined& joined : joined_) give_up(joined.group);
}

}  // namespace usp

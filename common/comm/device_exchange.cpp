#include "comm/device_exchange.h"

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

/// One for each pair and direction, in the same order on all ranks.
void join_peers(Engine& engine, const Group& group, DeviceLibrary& library, DeviceGroups& groups) {
  const int n = group.size();
  const std::vector<std::string> ids = agree_on_ids(engine, group, library, /*which=*/1, n * n);
  for (int from = 0; from < n; ++from) {
    for (int to = 0; to < n; ++to) {
      if (from == to) continue;
      if (group.rank != from && group.rank != to) continue;
      const bool sends = group.rank == from;
      std::unique_ptr<DeviceGroup> joined = library.join(ids[from * n + to], 2, sends ? 0 : 1);
      const std::lock_guard lock(groups.mutex);
      (sends ? groups.sends[to] : groups.recvs[from]) = std::move(joined);
    }
  }
}

DeviceGroup& group_for(Engine& engine, const Operation& operation) {
  Group& group = *operation.group;
  Runtime& runtime = Runtime::current();
  auto* library = dynamic_cast<DeviceLibrary*>(runtime.accelerator());
  USP_CHECK(library != nullptr, "{}: this device has no library to send by", operation.to_string());
  if (group.on_device == nullptr) {
    group.on_device = std::make_shared<DeviceGroups>();
    // The allocator of the runtime keeps the device alive.
    group.on_device->device = {runtime.allocator_in_force(), runtime.accelerator()};
  }
  DeviceGroups& groups = *group.on_device;
  if (groups.find(operation) == nullptr && operation.peer >= 0) {
    join_peers(engine, group, *library, groups);
  } else if (groups.find(operation) == nullptr) {
    const std::string id = agree_on_ids(engine, group, *library, /*which=*/0, 1)[0];
    std::unique_ptr<DeviceGroup> joined = library->join(id, group.size(), group.rank);
    const std::lock_guard lock(groups.mutex);
    groups.collectives = std::move(joined);
  }
  return *groups.find(operation);
}

}  // namespace

DeviceGroup* DeviceGroups::find(const Operation& operation) {
  const std::lock_guard lock(mutex);
  if (operation.peer < 0) return collectives.get();
  const auto& peers = operation.kind == CommKind::send ? sends : recvs;
  const auto found = peers.find(operation.peer);
  return found == peers.end() ? nullptr : found->second.get();
}

void DeviceExchange::start(Engine& engine, Operation& operation) {
  const Elements input = operation.memory.input, output = operation.memory.output;
  DeviceGroup::Call call;
  call.kind = operation.kind;
  call.input = input.data;
  call.output = output.data;
  call.input_count = input.numel;
  call.output_count = output.numel;
  call.dtype = operation.dtype;
  call.maximum = operation.reduce == ReduceOp::max;
  call.peer = operation.root;
  if (operation.kind == CommKind::send) call.peer = 1;  // of the two
  if (operation.kind == CommKind::recv) call.peer = 0;
  call.input_counts = operation.input_counts;
  call.output_counts = operation.output_counts;
  operation.memory.over = group_for(engine, operation).start(call);
}

void DeviceExchange::end(const Operation& operation) {
  dynamic_cast<SideCopies&>(*operation.group->on_device->device)
      .hold_work_until(*operation.memory.over);
}

void DeviceExchange::check(const Operation& operation) {
  const std::string error = operation.group->on_device->find(operation)->error();
  if (!error.empty()) fail("{}: {}", operation.to_string(), error);
}

void DeviceExchange::abort(const Operation& operation) {
  DeviceGroups* groups = operation.group->on_device.get();
  DeviceGroup* group = groups == nullptr ? nullptr : groups->find(operation);
  if (group != nullptr) group->abort();
}

}  // namespace usp

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>

#include "base/output.h"
#include "comm/engine.h"
#include "comm/links.h"
#include "comm/transfer.h"

namespace usp {

namespace {

using std::chrono::microseconds;

constexpr int kPollsBeforeYield = 4;
/// A poll that took longer, beside what a device took to answer, has moved bytes.
constexpr microseconds kWorkingPoll{20};
/// A sleep that is meant to end at a certain moment ends so much later.
constexpr microseconds kOversleep{60};
/// Timer slack of the kernel, which may let sleeps take this much longer to end several at once.
constexpr unsigned long kTimerSlackNs = 1000;
constexpr microseconds kShortestSleep{20}, kLongestSleep{5000}, kIdleSleep{10000};
/// How long the ranks have to say what they are in, once one asks.
constexpr std::chrono::milliseconds kReportTime{700};
/// A main thread that has not noticed a breakdown by then is stuck: the run ends without it.
constexpr std::chrono::seconds kBreakdownGrace{10};
/// A rank's last messages may arrive this much later than the news that it has left.
constexpr std::chrono::milliseconds kDepartureGrace{1000};

int64_t nanoseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

}  // namespace

/// An operation at the head of its channel, or behind it.
struct QueueEngine::Active {
  std::shared_ptr<Operation> operation;
  bool begun = false;
  int stage = 0;
  bool posted = false;              ///< the stage's messages
  std::vector<Transfer> transfers;  ///< of the stage
  std::vector<Transfer> early;      ///< of the next one, where they may leave early
  Clock::time_point since;
  Clock::time_point ready;  ///< when the stage's messages could leave
};

QueueEngine::QueueEngine(Transport& transport)
    : transport_(transport),
      flight_(transport.rank(), transport.size()),
      departed_(transport.size()),
      departed_at_(transport.size()),
      thread_([this] { run(); }) {}

QueueEngine::~QueueEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  transport_.bell().ring();
  thread_.join();
}

void QueueEngine::set_timeout(std::chrono::duration<double> timeout) {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

void QueueEngine::emulate(const Links& links) {
  const std::lock_guard lock(mutex_);
  links_to_be_ = std::make_shared<EmulatedLinks>(rank(), links);
}

void QueueEngine::prepare(Operation& operation) {
  Elements input = operation.memory.input, output = operation.memory.output;
  const Tensor& one =
      operation.memory.input.defined() ? operation.memory.input : operation.memory.output;
  const bool on_device = one.defined() && one.device() == Device::cuda;
  if (on_device && device_kind() == EngineKind::nccl) {
    operation.by_device = true;
    return plan(operation, input, output, /*with_scratch=*/false);  // for the ledger
  }
  const bool staged = on_device;
  if (staged) staging_.begin(operation, input, output);
  plan(operation, input, output, /*with_scratch=*/true);
  if (staged) Staging::download(operation);
}

void QueueEngine::connect(const std::shared_ptr<Group>& group) {
  if (device_kind() == EngineKind::nccl && group->size() > 1) exchange_.connect(group);
}

void QueueEngine::connect_pairs(const std::shared_ptr<Group>& group, const Pairs& pairs) {
  if (device_kind() == EngineKind::nccl && !pairs.empty()) exchange_.connect_pairs(group, pairs);
}

void QueueEngine::submit(std::span<const std::shared_ptr<Operation>> operations) {
  std::vector<std::shared_ptr<Operation>> by_device;
  for (const std::shared_ptr<Operation>& operation : operations) {
    flight_.queued(*operation);
    if (operation->by_device) by_device.push_back(operation);
  }
  if (!by_device.empty()) {
    try {
      exchange_.start(by_device);
    } catch (const Error&) {
      // What has been given up starts nothing any more; why it was is the reason to report.
      const std::lock_guard lock(mutex_);
      if (broken_.empty()) throw;
      for (const std::shared_ptr<Operation>& operation : operations) fail_operation(*operation);
      return;
    }
  }
  for (const std::shared_ptr<Operation>& operation : by_device) {
    for (const Stage& stage : operation->stages) {
      for (const Message& message : stage.sends) operation->wire_bytes += message.bytes;
    }
    // What is left to do: headers alone, by which ranks that disagree find out; and to see that the
    // operation ends.
    operation->stages.resize(2);
    operation->stages[0].finish = nullptr;
    operation->stages[1] = {};
    operation->stages[1].staged = operation->memory.over;
  }
  {
    const std::lock_guard lock(mutex_);
    for (const std::shared_ptr<Operation>& operation : operations) {
      if (broken_.empty()) {
        submitted_.push_back(operation);
      } else {
        fail_operation(*operation);
      }
    }
  }
  transport_.bell().ring();
}

void QueueEngine::wait(Operation& operation) {
  if (operation.memory.over != nullptr) {
    // One that has failed is reported by the next that the host waits for.
    if (operation.done.load(std::memory_order_acquire) == 0 || operation.error.empty()) {
      return exchange_.end(operation);
    }
  }
  if (operation.done.load(std::memory_order_acquire) == 0) {
    flight_.main_waits(operation);
    Staging::await(operation);
    if (operation.memory.staged != nullptr) transport_.bell().ring();  // its messages may leave
    operation.done.wait(0, std::memory_order_acquire);
    flight_.main_computes();
  }
  if (operation.error.empty()) return Staging::end(operation);
  if (operation.peer_failed) throw PeerFailed(operation.error);
  throw Error(operation.error);
}

void QueueEngine::fail_run(const std::string& message) {
  flight_.failed(message);
  Notice notice{Notice::failed, rank(), {}};
  fmt::format_to_n(notice.text, sizeof(notice.text) - 1, "{}", message);
  const std::lock_guard lock(mutex_);
  announcements_.push_back(notice);
  transport_.bell().ring();
}

bool QueueEngine::leave(std::chrono::duration<double> patience) {
  std::unique_lock lock(mutex_);
  announcements_.push_back({Notice::leaving, rank(), {}});
  departed_[rank()] = 1;
  transport_.bell().ring();
  departed_changed_.wait_for(lock, patience, [&] {
    return !broken_.empty() || std::find(departed_.begin(), departed_.end(), 0) == departed_.end();
  });
  return std::find(departed_.begin(), departed_.end(), 0) == departed_.end();
}

void QueueEngine::abort_after(std::chrono::milliseconds grace, int code) {
  const std::lock_guard lock(mutex_);
  abort_at_ = std::min(abort_at_, Clock::now() + grace);
  abort_code_ = code;
  main_knows_ = true;
  transport_.bell().ring();
}

void QueueEngine::run() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  int idle_polls = 0;
  Clock::time_point last_progress = Clock::now();
  while (true) {
    const int64_t rung = transport_.bell().count();
    const Clock::time_point begin = Clock::now();
    bool progress = false;
    asking_device_ = {};
    try {
      progress = poll();
    } catch (const std::exception& error) {
      break_down(error.what(), false);
    }
    {
      const std::lock_guard lock(mutex_);
      const bool idle = channels_.empty() && submitted_.empty();
      // What this rank has yet to say of its failure goes out first: the others wait for it.
      if (stopping_ && announcements_.empty() && (idle || !broken_.empty())) return;
      if (Clock::now() > abort_at_) {
        // A main thread that waits for its device cannot say it.
        if (!main_knows_ && !broken_by_peer_)
          print_error(fmt::format("rank {}: {}", rank(), broken_));
        transport_.abort(abort_code_);
      }
    }
    if (progress || Clock::now() - begin - asking_device_ > kWorkingPoll) {
      last_progress = Clock::now();
      idle_polls = 0;
    } else if (++idle_polls >= kPollsBeforeYield) {
      try {
        rest(last_progress, rung);
      } catch (const std::exception& error) {
        break_down(error.what(), false);
      }
    }
  }
}

void QueueEngine::give_up_on_device() {
  abort_devices();
  const std::lock_guard lock(mutex_);
  for (auto& [key, queue] : channels_) {
    std::erase_if(queue, [&](const std::unique_ptr<Active>& active) {
      if (!active->operation->by_device) return false;
      fail_operation(*active->operation);
      // Their headers may still come, into memory that is used again last.
      for (Transfer& transfer : active->transfers) {
        spare_buffers_.insert(spare_buffers_.begin(), transfer.take_buffer());
      }
      return true;
    });
  }
}

bool QueueEngine::poll() {
  std::vector<Notice> announcements;
  {
    const std::lock_guard lock(mutex_);
    announcements.swap(announcements_);
    for (std::shared_ptr<Operation>& operation : submitted_) {
      const CommKind direction =
          Transfer::is_point_to_point(operation->kind) ? operation->kind : CommKind::barrier;
      auto& queue = channels_[{operation->group->id, operation->peer, direction}];
      queue.push_back(std::make_unique<Active>());
      // This thread may have had to wake up first, which is no property of a link.
      if (queue.size() == 1 && !operation->by_device && operation->memory.staged == nullptr) {
        queue.back()->ready = operation->queued;
      }
      queue.back()->operation = std::move(operation);
    }
    submitted_.clear();
    links_ = links_to_be_;
  }
  for (const Notice& notice : announcements) {
    transport_.announce(notice);
    if (notice.type == Notice::failed) give_up_on_device();
  }
  bool progress = !announcements.empty();
  for (auto channel = channels_.begin(); channel != channels_.end();) {
    auto& queue = channel->second;
    while (!queue.empty()) {
      const bool waited = !queue.front()->posted;
      if (!advance(*queue.front())) {
        progress = progress || (waited && queue.front()->posted);
        break;
      }
      queue.pop_front();
      progress = true;
    }
    channel = queue.empty() ? channels_.erase(channel) : std::next(channel);
  }
  return progress;
}

void QueueEngine::begin(Active& active) {
  if (active.begun) return;
  active.begun = true;
  active.since = Clock::now();
  active.operation->begin_ns = nanoseconds(active.since);
  flight_.started(*active.operation);
}

void QueueEngine::begin_stage(Active& active) {
  begin(active);
  if (active.ready == Clock::time_point() || active.stage > 0) active.ready = Clock::now();
  active.transfers = active.early.empty() ? post(active, active.stage) : std::move(active.early);
  active.early.clear();
  active.posted = true;
}

/// Whether messages of a stage may leave. What a device takes to answer is no work of this thread:
/// where nothing else happens, it has to come to rest() and what is looked after there.
bool QueueEngine::may_leave(const Stage& stage) {
  if (stage.staged == nullptr) return true;
  const Clock::time_point begin = Clock::now();
  const bool ready = Staging::ready(stage);
  asking_device_ += Clock::now() - begin;
  return ready;
}

/// Hands over the messages of the next stage that may be under way with those of this one.
void QueueEngine::post_early(Active& active) {
  const Operation& operation = *active.operation;
  const int next = active.stage + 1;
  if (!active.early.empty() || next == std::ssize(operation.stages)) return;
  const Stage& stage = operation.stages[next];
  if (stage.early && may_leave(stage)) active.early = post(active, next);
}

/// Hands the messages of a stage to the transport.
std::vector<Transfer> QueueEngine::post(const Active& active, int stage) {
  Operation& operation = *active.operation;
  std::vector<Transfer> transfers;
  const auto add = [&](const Message& message, bool sending) {
    std::vector<char> buffer;
    if (!spare_buffers_.empty()) {
      buffer.swap(spare_buffers_.back());
      spare_buffers_.pop_back();
    }
    transfers.emplace_back(transport_, links_.get(), active.ready, operation, stage, message,
                           sending, std::move(buffer));
  };
  for (const Message& message : operation.stages[stage].receives) add(message, /*sending=*/false);
  for (const Message& message : operation.stages[stage].sends) add(message, /*sending=*/true);
  return transfers;
}

/// Whether the operation is finished.
bool QueueEngine::advance(Active& active) {
  Operation& operation = *active.operation;
  while (true) {
    Stage& stage = operation.stages[active.stage];
    if (!active.posted) {
      if (operation.by_device) begin(active);  // what it waits for is the operation itself
      if (!may_leave(stage)) return false;
      begin_stage(active);
    }
    post_early(active);
    bool all_done = true;
    for (Transfer& transfer : active.transfers) {
      if (transfer.done()) continue;
      all_done = transfer.advance(transport_, operation) && all_done;
    }
    if (!all_done) return false;
    for (Transfer& transfer : active.transfers) spare_buffers_.push_back(transfer.take_buffer());
    active.transfers.clear();
    if (stage.finish) stage.finish();
    Staging::upload(operation, stage);
    active.posted = false;
    if (++active.stage == std::ssize(operation.stages)) break;
  }
  finish(active);
  return true;
}

void QueueEngine::finish(Active& active) {
  Operation& operation = *active.operation;
  operation.end_ns = nanoseconds(Clock::now());
  operation.done.store(1, std::memory_order_release);
  operation.done.notify_all();
  flight_.finished(operation);  // while the main thread wakes up
}

/// Called when nothing moves: the time for what is not urgent, then for sleep.
void QueueEngine::rest(Clock::time_point last_progress, int64_t rung) {
  const Clock::time_point now = Clock::now();
  const auto elapsed = std::chrono::duration_cast<microseconds>(now - last_progress);
  const std::optional<Clock::time_point> due = next_due();
  // With links to imitate there is time to sleep: who yields to a thread that computes may not be
  // asked again for milliseconds.
  if (links_ == nullptr && !channels_.empty() && elapsed < transport_.patience()) {
    std::this_thread::yield();
    return;
  }
  flight_.sign_of_life();
  read_notices();
  for (const auto& [key, queue] : channels_) {
    check_departed(*queue.front());
    check_time(*queue.front());
  }
  check_main();
  // A device never rings: whether it has answered, only a poll finds out.
  const bool rings = transport_.rings() && std::ranges::none_of(channels_, [](const auto& channel) {
                       const Operation& operation = *channel.second.front()->operation;
                       return operation.by_device || operation.memory.staged != nullptr;
                     });
  microseconds sleep = rings || channels_.empty()
                           ? kIdleSleep
                           : std::clamp(elapsed / 16, kShortestSleep, kLongestSleep);
  if (due) {
    const auto left = std::chrono::duration_cast<microseconds>(*due - now) - kOversleep;
    if (left <= microseconds(0)) return;
    sleep = std::min(sleep, left);
  }
  transport_.bell().wait(rung, sleep);
}

std::optional<QueueEngine::Clock::time_point> QueueEngine::next_due() const {
  std::optional<Clock::time_point> next;
  if (links_ == nullptr) return next;
  for (const auto& [key, queue] : channels_) {
    for (const Transfer& transfer : queue.front()->transfers) {
      if (!transfer.done() && transfer.delayed()) {
        next = next ? std::min(*next, transfer.due()) : transfer.due();
      }
    }
  }
  return next;
}

void QueueEngine::read_notices() {
  while (const std::optional<Notice> notice = transport_.next_notice()) {
    switch (notice->type) {
      case Notice::leaving: {
        const std::lock_guard lock(mutex_);
        departed_[notice->rank] = 1;
        departed_at_[notice->rank] = Clock::now();
        departed_changed_.notify_all();
        break;
      }
      case Notice::failed:
        break_down(fmt::format("rank {} failed: {}", notice->rank, notice->text), true);
        break;
      case Notice::report: {
        Notice answer{Notice::status, rank(), {}};
        fmt::format_to_n(answer.text, sizeof(answer.text) - 1, "{}", flight_.status());
        transport_.announce(answer);
        if (notice->rank < rank()) {  // one report is enough
          asked_ = true;
          report_.reset();
        }
        break;
      }
      case Notice::status:
        if (report_) report_->answers[notice->rank] = notice->text;
        break;
    }
  }
  if (report_ && Clock::now() > report_->end) {
    std::string text = report_->cause;
    for (int r = 0; r < size(); ++r) {
      const std::string& answer = r == rank() ? flight_.status() : report_->answers[r];
      text += "\n  " + (answer.empty() ? fmt::format("rank {} does not answer", r) : answer);
    }
    report_.reset();
    break_down(text, false);
  }
}

void QueueEngine::check_time(const Active& active) {
  if (active.operation->by_device) DeviceExchange::check(*active.operation);
  if (active.begun) report_late(active.operation->to_string(), Clock::now() - active.since);
}

/// The main thread may be in a call of a device's library that waits for other ranks.
void QueueEngine::check_main() {
  const auto [call, seconds] = flight_.main_call();
  if (!call.empty()) report_late(call, std::chrono::duration<double>(seconds));
}

void QueueEngine::report_late(const std::string& what, std::chrono::duration<double> elapsed) {
  std::chrono::duration<double> timeout;
  {
    const std::lock_guard lock(mutex_);
    timeout = timeout_;
  }
  if (asked_ || elapsed < timeout) return;
  asked_ = true;
  report_ = Report{fmt::format("{} is not finished after {:.1f} s; what the ranks are in:", what,
                               timeout.count()),
                   std::vector<std::string>(size()), Clock::now() + kReportTime};
  transport_.announce({Notice::report, rank(), {}});
}

void QueueEngine::check_departed(const Active& active) {
  for (const Transfer& transfer : active.transfers) {
    if (transfer.done()) continue;
    const int peer = active.operation->group->members[transfer.peer()];
    const Clock::time_point left = departed_at_[peer];
    if (left != Clock::time_point() && Clock::now() - left > kDepartureGrace) {
      fail("rank {} has left the run, and rank {} waits for it in {}", peer, rank(),
           active.operation->to_string());
    }
  }
}

/// Nothing works any more: every operation fails with `message`, those still to come included.
void QueueEngine::break_down(const std::string& message, bool peer_failed) {
  const bool reusable = transport_.cancel();
  std::unique_lock lock(mutex_);
  if (broken_.empty()) {
    broken_ = message;
    broken_by_peer_ = peer_failed;
    abort_at_ = std::min(abort_at_, Clock::now() + kBreakdownGrace);
  }
  const auto give_up = [&](Operation& operation) {
    // The main thread drops its tensors when it hears of the failure; here they live on.
    if (!reusable && !operation.by_device) lost_.push_back(operation.memory);
    fail_operation(operation);
  };
  for (auto& [key, queue] : channels_) {
    for (const auto& active : queue) {
      give_up(*active->operation);
      for (std::vector<Transfer>* transfers : {&active->transfers, &active->early}) {
        for (Transfer& transfer : *transfers) {
          if (!reusable) spare_buffers_.push_back(transfer.take_buffer());
        }
      }
    }
  }
  channels_.clear();
  for (const auto& operation : submitted_) fail_operation(*operation);
  submitted_.clear();
  departed_changed_.notify_all();
  lock.unlock();
  abort_devices();  // whoever wakes up finds out why
}

/// Ranks that are threads have to get their main threads out of waits for their devices. A process
/// that ends takes its device's work with it, and NCCL's abort waits for the other ranks.
void QueueEngine::abort_devices() {
  if (!transport_.ranks_are_processes()) exchange_.abort();
}

void QueueEngine::fail_operation(Operation& operation) const {
  operation.error = broken_;
  operation.peer_failed = broken_by_peer_;
  operation.done.store(1, std::memory_order_release);
  operation.done.notify_all();
}

}  // namespace usp

#include "planner/record.h"

#include <algorithm>
#include <map>

#include "tensor/recorder.h"
#include "tensor/tensor.h"
#include "train_step.h"

namespace usp {

namespace {

/// Numbers from 0 on for values as they first come.
template <class Value>
class Interned {
 public:
  explicit Interned(std::vector<Value>& values) : values_(values) {}
  int32_t operator()(const Value& value) {
    const auto [place, is_new] = known_.emplace(value, static_cast<int32_t>(values_.size()));
    if (is_new) values_.push_back(value);
    return place->second;
  }

 private:
  std::vector<Value>& values_;
  std::map<Value, int32_t> known_;
};

bool is_product(std::string_view op) {
  return op == "matmul" || op.starts_with("linear_") || op.starts_with("grouped_linear_");
}

// [kernel]
/// What an op is, by its outputs and operands. A product's inner length follows from its
/// operations.
Kernel kernel_of(std::string_view op, int64_t flops, int64_t bytes,
                 std::span<const Tensor* const> operands) {
  Kernel kernel{.op = std::string(op), .flops = flops, .bytes = bytes};
  int64_t narrowest = INT64_MAX;
  for (const Tensor* operand : operands) {
    if (!operand->defined() || operand->dtype() == DType::i32) continue;
    if (bytes_of(operand->dtype()) >= narrowest) continue;
    narrowest = bytes_of(operand->dtype());
    kernel.dtype = operand->dtype();
  }
  if (flops == 0) return kernel;
  kernel.kind = is_product(op) ? KernelKind::matmul : KernelKind::attention;
  if (kernel.kind == KernelKind::attention) return kernel;
  const Tensor& out = **operands.begin();
  kernel.n = out.size(-1);
  kernel.m = out.size(-2);
  const Tensor& last = **(operands.end() - 1);  // weights of experts, or what makes their gradients
  kernel.groups = out.rank() == 3 ? out.size(0) : last.rank() == 3 ? last.size(0) : 1;
  if (out.rank() == 2 && last.rank() == 3) kernel.m /= kernel.groups;  // rows of an expert
  const int64_t outputs = kernel.groups * kernel.m * kernel.n;
  kernel.k = outputs == 0 ? 0 : flops / (2 * outputs);
  return kernel;
}
// [kernel]

/// Writes down what it is told. Of two strands that run in turns each has its own phases.
class ProgramRecorder : public Recorder {
 public:
  explicit ProgramRecorder(int rank) { program_.rank = rank; }

  /// Forgets all events: those of the step that begins now count.
  void begin_step() {
    ++step_;
    end_stretch();
    program_.memory.clear();
    program_.events.clear();
    program_.posts = 0;
    program_.tail = -1;
    actions_ = 0;
    for (Strand& strand : strands_) strand = {};
    begin_stretch(-1);
  }

  void op(std::string_view name, int64_t flops, int64_t bytes,
          std::span<const Tensor* const> operands, bool) override {
    add(Event::compute, kernel_(kernel_of(name, flops, bytes, operands)));
  }

  int64_t post(const Posted& operation) override {
    const Exchange exchange{group_of(operation),     operation.kind,       operation.peer,
                            operation.payload_bytes, operation.wire_bytes, operation.net_bytes};
    add(Event::post, exchange_(exchange));
    return step_ << 40 | program_.posts++;
  }

  void wait(int64_t posted) override {
    const int64_t step = posted >> 40;
    USP_CHECK(step >= step_ - 1, "an operation lasts for more than a step");
    const auto number = static_cast<int32_t>(posted & ((int64_t{1} << 40) - 1));
    add(step == step_ ? Event::wait : Event::wait_last, number);
  }

  void begin_phase(std::string_view name, int64_t number, int64_t) override {
    Strand& strand = this->strand();
    strand.phases.push_back(strand.now);
    if (name == "block") strand.now.block = static_cast<int32_t>(number);
    const char work = name == "forward"    ? 'F'
                      : name == "backward" ? 'B'
                      : name == "weights"  ? 'W'
                                           : '-';
    if (work != '-') strand.now.action = actions_++, works_.resize(actions_), works_.back() = work;
    if (name == "update" && program_.tail < 0) begin_tail();
  }
  void end_phase() override {
    Strand& strand = this->strand();
    if (strand.phases.empty()) return;  // of what had begun before
    strand.now = strand.phases.back();
    strand.phases.pop_back();
  }

  /// The step, whose forward and backward passes were those of `actions`, in their order.
  Program take(const std::vector<Action>& actions, const Stages& stages, int stage_rank);

 private:
  struct At {
    int64_t action = -1;
    int32_t block = -1;
  };
  struct Strand {
    At now;
    std::vector<At> phases;
  };

  Strand& strand() { return strands_[thread_turn()]; }

  void begin_tail() {
    program_.tail = std::ssize(program_.events);
    begin_stretch(-1);
  }

  // [memory]
  void begin_stretch(int64_t action) {
    end_stretch();
    stretch_ = action;
    program_.memory.push_back(
        {std::ssize(program_.events), Runtime::current().allocator().live_bytes(), 0});
  }
  void end_stretch() {
    Allocator& allocator = Runtime::current().allocator();
    program_.peak = std::max(program_.peak, allocator.peak_bytes());
    if (!program_.memory.empty()) program_.memory.back().peak = allocator.peak_bytes();
    allocator.reset_peaks();
  }
  // [memory]

  void add(Event::Kind kind, int32_t what) {
    const At& now = strand().now;
    const bool begins = program_.tail < 0 && now.action >= 0 && now.action != stretch_;
    if (begins) begin_stretch(now.action);
    // The number of the action stands for its segment until take().
    const auto segment = static_cast<int32_t>(program_.tail >= 0 ? -2 : now.action);
    program_.events.push_back({kind, what, segment, now.block});
  }

  int group_of(const Posted& operation) {
    const auto found = groups_.find(operation.group_id);
    if (found != groups_.end()) return found->second;
    int64_t number = 0;
    for (const ProgramGroup& group : program_.groups) {
      number += group.name == operation.group && *group.members == *operation.members;
    }
    program_.groups.push_back(
        {std::string(operation.group), number, operation.rank, operation.members});
    return groups_[operation.group_id] = static_cast<int>(program_.groups.size() - 1);
  }

  Program program_;
  Interned<Kernel> kernel_{program_.kernels};
  Interned<Exchange> exchange_{program_.exchanges};
  std::map<int64_t, int> groups_;  ///< by the communicator's number
  Strand strands_[kTurns];
  int64_t step_ = 0, actions_ = 0;
  int64_t stretch_ = -1;     ///< the action that it is of
  std::vector<char> works_;  ///< of each action
};

Program ProgramRecorder::take(const std::vector<Action>& actions, const Stages& stages,
                              int stage_rank) {
  Interned<ProgramSegment> segment(program_.segments);
  const bool known = std::ssize(actions) == actions_;
  const auto of_action = [&](int64_t number) -> ProgramSegment {
    if (number == -2) return {.work = 'U'};
    if (number < 0) return {};
    if (!known) return {.work = works_[number], .micro_batch = number / 2};  // halves, in turns
    const Action& action = actions[number];
    const int64_t stage = stages.stage_of({stage_rank, action.chunk});
    return {works_[number], stage, action.chunk, action.micro_batch};
  };
  for (Event& event : program_.events) event.segment = segment(of_action(event.segment));
  if (program_.tail < 0) begin_tail();
  end_stretch();
  return std::move(program_);
}

}  // namespace

double Program::flops() const {
  double sum = 0;
  for (const Event& event : events) {
    if (event.kind == Event::compute) sum += double(kernels[event.what].flops);
  }
  return sum;
}

Ledger Program::ledger() const {
  Ledger ledger;
  for (const Event& event : events) {
    if (event.kind != Event::post) continue;
    const Exchange& exchange = exchanges[event.what];
    ledger.add(groups[exchange.group].name, exchange.kind,
               {.calls = 1,
                .payload_bytes = exchange.payload_bytes,
                .wire_bytes = exchange.wire_bytes,
                .net_bytes = exchange.net_bytes});
  }
  return ledger;
}

std::string Program::site(const Event& at) const {
  const ProgramSegment& segment = segments[at.segment];
  if (segment.work == 'U') return "the update";
  if (segment.work == '-') return "between two passes";
  std::string text = fmt::format("{} of micro-batch {}, chunk {}", segment.work,
                                 segment.micro_batch, segment.chunk);
  return at.block < 0 ? text : text + fmt::format(", block {}", at.block);
}

// [record]
Program record(const TrainConfig& config, int rank) {
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  const DryMesh dry(config.mesh(), config.engine(), rank, config.communication->node_size);
  Trainer trainer(config, {/*dataset=*/nullptr, dry.mesh});
  ProgramRecorder recorder(rank);
  runtime.tell(&recorder);
  for (int64_t step = 0; step < 2; ++step) {  // what one step leaves to the next is waited for
    recorder.begin_step();
    trainer.train_step(step);
  }
  runtime.tell(nullptr);
  const Schedule& schedule = trainer.pipeline().schedule();
  const int stage_rank = dry.mesh.pp().rank();
  return recorder.take(schedule.actions[stage_rank], schedule.stages, stage_rank);
}
// [record]

bool same_until_tail(const Program& a, const Program& b) {
  if (a.tail != b.tail) return false;
  for (int64_t i = 0; i < a.tail; ++i) {
    const Event &own = a.events[i], &other = b.events[i];
    if (own.kind != other.kind || own.block != other.block) return false;
    if (a.segments[own.segment] != b.segments[other.segment]) return false;
    if (own.kind == Event::compute) {
      if (a.kernels[own.what] != b.kernels[other.what]) return false;
    } else if (own.kind == Event::post) {
      const Exchange &x = a.exchanges[own.what], &y = b.exchanges[other.what];
      const ProgramGroup &g = a.groups[x.group], &h = b.groups[y.group];
      const bool same = x.kind == y.kind && x.payload_bytes == y.payload_bytes &&
                        g.name == h.name && g.number == h.number &&
                        g.members->size() == h.members->size();
      if (!same) return false;
    } else if (own.what != other.what) {
      return false;
    }
  }
  return true;
}

}  // namespace usp

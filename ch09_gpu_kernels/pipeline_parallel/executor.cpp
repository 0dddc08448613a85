#include "pipeline_parallel/executor.h"

#include <algorithm>
#include <set>

#include "tensor/runtime.h"

namespace usp {

namespace {

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::nth_element(values, values.begin() + std::ssize(values) / 2);
  return values[values.size() / 2];
}

}  // namespace

void MeasuredWork::add(const Action& action, double took) {
  if (action.with_next) {
    in_turns += took;
    return;
  }
  seconds[static_cast<int>(action.work)] += took;
  ++actions[static_cast<int>(action.work)];
  if (keeps_all) all[static_cast<int>(action.work)].push_back(took);
}

double MeasuredWork::median(Work work) const { return median_of(all[static_cast<int>(work)]); }

Mail::Mail(const Schedule& schedule, const Communicator& pp, const Boundary& boundary,
           std::vector<int64_t> tokens)
    : pp_(pp), boundary_(boundary), tokens_(std::move(tokens)) {
  for (const StageMessage& message : messages(schedule)) {
    if (message.from == pp.rank()) to_send_.emplace(message.sent_by, message);
    if (message.to != pp.rank() || message.from == pp.rank()) continue;
    expected_[message.used_by] = message.from;
    to_receive_[message.from].push_back(message);
  }
}

void Mail::post(int64_t action) {
  const auto sender = expected_.find(action);
  if (sender == expected_.end() || receiving_.contains(action)) return;
  std::deque<StageMessage>& from = to_receive_[sender->second];
  while (!receiving_.contains(action)) {
    const StageMessage message = from.front();
    from.pop_front();
    const CategoryScope scope(Category::activations);
    Tensor tensor = Tensor::empty(boundary_.shape(tokens_[message.micro_batch]), boundary_.dtype,
                                  "from another stage");
    Handle handle = pp_.recv_async(tensor, message.from);
    receiving_.emplace(message.used_by, Receiving{message, std::move(tensor), std::move(handle)});
  }
}

Tensor Mail::take(int64_t action) {
  if (const auto own = handed_over_.extract(action)) return own.mapped();
  post(action);
  const auto found = receiving_.find(action);
  if (found == receiving_.end()) return {};
  Receiving arrived = std::move(found->second);
  receiving_.erase(found);
  arrived.handle.wait();
  std::deque<Sending>& sent = sending_[arrived.message.from];
  while (!sent.empty() && sent.front().used_by <= arrived.message.sent_by) {
    sent.front().handle.wait();  // it has been used: this returns at once
    sent.pop_front();
  }
  return arrived.tensor;
}

void Mail::send(int64_t action, Tensor tensor) {
  const auto found = to_send_.find(action);
  if (found == to_send_.end()) return;
  const auto& [from, to, micro_batch, sent_by, used_by] = found->second;
  if (to == from) {
    handed_over_.emplace(used_by, std::move(tensor));
  } else {
    sending_[to].push_back({used_by, pp_.send_async(tensor, to)});
  }
}

namespace {

/// The ranks between which messages of stages go: those of a step, of an evaluation and of logits;
/// and the two that measure how long one takes.
Pairs neighbors(const Schedule& schedule) {
  std::set<std::pair<int, int>> pairs;
  for (const Schedule& each : {schedule, forward_only(schedule.stages, 2)}) {
    for (const StageMessage& message : messages(each)) pairs.insert({message.from, message.to});
  }
  int at = 0;
  for (int64_t stage = 0; stage < schedule.stages.count(); ++stage) {
    const int next = schedule.stages.place_of(stage, 0, 2).rank;
    pairs.insert({at, next});
    at = next;
  }
  if (schedule.stages.ranks > 1) pairs.insert({{0, 1}, {1, 0}});
  std::erase_if(pairs, [](const auto& pair) { return pair.first == pair.second; });
  return {pairs.begin(), pairs.end()};
}

}  // namespace

Pipeline::Pipeline(const TrainConfig& config, Model& model, Grads& grads,
                   const TensorRegion& region, const Mesh& mesh)
    : model_(model),
      grads_(grads),
      region_(region),
      config_(config.pipeline),
      world_(mesh.world()),
      pp_(mesh.pp()),
      schedule_(config.pipeline.schedule(config.grad_acc_steps)),
      boundary_{config.model.hidden_size, config.tensor_parallel.row_shares(),
                parse_dtype(config.dtype)},
      tokens_(config.micro_batch_size * config.seq_len / config.context_parallel.cp_size),
      columns_(cut(config.model.vocab_size, mesh.tp().rank(), mesh.tp().size()).count) {
  share_copies(model.parameters(), schedule_.stages, mesh);
  pp_.connect_pairs(neighbors(schedule_));
  // Shapes take no time.
  measured_.keeps_all = config_.measures_times() && Runtime::current().device() != Device::meta;
}

/// A micro-batch in a chunk of this rank, from its forward pass to its last gradient.
struct Pipeline::InFlight {
  Pass pass;
  Model::Activations activations;
  Grads::Deferred weights;  ///< their gradients, where they wait
};

// [work_on]
Tensor Pipeline::work_on(const Action& action, Tensor in, InFlight& own, bool with_backward) {
  if (action.work == Work::F) {
    return model_.forward_chunk(action.chunk, std::move(in),
                                with_backward ? &own.activations : nullptr, own.pass);
  }
  if (action.work == Work::W) {
    grads_.run(own.weights);
    return {};
  }
  if (action.work == Work::B) grads_.defer_to(&own.weights);
  Tensor dx = model_.backward_chunk(action.chunk, std::move(in), std::move(own.activations), grads_,
                                    own.pass);
  grads_.defer_to(nullptr);
  return dx;
}
// [work_on]

void Pipeline::add_time(const Action& action, int64_t begin) {
  timer_.since(begin, [this, action](double took) { measured_.add(action, took); });
}

void Pipeline::run(const Schedule& schedule, std::vector<int64_t> tokens,
                   const TakeBatch& take_batch, bool with_backward) {
  const std::vector<Action>& actions = schedule.actions[pp_.rank()];
  Mail mail(schedule, pp_, boundary_, std::move(tokens));
  std::map<std::pair<int64_t, int64_t>, InFlight> running;  // by chunk, micro-batch
  const auto own = [&](int64_t i) -> InFlight& {
    return running[{actions[i].chunk, actions[i].micro_batch}];
  };
  Tensor in[2], out[2];
  const auto work = [&](int64_t i, int64_t part) {
    out[part] = work_on(actions[i], std::move(in[part]), own(i), with_backward);
  };
  const int64_t first = timer_.now();
  // [loop]
  for (int64_t i = 0, count = 0; i < std::ssize(actions); i += count) {
    count = actions[i].with_next ? 2 : 1;  // that run in turns
    for (int64_t part = 0; part < count; ++part) {
      const Action& action = actions[i + part];
      if (action.work == Work::F) own(i + part).pass = take_batch(action.micro_batch);
      in[part] = mail.take(i + part);
    }
    mail.post(i + count);
    const int64_t begin = timer_.now();
    if (count == 1) work(i, 0);
    if (count == 2) region_.in_turns([&] { work(i, 0); }, [&] { work(i + 1, 1); });
    if (with_backward) add_time(actions[i], begin);
    for (int64_t part = 0; part < count; ++part) {
      const Action& action = actions[i + part];
      mail.send(i + part, std::move(out[part]));
      if (action.work == Work::W || action.work == Work::BW || !with_backward) {
        running.erase({action.chunk, action.micro_batch});
      }
    }
  }
  // [loop]
  if (with_backward) timer_.since(first, [this](double took) { measured_.span += took; });
}

void Pipeline::train(const TakeBatch& take_batch) {
  timer_.read();  // what the step before took
  if (region_.config().halves() == 1) {
    const std::vector<int64_t> tokens(schedule_.micro_batches, tokens_);
    run(schedule_, tokens, take_batch, /*with_backward=*/true);
    return learn_times();
  }
  for (int64_t i = 0; i < schedule_.micro_batches; ++i) {
    region_.each_half(take_batch(i), [this](const Pass& half) {
      model_.backward(model_.forward(half), grads_, half);
    });
  }
}

void Pipeline::learn_times() {
  if (!measured_.keeps_all || ++steps_ < PipelineConfig::kWarmUpSteps) return;
  if (steps_ == PipelineConfig::kWarmUpSteps) {  // pages were touched in these, and buffers made
    for (std::vector<double>& seconds : measured_.all) seconds.clear();
    timer_.forget();
  }
  if (steps_ < PipelineConfig::kMeasuredUntil) return;
  timer_.read();
  // The mean over ranks, whose medians differ: every rank has to make the same table.
  const auto agreed = [&](double seconds, int64_t ranks) {
    return std::max(1e3 * world_.sum(seconds) / double(ranks), 1e-6);
  };
  const int64_t ranks = world_.size();
  const double f = agreed(measured_.median(Work::F), ranks);
  const double b = agreed(measured_.median(Work::B), ranks);
  const double w = agreed(measured_.median(Work::W), ranks);
  const double message = agreed(message_seconds(), 2 * ranks / pp_.size());
  measured_.times = fmt::format("{:.3g},{:.3g},{:.3g},{:.3g}", f, b, w, message);
  measured_.keeps_all = false;
  config_.pp_times = measured_.times;
  schedule_ = config_.schedule(schedule_.micro_batches);
}

double Pipeline::message_seconds() const {
  if (pp_.size() == 1 || pp_.rank() > 1) return 0;
  const UncountedTraffic uncounted;
  const CategoryScope scope(Category::communication);
  const Tensor tensor = Tensor::zeros(boundary_.shape(tokens_), boundary_.dtype);
  const int peer = 1 - pp_.rank();
  std::vector<double> times;
  WorkTimer timer;
  for (int i = 0; i < 9; ++i) {
    const int64_t begin = timer.now();
    if (pp_.rank() == 0) pp_.send(tensor, peer);
    pp_.recv(tensor, peer);
    if (pp_.rank() == 1) pp_.send(tensor, peer);
    timer.since(begin, [&times](double took) { times.push_back(took / 2); });
  }
  timer.read();
  return median_of(times);
}

void Pipeline::evaluate(const std::vector<Pass>& passes) {
  std::vector<int64_t> tokens;
  for (const Pass& pass : passes) tokens.push_back(pass.tokens.numel());
  run(
      forward_only(schedule_.stages, std::ssize(passes)), tokens,
      [&](int64_t i) { return passes[i]; }, /*with_backward=*/false);
}

Tensor Pipeline::logits(const Pass& pass) {
  const Stages& stages = schedule_.stages;
  Tensor x;
  int at = 0;
  for (int64_t stage = 0; stage < stages.count(); ++stage) {
    const Place place = stages.place_of(stage, 0, 2);
    const bool here = place.rank == pp_.rank(), from_here = at == pp_.rank();
    if (here && place.rank != at) {
      const CategoryScope scope(Category::activations);
      x = Tensor::empty({pass.tokens.numel(), boundary_.hidden_size}, boundary_.dtype);
      pp_.recv(x, at);
    } else if (from_here && place.rank != at) {
      pp_.send(x, place.rank);
    }
    at = place.rank;
    if (!here) continue;
    const bool ends = stage == stages.count() - 1;
    x = ends ? model_.logits_of_chunk(place.chunk, std::move(x), pass)
             : model_.forward_chunk(place.chunk, std::move(x), nullptr, pass);
  }
  if (at != pp_.rank()) {
    const int64_t rows = pass.mode == Pass::Mode::decode ? pass.num_samples : pass.tokens.numel();
    x = Tensor::empty({rows, columns_}, boundary_.dtype);
  }
  pp_.broadcast(x, at);
  return x;
}

}  // namespace usp

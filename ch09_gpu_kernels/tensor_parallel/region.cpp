#include "tensor_parallel/region.h"

#include "base/rules.h"
#include "config.h"
#include "tensor/ops.h"

namespace usp {

void TensorParallelConfig::bind(Args& args) {
  args.group("Tensor and sequence parallelism");
  args.bind("tp_size", tp_size, "ranks that shard every block's weights").may_differ_on_resume();
  args.bind("sequence_parallel", sequence_parallel,
            "shard the tokens too, wherever the weights are not")
      .may_differ_on_resume();
  args.bind("gathered_input", gathered_input, {"again", "kept"},
            "under sequence_parallel: gather a linear's input again for backward, or keep it")
      .may_differ_on_resume();
  args.bind("tp_overlap", tp_overlap, {"none", "weight_grad", "chunks", "batch_halves"},
            "what is computed while messages between the ranks of tp travel")
      .may_differ_on_resume();
  args.bind("dropout", dropout,
            "probability of 0 for each number that attention and MLP add to the residual stream");
}

void TensorParallelConfig::validate(const Args&) const {
  check_range("tp_size", double(tp_size), 1, 1 << 16);
  if (!(dropout >= 0 && dropout < 1)) {
    usage_error("dropout={} must be at least 0 and below 1; try 0.1", dropout);
  }
}

MeshSizes TensorParallelConfig::mesh(int64_t dp_size, const ModelConfig& model) const {
  const int64_t copies = tp_size / std::max<int64_t>(1, model.num_kv_heads);
  return {.dp = dp_size, .tp = tp_size, .tp_kv = std::max<int64_t>(1, copies)};
}

void TensorParallelConfig::check(const TrainConfig& run) const {
  const ModelConfig& model = run.model;
  const auto needs = [](const char* what, const char* flag, bool is_set) {
    if (!is_set) return;
    refuse_silent("flag_of_tp", {fmt::format("leave out --{}", flag)}, "{} is for {}", flag, what);
  };
  needs("tp_size above 1", "sequence_parallel", sequence_parallel && tp_size == 1);
  needs("tp_size above 1", "tp_overlap", tp_overlap != "weight_grad" && tp_size == 1);
  needs("sequence_parallel", "gathered_input", gathered_input != "again" && !sequence_parallel);
  const auto divides = [&](const char* rule, const char* what, int64_t number) {
    if (number % tp_size == 0) return;
    refuse(rule, divisors_of("tp_size", number), "tp_size={} must divide {}={}", tp_size, what,
           number);
  };
  divides("tp_of_heads", "num_heads", model.num_heads);
  const auto gives_each = [&](const char* rule, const char* what, int64_t number) {
    if (number >= tp_size) return;
    refuse_silent(rule, divisors_of("tp_size", model.num_heads, number),
                  "tp_size={} must be at most {}={}", tp_size, what, number);
  };
  gives_each("tp_of_ffn", "ffn_hidden_size", model.ffn_hidden_size);
  gives_each("tp_of_vocabulary", "vocab_size", model.vocab_size);
  if (model.num_kv_heads % tp_size != 0 && tp_size % model.num_kv_heads != 0) {
    refuse("tp_of_kv_heads", divisors_of("tp_size", model.num_kv_heads),
           "tp_size={} must divide num_kv_heads={}, or be a multiple of it", tp_size,
           model.num_kv_heads);
  }
  if (sequence_parallel) divides("tp_of_tokens", "seq_len", run.seq_len);
  if (run.micro_batch_size % halves() != 0) {
    refuse("halves_of_micro_batch", values_of("micro_batch_size", {run.micro_batch_size + 1}),
           "tp_overlap=batch_halves needs an even micro_batch_size, not {}", run.micro_batch_size);
  }
}

TensorRegion::TensorRegion(const TensorParallelConfig& config, const Communicator& tp)
    : tp_(tp), config_(config) {}

// [collectives]
Pending TensorRegion::all_reduce(const Tensor& x) const {
  Pending sum = on_its_way(x);
  if (size() > 1) sum.add(tp_->all_reduce_async(x));
  return sum;
}

Pending TensorRegion::gather(const Tensor& x) const {
  const Tensor whole = Tensor::empty({x.size(0) * size(), x.size(1)}, x.dtype(), "gathered");
  Pending gathered = on_its_way(whole);
  gathered.add(tp_->all_gather_async(whole, x));
  return gathered;
}

Pending TensorRegion::reduce_scatter(const Tensor& x) const {
  const Tensor shard = Tensor::empty({x.size(0) / size(), x.size(1)}, x.dtype(), "residual");
  Pending sum = on_its_way(shard);
  sum.add(tp_->reduce_scatter_async(shard, x));
  return sum;
}
// [collectives]

// [edges]
Pending TensorRegion::enter(const Tensor& x, const Pass& pass) const {
  return shares_rows(pass) ? gather(x) : Pending(x);  // g : f
}

Pending TensorRegion::enter_backward(const Tensor& dx) const {
  return shares_rows() ? reduce_scatter(dx) : all_reduce(dx);
}

Pending TensorRegion::leave(const Tensor& y, const Pass& pass) const {
  return shares_rows(pass) ? reduce_scatter(y) : all_reduce(y);  // g* : f*
}

Pending TensorRegion::leave_backward(const Tensor& dy) const {
  return shares_rows() ? gather(dy) : Pending(dy);
}
// [edges]

constexpr int64_t kChunks = 4;

// [sum_in_chunks]
Pending TensorRegion::sum_in_chunks(const Shape& shape, DType dtype, const ComputeRows& compute,
                                    bool shares_rows) const {
  const int64_t t = shares_rows ? size() : 1, own = shape[0] / t, H = shape[1];
  const Tensor y = Tensor::empty({own, H}, dtype, "residual");
  Pending sum(y);
  for (int64_t c = 0; c < kChunks; ++c) {
    const auto [begin, count] = cut(own, c, kChunks);
    if (count == 0) continue;
    const Tensor rows = y.narrow(0, begin, count);
    if (!shares_rows) {
      compute(begin, count, rows);
      sum.add(tp_->all_reduce_async(rows));
      continue;
    }
    const Tensor terms = Tensor::empty({t * count, H}, dtype);  // each rank's chunk of its rows
    for (int64_t r = 0; r < t; ++r) {
      compute(r * own + begin, count, terms.narrow(0, r * count, count));
    }
    sum.add(tp_->reduce_scatter_async(rows, terms));
  }
  return sum;
}
// [sum_in_chunks]

// [gather_in_chunks]
void TensorRegion::gather_in_chunks(const Tensor& x, const ComputeRows& use) const {
  const int64_t own = x.size(0);
  std::vector<Pending> chunks;
  for (int64_t c = 0; c < kChunks; ++c) {
    const auto [begin, count] = cut(own, c, kChunks);
    if (count > 0) chunks.push_back(gather(x.narrow(0, begin, count)));
  }
  int64_t begin = 0;
  for (Pending& chunk : chunks) {
    const Tensor rows = chunk.wait();
    const int64_t count = rows.size(0) / size();
    for (int64_t r = 0; r < size(); ++r) {
      use(r * own + begin, count, rows.narrow(0, r * count, count));
    }
    begin += count;
  }
}
// [gather_in_chunks]

// [halves]
void TensorRegion::each_half(const Pass& pass, const std::function<void(const Pass&)>& body) const {
  if (config_.halves() == 1) return body(pass);
  const auto half = [&](int64_t which) {
    Pass part = pass;
    part.part = which;
    part.num_samples = pass.num_samples / 2;
    part.first_sample = pass.first_sample + which * part.num_samples;
    part.documents = pass.documents.of_samples(which * part.num_samples, part.num_samples);
    const int64_t tokens = part.num_samples * pass.positions.count();
    part.tokens = pass.tokens.narrow(0, which * tokens, tokens);
    part.targets = pass.targets.narrow(0, which * tokens, tokens);
    return part;
  };
  in_turns([&] { body(half(0)); }, [&] { body(half(1)); });
}
// [halves]

void TensorRegion::in_turns(const std::function<void()>& first,
                            const std::function<void()>& second) const {
  turns_->run(first, second);
}

void TensorRegion::reduce(const Tensor& x, ReduceOp op) const {
  if (size() > 1) tp_->all_reduce(x, op);
}

Tensor TensorRegion::own_rows(const Tensor& x) const {
  if (!shares_rows()) return x;
  const int64_t rows = x.size(0) / size();
  return x.narrow(0, rank() * rows, rows);
}

void TensorRegion::share(Parameter& weight, int axis) const {
  const int64_t length = weight.global_shape[axis];
  const auto [begin, count] = cut(length, rank(), size());
  if (size() > 1) weight.slices = {{axis, begin, count}};
  weight.uneven = length % size() != 0;
}

void TensorRegion::share_kv_heads(Parameter& weight, int64_t G) const {
  if (size() <= G) return share(weight, 0);
  const int64_t D = weight.global_shape[0] / G, copies = size() / G;
  weight.slices = {{0, rank() / copies * D, D}};
  weight.grad_groups.push_back("tp_kv");
  weight.counted = rank() % copies == 0;
}

// [replicate]
void TensorRegion::replicate(Parameter& weight) const {
  if (shares_rows()) weight.grad_groups.push_back("tp");
  weight.counted = rank() == 0;
}
// [replicate]

}  // namespace usp

#include "experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tensor/runtime.h"

namespace usp::rehearsal {

namespace {

/// What a chapter makes operations of: plain loops over f32 or f64 on the CPU. On meta they do
/// nothing. `slots` gives each of a token's choices its row among those that are sent.
namespace loops {

/// Calls body(T{}) where there is data to compute with.
template <class Body>
void on_data(const Tensor& tensor, const Body& body) {
  if (tensor.device() == Device::meta) return;
  USP_CHECK(tensor.dtype() != DType::bf16, "plain loops compute in f32 and f64");
  if (tensor.dtype() == DType::f64) {
    body(double{});
  } else {
    body(float{});
  }
}

/// probs [T, E] = softmax(logits [T, E]), row by row.
void softmax(const Tensor& probs, const Tensor& logits) {
  on_data(logits, [&]<class T>(T) {
    const int64_t E = logits.size(1);
    for (int64_t t = 0; t < logits.size(0); ++t) {
      const T* z = logits.data<T>() + t * E;
      T* p = probs.data<T>() + t * E;
      const T max = *std::max_element(z, z + E);
      T sum = 0;
      for (int64_t e = 0; e < E; ++e) sum += p[e] = std::exp(z[e] - max);
      for (int64_t e = 0; e < E; ++e) p[e] /= sum;
    }
  });
}

/// dlogits = probs * (dprobs - the sum over experts of probs * dprobs)
void softmax_backward(const Tensor& dlogits, const Tensor& dprobs, const Tensor& probs) {
  on_data(dlogits, [&]<class T>(T) {
    const int64_t E = probs.size(1);
    for (int64_t t = 0; t < probs.size(0); ++t) {
      const T *p = probs.data<T>() + t * E, *dp = dprobs.data<T>() + t * E;
      T* dz = dlogits.data<T>() + t * E;
      const T sum = std::inner_product(p, p + E, dp, T{0});
      for (int64_t e = 0; e < E; ++e) dz[e] = p[e] * (dp[e] - sum);
    }
  });
}

/// choices [T, k] = the most probable experts; of equal ones the lower index.
void choose_top_k(const Tensor& choices, const Tensor& probs) {
  on_data(probs, [&]<class T>(T) {
    const int64_t E = probs.size(1), k = choices.size(1);
    std::vector<int32_t> order(E);
    for (int64_t t = 0; t < probs.size(0); ++t) {
      const T* p = probs.data<T>() + t * E;
      std::iota(order.begin(), order.end(), 0);
      std::ranges::stable_sort(order, [p](int32_t a, int32_t b) { return p[a] > p[b]; });
      std::copy_n(order.begin(), k, choices.data<int32_t>() + t * k);
    }
  });
}

/// counts [E]: how many tokens chose each expert.
void count_choices(const Tensor& counts, const Tensor& choices) {
  if (choices.device() == Device::meta) return;
  for (int64_t i = 0; i < choices.numel(); ++i) {
    ++counts.data<int32_t>()[choices.data<int32_t>()[i]];
  }
}

/// slots [T, k]: sorted by expert, then by token. A rank's experts follow one another, so that is
/// the order of the destination ranks, too.
void assign_slots(const Tensor& slots, const Tensor& choices, const Tensor& counts) {
  if (slots.device() == Device::meta) return;
  std::vector<int32_t> next(counts.numel());
  const int32_t* count = counts.data<int32_t>();
  std::exclusive_scan(count, count + counts.numel(), next.begin(), 0);
  for (int64_t i = 0; i < choices.numel(); ++i) {
    slots.data<int32_t>()[i] = next[choices.data<int32_t>()[i]]++;
  }
}

/// rows [R, H]: row slots[t, j] = x[t].
void scatter(const Tensor& rows, const Tensor& x, const Tensor& slots) {
  on_data(x, [&]<class T>(T) {
    const int64_t H = x.size(1), k = slots.size(1);
    for (int64_t i = 0; i < slots.numel(); ++i) {
      const int64_t row = slots.data<int32_t>()[i];
      std::copy_n(x.data<T>() + i / k * H, H, rows.data<T>() + row * H);
    }
  });
}

/// x[t] += the sum over j of row slots[t, j].
void gather_add(const Tensor& x, const Tensor& rows, const Tensor& slots) {
  on_data(x, [&]<class T>(T) {
    const int64_t H = x.size(1), k = slots.size(1);
    for (int64_t i = 0; i < slots.numel(); ++i) {
      const T* row = rows.data<T>() + slots.data<int32_t>()[i] * H;
      T* out = x.data<T>() + i / k * H;
      for (int64_t h = 0; h < H; ++h) out[h] += row[h];
    }
  });
}

/// y[t] = x[t] + the sum over j of gate[t, j] * row slots[t, j].
void combine(const Tensor& y, const Tensor& x, const Tensor& rows, const Routing& routing) {
  on_data(x, [&]<class T>(T) {
    const int64_t H = x.size(1), E = routing.probs.size(1), k = routing.slots.size(1);
    std::copy_n(x.data<T>(), x.numel(), y.data<T>());
    for (int64_t i = 0; i < routing.slots.numel(); ++i) {
      const int64_t t = i / k, expert = routing.choices.data<int32_t>()[i];
      const T gate = routing.probs.data<T>()[t * E + expert];
      const T* row = rows.data<T>() + routing.slots.data<int32_t>()[i] * H;
      for (int64_t h = 0; h < H; ++h) y.data<T>()[t * H + h] += gate * row[h];
    }
  });
}

/// drows [R, H] and dprobs [T, E] (zero at first) from dy [T, H].
void combine_backward(const Tensor& drows, const Tensor& dprobs, const Tensor& dy,
                      const Tensor& rows, const Routing& routing) {
  on_data(dy, [&]<class T>(T) {
    const int64_t H = dy.size(1), E = dprobs.size(1), k = routing.slots.size(1);
    for (int64_t i = 0; i < routing.slots.numel(); ++i) {
      const int64_t t = i / k, expert = routing.choices.data<int32_t>()[i];
      const int64_t slot = routing.slots.data<int32_t>()[i];
      const T gate = routing.probs.data<T>()[t * E + expert];
      const T *dout = dy.data<T>() + t * H, *row = rows.data<T>() + slot * H;
      T* drow = drows.data<T>() + slot * H;
      for (int64_t h = 0; h < H; ++h) drow[h] = gate * dout[h];
      dprobs.data<T>()[t * E + expert] = std::inner_product(dout, dout + H, row, T{0});
    }
  });
}

/// Rows by source rank, expert and token -> by expert, source rank and token, or back. counts
/// [ranks, experts].
void regroup(const Tensor& to, const Tensor& from, const std::vector<int64_t>& counts,
             int64_t experts, bool by_expert) {
  on_data(from, [&]<class T>(T) {
    const int64_t H = from.size(1), ranks = std::ssize(counts) / experts;
    std::vector<int64_t> begin(counts.size());  // of each part where source ranks come first
    std::exclusive_scan(counts.begin(), counts.end(), begin.begin(), int64_t{0});
    int64_t at = 0;  // where experts do
    for (int64_t expert = 0; expert < experts; ++expert) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t part = rank * experts + expert;
        const int64_t source = by_expert ? begin[part] : at;
        const int64_t target = by_expert ? at : begin[part];
        std::copy_n(from.data<T>() + source * H, counts[part] * H, to.data<T>() + target * H);
        at += counts[part];
      }
    }
  });
}

}  // namespace loops

/// Left by Combine's backward for Dispatch's.
struct RouterGradient {
  Tensor dprobs;  ///< [T, E]
};

int64_t sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/// The sums of `parts` equal stretches of counts.
std::vector<int64_t> sums_of(const std::vector<int64_t>& counts, int parts) {
  std::vector<int64_t> sums(parts);
  const size_t length = counts.size() / parts;
  for (size_t i = 0; i < counts.size(); ++i) sums[i / length] += counts[i];
  return sums;
}

/// How many of `choices` fall to each expert where all are equally popular.
std::vector<int64_t> even_counts(int64_t choices, int64_t experts) {
  std::vector<int64_t> counts(experts, choices / experts);
  for (int64_t expert = 0; expert < choices % experts; ++expert) ++counts[expert];
  return counts;
}

Tensor by_expert(const Tensor& rows, const Routing& routing, int64_t experts) {
  Tensor grouped = Tensor::empty(rows.shape(), rows.dtype());
  loops::regroup(grouped, rows, routing.from_ranks, experts, /*by_expert=*/true);
  return grouped;
}

Tensor by_rank(const Tensor& rows, const Routing& routing, int64_t experts) {
  Tensor grouped = Tensor::empty(rows.shape(), rows.dtype());
  loops::regroup(grouped, rows, routing.from_ranks, experts, /*by_expert=*/false);
  return grouped;
}

}  // namespace

void InFlight::start(const Communicator& ep, const Tensor& rows, const std::vector<int64_t>& to,
                     const std::vector<int64_t>& from) {
  const int64_t H = rows.size(1);
  const auto elements = [H](std::vector<int64_t> counts) {
    for (int64_t& count : counts) count *= H;
    return counts;
  };
  arriving_ = Tensor::empty({sum(from), H}, rows.dtype());
  exchange_ = ep.all_to_all_v_async(arriving_, rows, elements(from), elements(to));
}

Tensor InFlight::wait() {
  exchange_.wait();
  return arriving_;
}

Dispatch::Dispatch(const ExpertsConfig& config, RmsNorm norm, std::unique_ptr<Linear> router,
                   const Communicator& ep, const Communicator& counts)
    : config_(config), norm_(norm), router_(std::move(router)), ep_(ep), counts_(counts) {}

Tensor Dispatch::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  Routing& routing = saved.emplace<Routing>();
  const Tensor normed = norm_.forward(x, kept.norm);             // [T, H]
  routing = route(router_->forward(normed, kept.router, pass));  // of logits [T, E]
  const Shape rows_shape{routing.slots.numel(), x.size(1)};      // [R, H]
  const Tensor rows = Tensor::empty(rows_shape, x.dtype());
  loops::scatter(rows, normed, routing.slots);
  saved.emplace<ToExperts>().start(ep_, rows, routing.rows_to_rank, routing.rows_by_rank);
  return x;
}

Routing Dispatch::route(const Tensor& logits) const {
  const Shape choices_shape{logits.size(0), config_.top_k};
  Routing routing;
  routing.probs = Tensor::empty(logits.shape(), accumulate_dtype(logits.dtype()));
  routing.choices = Tensor::empty(choices_shape, DType::i32);
  routing.slots = Tensor::empty(choices_shape, DType::i32);
  const Tensor to_experts = Tensor::zeros({config_.num_experts}, DType::i32);
  loops::softmax(routing.probs, logits);
  loops::choose_top_k(routing.choices, routing.probs);
  loops::count_choices(to_experts, routing.choices);
  loops::assign_slots(routing.slots, routing.choices, to_experts);
  exchange_counts(routing, to_experts);
  return routing;
}

void Dispatch::exchange_counts(Routing& routing, const Tensor& to_experts) const {
  const int64_t E = config_.num_experts, experts = E / ep_.size();
  const Tensor from_ranks = Tensor::empty({E}, DType::i32);
  counts_.all_to_all(from_ranks, to_experts);  // E counts
  if (to_experts.device() == Device::meta) {
    // Nobody has chosen. Of the choices, spread evenly, every rank sends as many to these experts.
    routing.to_experts = even_counts(routing.choices.numel(), E);
    const auto own = routing.to_experts.begin() + ep_.rank() * experts;
    for (int rank = 0; rank < ep_.size(); ++rank) {
      routing.from_ranks.insert(routing.from_ranks.end(), own, own + experts);
    }
  } else {
    // The one read to the host that a training step makes: it says how large the buffers must be.
    routing.to_experts = to_experts.counts();
    routing.from_ranks = from_ranks.counts();
  }
  routing.rows_to_rank = sums_of(routing.to_experts, ep_.size());
  routing.rows_by_rank = sums_of(routing.from_ranks, ep_.size());
}

Tensor Dispatch::backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const Routing routing = saved.take<Routing>();
  const Tensor dprobs = saved.take<RouterGradient>().dprobs;         // [T, E]
  const Tensor dlogits = Tensor::empty(dprobs.shape(), dy.dtype());  // [T, E]
  loops::softmax_backward(dlogits, dprobs, routing.probs);
  const Tensor dnormed = router_->backward(dlogits, kept.router, grads, pass);  // [T, H]
  const Tensor drows = saved.take<FromExperts>().wait();                        // [R, H]
  loops::gather_add(dnormed, drows, routing.slots);
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/dy);
}

Experts::Experts(std::vector<FeedForward> experts, const Communicator& ep)
    : experts_(std::move(experts)), ep_(ep) {}

template <class Run>
Tensor Experts::each_expert(const Tensor& rows, const Routing& routing, const Run& run) const {
  Tensor outputs = Tensor::empty(rows.shape(), rows.dtype());
  int64_t begin = 0;
  for (size_t expert = 0; expert < experts_.size(); ++expert) {
    int64_t count = 0;
    for (int rank = 0; rank < ep_.size(); ++rank) {
      count += routing.from_ranks[rank * experts_.size() + expert];
    }
    // An expert without rows runs like any other: its weights expect a gradient.
    ops::copy(outputs.narrow(0, begin, count), run(expert, rows.narrow(0, begin, count)));
    begin += count;
  }
  return outputs;
}

Tensor Experts::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  const Routing& routing = saved.get<Routing>();
  std::vector<FeedForward::Saved>& kept = saved.emplace<Saved>().experts;
  kept.resize(experts_.size());
  const Tensor arrived = saved.take<ToExperts>().wait();  // [Q, H]
  const Tensor rows = by_expert(arrived, routing, std::ssize(experts_));
  const Tensor outputs = each_expert(rows, routing, [&](size_t expert, const Tensor& own) {
    return experts_[expert].forward(own, kept[expert], pass);
  });
  saved.emplace<FromExperts>().start(ep_, by_rank(outputs, routing, std::ssize(experts_)),
                                     routing.rows_by_rank, routing.rows_to_rank);
  return x;
}

Tensor Experts::backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) {
  const Routing& routing = saved.get<Routing>();
  std::vector<FeedForward::Saved> kept = saved.take<Saved>().experts;
  const Tensor arrived = saved.take<ToExperts>().wait();  // [Q, H]
  const Tensor doutputs = by_expert(arrived, routing, std::ssize(experts_));
  const Tensor drows = each_expert(doutputs, routing, [&](size_t expert, const Tensor& own) {
    return experts_[expert].backward(own, kept[expert], grads, pass);
  });
  saved.emplace<FromExperts>().start(ep_, by_rank(drows, routing, std::ssize(experts_)),
                                     routing.rows_by_rank, routing.rows_to_rank);
  return dy;
}

Combine::Combine(const Communicator& ep) : ep_(ep) {}

Tensor Combine::forward(const Tensor& x, BlockSaved& saved, const Pass&) {
  const Routing& routing = saved.get<Routing>();
  Saved& kept = saved.emplace<Saved>();
  kept.rows = saved.take<FromExperts>().wait();  // [R, H]
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  loops::combine(y, x, kept.rows, routing);
  return y;
}

Tensor Combine::backward(const Tensor& dy, BlockSaved& saved, Grads&, const Pass&) {
  const Routing& routing = saved.get<Routing>();
  const Tensor rows = saved.take<Saved>().rows;                    // [R, H]
  const Tensor drows = Tensor::empty(rows.shape(), rows.dtype());  // [R, H]
  RouterGradient& gradient = saved.emplace<RouterGradient>();
  gradient.dprobs = Tensor::zeros(routing.probs.shape(), routing.probs.dtype());
  loops::combine_backward(drows, gradient.dprobs, dy, rows, routing);
  saved.emplace<ToExperts>().start(ep_, drows, routing.rows_to_rank, routing.rows_by_rank);
  return dy;
}

namespace {

constexpr double kInitStd = 0.02;

/// This rank's experts, their weights added one expert after the other.
std::vector<FeedForward> own_experts(const ExpertsConfig& config, const ModelConfig& model,
                                     int64_t layer, ParameterList& parameters,
                                     const Communicator& ep) {
  const int64_t H = model.hidden_size, F = model.ffn_hidden_size;
  const double residual_init_std = kInitStd / std::sqrt(2.0 * double(model.num_layers));
  const int64_t count = config.num_experts / ep.size();
  std::vector<FeedForward> experts;
  for (int64_t expert = ep.rank() * count; expert < (ep.rank() + 1) * count; ++expert) {
    const auto weight = [&](const char* name, const Shape& shape, double init_std) {
      Parameter& parameter = parameters.add(
          fmt::format("model.layers.{}.mlp.experts.{}.{}", layer, expert, name), shape, init_std);
      parameter.grad_groups = {"edp"};
      return &parameter;
    };
    Parameter* gate = weight("gate_proj.weight", {F, H}, kInitStd);
    Parameter* up = weight("up_proj.weight", {F, H}, kInitStd);
    Parameter* down = weight("down_proj.weight", {H, F}, residual_init_std);
    experts.emplace_back(std::make_unique<Linear>(std::vector{gate, up}),
                         std::make_unique<Linear>(std::vector{down}));
  }
  return experts;
}

}  // namespace

std::vector<std::unique_ptr<Segment>> make_experts(const ExpertsConfig& config,
                                                   const ModelConfig& model, int64_t layer,
                                                   ParameterList& parameters,
                                                   const Communicator& ep) {
  const int64_t H = model.hidden_size, E = config.num_experts;
  if (config.top_k < 1 || config.top_k > E) {
    usage_error("top_k={} must be from 1 to num_experts={}", config.top_k, E);
  }
  if (E % ep.size() != 0) {
    usage_error("ep_size={} must divide num_experts={}; try {}", ep.size(), E, list_divisors(E));
  }
  const auto name = [&](const char* rest) {
    return fmt::format("model.layers.{}.{}", layer, rest);
  };
  const RmsNorm norm(parameters.add(name("post_attention_layernorm.weight"), {H}, 0),
                     model.rms_norm_eps);
  Parameter& router = parameters.add(name("mlp.gate.weight"), {E, H}, kInitStd);
  const Communicator counts = ep.split("ep_counts", [](int) { return 0; });
  std::vector<std::unique_ptr<Segment>> segments;
  segments.push_back(std::make_unique<Dispatch>(
      config, norm, std::make_unique<Linear>(std::vector{&router}), ep, counts));
  segments.push_back(
      std::make_unique<Experts>(own_experts(config, model, layer, parameters, ep), ep));
  segments.push_back(std::make_unique<Combine>(ep));
  return segments;
}

}  // namespace usp::rehearsal

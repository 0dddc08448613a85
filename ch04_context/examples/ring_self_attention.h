#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "comm/communicator.h"
#include "tensor/ops.h"

namespace usp {

// Sequence parallelism as Li et al. (2021, https://arxiv.org/abs/2105.13120) first had it. Ring
// attention (Liu et al., 2023, https://arxiv.org/abs/2310.01889) came later: it needs no whole row
// of scores.
//
// Dimensions in this file: B samples of S tokens, N heads of D channels; n ranks have R = S/n rows
// of each sample, rank r those from r R on.

/// Causal attention in which keys go round a ring to make whole rows of scores, softmax is over
/// whole rows, and then values go round. It computes in f64; on meta, in any dtype.
///
/// |              | one GPU      | each of n ranks                                        |
/// |--------------|--------------|--------------------------------------------------------|
/// | q, k, v, out | [B, S, N, D] | [B, R, N, D]                                           |
/// | probs        | [B, N, S, S] | [B, N, R, S]: all keys, for the rank's queries         |
/// | dk, dv       | [B, S, N, D] | terms of all [n, B, R, N, D], summed by an all-reduce  |
class RingSelfAttention {
 public:
  struct Saved {
    Tensor q, k, v;  ///< [B, R, N, D]
    Tensor probs;    ///< [B, N, R, S]
  };
  struct Gradients {
    Tensor dq, dk, dv;  ///< [B, R, N, D]
  };

  explicit RingSelfAttention(const Communicator& ring) : ring_(ring) {}

  // [forward]
  /// q, k, v [B, R, N, D] of this rank's rows -> out [B, R, N, D]
  Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, Saved& saved) const {
    const int64_t B = q.size(0), R = q.size(1), N = q.size(2), n = ring_.size();
    saved = {q, k, v, Tensor::empty({B, N, R, n * R}, q.dtype(), "probabilities")};
    each_block(k, [&](int place, int64_t b, int64_t h, const Tensor& keys) {
      ops::matmul(block(saved.probs, b, h, place), head(q, b, h), keys.transposed());
    });
    softmax(saved.probs, q.size(3));
    const Tensor out = Tensor::zeros(q.shape(), q.dtype());
    each_block(v, [&](int place, int64_t b, int64_t h, const Tensor& values) {
      ops::matmul(head(out, b, h), block(saved.probs, b, h, place), values, /*accumulate=*/true);
    });
    return out;
  }
  // [forward]

  // [backward]
  /// dout [B, R, N, D]
  Gradients backward(const Tensor& dout, const Saved& saved) const {
    const Tensor dv = summed_terms(saved.probs, dout);
    const Tensor dscores = Tensor::empty(saved.probs.shape(), dout.dtype());  // dprobs at first
    each_block(saved.v, [&](int place, int64_t b, int64_t h, const Tensor& values) {
      ops::matmul(block(dscores, b, h, place), head(dout, b, h), values.transposed());
    });
    softmax_backward(dscores, saved.probs, dout.size(3));
    const Tensor dk = summed_terms(dscores, saved.q);
    const Tensor dq = Tensor::zeros(dout.shape(), dout.dtype());
    each_block(saved.k, [&](int place, int64_t b, int64_t h, const Tensor& keys) {
      ops::matmul(head(dq, b, h), block(dscores, b, h, place), keys, /*accumulate=*/true);
    });
    return {dq, dk, dv};
  }
  // [backward]

 private:
  using Visit = std::function<void(int place, int64_t b, int64_t h, const Tensor& rows)>;

  /// Calls visit() for every head of the block of each place [B, R, N, D]: this rank's own first,
  /// then those that come round, while the next one is on its way.
  void each_block(const Tensor& own, const Visit& visit) const {
    const int n = ring_.size(), rank = ring_.rank();
    Tensor here = own;
    for (int step = 0; step < n; ++step) {
      Tensor coming;
      Handle passing;
      if (step + 1 < n) {
        coming = Tensor::empty(own.shape(), own.dtype());
        const SendRecv both[] = {{SendRecv::send, here, (rank + 1) % n},
                                 {SendRecv::recv, coming, (rank + n - 1) % n}};
        passing = ring_.send_recv_async(both);
      }
      for (int64_t b = 0; b < own.size(0); ++b) {
        for (int64_t h = 0; h < own.size(2); ++h) {
          visit((rank - step + n) % n, b, h, head(here, b, h));
        }
      }
      passing.wait();
      here = coming;
    }
  }

  // [summed_terms]
  /// weightsᵀ x, for weights [B, N, R, S] and x [B, R, N, D] of each rank's queries, summed over
  /// the ranks: this rank's rows of it. The sum is of all S rows, of which the others are dropped.
  Tensor summed_terms(const Tensor& weights, const Tensor& x) const {
    const int64_t B = x.size(0), R = x.size(1), N = x.size(2), n = ring_.size();
    const Tensor all = Tensor::empty({n * B, R, N, x.size(3)}, x.dtype());
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < N; ++h) {
        for (int place = 0; place < n; ++place) {
          ops::matmul(head(all, place * B + b, h), block(weights, b, h, place).transposed(),
                      head(x, b, h));
        }
      }
    }
    ring_.all_reduce(all);
    const Tensor own = Tensor::empty(x.shape(), x.dtype());
    ops::copy(own, all.narrow(0, ring_.rank() * B, B));
    return own;
  }
  // [summed_terms]

  /// scores [B, N, R, S] become probabilities over the keys at or before each row's position.
  void softmax(const Tensor& scores, int64_t D) const {
    each_row(scores, [&](int64_t row, int64_t seen, int64_t S) {
      double* values = scores.data<double>() + row * S;
      const double largest = *std::max_element(values, values + seen);
      double sum = 0;
      for (int64_t key = 0; key < seen; ++key) {
        values[key] = std::exp((values[key] - largest) / std::sqrt(double(D)));
        sum += values[key];
      }
      for (int64_t key = 0; key < S; ++key) values[key] = key < seen ? values[key] / sum : 0;
    });
  }

  /// dprobs [B, N, R, S] become the gradients of the products of queries and keys.
  void softmax_backward(const Tensor& dprobs, const Tensor& probs, int64_t D) const {
    each_row(probs, [&](int64_t row, int64_t seen, int64_t S) {
      double* gradient = dprobs.data<double>() + row * S;
      const double* p = probs.data<double>() + row * S;
      double mean = 0;
      for (int64_t key = 0; key < seen; ++key) mean += p[key] * gradient[key];
      for (int64_t key = 0; key < S; ++key) {
        gradient[key] = p[key] * (gradient[key] - mean) / std::sqrt(double(D));
      }
    });
  }

  /// Calls visit(row, how many keys it sees, S) for every row of [B, N, R, S].
  void each_row(const Tensor& x,
                const std::function<void(int64_t row, int64_t seen, int64_t S)>& visit) const {
    if (x.device() == Device::meta) return;
    const int64_t R = x.size(2), S = x.size(3);
    for (int64_t row = 0; row < x.numel() / S; ++row) visit(row, ring_.rank() * R + row % R + 1, S);
  }

  /// [R, D] of x [B, R, N, D]
  static Tensor head(const Tensor& x, int64_t b, int64_t h) {
    return x.narrow(0, b, 1).narrow(2, h, 1).view({x.size(1), x.size(3)});
  }
  /// [R, R] of scores [B, N, R, S]: those of a place's keys.
  static Tensor block(const Tensor& scores, int64_t b, int64_t h, int place) {
    const int64_t R = scores.size(2);
    return scores.narrow(0, b, 1).narrow(1, h, 1).narrow(3, place * R, R).view({R, R});
  }

  Communicator ring_;
};

// [formulas]
/// What attention over n ranks holds and sends, with as many kv heads as heads; `own`: bytes of a
/// number, `acc`: of one in acc dtype.
struct AttentionCosts {
  int64_t kept;  ///< bytes of a rank between forward and backward, the output among them
  int64_t peak;  ///< bytes of a rank at a time, in backward, without what messages need
  int64_t sent;  ///< bytes of a rank, forward and backward

  /// Whole rows of scores, in backward twice, and gradients of all S keys. Four trips of a block,
  /// and two all-reduces of n blocks.
  static AttentionCosts ring_self_attention(int64_t B, int64_t S, int64_t N, int64_t D, int64_t n,
                                            int64_t own) {
    const int64_t rows = B * S / n, block = rows * N * D, scores = N * rows * S;
    const int64_t kept = 4 * block + scores;
    return {kept * own, (kept + scores + (n + 3) * block) * own, 8 * (n - 1) * block * own};
  }
  /// A number a row and head instead of scores. Keys and values make two trips, their gradients
  /// one, in acc dtype. At backward's peak there are, besides what is kept and the gradients so
  /// far, the keys that are here and those that come, and four blocks' gradients: the own one, the
  /// one that is computed, the one that comes and the one that is sent.
  static AttentionCosts ring_attention(int64_t B, int64_t S, int64_t N, int64_t D, int64_t n,
                                       int64_t own, int64_t acc) {
    const int64_t rows = B * S / n, block = rows * N * D;
    const int64_t kept = 4 * block * own + rows * N * acc;
    const int64_t keys = (n > 3 ? 2 : 1) * 2 * block, gradients = (n > 2 ? 4 : 3) * 2 * block;
    const int64_t sums = rows * N * acc + 3 * block * acc;  // delta, and those of q, k and v
    return {kept, kept + block * own + sums + keys * own + gradients * acc,
            (n - 1) * 2 * block * (2 * own + acc)};
  }
};
// [formulas]

}  // namespace usp

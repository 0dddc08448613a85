#pragma once

#include <algorithm>
#include <string>

#include "base/rng.h"
#include "data_parallel/zero.h"
#include "optimizer.h"
#include "parallel_llama.h"
#include "pipeline_parallel/executor.h"

/// The smallest trainer that runs every kind of parallelism for which a layer takes the place of
/// another: what a chapter does to Trainer, over chapter 5's pipeline as it is.
namespace usp::rehearsal {

struct Setting {
  ModelConfig model;
  int64_t seq_len = 24;
  int64_t micro_batch_size = 2;
  int64_t micro_batches = 3;  ///< of each data-parallel rank, in a step
  Plan plan;
  std::string schedule = "1f1b";  ///< of the pipeline, by its name
  int64_t chunks = 1;             ///< of each rank of the pipeline
  int64_t zero_stage = 0;
  int64_t shard_size = 0;
};

inline OptimizerConfig optimizer_config() {
  OptimizerConfig config;
  config.grad_clip = 0.5;  // below the norms that occur
  // Where a gradient is almost zero, Adam divides its rounding errors by this.
  config.adam_eps = 1e-4;
  return config;
}

class RehearsalTrainer {
 public:
  RehearsalTrainer(const Setting& setting, const Communicator& world, const MeshSizes& sizes)
      : setting_(setting),
        mesh_(world, with_kv_copies(sizes, setting.model)),
        config_(train_config(setting, sizes)),
        llama_(setting.model, setting.seq_len, setting.plan, mesh_),
        model_(
            [this](int64_t block, ParameterList& parameters) { return build(block, parameters); },
            blocks_of_rank(config_, mesh_.pp().rank()).chunks),
        grads_(model_.parameters()),
        optimizer_(model_.parameters(), optimizer_config()),
        pipeline_(config_, model_, grads_, llama_.region(), mesh_) {
    {
      const CategoryScope scope(Category::workspace);
      loss_ = Tensor::zeros({1}, DType::f64);
    }
    data_parallel_ = make_data_parallel(config_, model_, grads_, optimizer_, mesh_);
  }

  void train_step(int64_t step) {
    const NoHostReads no_host_reads;
    ops::fill(loss_, 0);
    data_parallel_->begin_step(setting_.micro_batches);
    pipeline_.train([&](int64_t i) { return take_batch(step, i); });
    grads_.end_window();
    data_parallel_->finish();
    squares_ = optimizer_.grad_squares();
    mesh_.world().all_reduce(squares_);
    optimizer_.step(step, /*lr=*/0.01, squares_);
    data_parallel_->after_update();
  }

  /// The rank's samples of a step, and of these samples its positions.
  Pass take_batch(int64_t step, int64_t micro_step) const {
    const int64_t B = setting_.micro_batch_size, vocab = setting_.model.vocab_size;
    const int64_t micro_batch = micro_step * mesh_.dp().size() + mesh_.dp().rank();
    const int64_t global = setting_.micro_batches * mesh_.dp().size() * B;
    Pass pass;
    pass.num_samples = B;
    pass.seq_len = setting_.seq_len;
    pass.positions = llama_.context().positions(setting_.seq_len);
    std::vector<int32_t> tokens, targets;
    const RandomStream random(kSeed, "tokens");
    for (int64_t b = 0; b < B; ++b) {
      const int64_t sample = step * global + micro_batch * B + b;
      for (int64_t s = 0; s < pass.positions.count(); ++s) {
        const auto token = [&](int64_t position) {
          return static_cast<int32_t>(random.bits(sample, position).a % uint64_t(vocab));
        };
        tokens.push_back(token(pass.positions[s]));
        targets.push_back(token(pass.positions[s] + 1));
      }
    }
    pass.tokens = Tensor::from_host(tokens, {std::ssize(tokens)});
    pass.targets = Tensor::from_host(targets, {std::ssize(targets)});
    pass.loss = loss_;
    pass.loss_scale = 1 / double(global * setting_.seq_len);
    return pass;
  }

  double loss() const {
    mesh_.world().all_reduce(loss_);
    return loss_.item();
  }
  double grad_norm() const { return optimizer_.grad_norm().item(); }
  ParameterList& parameters() { return model_.parameters(); }
  const Optimizer& optimizer() const { return optimizer_; }
  const DataParallelStrategy& data_parallel() const { return *data_parallel_; }
  const Mesh& mesh() const { return mesh_; }

 private:
  static constexpr uint64_t kSeed = 5;

  static MeshSizes with_kv_copies(MeshSizes sizes, const ModelConfig& model) {
    sizes.tp_kv = std::max<int64_t>(1, sizes.tp / model.num_kv_heads);
    return sizes;
  }

  static TrainConfig train_config(const Setting& setting, const MeshSizes& sizes) {
    TrainConfig config;
    config.model = setting.model;
    config.dtype = "f64";
    config.seed = kSeed;
    config.seq_len = setting.seq_len;
    config.micro_batch_size = setting.micro_batch_size;
    config.grad_acc_steps = setting.micro_batches;
    config.data_parallel = {sizes.dp, "bucketed", 0.0007, setting.zero_stage, setting.shard_size};
    config.tensor_parallel.tp_size = sizes.tp;
    config.tensor_parallel.sequence_parallel = setting.plan.sequence_parallel;
    config.context_parallel.cp_size = sizes.cp;
    config.pipeline.pp_size = sizes.pp;
    config.pipeline.pp_schedule = setting.schedule;
    config.pipeline.pp_chunks = setting.chunks;
    return config;
  }

  Block build(int64_t block, ParameterList& parameters) {
    Block segments;
    if (block == 0) {
      segments.push_back(llama_.embedding(parameters));
    } else if (block == llama_.num_blocks() - 1) {
      segments.push_back(llama_.head(parameters));
    } else {
      segments.push_back(llama_.attention(block - 1, parameters));
      segments.push_back(llama_.mlp(block - 1, parameters));
    }
    return segments;
  }

  Setting setting_;
  Mesh mesh_;
  TrainConfig config_;
  ParallelLlama llama_;
  Model model_;
  Grads grads_;
  Optimizer optimizer_;
  Pipeline pipeline_;
  std::unique_ptr<DataParallelStrategy> data_parallel_;
  Tensor loss_, squares_;
};

}  // namespace usp::rehearsal

#include "fusion/fusion.h"

#include <algorithm>

#include "base/rules.h"
#include "config.h"
#include "run/attention_choice.h"
#include "tensor/backend.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

[[maybe_unused]] const bool is_announced = [] {
  asks_for_fused_kernels = [](const RunConfig& run) {
    return static_cast<const TrainConfig&>(run).fusion.fused();
  };
  return true;
}();

}  // namespace

void FusionConfig::bind(Args& args) {
  args.group("Fusion");
  args.bind("kernels", kernels, {"reference", "fused"},
            "each operation by itself, or head and loss as one that never holds the logits, and "
            "attention on a GPU's tensor cores")
      .may_differ_on_resume();
  args.bind("loss_rows", loss_rows, "rows of the logits that kernels=fused holds at once")
      .may_differ_on_resume();
}

FusionConfig FusionConfig::of_twin(const TrainConfig& run) const {
  constexpr int64_t kFewRows = 3;  // of 4 tokens or more, hence several chunks, mostly with a rest
  const int64_t tokens = run.samples_of_pass() * run.seq_len / run.context_parallel.cp_size;
  FusionConfig twin = *this;
  if (fused() && tokens > loss_rows) twin.loss_rows = std::min(kFewRows, loss_rows);
  return twin;
}

void FusionConfig::tell_device(const MlaShape& mla) const {
  Runtime::current().backend().fuse(fused());
  Runtime::current().backend().promise_values(mla.on() ? mla.v_head_dim : 0);
}

void FusionConfig::validate(const Args&) const { check_positive("loss_rows", loss_rows); }

void FusionConfig::check(const TrainConfig&) const {
  if (fused() || loss_rows == kLossRows) return;
  refuse_silent("rows_of_fused_loss", {"leave out --loss_rows", "--kernels fused"},
                "loss_rows={} is for kernels=fused", loss_rows);
}

}  // namespace usp

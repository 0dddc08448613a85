#include "fusion/fusion.h"

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

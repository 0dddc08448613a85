#include "config.h"

namespace usp {

void TrainConfig::bind(Args& args) {
  each_part([&](auto& part) { part.bind(args); });
  bind_training(args);
  bind_data(args);
  bind_execution(args);
  args.bind("attention", attention, {"naive", "blockwise"},
            "store attention probabilities, or recompute them in backward; on a GPU: the faster");
  args.bind("recompute", recompute, {"none", "selective", "full"},
            "drop the attention probabilities, or all of a block but its input, until backward")
      .may_differ_on_resume();
  args.bind("grad_accumulation", grad_accumulation, {"bf16", "f32", "both"},
            "in what dtype bf16 runs keep and sum gradients; both: one for each");
  bind_output(args);
}

void TrainConfig::validate(const Args& args) {
  each_part([&](auto& part) { part.validate(args); });
  validate_run();
  if (grad_accumulation != "f32" && dtype != "bf16") {
    refuse_silent("grad_accumulation_of_bf16", {"leave out --grad_accumulation", "--dtype bf16"},
                  "grad_accumulation={} needs dtype=bf16, not {}", grad_accumulation, dtype);
  }
  each_part([&](const auto& part) { part.check(*this); });
}

}  // namespace usp

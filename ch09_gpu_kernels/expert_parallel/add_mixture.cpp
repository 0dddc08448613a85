#include "expert_parallel/add_mixture.h"

#include <optional>

#include "expert_parallel/node_dispatch.h"
#include "tensor_parallel/linears.h"

namespace usp {

void add_mixture(const ModelConfig& config, const MixtureOptions& options, const RankView& view,
                 ParameterList& parameters, Block& block) {
  const ExpertShape& shape = config.experts;
  const int64_t H = config.hidden_size, F = shape.width(config.ffn_hidden_size);
  const TensorRegion& region = view.region;
  const auto weight = [&](const std::string& name, const Shape& sizes,
                          double init_std) -> Parameter& {
    return parameters.add(options.prefix + name, sizes, init_std);
  };
  Parameter& norm = weight("post_attention_layernorm.weight", {H}, 0);
  Parameter& gate = weight("mlp.gate.weight", {shape.num_experts, H}, options.init_std);
  region.replicate(norm);
  region.replicate(gate);
  std::optional<FeedForward> shared;
  if (const int64_t wide = shape.num_shared_experts * F; wide > 0) {
    Parameter& gate_proj =
        weight("mlp.shared_experts.gate_proj.weight", {wide, H}, options.init_std);
    Parameter& up = weight("mlp.shared_experts.up_proj.weight", {wide, H}, options.init_std);
    Parameter& down =
        weight("mlp.shared_experts.down_proj.weight", {H, wide}, options.output_init_std);
    auto gate_up = make_column_parallel({&gate_proj, &up}, "gate_up", region);
    shared.emplace(std::move(gate_up), make_row_parallel(down, region));
    // [fuse_shared]
    if (view.fusion.fused()) shared->fuse();
    // [fuse_shared]
  }
  // [expert_groups]
  const int64_t here = shape.num_experts / view.experts.size();
  const int64_t first = view.experts.rank() * here;
  std::vector<Parameter*> gate_up, down;
  const auto of_expert = [&](int64_t expert, const char* name, const Shape& sizes, double init_std,
                             int cut_axis) {
    Parameter& added =
        weight(fmt::format("mlp.experts.{}.{}.weight", expert, name), sizes, init_std);
    added.grad_groups = {"edp"};  // other ranks' copies of the same expert
    if (view.experts.config().expert_tp) region.share(added, cut_axis);
    return &added;
  };
  // [expert_groups]
  for (int64_t e = first; e < first + here; ++e) {
    gate_up.push_back(of_expert(e, "gate_proj", {F, H}, options.init_std, 0));
    gate_up.push_back(of_expert(e, "up_proj", {F, H}, options.init_std, 0));
  }
  for (int64_t e = first; e < first + here; ++e) {
    down.push_back(of_expert(e, "down_proj", {H, F}, options.output_init_std, 1));
  }
  Router router(shape, std::make_unique<RouterLinear>(gate), view.experts, region, view.context,
                view.load->add_layer(options.layer));
  // [fuse]
  const Mixture mixture{shape, H, view.experts, region, view.fusion.fused()};
  // [fuse]
  block.push_back(
      std::make_unique<Dispatch>(RmsNorm(norm, config.rms_norm_eps), std::move(router), mixture));
  if (mixture.nodes()) block.push_back(std::make_unique<FanOut>(mixture));
  block.push_back(std::make_unique<Experts>(GroupedLinear(gate_up, here, "gate_up"),
                                            GroupedLinear(down, here, "expert output"),
                                            std::move(shared), mixture));
  if (mixture.nodes()) block.push_back(std::make_unique<FanIn>(mixture));
  block.push_back(std::make_unique<Combine>(mixture));
}

}  // namespace usp

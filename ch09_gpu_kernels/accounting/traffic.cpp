#include "accounting/traffic.h"

#include "accounting/context_accountant.h"
#include "accounting/expert_accountant.h"
#include "accounting/pipeline_accountant.h"
#include "accounting/tensor_accountant.h"
#include "accounting/zero_accountant.h"

namespace usp {

// [arguments]
std::vector<Traffic> traffic_of_step(const TrainConfig& config,
                                     const DataParallelStrategy& strategy, const Mesh& mesh,
                                     const RankView& view) {
  // [arguments]
  std::vector<Traffic> rows;
  // [rows]
  rows.push_back(data_parallel_traffic(config, strategy));
  rows.push_back(tensor_traffic(config, mesh.tp()));
  rows.push_back(context_traffic(config, view.context));
  rows.push_back(pipeline_traffic(config, mesh.pp()));
  rows.push_back(expert_traffic(config, mesh.ep(), view.experts));
  // [rows]
  return rows;
}

}  // namespace usp

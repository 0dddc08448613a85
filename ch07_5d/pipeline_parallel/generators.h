#pragma once

#include <string>
#include <vector>

#include "pipeline_parallel/schedule.h"
#include "pipeline_parallel/simulate_schedule.h"

namespace usp {

/// What a generator is asked for.
struct ScheduleRequest {
  int64_t ranks = 1;           ///< p
  int64_t micro_batches = 1;   ///< m
  int64_t chunks = 1;          ///< v
  int64_t run_length = 0;      ///< N of `llama3`: micro-batches in a row; 0: p
  WorkTimes times = {};        ///< of `auto`
  int64_t most_in_flight = 0;  ///< of `auto`: micro-batches on a rank; 0: p
};

/// The names that make_schedule() knows.
const std::vector<std::string>& schedule_names();

/// The schedule of this name:
///
/// | name            | source                                | arXiv      | placement | backward |
/// |-----------------|---------------------------------------|------------|-----------|----------|
/// | `naive`         | one micro-batch at a time             |            | loop      | BW       |
/// | `afab`          | GPipe, Huang et al. (2019)            | 1811.06965 | loop      | BW       |
/// | `1f1b`          | PipeDream-flush, Narayanan (2021)     | 2006.09503 | loop      | BW       |
/// | `interleaved`   | Megatron-LM, Narayanan et al. (2021)  | 2104.04473 | loop      | BW       |
/// | `breadth_first` | Lamy-Poirier (2023)                   | 2211.05953 | loop      | BW       |
/// | `llama3`        | Llama 3, Dubey et al. (2024)          | 2407.21783 | loop      | BW       |
/// | `zb_h1`,`zb_h2` | zero bubble, Qi et al. (2023)         | 2401.10241 | loop      | B and W  |
/// | `zb_v`          | Qi et al. (2024)                      | 2405.15362 | fold      | B and W  |
/// | `dualpipe`      | DeepSeek-V3 (2024)                    | 2412.19437 | mirror    | both     |
/// | `dualpipe_v`    | the same, folded                      |            | fold      | both     |
/// | `auto`          | a list scheduler, from measured times |            | loop      | B and W  |
///
/// Throws UsageError where the request is none that the schedule can take, with one that it can.
Schedule make_schedule(const std::string& name, const ScheduleRequest& request);

}  // namespace usp

#pragma once

#include <string>

#include "base/args.h"

namespace usp {

struct TrainConfig;

/// Which ranks are neighbors, and what a run says and checks of who holds what.
struct CompositionConfig {
  static constexpr int64_t kMostRanksOfTwins = 64;  ///< that `prove` may ask for

  std::string mesh_order = "pp,dp,cp,tp";  ///< the axes from the slowest to the fastest
  std::string mesh_show;                   ///< print who is who, or the flags, instead of training
  std::string mesh_why;                    ///< of which row of the types the reason is asked
  int64_t mesh_left_out = 0;               ///< of a layer's messages, from 1 on; 0: none is
  int64_t check_copies = 0;                ///< steps from one comparison to the next; 0: none
  int64_t prove = 0;                       ///< train twins of at most this many ranks; 0: none
  std::string prove_dtype = "f64";         ///< bf16: is it further from one process than rounding?
  double fuzz = 0;                         ///< minutes of layouts drawn at random; 0: none

  bool proves() const { return prove > 0 || fuzz > 0; }

  void bind(Args& args);
  void validate(const Args& args) const;
  /// Throws UsageError if there are no copies to compare, or the run ends before, or if a proof is
  /// asked for beside another question. Any mesh order goes with any run.
  void check(const TrainConfig& run) const;
};

}  // namespace usp

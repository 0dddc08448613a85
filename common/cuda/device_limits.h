#pragma once

namespace usp::cuda {

/// What a kernel may ask of the GPU.
struct DeviceLimits {
  int shared_bytes = 0;     ///< of a block that asks for more than the default
  int capability = 0;       ///< 90 for 9.0, which has what hopper.h needs
  int multiprocessors = 0;  ///< that take blocks at the same time
};
/// Limits of the GPU that this thread uses.
DeviceLimits limits_of_this_device();

}  // namespace usp::cuda

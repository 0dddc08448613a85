#include "cuda/loaded/forward.h"

#include <dlfcn.h>

#include "base/check.h"

namespace usp::cuda {

void* open_library(const std::string& name, const char* needs, const char* does_without) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW);
  if (handle == nullptr) {
    usage_error(
        "{} needs {}, which the loader does not find; try LD_LIBRARY_PATH=/folder/with/it, or {}",
        needs, name, does_without);
  }
  return handle;
}

void* find_function(void* library, const char* name) {
  void* const found = dlsym(library, name);
  USP_CHECK(found != nullptr, "{} is no function of the library that is here", name);
  return found;
}

}  // namespace usp::cuda

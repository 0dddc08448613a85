#pragma once

#include <dlfcn.h>

#include <string>

#include "base/check.h"

namespace usp::cuda {

/// Opens a library that the loader knows. Throws UsageError where it does not: which flag needs the
/// library, and which one does without.
inline void* open_library(const std::string& name, const char* needs, const char* does_without) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW);
  if (handle == nullptr) {
    usage_error(
        "{} needs {}, which the loader does not find; try LD_LIBRARY_PATH=/folder/with/it, or {}",
        needs, name, does_without);
  }
  return handle;
}

/// A function of an opened library.
template <class Function>
Function* find_function(void* library, const char* name) {
  void* const found = dlsym(library, name);
  USP_CHECK(found != nullptr, "{} is no function of the library that is here", name);
  return reinterpret_cast<Function*>(found);
}

}  // namespace usp::cuda

/// Defines the library's function `NAME`: calls what LIBRARY(), once opened, has under this name.
#define USP_FORWARD(LIBRARY, RESULT, NAME, PARAMETERS, ARGUMENTS)     \
  extern "C" RESULT NAME PARAMETERS {                                 \
    static decltype(NAME)* const function =                           \
        usp::cuda::find_function<decltype(NAME)>((LIBRARY)(), #NAME); \
    return function ARGUMENTS;                                        \
  }

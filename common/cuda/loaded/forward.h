#pragma once

#include <string>

namespace usp::cuda {

/// Opens a library that the loader knows. Throws UsageError where it does not: which flag needs the
/// library, and which one does without.
void* open_library(const std::string& name, const char* needs, const char* does_without);

/// The address of a function of an opened library. Throws Error where it has none of the name.
void* find_function(void* library, const char* name);

}  // namespace usp::cuda

/// Defines the library's function `NAME`: calls what LIBRARY(), once opened, has under this name.
#define USP_FORWARD(LIBRARY, RESULT, NAME, PARAMETERS, ARGUMENTS)                        \
  extern "C" RESULT NAME PARAMETERS {                                                    \
    static auto* const function =                                                        \
        reinterpret_cast<decltype(NAME)*>(usp::cuda::find_function((LIBRARY)(), #NAME)); \
    return function ARGUMENTS;                                                           \
  }

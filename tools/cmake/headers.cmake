# Parsing what most files include takes longer than compiling many of them: it is done once for all
# targets that have the same options. Another level of optimization is another set of options. So is
# an option of one source: GCC would silently undo it, so that source needs SKIP_PRECOMPILE_HEADERS,
# and tests/course/test_precompiled.py finds it if it has none.

# usp_precompile_headers(target [header...]): the usual headers, and these, for `target` and for
# those that reuse them.
function(usp_precompile_headers target)
  target_precompile_headers(${target} PRIVATE
    <algorithm> <cmath> <cstdint> <filesystem> <functional> <map> <memory> <optional> <span> <string>
    <vector> <fmt/format.h> ${ARGN})
  usp_cache_despite_headers(${target})
endfunction()

# usp_reuse_headers(target owner): what usp_precompile_headers(owner) has made.
function(usp_reuse_headers target owner)
  target_precompile_headers(${target} REUSE_FROM ${owner})
  usp_cache_despite_headers(${target})
endfunction()

# Without this ccache caches no file that uses a header precompiled by GCC.
function(usp_cache_despite_headers target)
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
endfunction()

# usp_json_first(list): brings the sources that use the JSON library to the front of a list, so that
# one or two of the units into which several sources are united instantiate it, and not each of them.
function(usp_json_first list)
  set(with "")
  set(without "")
  foreach(source IN LISTS ${list})
    file(STRINGS ${source} uses REGEX "^#include .*json" LIMIT_COUNT 1)
    if(uses)
      list(APPEND with ${source})
    else()
      list(APPEND without ${source})
    endif()
  endforeach()
  set(${list} ${with} ${without} PARENT_SCOPE)
endfunction()

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

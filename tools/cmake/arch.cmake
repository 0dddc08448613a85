# Resolves USP_ARCH into explicit compiler flags. `native` itself is never passed on: an object cache keys on the text
# of the flags, and the same text on another CPU would mean another instruction set.

set(USP_ARCH native CACHE STRING "-march to build for: native, x86-64-v3, armv8.2-a, ...")

if(USP_ARCH STREQUAL "native")
  execute_process(
    COMMAND sh -c "\"$1\" -march=native -E -v - </dev/null 2>&1 | grep -m1 -E '(cc1|\"-cc1\")'" sh
            ${CMAKE_CXX_COMPILER}
    OUTPUT_VARIABLE native_line OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    string(REGEX MATCHALL "-m(arch|tune|cpu)=[^ ]+|-m[a-z0-9.-]+( |$)|--param [^ ]+=[0-9]+"
           usp_arch_flags "${native_line}")
    list(TRANSFORM usp_arch_flags STRIP)
    list(FILTER usp_arch_flags EXCLUDE REGEX "^--param")
  else()
    set(usp_arch_flags -march=native)
  endif()
  if(NOT usp_arch_flags)
    set(usp_arch_flags -march=native)
  endif()
else()
  set(usp_arch_flags -march=${USP_ARCH})
endif()

# Which of the optional instruction sets those flags turn on, as the compiler sees it. The
# program checks them when it starts.
execute_process(
  COMMAND ${CMAKE_CXX_COMPILER} ${usp_arch_flags} -dM -E -x c++ /dev/null
  OUTPUT_VARIABLE predefined ERROR_VARIABLE arch_error RESULT_VARIABLE arch_result)
if(NOT arch_result EQUAL 0)
  message(FATAL_ERROR "USP_ARCH=${USP_ARCH} is not known to ${CMAKE_CXX_COMPILER}; "
                      "try native or x86-64-v3\n${arch_error}")
endif()
set(usp_needed_instruction_sets "")
foreach(set IN ITEMS avx2 fma avx512f avx512bw avx512vl avx512dq avx512bf16)
  string(TOUPPER ${set} macro)
  if(predefined MATCHES "#define __${macro}__ 1")
    string(APPEND usp_needed_instruction_sets "USP_NEED(${set})")
  endif()
endforeach()
if(predefined MATCHES "#define __AVX512F__ 1")
  list(APPEND usp_arch_flags -mprefer-vector-width=512)
endif()
string(REGEX REPLACE "USP_NEED\\(([a-z0-9]+)\\)" " \\1" sets "${usp_needed_instruction_sets}")
string(REGEX MATCH "-m(arch|cpu)=[^;]+" usp_arch_summary "${usp_arch_flags}")
string(APPEND usp_arch_summary "${sets}")
message(STATUS "Building for ${usp_arch_summary}")

# Whether the kernels for NVIDIA GPUs are built: AUTO where there is a compiler for them, ON (an error
# without one), OFF. Sets USP_WITH_CUDA. Sanitizers watch host code alone. Under AUTO programs have
# the kernels where there is a GPU too; elsewhere a first build does not wait for them.
set(USP_CUDA AUTO CACHE STRING "Build for NVIDIA GPUs as well: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE USP_CUDA PROPERTY STRINGS AUTO ON OFF)
set(USP_WITH_CUDA OFF)
if(USP_CUDA STREQUAL "OFF" OR USP_SANITIZE OR USP_FUZZ)
  return()
endif()

find_program(USP_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
mark_as_advanced(USP_NVCC)
if(NOT USP_NVCC)
  if(USP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "USP_CUDA=ON needs nvcc, which is not on the PATH nor in /usr/local/cuda/bin; "
      "try -DUSP_NVCC=/path/to/nvcc, or -DUSP_CUDA=AUTO")
  endif()
  message(STATUS "No kernels for NVIDIA GPUs: there is no nvcc; programs run on the CPU")
  return()
endif()
set(CMAKE_CUDA_COMPILER ${USP_NVCC} CACHE FILEPATH "CUDA's compiler")
# The data-center GPUs since 2020 (8.0, 9.0a, 10.0), those that are lent for nothing (7.5, without
# bf16), desktops' (12.0), and as PTX what comes after them.
set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 90a-real 100 120 CACHE STRING "GPUs that kernels are compiled for")
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER} CACHE FILEPATH "Compiles the host's part of .cu files")
enable_language(CUDA)
foreach(kind IN ITEMS STANDARD EXTENSION)  # which CMake does not know before 3.26
  set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
endforeach()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
set(USP_WITH_CUDA ON)
set(USP_PROGRAMS_WITH_CUDA OFF)
if(USP_CUDA STREQUAL "ON" OR EXISTS /dev/nvidiactl OR EXISTS /dev/dxg)
  set(USP_PROGRAMS_WITH_CUDA ON)
else()
  message(STATUS "There is a compiler for NVIDIA GPUs, but no GPU here: programs run on the CPU; try "
    "-DUSP_CUDA=ON to have the kernels in them")
endif()

# usp_add_kernels(target source...): an object library of kernels, by nvcc. What the assembler reports
# of each goes beside its object, for ptxas.py, not to the screen.
# Where constexpr functions are read, such as those of Positions, they are compiled for the GPU too.
# A multiplication and an addition become one instruction (--fmad=true, the default): one rounding
# less, and twice the speed of two. The C++ compiler keeps them apart, so that its bits and those of
# a GPU differ in the last place anyway.
function(usp_add_kernels target)
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/common)
  target_compile_options(${target} PRIVATE --expt-relaxed-constexpr -Xptxas=-v
    -Xcompiler=-Wall,-Wextra $<$<BOOL:${USP_WERROR}>:-Werror=all-warnings>)
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER
    "python3;${CMAKE_SOURCE_DIR}/tools/cmake/ptxas.py;compile;${CMAKE_CXX_COMPILER_LAUNCHER}")
endfunction()

# usp_add_attention(library folder): of a chapter's folder, the rungs of attention that its trainer runs,
# each for the GPUs that run it: Hopper alone, or all with bf16.
function(usp_add_attention library folder)
  set(rungs ${folder}/kernels/attention)
  set(with_bf16 ${CMAKE_CUDA_ARCHITECTURES})
  list(FILTER with_bf16 EXCLUDE REGEX "^7")
  if(NOT with_bf16)
    set(with_bf16 80-real)
  endif()
  usp_add_kernels(${library}_80 ${rungs}/flash_2.cu ${rungs}/flash_2_backward.cu
    ${rungs}/flash_decode.cu ${folder}/fusion/attention.cu)
  set_target_properties(${library}_80 PROPERTIES CUDA_ARCHITECTURES "${with_bf16}")
  usp_add_kernels(${library}_90 ${rungs}/flash_3.cu ${rungs}/flash_3_backward.cu)
  set_target_properties(${library}_90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
  set_target_properties(${library}_80 ${library}_90 PROPERTIES EXCLUDE_FROM_ALL ON)
  add_library(${library} STATIC EXCLUDE_FROM_ALL ${rungs}/tiles.cpp
    $<TARGET_OBJECTS:${library}_80> $<TARGET_OBJECTS:${library}_90>)
  target_compile_options(${library} PRIVATE -Wno-psabi)  # a tensor map is aligned to 64 bytes
  target_link_libraries(${library} PUBLIC usp_common CUDA::cudart_static)  # beside usp_cuda, whole
endfunction()

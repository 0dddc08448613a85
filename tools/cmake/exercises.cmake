# usp_add_exercises(chapter): of every chNN/exercises/exN_name.judge.cpp two programs, built when asked for. judge_chNN_exN
# judges the reader's file; course_chNN_exN every answer that the course knows: starter, solution, wrong answers, mutants.
# Where the judge includes a header of the emulator, answers are kernels: compiled as tests/emulator compiles them, and not
# at all where there is none.
function(usp_add_exercises chapter)
  file(GLOB judges CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${chapter}/exercises/*.judge.cpp)
  string(SUBSTRING ${chapter} 0 4 short)
  foreach(judge IN LISTS judges)
    get_filename_component(name ${judge} NAME_WE)
    string(REGEX MATCH "^ex[0-9]+" number ${name})
    file(STRINGS ${judge} on_emulator REGEX "^#include \"emulator/" LIMIT_COUNT 1)
    if(on_emulator AND (USP_SANITIZE OR NOT USP_TESTS))
      continue()
    endif()
    foreach(kind IN ITEMS judge course)
      set(target ${kind}_${short}_${number})
      set(generated ${CMAKE_BINARY_DIR}/exercises/${target}.cpp)
      set(inputs ${CMAKE_SOURCE_DIR}/${chapter}/exercises/${name}.cpp
          ${CMAKE_SOURCE_DIR}/${chapter}/exercises/${name}.md ${CMAKE_SOURCE_DIR}/tools/exercise/answers.py)
      if(kind STREQUAL "course")
        list(APPEND inputs ${CMAKE_SOURCE_DIR}/solutions/${chapter}/${name}.cpp
             ${CMAKE_SOURCE_DIR}/solutions/${chapter}/${name}.wrong.md
             ${CMAKE_SOURCE_DIR}/tools/exercise/mutants.py)
      endif()
      add_custom_command(OUTPUT ${generated}
        COMMAND python3 -m tools.exercise.answers ${kind} ${short}.${number} ${generated}
        WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} DEPENDS ${inputs} VERBATIM)
      add_executable(${target} EXCLUDE_FROM_ALL ${generated})
      # What a starter has prepared for the reader's lines is not used yet.
      target_compile_options(${target} PRIVATE ${usp_once_flags}
        -Wno-unused-parameter -Wno-unused-variable -Wno-unused-but-set-variable)
      target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/${chapter}/exercises)
      if(on_emulator)
        target_link_libraries(${target} PRIVATE checked_kernels lab_launching)
        # Ahead of the object: or the emulator would call functions of the standard library that are checked as kernels are.
        target_link_options(${target} PRIVATE LINKER:--whole-archive $<TARGET_FILE:cuda_emulator> LINKER:--no-whole-archive)
      else()
        usp_reuse_headers(${target} usp_once)
      endif()
      target_link_libraries(${target} PRIVATE usp_judge)
      usp_exercise_reads_chapter(reads ${judge} ${chapter})
      if(reads)
        target_link_libraries(${target} PRIVATE ${chapter}_objects)
      endif()
    endforeach()
  endforeach()
endfunction()

# usp_exercise_reads_chapter(out judge chapter): whether the judge includes a header of its chapter; only then is the
# chapter compiled before the exercise is.
function(usp_exercise_reads_chapter out judge chapter)
  file(STRINGS ${judge} includes REGEX "^#include \"")
  set(${out} FALSE PARENT_SCOPE)
  foreach(line IN LISTS includes)
    string(REGEX REPLACE "^#include \"(.*)\"$" "\\1" header ${line})
    if(EXISTS ${CMAKE_SOURCE_DIR}/${chapter}/${header})
      set(${out} TRUE PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

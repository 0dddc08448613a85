# usp_sources_of_chapter(out folder): the .cpp files in a chapter's root and in its rooms.
function(usp_sources_of_chapter out folder)
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp ${folder}/*/*.cpp)
  list(FILTER sources EXCLUDE REGEX "/(examples|exercises|figures)/[^/]*$")
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# usp_add_chapter(): the executable of the chapter in the current folder, named after it, from all sources but
# main.cpp as an object library that the chapter's tests link too. Each examples/NAME.cpp is an executable
# <chapter>_NAME.
function(usp_add_chapter)
  get_filename_component(chapter ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  usp_sources_of_chapter(sources ${CMAKE_CURRENT_SOURCE_DIR})
  list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/main.cpp)
  add_library(${chapter}_objects OBJECT ${sources})
  target_include_directories(${chapter}_objects PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_definitions(${chapter}_objects PUBLIC
    USP_CHAPTER="${chapter}")
  target_link_libraries(${chapter}_objects
    PUBLIC usp_ranks PRIVATE nlohmann_json::nlohmann_json)
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/proof/types.cpp)
    target_link_libraries(${chapter}_objects PUBLIC usp_types)
  endif()
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/planner/cluster.cpp)  # in this file alone: it names the checkout
    set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/planner/cluster.cpp PROPERTIES
      COMPILE_DEFINITIONS USP_CLUSTERS="${CMAKE_CURRENT_SOURCE_DIR}/clusters")
  endif()
  target_compile_options(${chapter}_objects PRIVATE ${usp_once_flags})
  usp_reuse_headers(${chapter}_objects usp_once)
  # Headers take longer than the rest of such a file. Where nobody waits for a single one, several
  # share them, so names in their unnamed namespaces must not clash: under the sanitizers, and in a
  # chapter of which another is a copy.
  if(USP_SANITIZE OR NOT chapter IN_LIST usp_newest_chapters)
    set_target_properties(${chapter}_objects PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  endif()
  add_executable(${chapter} main.cpp)
  target_link_libraries(${chapter} PRIVATE ${chapter}_objects)
  if(USP_PROGRAMS_WITH_CUDA)  # whole, or the programs would take usp_common's refusal of this device
    target_link_libraries(${chapter} PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,usp_cuda>)
  endif()
  # A copy of a chapter has no kernels/ of its own: its trainer keeps the blockwise kernels.
  if(USP_WITH_CUDA AND EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/kernels/attention)
    usp_add_attention(${chapter}_attention ${CMAKE_CURRENT_SOURCE_DIR})
    if(USP_PROGRAMS_WITH_CUDA)
      target_link_libraries(${chapter} PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,${chapter}_attention>)
    endif()
  endif()
  target_compile_options(${chapter} PRIVATE ${usp_once_flags})
  usp_reuse_headers(${chapter} usp_once)
  file(GLOB examples CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/examples/*.cpp)
  foreach(example IN LISTS examples)
    get_filename_component(name ${example} NAME_WE)
    add_executable(${chapter}_${name} ${example})
    target_link_libraries(${chapter}_${name} PRIVATE ${chapter}_objects)
    set_property(GLOBAL APPEND PROPERTY usp_examples ${chapter}_${name})
  endforeach()
endfunction()

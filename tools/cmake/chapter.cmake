# usp_add_chapter(): the executable of the chapter in the current folder, named after it, from all sources but
# main.cpp as an object library that the chapter's tests link too. Each examples/NAME.cpp is an executable
# <chapter>_NAME.
function(usp_add_chapter)
  get_filename_component(chapter ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/main.cpp)
  file(READ ${CMAKE_CURRENT_SOURCE_DIR}/chapter.json manifest)
  set(library usp_common)
  if(manifest MATCHES "\"ranks\"")
    set(library usp_ranks)
  endif()
  add_library(${chapter}_objects OBJECT ${sources})
  target_include_directories(${chapter}_objects PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_definitions(${chapter}_objects PUBLIC
    USP_CHAPTER="${chapter}" USP_CORPUS="${CMAKE_SOURCE_DIR}/data/corpus.txt")
  target_link_libraries(${chapter}_objects
    PUBLIC ${library} PRIVATE nlohmann_json::nlohmann_json)
  add_executable(${chapter} main.cpp)
  target_link_libraries(${chapter} PRIVATE ${chapter}_objects)
  file(GLOB examples CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/examples/*.cpp)
  foreach(example IN LISTS examples)
    get_filename_component(name ${example} NAME_WE)
    add_executable(${chapter}_${name} ${example})
    target_link_libraries(${chapter}_${name} PRIVATE ${chapter}_objects)
  endforeach()
endfunction()

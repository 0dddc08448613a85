# Which chapter introduces what: read from the files and from the chapters' chapter.json.

# usp_chapter_field(chapter field out): what chapter.json says, "" if nothing or null.
function(usp_chapter_field chapter field out)
  set(manifest ${CMAKE_SOURCE_DIR}/${chapter}/chapter.json)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${manifest})
  file(READ ${manifest} text)
  string(JSON value ERROR_VARIABLE missing GET "${text}" ${field})
  if(missing)
    set(value "")
  endif()
  set(${out} "${value}" PARENT_SCOPE)
endfunction()

# usp_chapters_testing(out technique chapter...): those of the chapters for which the tests of a
# technique, that is of its header in the chapters, are compiled: where it appears first, where it is
# edited, and at the end of each chain of chapters. Everywhere else its files are the same, which
# ./book delta checks. What has no header in any chapter is as old as the first.
function(usp_chapters_testing out technique)
  set(has_header FALSE)
  set(parents "")
  foreach(chapter IN LISTS ARGN)
    usp_chapter_field(${chapter} parent parent_${chapter})
    list(APPEND parents "${parent_${chapter}}")
    if(EXISTS ${CMAKE_SOURCE_DIR}/${chapter}/${technique}.h)
      set(has_header TRUE)
    endif()
  endforeach()
  set(found "")
  foreach(chapter IN LISTS ARGN)
    set(parent "${parent_${chapter}}")
    if(has_header AND NOT EXISTS ${CMAKE_SOURCE_DIR}/${chapter}/${technique}.h)
      continue()
    endif()
    usp_chapter_field(${chapter} edits edits)
    if(NOT parent OR NOT chapter IN_LIST parents OR edits MATCHES "\"${technique}\\.(h|cpp)\""
       OR (has_header AND NOT EXISTS ${CMAKE_SOURCE_DIR}/${parent}/${technique}.h))
      list(APPEND found ${chapter})
    endif()
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# usp_ends_of_chains(out chapter...): those of the chapters of which no chapter is a copy.
function(usp_ends_of_chains out)
  set(ends ${ARGN})
  foreach(chapter IN LISTS ARGN)
    usp_chapter_field(${chapter} parent parent)
    list(REMOVE_ITEM ends "${parent}")
  endforeach()
  set(${out} ${ends} PARENT_SCOPE)
endfunction()

# usp_carries(out chapter technique): whether the chapter has a technique's files as its parent has them.
function(usp_carries out chapter technique)
  usp_chapter_field(${chapter} parent parent)
  usp_chapter_field(${chapter} edits edits)
  set(${out} FALSE PARENT_SCOPE)
  if(parent AND EXISTS ${CMAKE_SOURCE_DIR}/${parent}/${technique}.h
     AND NOT edits MATCHES "\"${technique}\\.(h|cpp)\"")
    set(${out} TRUE PARENT_SCOPE)
  endif()
endfunction()

# usp_first_with(out file chapter...): the first of the chapters that has the file.
function(usp_first_with out file)
  foreach(chapter IN LISTS ARGN)
    if(EXISTS ${CMAKE_SOURCE_DIR}/${chapter}/${file})
      set(${out} ${chapter} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(FATAL_ERROR "no chapter has ${file}")
endfunction()

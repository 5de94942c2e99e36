# cairn_require_library(TARGET HEADER LIBRARY DEBIAN): the imported target cairn_external::TARGET for a
# library whose own package files are missing or ask for more than Cairn uses. Shared by the build and the
# installed package.
function(cairn_require_library target header library debian)
  find_path(CAIRN_${target}_INCLUDE ${header} HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(CAIRN_${target}_LIBRARY NAMES ${library} HINTS ${CUDAToolkit_LIBRARY_DIR})
  if(NOT CAIRN_${target}_INCLUDE OR NOT CAIRN_${target}_LIBRARY)
    message(FATAL_ERROR
      "Cairn needs ${header} and lib${library}: install them with 'apt-get install ${debian}' or run scripts/install_dependencies")
  endif()
  if(NOT TARGET cairn_external::${target})
    add_library(cairn_external::${target} UNKNOWN IMPORTED GLOBAL)
    set_target_properties(cairn_external::${target} PROPERTIES
      IMPORTED_LOCATION ${CAIRN_${target}_LIBRARY}
      INTERFACE_INCLUDE_DIRECTORIES ${CAIRN_${target}_INCLUDE})
  endif()
endfunction()

# cairn_component(NAME [DEPENDS component...] [LINK library...])
#
# Declares the library cairn::NAME from the folder it is called in:
#   include/cairn/*/*.h      public headers, checked to compile alone (VERIFY_INTERFACE_HEADER_SETS)
#   src/*.cpp                sources of every build
#   src/**/<feature>/        sources of builds with that feature (cuda, nccl, gloo, mpi); src/**/no_<feature>.cpp of those without
# DEPENDS are the components whose headers it may include: nothing else is on its include path.
# LINK are private libraries: no public header may name them.
set(CAIRN_FEATURES cuda nccl gloo mpi)

function(cairn_component name)
  cmake_parse_arguments(arg "" "" "DEPENDS;LINK" ${ARGN})
  file(GLOB_RECURSE headers RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS include/*.h)
  file(GLOB_RECURSE sources RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS src/*.cpp)
  foreach(feature IN LISTS CAIRN_FEATURES)
    string(TOUPPER ${feature} upper)
    if(CAIRN_HAS_${upper})
      list(FILTER sources EXCLUDE REGEX "/no_${feature}\\.cpp$")
      if(feature STREQUAL cuda)
        file(GLOB_RECURSE device_sources CONFIGURE_DEPENDS src/cuda/*.cu)
        list(APPEND sources ${device_sources})
        if(CAIRN_CUDA STREQUAL "SIMULATED")
          cairn_simulate_kernels(${device_sources})
        endif()
      endif()
    else()
      list(FILTER sources EXCLUDE REGEX "/${feature}/")
    endif()
  endforeach()

  # Compiled by themselves, with and without a feature: all other files compile alike in every build, so that
  # ccache has one for the other.
  list(JOIN CAIRN_FEATURES "|" features)
  set(feature_sources ${sources})
  list(FILTER feature_sources INCLUDE REGEX "/(no_)?(${features})[/.]")
  set_source_files_properties(${feature_sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  if(CAIRN_CUDA STREQUAL "SIMULATED")
    list(FILTER feature_sources INCLUDE REGEX "/(cuda|nccl)/")
    set_property(SOURCE ${feature_sources}
      APPEND PROPERTY INCLUDE_DIRECTORIES $<TARGET_PROPERTY:cairn_gpusim,INTERFACE_INCLUDE_DIRECTORIES>)
  endif()

  cairn_library(${name} SOURCES ${sources} HEADERS ${headers} DEPENDS ${arg_DEPENDS} LINK ${arg_LINK})
endfunction()

# cairn_library(NAME SOURCES file... HEADERS file... DEPENDS component... LINK library...): the library
# cairn::NAME of these files.
function(cairn_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;HEADERS;DEPENDS;LINK" ${ARGN})
  add_library(cairn_${name} ${arg_SOURCES})
  add_library(cairn::${name} ALIAS cairn_${name})
  set_target_properties(cairn_${name} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON
    VERIFY_INTERFACE_HEADER_SETS ON
    DEFINE_SYMBOL ""  # archives and shared libraries compile alike, so that ccache has one for the other
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  if(BUILD_SHARED_LIBS)  # exports what is cairn's, and nothing of the libraries that were compiled in
    set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
    target_link_options(cairn_${name} PRIVATE -Wl,--version-script=${exports} -Wl,--no-undefined)
    set_target_properties(cairn_${name} PROPERTIES LINK_DEPENDS ${exports})
  endif()
  target_compile_features(cairn_${name} PUBLIC cxx_std_20)
  if(NOT name MATCHES "^(core|kernels|data|parallel_groups)$")
    target_compile_options(cairn_${name} PRIVATE ${CAIRN_WITHOUT_LOOPS})
  endif()
  target_sources(cairn_${name} PUBLIC FILE_SET HEADERS BASE_DIRS include FILES ${arg_HEADERS})
  target_include_directories(cairn_${name} PRIVATE src)
  list(TRANSFORM arg_DEPENDS PREPEND cairn:: OUTPUT_VARIABLE dependencies)
  target_link_libraries(cairn_${name} PUBLIC ${dependencies} PRIVATE $<BUILD_INTERFACE:cairn_private_options>
    ${arg_LINK})
  if(CAIRN_HAS_OPENMP)
    target_link_libraries(cairn_${name} PRIVATE OpenMP::OpenMP_CXX)
  endif()
  if(CAIRN_HAS_CUDA)
    target_link_libraries(cairn_${name} PRIVATE ${CAIRN_CUDA_RUNTIME})
    target_compile_options(cairn_${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  endif()
  if(CAIRN_INSTALL)
    install(TARGETS cairn_${name} EXPORT cairnTargets LIBRARY COMPONENT libraries NAMELINK_COMPONENT development
      ARCHIVE COMPONENT development FILE_SET HEADERS COMPONENT development)
    cairn_pkg_config(${name} "-L\${libdir} -lcairn_${name}" "${arg_DEPENDS}" "${arg_LINK}")
  endif()
endfunction()

# cairn_bundle(NAME component...): cairn::NAME, which has no files of its own and hands on these components.
function(cairn_bundle name)
  add_library(cairn_${name} INTERFACE)
  add_library(cairn::${name} ALIAS cairn_${name})
  set_target_properties(cairn_${name} PROPERTIES EXPORT_NAME ${name})
  list(TRANSFORM ARGN PREPEND cairn:: OUTPUT_VARIABLE components)
  target_link_libraries(cairn_${name} INTERFACE ${components})
  if(CAIRN_INSTALL)
    install(TARGETS cairn_${name} EXPORT cairnTargets)
    cairn_pkg_config(${name} "" "${ARGN}" "")
  endif()
endfunction()

# cairn-NAME.pc for pkg-config. Libraries that Cairn links for itself matter to `pkg-config --static` alone.
function(cairn_pkg_config name own_library depends links)
  list(TRANSFORM depends PREPEND cairn- OUTPUT_VARIABLE requires)
  list(JOIN requires ", " requires)
  set(private "")
  foreach(link IN LISTS links)
    string(REGEX REPLACE "^.*::" "" library ${link})
    if(link STREQUAL "Threads::Threads")
      list(APPEND private -pthread)
    elseif(link STREQUAL "spdlog::spdlog")
      list(APPEND private -lspdlog -lfmt)
    elseif(link STREQUAL "cppzmq")
      list(APPEND private -lzmq)
    elseif(link STREQUAL "MPI::MPI_CXX")
      list(APPEND private ${MPI_CXX_LIBRARIES})
    elseif(link STREQUAL "ZLIB::ZLIB")
      list(APPEND private -lz)
    elseif(NOT link MATCHES "^nlohmann_json::")  # headers alone
      list(APPEND private -l${library})
    endif()
  endforeach()
  if(CAIRN_HAS_OPENMP)
    list(APPEND private ${OpenMP_CXX_FLAGS})
  endif()
  if(CAIRN_HAS_CUDA)
    list(APPEND private -lcudart)
  endif()
  list(JOIN private " " private)
  file(RELATIVE_PATH to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)  # wherever it is unpacked
  configure_file(${PROJECT_SOURCE_DIR}/cmake/cairn.pc.in ${CMAKE_CURRENT_BINARY_DIR}/cairn-${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cairn-${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
    COMPONENT development)
endfunction()

# Kernels for the simulated GPU are plain C++ that asks before every access to memory
# (tests/gpu/sim/kernels.cpp answers). Vectorising and merging would change how wide an access is. Undefined
# behaviour of theirs is reported too.
function(cairn_simulate_kernels)
  set(undefined alignment,bool,bounds,integer-divide-by-zero,shift,signed-integer-overflow)
  set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX
    COMPILE_DEFINITIONS CAIRN_SIMT_EMULATOR
    INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/tests
    COMPILE_OPTIONS
    "-x;c++;-fsanitize=kernel-address;--param=asan-instrumentation-with-call-threshold=0;--param=asan-stack=0;--param=asan-globals=0;-fno-tree-vectorize;-fno-store-merging;-fsanitize=${undefined};-fsanitize-recover=${undefined};-fsanitize=unreachable,return;-O1")
endfunction()

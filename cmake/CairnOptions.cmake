# Language level, optimisation, sanitizers and where programs go.
include(GNUInstallDirs)

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)

# What every Cairn target is compiled with; never handed on to users of the libraries.
add_library(cairn_private_options INTERFACE)
target_compile_options(cairn_private_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${CAIRN_WERROR}>>:-Werror>)
if(CAIRN_WERROR AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")  # newer ones see what libstdc++'s stable_sort is made of
  target_compile_options(cairn_private_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-error=deprecated-declarations>)
endif()
if(CMAKE_UNITY_BUILD)  # a class of one file may have a member of that file's own types
  target_compile_options(cairn_private_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()
# What has no loops over elements gains nothing from -O3, and compiles in 5/6 of the time without.
set(CAIRN_WITHOUT_LOOPS "")
set(CAIRN_PROGRAMS "")  # they call the libraries, where the time goes: -O1 compiles faster
if(CMAKE_CXX_FLAGS_RELEASE MATCHES "-O3")
  set(CAIRN_WITHOUT_LOOPS $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O2>)
  set(CAIRN_PROGRAMS $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>)
endif()
# g++ collects its garbage whenever it has grown by half, which costs time and where there is memory saves nothing.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)  # MiB
  if(memory GREATER 15000)
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1048576>")  # KiB
  endif()
endif()
if(CAIRN_SANITIZE)
  set(flags -fsanitize=${CAIRN_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
  add_link_options(-fsanitize=${CAIRN_SANITIZE})
endif()

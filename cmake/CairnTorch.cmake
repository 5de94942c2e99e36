# Finds libtorch: sets CAIRN_HAS_TORCH and makes cairn_external::torch. Headers and libraries are taken as
# they lie, without TorchConfig.cmake: that of a wheel for CUDA insists on the toolkit that it was built with,
# also where only its CPU side is used.
#
# Looked for in Torch_DIR, CMAKE_PREFIX_PATH (torch.utils.cmake_prefix_path), the project's .venv and
# build/libtorch (scripts/fetch_libtorch).
set(CAIRN_TORCH AUTO CACHE STRING "cairn::libtorch: AUTO (where libtorch is found), ON (insist) or OFF")
set_property(CACHE CAIRN_TORCH PROPERTY STRINGS AUTO ON OFF)
set(CAIRN_HAS_TORCH OFF)

function(cairn_find_torch)
  file(GLOB wheels ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch
    ${PROJECT_SOURCE_DIR}/build/libtorch/torch)
  find_file(CAIRN_TORCH_CONFIG TorchConfig.cmake HINTS ${Torch_DIR} ${wheels} PATH_SUFFIXES Torch share/cmake/Torch)
  if(NOT CAIRN_TORCH_CONFIG)
    return()
  endif()
  get_filename_component(root ${CAIRN_TORCH_CONFIG} REALPATH)
  get_filename_component(root ${root}/../../../.. ABSOLUTE)
  find_library(CAIRN_TORCH_CPU torch_cpu PATHS ${root}/lib NO_DEFAULT_PATH)
  find_library(CAIRN_TORCH_C10 c10 PATHS ${root}/lib NO_DEFAULT_PATH)
  if(NOT CAIRN_TORCH_CPU OR NOT CAIRN_TORCH_C10)
    return()
  endif()
  add_library(cairn_external::torch SHARED IMPORTED GLOBAL)
  set_target_properties(cairn_external::torch PROPERTIES IMPORTED_LOCATION ${CAIRN_TORCH_CPU}
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES ${CAIRN_TORCH_C10})
  set(CAIRN_HAS_TORCH ON PARENT_SCOPE)
endfunction()

# Simulated GPUs stand in for a driver that libtorch would look for.
if(CAIRN_TORCH AND NOT CAIRN_CUDA STREQUAL "SIMULATED")
  cairn_find_torch()
  if(NOT CAIRN_HAS_TORCH AND NOT CAIRN_TORCH STREQUAL "AUTO")
    message(FATAL_ERROR
      "CAIRN_TORCH=ON needs libtorch: pip install torch, and -DCMAKE_PREFIX_PATH=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)')")
  endif()
endif()

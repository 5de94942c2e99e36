# Finds the libraries Cairn stands on. A missing required one ends the configuration with the Debian package to install;
# optional ones set CAIRN_HAS_<NAME>, and a folder's src/<name>/ or src/no_<name>.cpp follows (see CairnComponent).
include(CairnExternal)

macro(cairn_require package debian)
  find_package(${package} QUIET ${ARGN})
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR
      "Cairn needs ${package}: install it with 'apt-get install ${debian}' or run scripts/install_dependencies")
  endif()
endmacro()

cairn_require(Threads libc6-dev)
cairn_require(ZLIB zlib1g-dev)
cairn_require(nlohmann_json nlohmann-json3-dev)
cairn_require(spdlog libspdlog-dev)
cairn_require(cppzmq "cppzmq-dev libzmq3-dev")
cairn_require_library(dnnl oneapi/dnnl/dnnl.hpp dnnl libdnnl-dev)
cairn_require_library(hwy hwy/highway.h hwy libhwy-dev)
cairn_require_library(xxhash xxhash.h xxhash libxxhash-dev)
cairn_require_library(sodium sodium.h sodium libsodium-dev)
cairn_require_library(turbojpeg turbojpeg.h turbojpeg libturbojpeg0-dev)
cairn_require_library(png16 png.h png16 libpng-dev)
cairn_require_library(pcre2-8 pcre2.h pcre2-8 libpcre2-dev)
# cairn_require_header(NAME HEADER DEBIAN): CAIRN_<NAME>_INCLUDE, of a library that is headers alone and that
# no public header names.
function(cairn_require_header name header debian)
  find_path(CAIRN_${name}_INCLUDE ${header})
  if(NOT CAIRN_${name}_INCLUDE)
    message(FATAL_ERROR
      "Cairn needs ${header}: install it with 'apt-get install ${debian}' or run scripts/install_dependencies")
  endif()
endfunction()
cairn_require_header(dlpack dlpack/dlpack.h libdlpack-dev)
cairn_require_header(protozero protozero/pbf_writer.hpp libprotozero-dev)

# OpenMP carries the CPU kernels' threads; ThreadSanitizer cannot see into libgomp, so that build runs them serially.
set(CAIRN_HAS_OPENMP OFF)
if(NOT CAIRN_SANITIZE MATCHES "thread")
  find_package(OpenMP QUIET COMPONENTS CXX)
  set(CAIRN_HAS_OPENMP ${OpenMP_CXX_FOUND})
endif()

find_package(Gloo QUIET)
set(CAIRN_HAS_GLOO ${Gloo_FOUND})

set(MPI_CXX_SKIP_MPICXX ON)  # the C interface alone
find_package(MPI QUIET COMPONENTS CXX)
set(CAIRN_HAS_MPI ${MPI_CXX_FOUND})

set(CAIRN_HAS_CUDA OFF)
set(CAIRN_HAS_NCCL OFF)

# Without cuDNN there is no CUDA backend; without NCCL there is one, for one process.
function(cairn_find_cuda)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(missing "a CUDA compiler: put nvcc on PATH or set CMAKE_CUDA_COMPILER" PARENT_SCOPE)
    return()
  endif()
  find_package(CUDAToolkit QUIET)
  find_path(CAIRN_cudnn_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_path(CAIRN_nccl_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  if(NOT CAIRN_cudnn_INCLUDE)
    set(missing "cuDNN 9 (cudnn.h and libcudnn) beside the CUDA toolkit" PARENT_SCOPE)
    return()
  endif()
  set(CAIRN_HAS_CUDA ON PARENT_SCOPE)
  if(CAIRN_nccl_INCLUDE)
    set(CAIRN_HAS_NCCL ON PARENT_SCOPE)
  endif()
endfunction()

if(CAIRN_CUDA STREQUAL "SIMULATED")
  # NVIDIA's headers; tests/gpu/sim in place of the libraries, and no compiler but the host's.
  find_package(CUDAToolkit QUIET)
  find_path(CAIRN_cudnn_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_path(CAIRN_nccl_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  if(NOT CUDAToolkit_FOUND OR NOT CAIRN_cudnn_INCLUDE OR NOT CAIRN_nccl_INCLUDE)
    message(FATAL_ERROR "CAIRN_CUDA=SIMULATED needs the headers of the CUDA toolkit, cuDNN 9 and NCCL")
  endif()
  set(CAIRN_HAS_CUDA ON)
  set(CAIRN_HAS_NCCL ON)
  set(CAIRN_CUDA_RUNTIME $<LINK_ONLY:cairn_gpusim>)  # cairn_component gives its headers to the files that name them
  set(CAIRN_CUDA_KERNEL_LIBRARIES ${CAIRN_CUDA_RUNTIME})
  set(CAIRN_NCCL ${CAIRN_CUDA_RUNTIME})
elseif(CAIRN_CUDA)  # AUTO or ON
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
  endif()
  cairn_find_cuda()
  if(CAIRN_HAS_CUDA)
    enable_language(CUDA)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # the one core links
    if(CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA_STANDARD 20)
    else()  # CMake up to 3.25 does not know that nvcc speaks C++20
      add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
    endif()
    find_package(CUDAToolkit REQUIRED)
    cairn_require_library(cudnn cudnn.h cudnn cudnn9)
    if(CAIRN_HAS_NCCL)
      cairn_require_library(nccl nccl.h nccl libnccl-dev)
    endif()
    set(CAIRN_CUDA_RUNTIME CUDA::cudart)
    set(CAIRN_CUDA_KERNEL_LIBRARIES CUDA::cublasLt cairn_external::cudnn ${CMAKE_DL_LIBS})
    set(CAIRN_NCCL cairn_external::nccl)
  elseif(NOT CAIRN_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "CAIRN_CUDA=ON needs ${missing}")
  endif()
endif()
message(STATUS
  "Cairn backends: cpu, cuda ${CAIRN_HAS_CUDA}, nccl ${CAIRN_HAS_NCCL}, gloo ${CAIRN_HAS_GLOO}, mpi ${CAIRN_HAS_MPI}, openmp ${CAIRN_HAS_OPENMP}")

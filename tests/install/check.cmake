# cmake -DHOW=... -DCAIRN_SOURCE=... -DCAIRN_BUILD=... -DWORK=... -P check.cmake: builds the consumer project
# and runs its programs.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(status)
    message(FATAL_ERROR "failed with ${status}: ${ARGN}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
set(programs uses_core)
if(HOW STREQUAL "INSTALLED")
  run(${CMAKE_COMMAND} --install ${CAIRN_BUILD} --prefix ${WORK}/prefix)
  list(APPEND programs trains trains_in_c)
endif()
set(as_preset "")
if(HOW STREQUAL "SUBDIRECTORY")  # compiled as the presets do, so that ccache has it; FETCHCONTENT is as users have it
  set(as_preset -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=16 -DCAIRN_WERROR=ON)
endif()
run(${CMAKE_COMMAND} -G Ninja -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK}/build -DHOW=${HOW} -DCAIRN_SOURCE=${CAIRN_SOURCE}
  -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_BUILD_TYPE=Release -DCAIRN_CUDA=OFF ${as_preset})
run(${CMAKE_COMMAND} --build ${WORK}/build --target ${programs})
foreach(program IN LISTS programs)
  run(${WORK}/build/${program})
endforeach()

# The README's first program, as a stranger builds it: it trains.
if(HOW STREQUAL "INSTALLED")
  run(${CMAKE_COMMAND} -G Ninja -S ${CAIRN_SOURCE}/examples/00_train_step -B ${WORK}/first
    -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_BUILD_TYPE=Release)
  run(${CMAKE_COMMAND} --build ${WORK}/first)
  run(${CMAKE_COMMAND} -DPROGRAM=${WORK}/first/train_step -P ${CMAKE_CURRENT_LIST_DIR}/loss_falls.cmake)
endif()

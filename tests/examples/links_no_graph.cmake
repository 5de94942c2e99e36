# Fails unless PROGRAM links the components below and no others (LINKED), and holds no code of autograd or nn;
# WITH_GRAPH, a program that does, shows that such code would be seen.
set(expected cairn::amp_scaling cairn::checkpointing_states cairn::core cairn::gradients cairn::kernels cairn::optim
  cairn::parallel_groups)
list(SORT LINKED)
if(NOT LINKED STREQUAL expected)
  message(FATAL_ERROR "expected ${expected}, got ${LINKED}")
endif()

# Into `count`: the lines of nm that hold `text`.
function(count_symbols program text count)
  execute_process(COMMAND ${NM} -C ${program} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "${text}" found "${symbols}")
  list(LENGTH found length)
  set(${count} ${length} PARENT_SCOPE)
endfunction()

foreach(space autograd nn)
  count_symbols(${WITH_GRAPH} "cairn::${space}::" control)
  if(control LESS 100)
    message(FATAL_ERROR "expected code of cairn::${space} in ${WITH_GRAPH}, got ${control} symbols")
  endif()
  count_symbols(${PROGRAM} "cairn::${space}::" surplus)
  if(NOT surplus EQUAL 0)
    message(FATAL_ERROR "expected no code of cairn::${space} in ${PROGRAM}, got ${surplus} symbols")
  endif()
endforeach()
count_symbols(${PROGRAM} "cairn::optim::" control)
if(control LESS 20)
  message(FATAL_ERROR "expected code of cairn::optim in ${PROGRAM}, got ${control} symbols")
endif()

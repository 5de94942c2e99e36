# cmake -DPROGRAM=... -P loss_falls.cmake: fails unless the losses that it prints begin above 1.5 (ten
# classes, untrained) and end below 0.5.
execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE told COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "loss [0-9.]+" losses "${told}")
string(REGEX REPLACE "loss " "" losses "${losses}")
list(POP_FRONT losses first)
list(POP_BACK losses last)
if(NOT first GREATER 1.5 OR NOT last LESS 0.5)
  message(FATAL_ERROR "expected a loss that falls from above 1.5 to below 0.5, got:\n${told}")
endif()

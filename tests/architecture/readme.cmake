# Fails where a folder of TESTS has no row in its README.
file(STRINGS ${TESTS}/README.md text)
file(GLOB folders RELATIVE ${TESTS} LIST_DIRECTORIES true ${TESTS}/*)
foreach(folder IN LISTS folders)
  if(IS_DIRECTORY ${TESTS}/${folder} AND NOT text MATCHES "`${folder}/`")
    message(SEND_ERROR "expected `${folder}/` in ${TESTS}/README.md: what it tests, how to run it")
  endif()
endforeach()

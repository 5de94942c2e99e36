# cmake --install: libraries, headers, and a package for find_package(cairn) with the targets cairn::core ...
# cairn::parallel.
include(CMakePackageConfigHelpers)

set(destination ${CMAKE_INSTALL_LIBDIR}/cmake/cairn)
install(EXPORT cairnTargets NAMESPACE cairn:: DESTINATION ${destination} COMPONENT development)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/cairn-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/cairn-config.cmake
  INSTALL_DESTINATION ${destination})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/cairn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cairn-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/cairn-config-version.cmake
  ${CMAKE_CURRENT_LIST_DIR}/CairnExternal.cmake DESTINATION ${destination} COMPONENT development)

# cpack -G DEB: the libraries, what programs are built with, and the tools.
set(CPACK_PACKAGE_CONTACT "Cairn maintainers <maintainers@cairn.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_COMPONENTS_ALL libraries development tools)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_ENABLE_COMPONENT_DEPENDS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS core kernels gradients autograd nn data observe optim amp/scaling amp
  checkpointing/states checkpointing/activations parallel/groups parallel capi)
list(TRANSFORM CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS PREPEND ${CMAKE_BINARY_DIR}/)
set(CPACK_DEBIAN_LIBRARIES_PACKAGE_NAME libcairn${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libcairn-dev)
set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME cairn-tools)
set(CPACK_COMPONENT_DEVELOPMENT_DEPENDS libraries)
set(CPACK_COMPONENT_TOOLS_DEPENDS libraries)
include(CPack)

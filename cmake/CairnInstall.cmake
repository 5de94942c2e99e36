# cmake --install: libraries, headers, and a package for find_package(cairn) with the targets cairn::core ... cairn::parallel.
include(CMakePackageConfigHelpers)

set(destination ${CMAKE_INSTALL_LIBDIR}/cmake/cairn)
install(EXPORT cairnTargets NAMESPACE cairn:: DESTINATION ${destination})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/cairn-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/cairn-config.cmake
  INSTALL_DESTINATION ${destination})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/cairn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cairn-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/cairn-config-version.cmake
  ${CMAKE_CURRENT_LIST_DIR}/CairnExternal.cmake DESTINATION ${destination})

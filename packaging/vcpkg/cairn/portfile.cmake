# An overlay port that builds the tree it lies in: vcpkg install cairn --overlay-ports=packaging/vcpkg
get_filename_component(SOURCE_PATH ${CMAKE_CURRENT_LIST_DIR}/../../.. ABSOLUTE)

vcpkg_cmake_configure(SOURCE_PATH ${SOURCE_PATH}
  OPTIONS -DCAIRN_BUILD_TESTS=OFF -DCAIRN_BUILD_EXAMPLES=OFF -DCMAKE_UNITY_BUILD=ON -DCAIRN_TORCH=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME cairn CONFIG_PATH lib/cmake/cairn)
vcpkg_copy_tools(TOOL_NAMES cairn-run cairn-ckpt cairn-observe AUTO_CLEAN)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE ${CURRENT_PACKAGES_DIR}/debug/include)
vcpkg_install_copyright(FILE_LIST ${SOURCE_PATH}/LICENSE)

# Another library of its series can stand in its place, and it opens its CUDA device at run time.
vcpkg_check_linkage(ONLY_DYNAMIC_LIBRARY)

vcpkg_download_distfile(ARCHIVE
  URLS "@SDIST_URL@"
  FILENAME "libdc-${VERSION}.tar.gz"
  SHA512 @SHA512@)
vcpkg_extract_source_archive(SOURCE_PATH ARCHIVE "${ARCHIVE}")

vcpkg_configure_meson(SOURCE_PATH "${SOURCE_PATH}" OPTIONS -Dtests=false)
vcpkg_install_meson()
vcpkg_fixup_pkgconfig()
vcpkg_copy_tools(TOOL_NAMES libdc AUTO_CLEAN)

# It moves the files from lib/cmake, from where they look for the library and the header.
vcpkg_cmake_config_fixup(PACKAGE_NAME libdc CONFIG_PATH lib/cmake/libdc)
set(config "${CURRENT_PACKAGES_DIR}/share/libdc/libdc-config.cmake")
vcpkg_replace_string("${config}" "LIST_DIR}/../..\"" "LIST_DIR}/../../lib\"")
vcpkg_replace_string("${config}" "LIST_DIR}/../../../include\"" "LIST_DIR}/../../include\"")

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE" "${SOURCE_PATH}/packaging/debian/copyright")

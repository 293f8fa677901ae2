# Runs a portfile without vcpkg: cmake -DPORT_DIR=... -DVERSION=... -DOUT=... -P vcpkg.cmake. These are the functions
# that it calls. They take the arguments of vcpkg's, and do the same for one build.
set(PORT libdc)
set(CURRENT_PACKAGES_DIR "${OUT}/packages")
file(MAKE_DIRECTORY "${OUT}")

function(run)
  execute_process(COMMAND ${ARGV} WORKING_DIRECTORY "${OUT}" COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_check_linkage linkage)
  if(NOT linkage STREQUAL ONLY_DYNAMIC_LIBRARY)
    message(FATAL_ERROR "a linkage of ${linkage}")
  endif()
endfunction()

function(vcpkg_download_distfile archive)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "FILENAME;SHA512" "URLS")
  file(DOWNLOAD "${arg_URLS}" "${OUT}/${arg_FILENAME}" EXPECTED_HASH "SHA512=${arg_SHA512}")
  set(${archive} "${OUT}/${arg_FILENAME}" PARENT_SCOPE)
endfunction()

function(vcpkg_extract_source_archive sources)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "ARCHIVE" "")
  file(ARCHIVE_EXTRACT INPUT "${arg_ARCHIVE}" DESTINATION "${OUT}/src")
  file(GLOB inside "${OUT}/src/*")
  set(${sources} "${inside}" PARENT_SCOPE)
endfunction()

function(vcpkg_configure_meson)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
  run(meson setup build "${arg_SOURCE_PATH}" --prefix "${CURRENT_PACKAGES_DIR}" --libdir lib --buildtype release
    --wrap-mode nodownload ${arg_OPTIONS})
endfunction()

function(vcpkg_install_meson)
  run(meson install -C build --quiet)
endfunction()

function(vcpkg_fixup_pkgconfig)
endfunction()

function(vcpkg_copy_tools)
  cmake_parse_arguments(PARSE_ARGV 0 arg "AUTO_CLEAN" "" "TOOL_NAMES")
  foreach(tool IN LISTS arg_TOOL_NAMES)
    file(COPY "${CURRENT_PACKAGES_DIR}/bin/${tool}" DESTINATION "${CURRENT_PACKAGES_DIR}/tools/${PORT}")
    file(REMOVE "${CURRENT_PACKAGES_DIR}/bin/${tool}")
  endforeach()
endfunction()

function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "PACKAGE_NAME;CONFIG_PATH" "")
  file(GLOB files "${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH}/*")
  file(COPY ${files} DESTINATION "${CURRENT_PACKAGES_DIR}/share/${arg_PACKAGE_NAME}")
  file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/lib/cmake")
endfunction()

function(vcpkg_replace_string file match replacement)
  file(READ "${file}" before)
  string(REPLACE "${match}" "${replacement}" after "${before}")
  if(after STREQUAL before)
    message(FATAL_ERROR "${file} does not have ${match}")
  endif()
  file(WRITE "${file}" "${after}")
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
  foreach(name IN LISTS arg_FILE_LIST)
    file(READ "${name}" text)
    file(APPEND "${CURRENT_PACKAGES_DIR}/share/${PORT}/copyright" "${text}")
  endforeach()
endfunction()

include("${PORT_DIR}/portfile.cmake")

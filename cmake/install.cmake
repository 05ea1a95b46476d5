# SPDX-License-Identifier: Apache-2.0
# `cmake --install`: headers, library, the program when it was built, examples, and the two ways to find them
# (find_package and pkg-config). The install tree may be moved as a whole.
include(CMakePackageConfigHelpers)

set(FW_CONFIG_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/fastweight)
install(TARGETS fastweight EXPORT fastweight_targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/fastweight DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(EXPORT fastweight_targets NAMESPACE fastweight:: FILE fastweight-targets.cmake DESTINATION ${FW_CONFIG_DIR})
configure_package_config_file(cmake/fastweight-config.cmake.in ${PROJECT_BINARY_DIR}/fastweight-config.cmake
                              INSTALL_DESTINATION ${FW_CONFIG_DIR})
# before 1.0 a minor version may change the interface
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fastweight-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fastweight-config.cmake ${PROJECT_BINARY_DIR}/fastweight-config-version.cmake
        DESTINATION ${FW_CONFIG_DIR})

file(RELATIVE_PATH FW_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" FW_PREFIX_FROM_PC "${FW_PREFIX_FROM_PC}")
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(FW_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
else()
  set(FW_PC_PREFIX "\${pcfiledir}/${FW_PREFIX_FROM_PC}")
endif()
configure_file(cmake/fastweight.pc.in ${PROJECT_BINARY_DIR}/fastweight.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fastweight.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(DIRECTORY examples/ DESTINATION ${CMAKE_INSTALL_DATADIR}/fastweight/examples)
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET fastweight_cli)
  set_target_properties(fastweight_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS fastweight_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

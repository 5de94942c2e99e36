/// Cairn's version, by the rules of semantic versioning: while MAJOR is 0 a new MINOR may break programs, a new PATCH never does. Libraries of
/// the same MAJOR.MINOR replace each other (it is their SONAME). CMake reads the numbers from here.
#pragma once

#define CAIRN_VERSION_MAJOR 0
#define CAIRN_VERSION_MINOR 1
#define CAIRN_VERSION_PATCH 0

namespace cairn {

/// Of the headers that a program was compiled with, for example "0.1.0". `library_version()` is that of the library it runs with.
#define CAIRN_VERSION_TEXT_(a, b, c) #a "." #b "." #c
#define CAIRN_VERSION_TEXT(a, b, c) CAIRN_VERSION_TEXT_(a, b, c)
#define CAIRN_VERSION CAIRN_VERSION_TEXT(CAIRN_VERSION_MAJOR, CAIRN_VERSION_MINOR, CAIRN_VERSION_PATCH)

const char* library_version() noexcept;

}  // namespace cairn

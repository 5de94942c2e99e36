// The commands of cairn-ckpt. Each prints what it finds and returns the exit status: 0, or 1 where
// something is damaged or differs.
#pragma once

#include <string>

namespace cairn::tools {

int inspect(const std::string& path);
int verify(const std::string& path);
int diff(const std::string& a, const std::string& b);

}  // namespace cairn::tools

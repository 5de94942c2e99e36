// PTX as nvcc prints it.
#pragma once

#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace cairn::ptx {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Instruction {
  std::string text;                   // as it stands there
  std::vector<std::string> name;      // ld.global.u32: ld, global, u32
  std::vector<std::string> operands;  // registers, numbers, [addresses], {lists of registers}
};

struct SharedArray {
  std::string name;
  std::size_t bytes;  // 0: dynamic shared memory
};

struct Kernel {
  std::vector<std::string> parameters;
  std::map<std::string, int> registers;  // their bits, by the name without its number
  std::vector<SharedArray> shared;
  std::vector<Instruction> code;
};

/// The kernels of a text by their names.
std::map<std::string, Kernel> parse(const std::string& text);

/// Parts of a text between separators that no bracket or brace encloses, without spaces at their
/// ends.
std::vector<std::string> split(const std::string& text, char separator);

}  // namespace cairn::ptx

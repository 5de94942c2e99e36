// A warp that runs a kernel's PTX, all its lanes at once: of the instructions that Cairn's inline
// PTX has, those forms alone, and of all others what twins.cu is made into. No branches. Anything
// else is an Error that quotes the instruction, and so are
//   - registers that nothing has written, or of another width than the instruction's
//   - addresses outside of what the instruction's memory has, or not a multiple of what it moves
//   - copies that nobody waited for
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ptx/program.h"

namespace cairn::ptx {

inline constexpr unsigned kLanes = 32;
using Lanes = std::array<std::uint64_t, kLanes>;

/// Global memory: the host's.
struct Region {
  std::uint64_t begin;
  std::size_t bytes;
  bool writable;
};

class Warp {
 public:
  /// Shared memory is NaN at first, as the emulator's.
  Warp(const Kernel& kernel, std::vector<std::uint64_t> parameters, std::vector<Region> global,
       std::size_t dynamic_shared_bytes);
  void run();
  /// The bytes that each access to global memory moved.
  const std::vector<std::size_t>& accesses() const { return accesses_; }

 private:
  struct Copy {
    std::byte* to;
    std::array<std::byte, 16> value;
  };

  void execute(const Instruction& instruction);
  void load(const Instruction& instruction);
  void store(const Instruction& instruction);
  void move(const Instruction& instruction);
  void convert_address(const Instruction& instruction);
  void convert(const Instruction& instruction);
  void compute(const Instruction& instruction);
  void start_copy(const Instruction& instruction);
  void load_matrices(const Instruction& instruction);
  void multiply_matrices(const Instruction& instruction);

  int bits_of(const std::string& register_name) const;
  Lanes read(const std::string& operand, int bits) const;
  void write(const std::string& register_name, int bits, const Lanes& values);
  Lanes addresses(const std::string& operand) const;
  std::byte* memory(const std::string& space, std::uint64_t address, std::size_t bytes, bool write);

  const Kernel& kernel_;
  std::vector<std::uint64_t> parameters_;
  std::vector<Region> global_;
  std::vector<std::byte> shared_;
  std::map<std::string, std::uint64_t> symbols_;  // addresses in shared memory
  std::map<std::string, Lanes> registers_;
  std::vector<Copy> copies_;
  std::vector<std::size_t> accesses_;
};

}  // namespace cairn::ptx

// Names for addresses of a process, from the ELF files that it has mapped.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cairn::run {

class ElfFile;

class Symbols {
 public:
  explicit Symbols(pid_t process);
  ~Symbols();
  Symbols(const Symbols&) = delete;
  Symbols& operator=(const Symbols&) = delete;

  /// "train_step(int)  in train"; where the file names no function "?  in libx.so+0x1f00".
  std::string name(std::uint64_t address);

 private:
  struct Mapping {
    std::uint64_t begin = 0, end = 0, offset = 0;
    std::string path;
  };
  const ElfFile& file(const std::string& path);

  pid_t process_;
  std::string program_;  // what /proc/PID/exe is
  std::vector<Mapping> mappings_;
  std::map<std::string, std::unique_ptr<ElfFile>> files_;
};

}  // namespace cairn::run

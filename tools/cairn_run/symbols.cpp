#include "symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "jobs.h"

namespace cairn::run {

/// The functions of a 64-bit ELF file, by address; none where it is not one. What it says of itself
/// is not trusted.
class ElfFile {
 public:
  explicit ElfFile(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status {};
    if (file >= 0 && fstat(file, &status) == 0 && status.st_size > 0) {
      size_ = static_cast<std::size_t>(status.st_size);
      void* const memory = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
      if (memory != MAP_FAILED) bytes_ = static_cast<const char*>(memory);
    }
    if (file >= 0) close(file);
    if (bytes_ != nullptr) read();
  }
  ~ElfFile() {
    if (bytes_ != nullptr) munmap(const_cast<char*>(bytes_), size_);
  }
  ElfFile(const ElfFile&) = delete;
  ElfFile& operator=(const ElfFile&) = delete;

  /// Of the function that a byte of the file belongs to; "": unknown.
  std::string_view function_at(std::uint64_t offset) const {
    std::uint64_t address = 0;
    for (const Elf64_Phdr& part : parts_) {
      if (part.p_type == PT_LOAD && offset >= part.p_offset &&
          offset - part.p_offset < part.p_filesz)
        address = offset - part.p_offset + part.p_vaddr;
    }
    auto after = std::upper_bound(functions_.begin(), functions_.end(), address,
                                  [](std::uint64_t at, const Function& f) { return at < f.begin; });
    // An alias or a part of it may begin later.
    for (int i = 0; i < 8 && after != functions_.begin(); ++i) {
      --after;
      if (address - after->begin < after->size) return after->name;
    }
    return "";
  }

 private:
  struct Function {
    std::uint64_t begin = 0, size = 0;
    std::string_view name;
  };

  /// Copies of a table's entries; fewer where the file ends before.
  template <class T>
  std::vector<T> table(std::uint64_t offset, std::uint64_t count) const {
    if (offset > size_) return {};
    std::vector<T> entries(std::min<std::uint64_t>(count, (size_ - offset) / sizeof(T)));
    if (!entries.empty()) std::memcpy(entries.data(), bytes_ + offset, entries.size() * sizeof(T));
    return entries;
  }

  std::string_view text_at(const Elf64_Shdr& texts, std::uint64_t at) const {
    if (at >= texts.sh_size || texts.sh_offset > size_ || at >= size_ - texts.sh_offset) return "";
    const std::uint64_t room = std::min(texts.sh_size - at, size_ - texts.sh_offset - at);
    const char* const text = bytes_ + texts.sh_offset + at;
    return {text, strnlen(text, room)};
  }

  void read() {
    const auto heads = table<Elf64_Ehdr>(0, 1);
    if (heads.empty() || std::memcmp(heads[0].e_ident, ELFMAG, SELFMAG) != 0 ||
        heads[0].e_ident[EI_CLASS] != ELFCLASS64)
      return;
    parts_ = table<Elf64_Phdr>(heads[0].e_phoff, heads[0].e_phnum);
    const auto sections = table<Elf64_Shdr>(heads[0].e_shoff, heads[0].e_shnum);
    for (const Elf64_Shdr& section : sections) {
      const bool symbols = section.sh_type == SHT_SYMTAB || section.sh_type == SHT_DYNSYM;
      if (symbols && section.sh_link < sections.size()) add(section, sections[section.sh_link]);
    }
    std::sort(functions_.begin(), functions_.end(),
              [](const Function& a, const Function& b) { return a.begin < b.begin; });
  }

  void add(const Elf64_Shdr& section, const Elf64_Shdr& texts) {
    const auto symbols = table<Elf64_Sym>(section.sh_offset, section.sh_size / sizeof(Elf64_Sym));
    for (const Elf64_Sym& symbol : symbols) {
      const auto type = ELF64_ST_TYPE(symbol.st_info);
      if ((type != STT_FUNC && type != STT_GNU_IFUNC) || symbol.st_size == 0) continue;
      functions_.push_back({symbol.st_value, symbol.st_size, text_at(texts, symbol.st_name)});
    }
  }

  const char* bytes_ = nullptr;
  std::uint64_t size_ = 0;
  std::vector<Elf64_Phdr> parts_;
  std::vector<Function> functions_;
};

namespace {

std::string demangled(std::string_view name) {
  const std::string mangled(name);
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : mangled;
  std::free(text);
  return printable(result);
}

std::string hexadecimal(std::uint64_t number) {
  std::ostringstream text;
  text << "0x" << std::hex << number;
  return text.str();
}

}  // namespace

Symbols::Symbols(pid_t process) : process_(process) {
  const std::string folder = "/proc/" + std::to_string(process);
  std::error_code gone;
  program_ = std::filesystem::read_symlink(folder + "/exe", gone).string();
  std::ifstream maps(folder + "/maps");
  for (std::string line;
       std::getline(maps, line);) {  // "begin-end rights offset device inode path"
    std::istringstream fields(line);
    Mapping mapping;
    char dash = 0;
    std::string rights, device, inode;
    fields >> std::hex >> mapping.begin >> dash >> mapping.end >> rights >> mapping.offset >>
        device >> inode >> std::ws;
    std::getline(fields, mapping.path);
    if (rights.find('x') != std::string::npos) mappings_.push_back(std::move(mapping));
  }
}

Symbols::~Symbols() = default;

/// Through the process's own root; the program itself also where its file has been replaced.
const ElfFile& Symbols::file(const std::string& path) {
  std::unique_ptr<ElfFile>& file = files_[path];
  const std::string folder = "/proc/" + std::to_string(process_);
  if (!file) {
    file = std::make_unique<ElfFile>(path == program_ ? folder + "/exe" : folder + "/root" + path);
  }
  return *file;
}

std::string Symbols::name(std::uint64_t address) {
  for (const Mapping& mapping : mappings_) {
    if (address < mapping.begin || address >= mapping.end) continue;
    const std::uint64_t offset = address - mapping.begin + mapping.offset;
    const std::string base = printable(mapping.path.substr(mapping.path.rfind('/') + 1));
    if (!mapping.path.starts_with('/')) return "?  in " + (base.empty() ? "generated code" : base);
    const std::string_view function = file(mapping.path).function_at(offset);
    if (function.empty()) return "?  in " + base + "+" + hexadecimal(offset);
    return demangled(function) + "  in " + base;
  }
  return "?  at " + hexadecimal(address);
}

}  // namespace cairn::run

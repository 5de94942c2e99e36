// Runs shell commands for tests of programs.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace cairn::test {

struct ShellResult {
  int status = 0;  // 128 + n for signal n
  std::string out;
  std::string err;
  double seconds = 0.0;
};

/// Of what there is to read: a process of /proc may be gone.
inline std::string read_text(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// A folder that vanishes with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "cairn_test_XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string string() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline ShellResult shell(const std::string& command) {
  const TemporaryFolder folder;
  const std::string redirected =
      "{ " + command + "\n} >" + (folder / "out").string() + " 2>" + (folder / "err").string();
  const auto start = std::chrono::steady_clock::now();
  const int status = std::system(redirected.c_str());
  ShellResult result;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  result.out = read_text(folder / "out");
  result.err = read_text(folder / "err");
  return result;
}

}  // namespace cairn::test

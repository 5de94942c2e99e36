// A disk in memory that knows which of its contents would outlive a loss of power, and that a test
// makes fail, fill up or die with its process at any call.
//
// A file's bytes are safe once the file was flushed, a folder's names once the folder was. A loss
// of power takes each file back to its flushed bytes or to a part of the later ones, and each
// folder, by itself, to its flushed names or to those after any later change.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/system_calls.h"

namespace cairn::checkpointing {

class SimulatedDisk : public SystemCalls {
  using Guard = std::lock_guard<std::recursive_mutex>;

 public:
  /// Thrown out of the call at which a process is killed. No std::exception: no handler of the code
  /// under test may take it for an error.
  struct Killed {};
  enum class Fault { none, kill_all, kill_one, fail, full, fail_read, fail_reads, gone };

  /// What befalls the calls that change the disk: `fault` at the one after `calls` more. After
  /// kill_all no call does anything, after kill_one none of that thread; `full` lasts, `fail` is
  /// one EIO. fail_read is one EIO of the calls that look at it, fail_reads that of all from there
  /// on, gone that of every call.
  void plan(Fault fault, int calls) {
    fault_ = fault;
    calls_left_ = calls;
    happened_ = false;
  }
  bool fault_happened() const { return happened_; }
  /// Whether it has files mapped; not every file system can.
  void set_maps(bool maps) { maps_ = maps; }
  /// The processes are gone, with their open files; the machine goes on.
  void restart() {
    plan(Fault::none, 0);
    open_files_.clear();
    locks_.clear();
    dead_threads_.clear();
    all_dead_ = false;
  }
  void lose_power(unsigned seed) {
    std::mt19937 random(seed);
    lose_power(*root_, random, seed % 2 == 0);
    restart();
  }

  // What tests do to the disk behind the code's back; flushed at once.
  std::string* bytes_of(const std::string& path) {
    const NodePtr node = find(path);
    return node && !node->folder ? &node->bytes : nullptr;
  }
  void set_bytes(const std::string& path, const std::string& bytes) {
    const NodePtr node = find(path);
    node->bytes = node->flushed = bytes;
  }
  void erase(const std::string& path) {
    const NodePtr folder = find(parent(path));
    folder->entries.erase(leaf(path));
    for (Entries& before : folder->before) before.erase(leaf(path));
  }
  /// As a process that is not this one would have it, until restart().
  void lock_from_elsewhere(const std::string& path) { locks_[++last_file_] = find(path); }
  std::vector<std::string> names(const std::string& path) {
    std::vector<std::string> found;
    if (const NodePtr node = find(path)) {
      for (const auto& [name, entry] : node->entries) found.push_back(name);
    }
    return found;
  }

  int open(const std::string& path, int flags) override {
    const Guard guard(mutex_);
    const bool create = (flags & O_CREAT) != 0;
    if (refused(create, /*takes_space=*/create)) return -1;
    NodePtr node = find(path);
    if (node && create && (flags & O_EXCL) != 0) return failed(EEXIST);
    if (!node && !create) return failed(ENOENT);
    if (!node) {
      const NodePtr folder = find_folder(parent(path));
      if (!folder) return failed(find(parent(path)) ? ENOTDIR : ENOENT);
      node = std::make_shared<Node>();
      change(*folder)[leaf(path)] = node;
    }
    if (node->folder && create) return failed(EISDIR);
    if (!node->folder && (flags & O_DIRECTORY) != 0) return failed(ENOTDIR);
    if ((flags & O_TRUNC) != 0) node->bytes.clear();
    open_files_[++last_file_] = node;
    if ((flags & O_ACCMODE) != O_RDONLY) written_files_.insert(last_file_);
    return last_file_;
  }
  ssize_t read(int file, void* data, std::size_t bytes, std::uint64_t offset) override {
    const Guard guard(mutex_);
    if (refused(false)) return -1;
    const std::string& all = open_files_.at(file)->bytes;
    const std::size_t from = std::min<std::size_t>(offset, all.size());
    return static_cast<ssize_t>(all.copy(static_cast<char*>(data), bytes, from));
  }
  /// Promises nothing; what goes wrong is told by the next fsync.
  void start_flush(int file, std::uint64_t, std::size_t) override {
    const Guard guard(mutex_);
    if (refused(true, true)) open_files_.at(file)->late_error = errno;
  }
  ssize_t write(int file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    constexpr std::size_t kLargestWrite = 512;  // so that a kill may fall into the midst of a file
    const Guard guard(mutex_);
    if (refused(true, true)) return -1;
    const std::size_t n = std::min(bytes, kLargestWrite);
    std::string& all = open_files_.at(file)->bytes;
    if (all.size() < offset + n) all.resize(offset + n);
    all.replace(offset, n, static_cast<const char*>(data), n);
    return static_cast<ssize_t>(n);
  }
  int lock(int file) override {
    const Guard guard(mutex_);
    if (refused(false)) return -1;
    for (const auto& [other, node] : locks_) {
      if (other != file && node == open_files_.at(file)) return failed(EWOULDBLOCK);
    }
    locks_[file] = open_files_.at(file);
    return 0;
  }
  void* map(int file, std::size_t bytes) override {
    const Guard guard(mutex_);
    if (refused(false)) return nullptr;
    errno = ENODEV;
    if (!maps_) return nullptr;
    auto copy = std::make_unique<char[]>(bytes);
    open_files_.at(file)->bytes.copy(copy.get(), bytes);
    char* data = copy.get();
    mapped_[data] = std::move(copy);
    return data;
  }
  int populate(void* /*data*/, std::size_t /*bytes*/) override {
    const Guard guard(mutex_);
    return refused(false) ? -1 : 0;
  }
  void unmap(void* data, std::size_t /*bytes*/) override {
    const Guard guard(mutex_);
    mapped_.erase(data);
  }
  void sleep(std::chrono::milliseconds) override {}  // nobody else does anything meanwhile
  int fsync(int file) override {
    const Guard guard(mutex_);
    if (refused(true)) return -1;
    Node& node = *open_files_.at(file);
    if (node.late_error != 0) return failed(std::exchange(node.late_error, 0));
    node.flushed = node.bytes;
    node.before.clear();
    return 0;
  }
  int close(int file) override {  // never throws: destructors call it
    const Guard guard(mutex_);
    locks_.erase(file);
    open_files_.erase(file);
    const bool written = written_files_.erase(file) > 0;
    const bool may_fail = fault_ == Fault::fail || fault_ == Fault::gone;
    return written && may_fail && refused(true) ? -1 : 0;
  }
  int status(int file, struct stat& status) override {
    const Guard guard(mutex_);
    if (refused(false)) return -1;
    return describe(*open_files_.at(file), status);
  }
  int status(const std::string& path, struct stat& status) override {
    const Guard guard(mutex_);
    if (refused(false)) return -1;
    const NodePtr node = find(path);
    return node ? describe(*node, status) : failed(ENOENT);
  }
  int list(const std::string& path, std::vector<std::string>& found) override {
    const Guard guard(mutex_);
    if (refused(false)) return -1;
    if (!find_folder(path)) return failed(find(path) ? ENOTDIR : ENOENT);
    found = names(path);
    return 0;
  }
  int make_folder(const std::string& path) override {
    const Guard guard(mutex_);
    if (refused(true, true)) return -1;
    const NodePtr folder = find_folder(parent(path));
    if (!folder) return failed(ENOENT);
    if (folder->entries.contains(leaf(path))) return failed(EEXIST);
    const NodePtr node = std::make_shared<Node>();
    node->folder = true;
    change(*folder)[leaf(path)] = node;
    return 0;
  }
  int rename(const std::string& from, const std::string& to) override {  // in one folder
    const Guard guard(mutex_);
    if (refused(true)) return -1;
    const NodePtr node = find(from), there = find(to);
    if (!node) return failed(ENOENT);
    if (there && there->folder && !there->entries.empty()) return failed(ENOTEMPTY);
    Entries& entries = change(*find_folder(parent(from)));
    entries.erase(leaf(from));
    entries[leaf(to)] = node;
    return 0;
  }
  int remove_file(const std::string& path) override {
    const Guard guard(mutex_);
    if (refused(true)) return -1;
    const NodePtr node = find(path);
    if (!node || node->folder) return failed(node ? EISDIR : ENOENT);
    change(*find_folder(parent(path))).erase(leaf(path));
    return 0;
  }
  int remove_folder(const std::string& path) override {
    const Guard guard(mutex_);
    if (refused(true)) return -1;
    const NodePtr node = find(path);
    if (!node || !node->entries.empty()) return failed(node ? ENOTEMPTY : ENOENT);
    change(*find_folder(parent(path))).erase(leaf(path));
    return 0;
  }

 private:
  struct Node;
  using NodePtr = std::shared_ptr<Node>;
  using Entries = std::map<std::string, NodePtr>;
  struct Node {
    bool folder = false;
    std::string bytes, flushed;   // of a file
    int late_error = 0;           // of a flush that had begun
    Entries entries;              // of a folder
    std::vector<Entries> before;  // its names before each change since it was flushed
  };

  static std::string parent(const std::string& path) { return path.substr(0, path.rfind('/')); }
  static std::string leaf(const std::string& path) { return path.substr(path.rfind('/') + 1); }
  static int failed(int reason) {
    errno = reason;
    return -1;
  }
  static Entries& change(Node& folder) {
    folder.before.push_back(folder.entries);
    return folder.entries;
  }
  static int describe(const Node& node, struct stat& status) {
    status.st_mode = node.folder ? S_IFDIR : S_IFREG;
    status.st_size = static_cast<off_t>(node.bytes.size());
    status.st_ino = reinterpret_cast<ino_t>(&node);
    return 0;
  }

  NodePtr find(const std::string& path) const {
    NodePtr node = root_;
    for (std::size_t from = 1; node && from < path.size();) {
      const std::size_t to = std::min(path.find('/', from), path.size());
      const auto found = node->entries.find(path.substr(from, to - from));
      node = found == node->entries.end() ? nullptr : found->second;
      from = to + 1;
    }
    return node;
  }
  NodePtr find_folder(const std::string& path) const {
    const NodePtr node = find(path);
    return node && node->folder ? node : nullptr;
  }

  // Whether the call must fail (errno says why). Throws where its process is or gets killed.
  bool refused(bool changes, bool takes_space = false) {
    if (all_dead_ || dead_threads_.contains(std::this_thread::get_id())) throw Killed{};
    const bool befalls_reads = fault_ == Fault::fail_read || fault_ == Fault::fail_reads;
    const bool befalls = fault_ == Fault::gone || changes != befalls_reads;
    if (!befalls || fault_ == Fault::none) return false;
    const bool now = calls_left_ > 0 ? --calls_left_ == 0 : false;
    happened_ = happened_ || now;
    if (!happened_) return false;
    if (fault_ == Fault::full) {
      errno = ENOSPC;
      return takes_space;
    }
    if (fault_ == Fault::fail_reads || fault_ == Fault::gone) {
      errno = EIO;
      return true;
    }
    if (!now) return false;
    if (fault_ == Fault::fail || fault_ == Fault::fail_read) {
      errno = EIO;
      return true;
    }
    if (fault_ == Fault::kill_all) all_dead_ = true;
    dead_threads_.insert(std::this_thread::get_id());
    throw Killed{};
  }

  static void lose_power(Node& node, std::mt19937& random, bool all) {
    if (!node.folder) {
      if (node.bytes != node.flushed) {
        const std::size_t kept = all ? 0 : random() % (node.bytes.size() + 1);
        node.bytes = random() % 2 == 0 ? node.flushed : node.bytes.substr(0, kept);
      }
      node.flushed = node.bytes;
      return;
    }
    const std::size_t at = all ? 0 : random() % (node.before.size() + 1);
    if (at < node.before.size()) node.entries = node.before[at];
    node.before.clear();
    for (const auto& [name, entry] : node.entries) lose_power(*entry, random, all);
  }

  NodePtr root_ = [] {
    const NodePtr root = std::make_shared<Node>();
    root->folder = true;
    return root;
  }();

  std::recursive_mutex mutex_;
  std::map<int, NodePtr> open_files_, locks_;
  std::set<int> written_files_;
  std::map<void*, std::unique_ptr<char[]>> mapped_;
  int last_file_ = 2;
  bool maps_ = false;
  Fault fault_ = Fault::none;
  int calls_left_ = 0;
  bool happened_ = false, all_dead_ = false;
  std::set<std::thread::id> dead_threads_;
};

}  // namespace cairn::checkpointing

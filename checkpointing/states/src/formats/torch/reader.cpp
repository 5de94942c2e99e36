#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "cairn/checkpointing/torch_file.h"
#include "cairn/core/error.h"
#include "formats/flat_state.h"
#include "formats/torch/archive.h"
#include "formats/torch/pickle_reader.h"
#include "formats/zip/reader.h"
#include "io/mapped_file.h"
#include "io/printable.h"

namespace cairn::checkpointing {

namespace {

constexpr int kDeepest = 64;                        // dictionaries in dictionaries
constexpr std::uint64_t kWidestElement = 8;         // of the widest element
constexpr std::uint64_t kLeastBudget = 64'000'000;  // bytes
constexpr std::uint64_t kBudgetForAByte = 16;       // of the file

template <class... Args>
[[noreturn]] void fail_torch(const Args&... args) {
  core::fail<core::DataError>("torch", args...);
}

class TorchFile {
 public:
  /// Of `size` bytes of the file from `offset` on; `place` names them.
  TorchFile(std::shared_ptr<MappedFile> file, std::uint64_t offset, std::uint64_t size,
            std::string place, const TorchReadOptions& options)
      : file_(std::move(file)),
        offset_(offset),
        place_(std::move(place)),
        zip_(check_kind(file_->bytes().substr(offset, size), place_), place_),
        budget_(kLeastBudget + kBudgetForAByte * size) {
    find_folder();
    if (options.verify) check_all();
    check_byte_order();
  }

  StateDict read() {
    const Pickle pickle = unpickled();
    const Pickle::Value& root = pickle[pickle.root()];
    if (root.kind == Pickle::Kind::tensor) {
      add(pickle, pickle.root(), "tensor", 0);
    } else {
      add_items(pickle, root, "", 0);
    }
    return unflatten(flat_);
  }

  FlatState read_values() {
    const Pickle pickle = unpickled();
    const Pickle::Value& root = pickle[pickle.root()];
    if (is_collection(root)) {
      add_items(pickle, root, "", 0);
    } else {
      add(pickle, pickle.root(), kOnlyValue, 0);
    }
    return std::move(flat_);
  }

  FlatState read_as(const std::string& name) {
    const Pickle pickle = unpickled();
    add(pickle, pickle.root(), name, 0);
    return std::move(flat_);
  }

 private:
  const std::string& path() const { return place_; }

  Pickle unpickled() const {
    const ZipEntry* entry = zip_.find(folder_ + "data.pkl");
    return {zip_.bytes_of(*entry), entry->offset, path()};
  }

  static std::string_view check_kind(std::string_view bytes, const std::string& place) {
    if (bytes.starts_with("PK")) return bytes;
    fail_torch(
        "expected a zip archive, as torch.save writes it since PyTorch 1.6, got another kind of "
        "file at byte 0 "
        "in '",
        place, "' (an older file: load and save it again in Python)");
  }

  // All of an archive lies in one folder, of any name.
  void find_folder() {
    for (const ZipEntry& entry : zip_.entries()) {
      const std::size_t slash = entry.name.find('/');
      if (slash == std::string::npos || entry.name.substr(slash + 1) != "data.pkl") continue;
      folder_ = entry.name.substr(0, slash + 1);
      return;
    }
    fail_torch("expected an archive of torch.save's with data.pkl, got a zip archive without, '",
               path(), "'");
  }

  void check_all() const {
    std::string damaged;
    for (const ZipEntry& entry : zip_.entries()) {
      if (zip_.intact(entry)) continue;
      damaged += core::str("; '", printable(entry.name), "' at bytes ", entry.offset, " to ",
                           entry.offset + entry.size);
    }
    if (damaged.empty()) return;
    fail_torch("expected the checksums that '", path(), "' states, got others: it is damaged",
               damaged);
  }

  void check_byte_order() const {
    const ZipEntry* order = zip_.find(folder_ + "byteorder");
    if (order == nullptr || zip_.bytes_of(*order) == "little") return;
    fail_torch("expected the byte order 'little' at byte ", order->offset, " in '", path(),
               "', got another");
  }

  template <class... Args>
  [[noreturn]] void fail_at(const Pickle::Value& value, const Args&... args) const {
    fail_torch(args..., " at byte ", value.at, " in '", path(), "'");
  }

  // What is handed out may be larger than the file, which shares, but not by much.
  void charge(const Pickle::Value& value, std::uint64_t bytes) {
    if (bytes > budget_) {
      fail_at(value, "expected a state of at most ", kBudgetForAByte,
              " times the file's size (and 64 MB), got more");
    }
    budget_ -= bytes;
  }

  void add(const Pickle& pickle, Pickle::Ref ref, const std::string& name, int depth) {
    const Pickle::Value& value = pickle[ref];
    charge(value, name.size() + sizeof(FlatState::value_type));
    if (!usable_name(name)) fail_at(value, "expected at most 64 keys in a name, got more");
    switch (value.kind) {
      case Pickle::Kind::none:
        return;
      case Pickle::Kind::boolean:
      case Pickle::Kind::integer:
        flat_.emplace_back(name, std::get<std::int64_t>(value.data));
        return;
      case Pickle::Kind::number:
        flat_.emplace_back(name, std::get<double>(value.data));
        return;
      case Pickle::Kind::text: {
        const auto text = std::get<std::string_view>(value.data);
        charge(value, text.size());
        flat_.emplace_back(name, std::string(text));
        return;
      }
      case Pickle::Kind::list:
      case Pickle::Kind::tuple:
      case Pickle::Kind::dictionary:
        return add_items(pickle, value, name, depth);
      case Pickle::Kind::object:  // its attributes
        for (const Pickle::Ref attributes : std::get<std::vector<Pickle::Ref>>(value.data))
          add_items(pickle, pickle[attributes], name, depth);
        return;
      case Pickle::Kind::tensor:
        flat_.emplace_back(name, tensor_of(pickle, value));
        return;
      case Pickle::Kind::bytes:
      case Pickle::Kind::storage:
      case Pickle::Kind::numpy_dtype:
      case Pickle::Kind::name:
        break;
    }
    fail_at(value, "expected a tensor, number, text, list or dictionary as '", printable(name),
            "', got ", checkpointing::name(value.kind));
  }

  static bool is_collection(const Pickle::Value& value) {
    return value.kind == Pickle::Kind::list || value.kind == Pickle::Kind::tuple ||
           value.kind == Pickle::Kind::dictionary;
  }

  void add_items(const Pickle& pickle, const Pickle::Value& value, const std::string& name,
                 int depth) {
    if (!is_collection(value)) {
      fail_at(value, "expected a dictionary or a tensor, got ", checkpointing::name(value.kind));
    }
    if (depth == kDeepest) fail_at(value, "expected at most ", kDeepest, " levels, got more");
    const auto& items = std::get<std::vector<Pickle::Ref>>(value.data);
    charge(value, items.size() * sizeof(Pickle::Ref));
    const std::size_t before = flat_.size();
    const std::string prefix = name.empty() ? "" : name + ".";
    if (value.kind == Pickle::Kind::dictionary) {
      const std::set<std::size_t> stale = replaced_keys(pickle, items);
      for (std::size_t i = 0; i < items.size(); i += 2) {
        if (!stale.contains(i))
          add(pickle, items[i + 1], prefix + key_of(pickle[items[i]]), depth + 1);
      }
    } else {
      for (std::size_t i = 0; i < items.size(); ++i)
        add(pickle, items[i], prefix + std::to_string(i), depth + 1);
    }
    if (flat_.size() == before && !name.empty()) flat_.emplace_back(name, StateDict{});
  }

  // A key that is set again replaces the value before.
  std::set<std::size_t> replaced_keys(const Pickle& pickle,
                                      const std::vector<Pickle::Ref>& items) const {
    std::map<std::string, std::size_t> latest;
    std::set<std::size_t> replaced;
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const auto [place, is_new] = latest.emplace(key_of(pickle[items[i]]), i);
      if (!is_new) replaced.insert(std::exchange(place->second, i));
    }
    return replaced;
  }

  std::string key_of(const Pickle::Value& key) const {
    std::string name;
    if (key.kind == Pickle::Kind::integer) {
      name = std::to_string(std::get<std::int64_t>(key.data));
    } else if (key.kind == Pickle::Kind::text) {
      name = std::get<std::string_view>(key.data);
    } else {
      fail_at(key, "expected text or an integer as key, got ", checkpointing::name(key.kind));
    }
    if (!usable_name(name) || name.size() > 1000) {
      fail_at(key, "expected a key of at most 1000 bytes with text around each '.', got '",
              printable(name), "'");
    }
    return name;
  }

  Tensor tensor_of(const Pickle& pickle, const Pickle::Value& value) {
    const Pickle::TensorOf& tensor = pickle.tensor(value);
    const std::size_t width = core::size_of(tensor.storage.dtype);
    charge(value, static_cast<std::uint64_t>(tensor.shape.numel()) * width);
    const Tensor& bytes = storage_of(value, tensor.storage);
    char* data = static_cast<char*>(bytes.raw_data());
    if (tensor.storage.dtype == DType::boolean) check_booleans(value, bytes);
    if (data != nullptr) data += tensor.offset * static_cast<std::int64_t>(width);
    return bytes.alias(TensorView(data, tensor.shape, tensor.strides, tensor.storage.dtype));
  }

  // The storage's bytes, the same for all that share it.
  const Tensor& storage_of(const Pickle::Value& value, const Pickle::Storage& storage) {
    const std::string name = folder_ + "data/" + std::string(storage.key.substr(0, 100));
    const ZipEntry* entry = zip_.find(name);
    if (entry == nullptr)
      fail_at(value, "expected the entry '", printable(name), "' of a tensor, got none; needed");
    const auto needed = static_cast<std::uint64_t>(storage.numel);
    if (needed > entry->size / core::size_of(storage.dtype)) {
      fail_at(value, "expected ", storage.numel, " elements of ", storage.dtype, " in '",
              printable(name), "', got ", entry->size, " bytes; needed");
    }
    Tensor& bytes = storages_[entry];
    if (!bytes.defined()) bytes = bytes_of(*entry);
    return bytes;
  }

  Tensor bytes_of(const ZipEntry& entry) const {
    char* data = file_->data() + offset_ + entry.offset;
    const Shape shape{static_cast<std::int64_t>(entry.size)};
    if (reinterpret_cast<std::uintptr_t>(data) % kWidestElement == 0) {
      return Tensor::wrap(TensorView(data, shape, DType::u8), file_);
    }
    Tensor aligned = Tensor::empty(shape, DType::u8, Device{});
    if (entry.size > 0) std::memcpy(aligned.raw_data(), data, entry.size);
    return aligned;
  }

  // Any other byte in a bool is undefined.
  void check_booleans(const Pickle::Value& value, const Tensor& bytes) {
    if (!booleans_.insert(bytes.raw_data()).second) return;
    const auto* first = bytes.data<std::uint8_t>();
    const auto* last = first + bytes.numel();
    if (std::all_of(first, last, [](std::uint8_t byte) { return byte <= 1; })) return;
    fail_at(value, "expected booleans of 0 and 1, got others in a tensor");
  }

  std::shared_ptr<MappedFile> file_;
  std::uint64_t offset_;
  std::string place_;
  ZipReader zip_;
  std::uint64_t budget_;
  std::string folder_;  // "archive/"
  FlatState flat_;
  std::map<const ZipEntry*, Tensor> storages_;
  std::set<const void*> booleans_;  // storages whose booleans are good
};

}  // namespace

StateDict read_torch(const std::string& path, const TorchReadOptions& options) {
  auto file = std::make_shared<MappedFile>(path);
  const std::uint64_t size = file->size();
  return TorchFile(std::move(file), 0, size, path, options).read();
}

FlatState read_torch_values(const std::string& path, const TorchReadOptions& options) {
  auto file = std::make_shared<MappedFile>(path);
  const std::uint64_t size = file->size();
  return TorchFile(std::move(file), 0, size, path, options).read_values();
}

FlatState read_torch_archive(const TorchArchive& archive, const std::string& name,
                             const TorchReadOptions& options) {
  const std::string place = core::str(archive.file->path(), " from byte ", archive.offset);
  return TorchFile(archive.file, archive.offset, archive.size, place, options).read_as(name);
}

}  // namespace cairn::checkpointing

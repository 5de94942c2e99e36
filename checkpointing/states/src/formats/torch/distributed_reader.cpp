// A folder of torch.distributed.checkpoint's: .metadata, a pickle, says of what pieces each tensor
// is made and where in which file each lies; a piece is an archive of torch.save's.
#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>

#include "cairn/core/error.h"
#include "cairn/kernels/copy.h"
#include "formats/flat_state.h"
#include "formats/torch/archive.h"
#include "formats/torch/pickle_reader.h"
#include "io/printable.h"

namespace cairn::checkpointing {

namespace {

namespace fs = std::filesystem;

using Sizes = std::vector<std::int64_t>;

constexpr std::size_t kLongestName = 1000, kMostAttributes = 32;

class DistributedCheckpoint {
 public:
  DistributedCheckpoint(std::string folder, const TorchReadOptions& options)
      : folder_(std::move(folder)),
        options_(options),
        metadata_((fs::path(folder_) / kDistributedMetadata).string()),
        pickle_(metadata_.bytes(), 0, metadata_.path()) {}

  StateDict read() {
    find_pieces();
    each_item(field(root(), "state_dict_metadata", "the metadata"), [&](Value key, Value entry) {
      const std::string name = name_in(key);
      if (find_field(entry, "size") == nullptr) return add_other(name, key);
      flat_.emplace_back(name, whole(name, entry));
    });
    return unflatten(std::move(flat_));
  }

 private:
  using Value = const Pickle::Value&;
  using Place = std::pair<std::string, std::optional<Sizes>>;  // name, where the piece begins
  struct Piece {
    Sizes begin, size;
    Tensor tensor;
  };

  template <class... Args>
  [[noreturn]] void fail_at(Value value, const Args&... args) const {
    core::fail<core::DataError>("torch", args..., " at byte ", value.at, " in '", metadata_.path(),
                                "'");
  }

  // ---- the pickle's values

  Value root() const { return pickle_[pickle_.root()]; }

  const std::vector<Pickle::Ref>& items(Value value, Pickle::Kind kind, const char* what) const {
    if (value.kind != kind)
      fail_at(value, "expected ", name(kind), " as ", what, ", got ", name(value.kind));
    return std::get<std::vector<Pickle::Ref>>(value.data);
  }
  template <class F>
  void each_item(Value dictionary, F&& f) const {
    const auto& all = items(dictionary, Pickle::Kind::dictionary, "a dictionary");
    for (std::size_t i = 0; i < all.size(); i += 2) f(pickle_[all[i]], pickle_[all[i + 1]]);
  }
  const Pickle::Value* find_field(Value object, std::string_view attribute) const {
    const auto& state = items(object, Pickle::Kind::object, "metadata");
    if (state.empty()) return nullptr;
    Value attributes = pickle_[state.front()];
    const auto& all = items(attributes, Pickle::Kind::dictionary, "attributes");
    if (all.size() > 2 * kMostAttributes)
      fail_at(attributes, "expected at most ", kMostAttributes, " attributes, got more");
    for (std::size_t i = 0; i < all.size(); i += 2) {
      if (text(pickle_[all[i]], "an attribute's name") == attribute) return &pickle_[all[i + 1]];
    }
    return nullptr;
  }
  Value field(Value object, std::string_view attribute, const char* what) const {
    if (const Pickle::Value* found = find_field(object, attribute)) return *found;
    fail_at(object, "expected '", attribute, "' in ", what, ", got an object without");
  }
  std::string_view text(Value value, const char* what) const {
    if (value.kind != Pickle::Kind::text)
      fail_at(value, "expected text as ", what, ", got ", name(value.kind));
    return std::get<std::string_view>(value.data);
  }
  std::string name_in(Value value) const {
    const std::string_view name = text(value, "a name");
    if (name.size() > kLongestName || !usable_name(std::string(name)))
      fail_at(value, "expected a name of at most ", kLongestName,
              " bytes with text around each '.', got '", printable(name.substr(0, 100)), "'");
    return std::string(name);
  }
  std::int64_t count(Value value, const char* what) const {
    const bool known = value.kind == Pickle::Kind::integer;
    const std::int64_t number = known ? std::get<std::int64_t>(value.data) : -1;
    if (number < 0) fail_at(value, "expected 0 or more as ", what, ", got ", name(value.kind));
    return number;
  }
  Sizes sizes(Value value, const char* what) const {
    const auto& all = items(value, Pickle::Kind::tuple, what);
    if (all.size() > static_cast<std::size_t>(core::kMaxDims))
      fail_at(value, "expected at most ", core::kMaxDims, " dimensions, got ", all.size());
    Sizes numbers;
    for (const Pickle::Ref one : all) numbers.push_back(count(pickle_[one], what));
    return numbers;
  }

  // ---- what lies where

  void find_pieces() {
    each_item(field(root(), "storage_data", "the metadata"), [&](Value index, Value stored) {
      const Pickle::Value* offset = find_field(index, "offset");
      std::optional<Sizes> begin;
      if (offset != nullptr && offset->kind != Pickle::Kind::none)
        begin = sizes(*offset, "an offset");
      places_[{name_in(field(index, "fqn", "an index")), begin}] = &stored;
    });
  }

  /// Where it is stored. Nothing is read twice, so what is read is no more than the files hold.
  TorchArchive take_archive(const Place& place, Value whom) {
    const auto found = places_.extract(place);
    if (found.empty())
      fail_at(whom, "expected a place in a file for '", printable(place.first),
              "', or a piece of it, got none; needed");
    Value stored = *found.mapped();
    const auto* transforms = find_field(stored, "transform_descriptors");
    if (transforms != nullptr && transforms->kind != Pickle::Kind::none)
      fail_at(stored, "expected files as they are, got compressed ones (save without extensions)");
    const auto file = file_of(field(stored, "relative_path", "a place"));
    const std::int64_t offset = count(field(stored, "offset", "a place"), "an offset");
    const std::int64_t length = count(field(stored, "length", "a place"), "a length");
    const auto size = static_cast<std::int64_t>(file->size());
    if (offset > size || length > size - offset)
      fail_at(stored, "expected ", length, " bytes from ", offset, " on in '", file->path(),
              "', got a file of ", size, "; needed");
    return {file, static_cast<std::uint64_t>(offset), static_cast<std::uint64_t>(length)};
  }

  std::shared_ptr<MappedFile> file_of(Value path) {
    const std::string name(text(path, "a file"));
    if (name.empty() || name == ".." || name.find('/') != std::string::npos)
      fail_at(path, "expected a file of the folder, got '", printable(name), "'");
    std::shared_ptr<MappedFile>& file = files_[name];
    if (!file) file = std::make_shared<MappedFile>((fs::path(folder_) / name).string());
    return file;
  }

  void add_other(const std::string& name, Value key) {
    const TorchArchive archive = take_archive({name, std::nullopt}, key);
    for (auto& entry : read_torch_archive(archive, name, options_))
      flat_.push_back(std::move(entry));
  }

  // ---- tensors

  Tensor whole(const std::string& name, Value entry) {
    const Sizes extents = sizes(field(entry, "size", "a tensor"), "a size");
    const Shape shape(extents.begin(), extents.end());
    std::vector<Piece> pieces = pieces_of(name, shape, entry);
    if (pieces.size() == 1 && pieces.front().tensor.shape() == shape) return pieces.front().tensor;
    Tensor all = Tensor::empty(shape, pieces.front().tensor.dtype(), Device{});
    for (const Piece& piece : pieces) kernels::copy(piece.tensor.view(), part_of(all, piece));
    return all;
  }

  /// Those that hold anything; they fill the tensor and do not overlap.
  std::vector<Piece> pieces_of(const std::string& name, const Shape& shape, Value entry) {
    std::vector<Piece> pieces;
    std::int64_t elements = 0;
    for (const Pickle::Ref ref :
         items(field(entry, "chunks", "a tensor"), Pickle::Kind::list, "chunks")) {
      pieces.push_back(piece_of(name, shape, pickle_[ref]));
      elements += pieces.back().tensor.numel();
      if (pieces.back().tensor.dtype() != pieces.front().tensor.dtype())
        fail_at(entry, "expected pieces of one dtype of '", printable(name), "', got ",
                pieces.front().tensor.dtype(), " and ", pieces.back().tensor.dtype());
    }
    if (pieces.empty() || elements != checked_numel(shape, entry) || !fill(pieces, shape))
      fail_at(entry, "expected pieces that fill '", printable(name), "' ", shape, ", got ",
              pieces.size(), " with ", elements, " elements that do not");
    return pieces;
  }

  Piece piece_of(const std::string& name, const Shape& shape, Value chunk) {
    Piece piece{sizes(field(chunk, "offsets", "a chunk"), "offsets"),
                sizes(field(chunk, "sizes", "a chunk"), "sizes"),
                {}};
    const auto dims = static_cast<std::size_t>(shape.dims());
    bool inside = piece.begin.size() == dims && piece.size.size() == dims;
    for (std::size_t d = 0; inside && d < dims; ++d) {
      const std::int64_t extent = shape[static_cast<int>(d)];
      inside = piece.begin[d] <= extent && piece.size[d] <= extent - piece.begin[d];
    }
    if (!inside) fail_at(chunk, "expected a piece inside of '", printable(name), "' ", shape);
    const TorchArchive archive = take_archive({name, piece.begin}, chunk);
    const FlatState stored = read_torch_archive(archive, name, options_);
    const auto* tensor = stored.size() == 1 ? std::get_if<Tensor>(&stored[0].second) : nullptr;
    const Shape expected(piece.size.begin(), piece.size.end());
    const bool fits = tensor != nullptr && tensor->shape() == expected;
    if (!fits || tensor->nbytes() > archive.size)
      fail_at(chunk, "expected a tensor ", expected, " of at most ", archive.size,
              " bytes as a piece of '", printable(name), "', got ",
              tensor == nullptr ? std::string("none") : core::str(tensor->shape()));
    piece.tensor = *tensor;
    return piece;
  }

  std::int64_t checked_numel(const Shape& shape, Value entry) const {
    std::int64_t numel = 1;
    for (const std::int64_t extent : shape) {
      if (__builtin_mul_overflow(numel, extent, &numel))
        fail_at(entry, "expected a tensor whose elements can be counted, got ", shape);
    }
    return numel;
  }

  /// Of pieces that have as many elements as the tensor: whether they leave none out.
  static bool fill(const std::vector<Piece>& pieces, const Shape& shape) {
    if (pieces.size() == 1) return true;
    const Tensor seen = Tensor::full(shape, 0, DType::u8, Device{});
    for (const Piece& piece : pieces) kernels::fill(part_of(seen, piece), 1);
    const auto* first = seen.data<std::uint8_t>();
    return std::find(first, first + seen.numel(), 0) == first + seen.numel();
  }

  static TensorView part_of(const Tensor& whole, const Piece& piece) {
    TensorView part = whole.view();
    for (std::size_t d = 0; d < piece.begin.size(); ++d)
      part = part.slice(static_cast<int>(d), piece.begin[d], piece.begin[d] + piece.size[d]);
    return part;
  }

  std::string folder_;
  TorchReadOptions options_;
  MappedFile metadata_;
  Pickle pickle_;
  std::map<Place, const Pickle::Value*> places_;
  std::map<std::string, std::shared_ptr<MappedFile>> files_;
  FlatState flat_;
};

}  // namespace

StateDict read_torch_distributed(const std::string& folder, const TorchReadOptions& options) {
  return DistributedCheckpoint(folder, options).read();
}

}  // namespace cairn::checkpointing

#include "checkpoint/shards.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "cairn/checkpointing/safetensors.h"
#include "cairn/core/error.h"
#include "cairn/core/packer.h"
#include "formats/safetensors/format.h"
#include "io/host_copy.h"

namespace cairn::checkpointing {

namespace {

// Elements of one row, or of the whole where from is 0; nothing where that passes 63 bits.
std::optional<std::int64_t> product_from(const Shape& shape, int from) {
  std::int64_t product = 1;
  for (int d = from; d < shape.dims(); ++d) {
    if (__builtin_mul_overflow(product, shape[d], &product)) return {};
  }
  return product;
}

bool is_rows(const Shape& shape, const Shape& whole) {
  return shape.dims() == whole.dims() && shape.dims() > 0 &&
         std::equal(shape.begin() + 1, shape.end(), whole.begin() + 1);
}

void check_cover(const ShardedTensor& tensor, std::string& problems) {
  std::int64_t at = 0;
  const auto tell = [&](std::int64_t begin, std::int64_t end, const auto&... what) {
    problems += core::str("\n  '", tensor.name, "' ", tensor.whole, ": elements ", begin, " to ",
                          end - 1, what...);
  };
  const ShardPiece* before = nullptr;
  for (const ShardPiece& piece : tensor.pieces) {
    const auto [begin, end] = piece.elements;
    if (begin > at) tell(at, begin, " are missing");
    if (begin < at) {
      tell(begin, std::min(at, end), " are in ", before->entry->file, " and in ",
           piece.entry->file);
    }
    if (end > at) before = &piece;
    at = std::max(at, end);
  }
  const auto all = product_from(tensor.whole, 0);
  if (all && at < *all) tell(at, *all, " are missing");
}

Tensor flat_elements(const Tensor& host, ElementRange range) {
  Tensor result = Tensor::empty({range.end - range.begin}, host.dtype(), Device{});
  const auto width = static_cast<std::int64_t>(core::size_of(host.dtype()));
  if (result.numel() == 0) return result;
  std::memcpy(result.raw_data(), static_cast<const char*>(host.raw_data()) + range.begin * width,
              result.nbytes());
  return result;
}

Tensor in_shape(const Tensor& x, const Shape& shape) {
  return Tensor::wrap(TensorView(x.raw_data(), shape, x.dtype()), x.storage());
}

// What cannot be had in the form that is wanted: a part names it as of another shape, or surplus.
Shard nothing_of(const Shape& whole, DType dtype) {
  return {Tensor::empty({0}, dtype, Device{}), whole, 0};
}

// These elements of a tensor of `whole`, as what is wanted: one like `wanted`.
StateDict::Value shard_like(const Shard& wanted, const Shape& whole, DType dtype,
                            const std::function<Tensor(ElementRange)>& elements) {
  if (!(whole == wanted.whole)) return nothing_of(whole, dtype);
  const auto range = elements_of(wanted.tensor.shape(), {wanted.whole, wanted.begin});
  CAIRN_CHECK(range.has_value(), "resume", "expected a shard within ", whole, ", got ",
              wanted.tensor.shape(), " from ", wanted.begin, " on");
  return Shard{in_shape(elements(*range), wanted.tensor.shape()), whole, wanted.begin};
}

/// "model", of "shards.model.fc.weight".
std::string part_of(const std::string& name) {
  const std::size_t begin = std::strlen(kShardPrefix);
  return name.substr(begin, name.find('.', begin) - begin);
}

using Described = std::set<std::pair<std::string, std::uint64_t>>;  // parts, and what is held

Described parse_described(const std::string& told) {
  Described parts;
  core::Unpacker message(told);
  while (!message.rest().empty()) {
    std::string part = message.text();
    parts.emplace(std::move(part), message.number());
  }
  return parts;
}

}  // namespace

std::string describe_shards(const FlatState& own) {
  std::map<std::string, core::Packer> parts;
  for (const auto& [name, value] : own) {
    const auto* shard = std::get_if<Shard>(&value);
    if (shard == nullptr) continue;
    parts[part_of(name)].text(name).text(core::str(shard->tensor.shape(), " from ", shard->begin));
  }
  core::Packer all;
  for (const auto& [part, held] : parts)
    all.text(part).number(checksum(held.bytes().data(), held.bytes().size()));
  return all.bytes();
}

void leave_out_copies(FlatState& own, const std::vector<std::string>& told, int rank) {
  Described before;
  for (int r = 0; r < rank; ++r) before.merge(parse_described(told[static_cast<std::size_t>(r)]));
  std::set<std::string> copies;
  for (const auto& held : parse_described(told[static_cast<std::size_t>(rank)])) {
    if (before.contains(held)) copies.insert(held.first);
  }
  std::erase_if(own, [&](const auto& entry) {
    return std::holds_alternative<Shard>(entry.second) && copies.contains(part_of(entry.first));
  });
}

std::optional<ElementRange> elements_of(const Shape& shape, const ShardPlace& place) {
  const auto whole = product_from(place.whole, 0);
  const bool rows = is_rows(shape, place.whole);
  if (!whole || (!rows && shape.dims() != 1) || place.begin < 0) return {};
  const std::int64_t unit = rows ? product_from(place.whole, 1).value_or(0) : 1;
  const std::int64_t units = rows ? place.whole[0] : *whole;
  if (place.begin > units || shape[0] > units - place.begin) return {};
  return ElementRange{place.begin * unit, (place.begin + shape[0]) * unit};
}

std::vector<ShardedTensor> sharded_tensors(const std::vector<ManifestFile>& files,
                                           std::string& problems) {
  std::vector<ShardedTensor> tensors;
  std::map<std::string, std::size_t> places;
  for (const ManifestFile& file : files) {
    for (const CheckpointEntry& entry : file.entries) {
      if (!entry.shard) continue;
      const std::string name = entry.name.substr(std::strlen(kShardPrefix));
      const auto [found, is_new] = places.emplace(name, tensors.size());
      if (is_new) tensors.push_back({name, entry.dtype, entry.shard->whole, {}});
      ShardedTensor& tensor = tensors[found->second];
      const auto elements = elements_of(entry.shape, *entry.shard);
      if (!elements || entry.dtype != tensor.dtype || !(entry.shard->whole == tensor.whole)) {
        problems += core::str("\n  '", name, "' ", tensor.dtype, " ", tensor.whole, ": ", file.name,
                              " has ", entry.dtype, " ", entry.shape, " from ", entry.shard->begin,
                              " of ", entry.shard->whole);
      } else if (elements->begin < elements->end) {
        tensor.pieces.push_back({&entry, *elements});
      }
    }
  }
  for (ShardedTensor& tensor : tensors) {
    std::stable_sort(tensor.pieces.begin(), tensor.pieces.end(),
                     [](const ShardPiece& a, const ShardPiece& b) {
                       return a.elements.begin < b.elements.begin;
                     });
    check_cover(tensor, problems);
  }
  return tensors;
}

std::vector<ShardedTensor> sharded_tensors(const Manifest& manifest) {
  std::string problems;
  return sharded_tensors(manifest.files, problems);
}

Tensor read_elements(const ShardedTensor& tensor, ElementRange elements, const PieceReader& read) {
  Tensor result = Tensor::empty({elements.end - elements.begin}, tensor.dtype, Device{});
  const auto width = static_cast<std::int64_t>(core::size_of(tensor.dtype));
  for (const ShardPiece& piece : tensor.pieces) {
    const std::int64_t begin = std::max(elements.begin, piece.elements.begin);
    const std::int64_t end = std::min(elements.end, piece.elements.end);
    if (begin >= end) continue;
    const Tensor values = read(*piece.entry);
    std::memcpy(
        static_cast<char*>(result.raw_data()) + (begin - elements.begin) * width,
        static_cast<const char*>(values.raw_data()) + (begin - piece.elements.begin) * width,
        static_cast<std::size_t>((end - begin) * width));
  }
  return result;
}

Tensor read_whole(const ShardedTensor& tensor, const PieceReader& read) {
  return in_shape(read_elements(tensor, {0, tensor.whole.numel()}, read), tensor.whole);
}

FlatState in_wanted_form(FlatState stored, const std::vector<ShardedTensor>& sharded,
                         const FlatState& wanted, const PieceReader& read) {
  std::map<std::string, const StateDict::Value*> forms;
  for (const auto& [name, value] : wanted) forms[name] = &value;
  const auto form_of = [&](const std::string& name) {
    const auto found = forms.find(name);
    return found == forms.end() ? nullptr : found->second;
  };
  for (auto& [name, value] : stored) {
    const StateDict::Value* form = form_of(name);
    const auto* shard = form == nullptr ? nullptr : std::get_if<Shard>(form);
    const auto* tensor = std::get_if<Tensor>(&value);
    if (shard == nullptr || shard->rounded.defined() || tensor == nullptr) continue;
    value = shard_like(
        *shard, tensor->shape(), tensor->dtype(),
        [host = on_host(*tensor)](ElementRange range) { return flat_elements(host, range); });
  }
  for (const ShardedTensor& tensor : sharded) {
    const StateDict::Value* form = form_of(tensor.name);
    const auto* shard = form == nullptr ? nullptr : std::get_if<Shard>(form);
    if (shard == nullptr || shard->rounded.defined()) {
      stored.emplace_back(tensor.name, read_whole(tensor, read));
    } else {
      const auto elements = [&](ElementRange range) { return read_elements(tensor, range, read); };
      stored.emplace_back(tensor.name, shard_like(*shard, tensor.whole, tensor.dtype, elements));
    }
  }
  return stored;
}

Shard even_shard(const ShardedTensor& tensor, int rank, int world_size, const PieceReader& read) {
  const bool rows = tensor.whole.dims() > 0 &&
                    std::all_of(tensor.pieces.begin(), tensor.pieces.end(), [&](const auto& piece) {
                      return is_rows(piece.entry->shape, tensor.whole);
                    });
  const std::int64_t units = rows ? tensor.whole[0] : tensor.whole.numel();
  const std::int64_t each = units / world_size, more = units % world_size;
  const std::int64_t begin = rank * each + std::min<std::int64_t>(rank, more);
  Shape shape = rows ? tensor.whole : Shape{0};
  shape[0] = each + (rank < more ? 1 : 0);
  const ElementRange elements = *elements_of(shape, {tensor.whole, begin});
  return {in_shape(read_elements(tensor, elements, read), shape), tensor.whole, begin};
}

PieceReader piece_reader(const std::string& folder) {
  auto files =
      std::make_shared<std::map<std::string, std::unique_ptr<SafetensorsReader>, std::less<>>>();
  return [folder, files](const CheckpointEntry& piece) {
    std::unique_ptr<SafetensorsReader>& file = (*files)[piece.file];
    const std::string path = core::str(folder, "/", piece.file);
    if (!file) file = std::make_unique<SafetensorsReader>(path);
    const SafetensorsEntry* stored = file->find(piece.name);
    const bool same =
        stored != nullptr && stored->dtype == piece.dtype && stored->shape == piece.shape;
    Tensor values = same ? file->map(*stored) : Tensor();
    if (!same || checksum(values.raw_data(), values.nbytes()) != piece.checksum) {
      core::fail<core::DataError>("checkpoint", "expected '", piece.name, "' ", piece.dtype, " ",
                                  piece.shape, " in '", path,
                                  "' with the manifest's checksum, got another");
    }
    return values;
  };
}

}  // namespace cairn::checkpointing

#include <algorithm>
#include <bit>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "cairn/core/error.h"
#include "formats/flat_state.h"
#include "formats/json_text.h"
#include "formats/safetensors/format.h"
#include "io/file_io.h"
#include "io/host_copy.h"
#include "io/work_threads.h"

namespace cairn::checkpointing {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace {

using Parts = std::vector<SafetensorsPart>;

void check_names(const std::string& path, const Parts& parts) {
  std::vector<std::string_view> names;
  for (const SafetensorsPart& part : parts) {
    CAIRN_CHECK(!part.name.empty() && part.name != kMetadataKey, "safetensors",
                "expected a name for each tensor in '", path, "', got '", part.name, "'");
    names.emplace_back(part.name);
  }
  const std::string_view twice = repeated_name(std::move(names));
  CAIRN_CHECK(twice.empty(), "safetensors", "expected distinct names in '", path, "', got '", twice,
              "' twice");
}

std::uint64_t bytes_of(const SafetensorsPart& part) {
  return core::size_of(part.dtype) * static_cast<std::uint64_t>(part.shape.numel());
}

// Wide elements first, so that each tensor starts at a multiple of its element size.
std::vector<std::size_t> data_order(const Parts& parts) {
  std::vector<std::size_t> order(parts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return core::size_of(parts[a].dtype) > core::size_of(parts[b].dtype);
  });
  return order;
}

std::string header_text(const Parts& parts, const std::vector<std::size_t>& order,
                        const SafetensorsMetadata& metadata) {
  const auto quoted = [](const std::string& name) { return json_string(name, "safetensors"); };
  std::string about;
  for (const auto& [key, value] : metadata) {
    about += core::str(about.empty() ? "" : ",", quoted(key), ':', quoted(value));
  }
  std::string text = "{";
  if (!about.empty()) text += core::str(quoted(kMetadataKey), ":{", about, '}');
  std::uint64_t offset = 0;
  for (const std::size_t i : order) {
    const SafetensorsPart& part = parts[i];
    const std::uint64_t end = offset + bytes_of(part);
    if (text.size() > 1) text += ',';
    text += quoted(part.name) + R"(:{"dtype":")" + safetensors_name(part.dtype) + R"(","shape":)" +
            json_sizes(part.shape) + R"(,"data_offsets":[)" + std::to_string(offset) + ',' +
            std::to_string(end) + "]}";
    offset = end;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts aligned
  return text;
}

// A piece is summed and written while it is in the cache; then the disk begins, while the next one
// comes. Returns the checksum.
std::uint64_t write_and_sum(WritableFile& file, std::uint64_t offset, const Tensor& host) {
  constexpr std::size_t kPiece = std::size_t{4} << 20;
  const auto* data = static_cast<const char*>(host.raw_data());
  RunningChecksum sum;
  for (std::size_t at = 0; at < host.nbytes(); at += kPiece) {
    const std::size_t bytes = std::min(kPiece, host.nbytes() - at);
    sum.add(data + at, bytes);
    file.write_at(offset + at, data + at, bytes);
    file.start_flush(offset + at, bytes);
  }
  return sum.value();
}

// The file's beginning, and where each tensor's data lies.
struct FileLayout {
  std::vector<std::size_t> order;
  std::string beginning;
  std::vector<std::uint64_t> offsets;  // of the tensors, in the file
  std::uint64_t end = 0;

  FileLayout(const Parts& parts, const SafetensorsMetadata& metadata)
      : order(data_order(parts)), offsets(parts.size()) {
    const std::string header = header_text(parts, order, metadata);
    const std::uint64_t length = header.size();
    CAIRN_CHECK(length <= kLargestHeader, "safetensors", "expected a header of at most ",
                kLargestHeader, " bytes, got ", length);
    beginning = std::string(reinterpret_cast<const char*>(&length), sizeof length) + header;
    end = beginning.size();
    for (const std::size_t i : order) {
      offsets[i] = end;
      end += bytes_of(parts[i]);
    }
  }
};

void write_values(WritableFile& file, const FileLayout& layout, const Parts& parts,
                  std::vector<std::uint64_t>& checksums) {
  for (const SafetensorsPart& part : parts)
    if (part.values.defined()) wait_for_device(part.values);  // in this thread, whose streams wrote
  on_threads(threads_for(layout.end), layout.order.size(), [&](std::size_t job) {
    const std::size_t i = layout.order[job];
    const SafetensorsPart& part = parts[i];
    if (!part.values.defined()) return;
    const std::uint64_t begin = core::size_of(part.dtype) * static_cast<std::uint64_t>(part.begin);
    checksums[i] = write_and_sum(file, layout.offsets[i] + begin, on_host(part.values));
  });
}

Parts whole_parts(const std::string& path, const NamedTensors& tensors) {
  Parts parts;
  parts.reserve(tensors.size());
  for (const core::NamedTensor& entry : tensors) {
    CAIRN_CHECK(entry.tensor.defined(), "safetensors", "expected a tensor for '", entry.name,
                "' in '", path, "', got an undefined one");
    parts.push_back({entry.name, entry.tensor.dtype(), entry.tensor.shape(), entry.tensor});
  }
  return parts;
}

}  // namespace

SafetensorsChecksums write_safetensors_parts(const std::string& path, const Parts& parts,
                                             const SafetensorsMetadata& metadata,
                                             const World& world) {
  check_names(path, parts);
  const FileLayout layout(parts, metadata);
  SafetensorsChecksums checksums{checksum(layout.beginning.data(), layout.beginning.size()), {}};
  checksums.tensors.resize(parts.size());
  std::optional<WritableFile> file;
  world.all_or_throw<core::IoError>("safetensors", [&] {
    if (world.rank == 0) file.emplace(path).write(layout.beginning);
    return "";
  });
  world.all_or_throw<core::IoError>("safetensors", [&] {
    if (!file) file.emplace(path, WritableFile::Mode::existing);
    write_values(*file, layout, parts, checksums.tensors);
    file->close();
    return "";
  });
  return checksums;
}

SafetensorsChecksums write_safetensors_with_checksums(const std::string& path,
                                                      const NamedTensors& tensors,
                                                      const SafetensorsMetadata& metadata) {
  return write_safetensors_parts(path, whole_parts(path, tensors), metadata, {});
}

void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const SafetensorsMetadata& metadata) {
  write_safetensors_with_checksums(path, tensors, metadata);
}

}  // namespace cairn::checkpointing

#include <algorithm>
#include <bit>
#include <numeric>
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

void check_names(const std::string& path, const NamedTensors& tensors) {
  std::vector<std::string_view> names;
  for (const core::NamedTensor& entry : tensors) {
    CAIRN_CHECK(!entry.name.empty() && entry.name != kMetadataKey, "safetensors",
                "expected a name for each tensor in '", path, "', got '", entry.name, "'");
    CAIRN_CHECK(entry.tensor.defined(), "safetensors", "expected a tensor for '", entry.name,
                "', got an undefined one");
    names.emplace_back(entry.name);
  }
  const std::string_view twice = repeated_name(std::move(names));
  CAIRN_CHECK(twice.empty(), "safetensors", "expected distinct names in '", path, "', got '", twice,
              "' twice");
}

// Wide elements first, so that each tensor starts at a multiple of its element size.
std::vector<std::size_t> data_order(const NamedTensors& tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return core::size_of(tensors[a].tensor.dtype()) > core::size_of(tensors[b].tensor.dtype());
  });
  return order;
}

std::string header_text(const NamedTensors& tensors, const std::vector<std::size_t>& order,
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
    const Tensor& x = tensors[i].tensor;
    const std::uint64_t end = offset + x.nbytes();
    if (text.size() > 1) text += ',';
    text += quoted(tensors[i].name) + R"(:{"dtype":")" + safetensors_name(x.dtype()) +
            R"(","shape":)" + json_sizes(x.shape()) + R"(,"data_offsets":[)" +
            std::to_string(offset) + ',' + std::to_string(end) + "]}";
    offset = end;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts aligned
  return text;
}

// A piece is summed and written while it is in the cache; then the disk begins, while the next one
// comes. Returns the checksum.
std::uint64_t write_and_sum(WritableFile& file, std::uint64_t offset, const Tensor& host) {
  constexpr std::size_t kPiece = std::size_t{4} << 20, kWorthACall = std::size_t{1} << 20;
  const auto* data = static_cast<const char*>(host.raw_data());
  RunningChecksum sum;
  for (std::size_t at = 0; at < host.nbytes(); at += kPiece) {
    const std::size_t bytes = std::min(kPiece, host.nbytes() - at);
    sum.add(data + at, bytes);
    file.write_at(offset + at, data + at, bytes);
    if (bytes >= kWorthACall) file.start_flush(offset + at, bytes);
  }
  return sum.value();
}

}  // namespace

SafetensorsChecksums write_safetensors_with_checksums(const std::string& path,
                                                      const NamedTensors& tensors,
                                                      const SafetensorsMetadata& metadata) {
  check_names(path, tensors);
  const std::vector<std::size_t> order = data_order(tensors);
  const std::string header = header_text(tensors, order, metadata);
  const std::uint64_t length = header.size();
  CAIRN_CHECK(length <= kLargestHeader, "safetensors", "expected a header of at most ",
              kLargestHeader, " bytes, got ", length);
  const std::string beginning =
      std::string(reinterpret_cast<const char*>(&length), sizeof length) + header;
  WritableFile file(path);
  file.write(beginning);
  SafetensorsChecksums checksums{checksum(beginning.data(), beginning.size()), {}};
  checksums.tensors.resize(tensors.size());
  std::vector<std::uint64_t> offsets;
  std::uint64_t end = beginning.size();
  for (const std::size_t i : order) {
    offsets.push_back(end);
    end += tensors[i].tensor.nbytes();
    wait_for_device(tensors[i].tensor);  // in this thread, whose streams wrote it
  }
  on_threads(threads_for(end), order.size(), [&](std::size_t job) {
    const std::size_t i = order[job];
    const Tensor host = on_host(tensors[i].tensor);
    checksums.tensors[i] = write_and_sum(file, offsets[job], host);
  });
  file.close();
  return checksums;
}

void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const SafetensorsMetadata& metadata) {
  write_safetensors_with_checksums(path, tensors, metadata);
}

}  // namespace cairn::checkpointing

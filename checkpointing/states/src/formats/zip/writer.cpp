#include "formats/zip/writer.h"

#include <utility>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

namespace {

constexpr std::uint64_t kZipAlignment = 64;  // as torch's
constexpr std::uint16_t kZipVersion = 45;    // of the format: zip64
constexpr std::uint16_t kUtf8 = 0x800;       // names
constexpr std::uint16_t kMidnight = 0,
                        kFirstDay = 0x21;   // 1980-01-01: the same state, the same file
constexpr std::uint16_t kPadding = 0x4246;  // an extra field that torch pads with, too

void put_bytes(std::string& out, const void* data, std::size_t bytes) {
  out.append(static_cast<const char*>(data), bytes);
}

template <class... T>
std::string fields(T... values) {
  std::string out;
  (put_bytes(out, &values, sizeof values), ...);
  return out;
}

constexpr std::uint16_t u16(std::uint64_t value) {
  return static_cast<std::uint16_t>(value);
}

}  // namespace

ZipWriter::ZipWriter(const std::string& path, std::uint64_t limit) : file_(path), limit_(limit) {}

void ZipWriter::write(std::string_view bytes) {
  file_.write(bytes);
  at_ += bytes.size();
}

std::uint32_t ZipWriter::short_value(std::uint64_t value) const {
  return value >= limit_ ? zip::kIn64 : static_cast<std::uint32_t>(value);
}

void ZipWriter::add(const std::string& name, std::string_view bytes) {
  Written written{{name, 0, bytes.size(), zip_crc32(bytes)}, at_};
  const std::uint32_t size = short_value(bytes.size());
  std::string extra;
  if (size == zip::kIn64) {
    extra = fields(zip::kExtra64, std::uint16_t{16}, std::uint64_t{bytes.size()},
                   std::uint64_t{bytes.size()});
  }
  const std::uint64_t body = at_ + zip::kLocalBytes + name.size() + extra.size() + 4;
  const std::uint64_t padding = (kZipAlignment - body % kZipAlignment) % kZipAlignment;
  extra += fields(kPadding, u16(padding)) + std::string(padding, ' ');
  write(fields(zip::kLocal, kZipVersion, kUtf8, std::uint16_t{0}, kMidnight, kFirstDay,
               written.entry.crc32, size, size, u16(name.size()), u16(extra.size())));
  write(name);
  write(extra);
  written.entry.offset = at_;
  write(bytes);
  written_.push_back(std::move(written));
}

void ZipWriter::close() {
  const std::uint64_t contents = at_;
  for (const auto& [entry, header] : written_) {
    const std::uint32_t size = short_value(entry.size);
    const std::uint32_t offset = short_value(header);
    std::string wide;
    if (size == zip::kIn64) wide += fields(entry.size, entry.size);
    if (offset == zip::kIn64) wide += fields(header);
    if (!wide.empty()) wide.insert(0, fields(zip::kExtra64, u16(wide.size())));
    write(fields(zip::kCentral, kZipVersion, kZipVersion, kUtf8, std::uint16_t{0}, kMidnight,
                 kFirstDay, entry.crc32, size, size, u16(entry.name.size()), u16(wide.size()),
                 std::uint16_t{0}, std::uint16_t{0}, std::uint16_t{0}, std::uint32_t{0}, offset));
    write(entry.name);
    write(wide);
  }
  const std::uint64_t end64 = at_;
  const std::uint64_t bytes = end64 - contents;
  const std::uint64_t count = written_.size();
  // Always there, as torch's: its reader and ours look there where a value does not fit.
  write(fields(zip::kEnd64, std::uint64_t{zip::kEnd64Bytes - 12}, kZipVersion, kZipVersion,
               std::uint32_t{0}, std::uint32_t{0}, count, count, bytes, contents));
  write(fields(zip::kLocator64, std::uint32_t{0}, end64, std::uint32_t{1}));
  const std::uint16_t entries = count >= zip::kCountIn64 ? zip::kCountIn64 : u16(count);
  write(fields(zip::kEnd, std::uint16_t{0}, std::uint16_t{0}, entries, entries, short_value(bytes),
               short_value(contents), std::uint16_t{0}));
  file_.close();
}

}  // namespace cairn::checkpointing

#include "formats/zip/reader.h"

#include <zlib.h>

#include <algorithm>
#include <numeric>

#include "cairn/core/error.h"
#include "formats/zip/format.h"
#include "io/printable.h"

namespace cairn::checkpointing {

namespace {

using zip::field;

// What the end of the archive says of its table of contents.
struct ZipContents {
  std::uint64_t entries = 0, bytes = 0, offset = 0;
};

class ZipParser {
 public:
  ZipParser(std::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  std::vector<ZipEntry> entries() const {
    const ZipContents contents = find_contents();
    std::vector<ZipEntry> entries;
    std::uint64_t at = contents.offset;
    const std::uint64_t end = contents.offset + contents.bytes;
    for (std::uint64_t i = 0; i < contents.entries; ++i) entries.push_back(entry_at(at, end));
    if (at != end) {
      fail(at, "expected the table of contents to end at ", end, ", got ", contents.entries,
           " entries up to");
    }
    check_overlaps(entries, contents.offset);
    return entries;
  }

 private:
  template <class... Args>
  [[noreturn]] void fail(std::uint64_t at, const Args&... args) const {
    core::fail<core::DataError>("zip", args..., " byte ", at, " in '", path_, "'");
  }

  bool fits(std::uint64_t at, std::uint64_t size, std::uint64_t end) const {
    return at <= end && size <= end - at;
  }

  // The end record is the last thing in the file but for a comment, whose length it tells.
  std::uint64_t find_end() const {
    if (bytes_.size() < zip::kEndBytes) {
      fail(bytes_.size(), "expected a zip archive, got the end of the file at");
    }
    const std::uint64_t last = bytes_.size() - zip::kEndBytes;
    for (std::uint64_t back = 0; back <= std::min<std::uint64_t>(last, 0xffff); ++back) {
      const std::uint64_t at = last - back;
      if (field<std::uint32_t>(bytes_, at) == zip::kEnd &&
          field<std::uint16_t>(bytes_, at + 20) == back) {
        return at;
      }
    }
    fail(bytes_.size(),
         "expected the end record of a zip archive, got a truncated file or another kind, up to");
  }

  ZipContents find_contents() const {
    const std::uint64_t end = find_end();
    const auto entries = field<std::uint16_t>(bytes_, end + 10);
    const auto size = field<std::uint32_t>(bytes_, end + 12);
    const auto offset = field<std::uint32_t>(bytes_, end + 16);
    ZipContents contents{entries, size, offset};
    std::uint64_t limit = end;
    if (entries == zip::kCountIn64 || size == zip::kIn64 || offset == zip::kIn64) {
      contents = contents_in_64(end, limit);
    }
    if (!fits(contents.offset, contents.bytes, limit)) {
      fail(end, "expected a table of contents before the end record, got ", contents.bytes,
           " bytes at ", contents.offset, ", stated at");
    }
    if (contents.entries > contents.bytes / zip::kCentralBytes) {
      fail(end, "expected entries that fit ", contents.bytes, " bytes, got ", contents.entries,
           ", stated at");
    }
    return contents;
  }

  ZipContents contents_in_64(std::uint64_t end, std::uint64_t& limit) const {
    if (end < zip::kLocator64Bytes ||
        field<std::uint32_t>(bytes_, end - zip::kLocator64Bytes) != zip::kLocator64) {
      fail(end, "expected a zip64 record before");
    }
    const std::uint64_t locator = end - zip::kLocator64Bytes;
    const auto at = field<std::uint64_t>(bytes_, locator + 8);
    if (!fits(at, zip::kEnd64Bytes, locator) || field<std::uint32_t>(bytes_, at) != zip::kEnd64) {
      fail(locator, "expected a zip64 end record at ", at, ", got none; stated at");
    }
    limit = at;
    return {field<std::uint64_t>(bytes_, at + 32), field<std::uint64_t>(bytes_, at + 40),
            field<std::uint64_t>(bytes_, at + 48)};
  }

  // Reads the entry of the table at `at` and moves past it.
  ZipEntry entry_at(std::uint64_t& at, std::uint64_t end) const {
    if (!fits(at, zip::kCentralBytes, end) || field<std::uint32_t>(bytes_, at) != zip::kCentral) {
      fail(at, "expected an entry of the table of contents at");
    }
    const auto flags = field<std::uint16_t>(bytes_, at + 8);
    const auto method = field<std::uint16_t>(bytes_, at + 10);
    const auto name_bytes = field<std::uint16_t>(bytes_, at + 28);
    const auto extra_bytes = field<std::uint16_t>(bytes_, at + 30);
    const auto comment_bytes = field<std::uint16_t>(bytes_, at + 32);
    const std::uint64_t variable = std::uint64_t{name_bytes} + extra_bytes + comment_bytes;
    const std::uint64_t body = at + zip::kCentralBytes;
    if (!fits(body, variable, end)) fail(at, "expected a whole entry at");
    ZipEntry entry;
    entry.name = std::string(bytes_.substr(body, name_bytes));
    entry.crc32 = field<std::uint32_t>(bytes_, at + 16);
    if ((flags & 1) != 0 || method != 0) {
      fail(at,
           "expected entries neither compressed nor encrypted, as torch.save writes them, got '",
           printable(entry.name), "' with method ", method, " and flags ", flags, " at");
    }
    const Sizes sizes = sizes_of(at, bytes_.substr(body + name_bytes, extra_bytes));
    if (sizes.stored != sizes.size) {
      fail(at, "expected stored bytes, got ", sizes.stored, " for ", sizes.size, " of '",
           printable(entry.name), "' at");
    }
    entry.size = sizes.size;
    entry.offset = data_offset(sizes.header, entry.name);
    at = body + variable;
    return entry;
  }

  struct Sizes {
    std::uint64_t size = 0, stored = 0, header = 0;
  };

  Sizes sizes_of(std::uint64_t at, std::string_view extra) const {
    Sizes sizes{field<std::uint32_t>(bytes_, at + 24), field<std::uint32_t>(bytes_, at + 20),
                field<std::uint32_t>(bytes_, at + 42)};
    std::string_view wide = extra_64(extra);
    for (std::uint64_t* value : {&sizes.size, &sizes.stored, &sizes.header}) {
      if (*value != zip::kIn64) continue;
      if (wide.size() < 8) fail(at, "expected the 64-bit sizes of the entry at");
      *value = field<std::uint64_t>(wide, 0);
      wide.remove_prefix(8);
    }
    return sizes;
  }

  static std::string_view extra_64(std::string_view extra) {
    while (extra.size() >= 4) {
      const auto id = field<std::uint16_t>(extra, 0);
      const auto size = field<std::uint16_t>(extra, 2);
      extra.remove_prefix(4);
      if (size > extra.size()) return {};
      if (id == zip::kExtra64) return extra.substr(0, size);
      extra.remove_prefix(size);
    }
    return {};
  }

  // Where the bytes begin: past the entry's own header, which repeats the name.
  std::uint64_t data_offset(std::uint64_t header, const std::string& name) const {
    if (!fits(header, zip::kLocalBytes, bytes_.size()) ||
        field<std::uint32_t>(bytes_, header) != zip::kLocal) {
      fail(header, "expected the header of '", printable(name), "' at");
    }
    const auto name_bytes = field<std::uint16_t>(bytes_, header + 26);
    const auto extra_bytes = field<std::uint16_t>(bytes_, header + 28);
    const std::uint64_t body = header + zip::kLocalBytes;
    if (!fits(body, std::uint64_t{name_bytes} + extra_bytes, bytes_.size()) ||
        bytes_.substr(body, name_bytes) != name) {
      fail(header, "expected the header of '", printable(name), "', got another at");
    }
    return body + name_bytes + extra_bytes;
  }

  void check_overlaps(std::vector<ZipEntry>& entries, std::uint64_t end) const {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const ZipEntry& a, const ZipEntry& b) { return a.offset < b.offset; });
    std::uint64_t at = 0;
    for (const ZipEntry& entry : entries) {
      if (entry.offset < at || !fits(entry.offset, entry.size, end)) {
        fail(entry.offset, "expected '", printable(entry.name), "' to lie between ", at, " and ",
             end, ", got ", entry.size, " bytes at");
      }
      at = entry.offset + entry.size;
    }
  }

  std::string_view bytes_;
  const std::string& path_;
};

}  // namespace

ZipReader::ZipReader(std::string_view bytes, const std::string& path)
    : bytes_(bytes), entries_(ZipParser(bytes, path).entries()), by_name_(entries_.size()) {
  std::iota(by_name_.begin(), by_name_.end(), std::size_t{0});
  const auto name_of = [this](std::size_t i) -> const std::string& { return entries_[i].name; };
  std::sort(by_name_.begin(), by_name_.end(),
            [&](std::size_t a, std::size_t b) { return name_of(a) < name_of(b); });
  for (std::size_t i = 1; i < by_name_.size(); ++i) {
    if (name_of(by_name_[i - 1]) != name_of(by_name_[i])) continue;
    const ZipEntry& second = entries_[by_name_[i]];
    core::fail<core::DataError>("zip", "expected distinct names, got '", printable(second.name),
                                "' twice, again at byte ", second.offset, " in '", path, "'");
  }
}

const ZipEntry* ZipReader::find(std::string_view name) const {
  const auto found =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [this](std::size_t i, std::string_view n) { return entries_[i].name < n; });
  if (found == by_name_.end() || entries_[*found].name != name) return nullptr;
  return &entries_[*found];
}

std::string_view ZipReader::bytes_of(const ZipEntry& entry) const {
  return bytes_.substr(entry.offset, entry.size);
}

bool ZipReader::intact(const ZipEntry& entry) const {
  return zip_crc32(bytes_of(entry)) == entry.crc32;
}

std::uint32_t zip_crc32(std::string_view bytes) {
  return static_cast<std::uint32_t>(
      crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace cairn::checkpointing

#include "cairn/data/image_folder.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "cairn/core/error.h"
#include "draws.h"
#include "picture.h"

namespace cairn::data {

namespace {

namespace fs = std::filesystem;
using detail::EncodedPicture, detail::Picture, detail::Window;

constexpr const char* kWhere = "image_folder";

bool is_picture(const fs::path& path) {
  std::string ending = path.extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return ending == ".jpg" || ending == ".jpeg" || ending == ".png";
}

/// What `list` says, of a folder's entries.
template <class List>
std::vector<std::string> names_in(const fs::path& folder, List&& list) try {
  std::vector<std::string> names = list();
  std::sort(names.begin(), names.end());
  return names;
} catch (const fs::filesystem_error& error) {
  core::fail<core::IoError>(kWhere, "expected a folder of classes that can be read, got '",
                            folder.string(), "': ", error.code().message());
}

std::vector<std::string> folders_of(const fs::path& root) {
  std::vector<std::string> names = names_in(root, [&] {
    std::vector<std::string> all;
    for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
      if (entry.is_directory()) all.push_back(entry.path().filename().string());
    }
    return all;
  });
  if (names.empty()) {
    core::fail<core::DataError>(kWhere, "expected a folder for each class in '", root.string(),
                                "', got none (ROOT/CLASS/PICTURE.jpg)");
  }
  return names;
}

std::vector<std::string> pictures_of(const fs::path& folder) {
  constexpr auto kLinks = fs::directory_options::follow_directory_symlink;
  std::vector<std::string> names = names_in(folder, [&] {
    std::vector<std::string> all;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder, kLinks)) {
      const fs::path name = entry.path().lexically_relative(folder);
      if (is_picture(name) && entry.is_regular_file()) all.push_back(name.string());
    }
    return all;
  });
  if (names.empty()) {
    core::fail<core::DataError>(kWhere, "expected pictures (.jpg, .jpeg or .png) in '",
                                folder.string(), "', got none");
  }
  return names;
}

void check(const ImageFolderOptions& options) {
  CAIRN_CHECK(options.size > 0, kWhere, "expected a size > 0, got ", options.size);
  CAIRN_CHECK(options.random_resized_crop || options.resize >= options.size, kWhere,
              "expected resize >= size ", options.size, ", got ", options.resize);
  CAIRN_CHECK(options.smallest_area > 0 && options.smallest_area <= options.largest_area &&
                  options.largest_area <= 1,
              kWhere, "expected areas of 0 to 1 in order, got ", options.smallest_area, " and ",
              options.largest_area);
  CAIRN_CHECK(options.smallest_ratio > 0 && options.smallest_ratio <= options.largest_ratio, kWhere,
              "expected ratios above 0 in order, got ", options.smallest_ratio, " and ",
              options.largest_ratio);
}

double draw_between(double low, double high) {
  return low + (high - low) * detail::draw_uniform();
}

/// The largest middle part whose ratio is within the range.
Window middle_of(std::int64_t height, std::int64_t width, const ImageFolderOptions& options) {
  const double ratio = static_cast<double>(width) / static_cast<double>(height);
  Window window{0, 0, height, width};
  if (ratio < options.smallest_ratio) {
    window.height = std::lround(static_cast<double>(width) / options.smallest_ratio);
  } else if (ratio > options.largest_ratio) {
    window.width = std::lround(static_cast<double>(height) * options.largest_ratio);
  }
  window.top = (height - window.height) / 2;
  window.left = (width - window.width) / 2;
  return window;
}

/// torchvision's RandomResizedCrop.get_params.
Window draw_window(std::int64_t height, std::int64_t width, const ImageFolderOptions& options) {
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double area = static_cast<double>(height * width) *
                        draw_between(options.smallest_area, options.largest_area);
    const double ratio =
        std::exp(draw_between(std::log(options.smallest_ratio), std::log(options.largest_ratio)));
    const std::int64_t w = std::lround(std::sqrt(area * ratio)),
                       h = std::lround(std::sqrt(area / ratio));
    if (w <= 0 || w > width || h <= 0 || h > height) continue;
    const std::int64_t top = detail::draw_below(height - h + 1),
                       left = detail::draw_below(width - w + 1);
    return {top, left, h, w};
  }
  return middle_of(height, width, options);
}

void read_random(const EncodedPicture& file, const ImageFolderOptions& options,
                 std::uint8_t* planes) {
  Window window = draw_window(file.height(), file.width(), options);
  int reduction = 1;
  const std::int64_t shorter = std::min(window.height, window.width);
  while (file.reduces() && reduction < 8 && shorter / (2 * reduction) >= options.size)
    reduction *= 2;
  window = {window.top / reduction, window.left / reduction, window.height / reduction,
            window.width / reduction};
  detail::resize(file.decode(reduction), window, options.size, options.size,
                 {0, 0, options.size, options.size}, planes);
}

void read_middle(const EncodedPicture& file, const ImageFolderOptions& options,
                 std::uint8_t* planes) {
  const std::int64_t shorter = std::min(file.height(), file.width()),
                     height = options.resize * file.height() / shorter,
                     width = options.resize * file.width() / shorter;
  const auto first = [&](std::int64_t whole) {  // halves to even, as Python's round
    return static_cast<std::int64_t>(
        std::nearbyint(static_cast<double>(whole - options.size) / 2.0));
  };
  detail::resize(file.decode(), {0, 0, file.height(), file.width()}, height, width,
                 {first(height), first(width), options.size, options.size}, planes);
}

}  // namespace

Tensor read_image(const std::string& path) {
  const Picture picture = EncodedPicture(path).decode();
  Tensor planes = Tensor::empty({3, picture.height, picture.width}, DType::u8);
  auto* const out = planes.data<std::uint8_t>();
  const auto pixels = static_cast<std::size_t>(picture.height * picture.width);
  for (std::size_t i = 0; i < pixels; ++i) {
    for (std::size_t c = 0; c < 3; ++c) out[c * pixels + i] = picture.rgb[3 * i + c];
  }
  return planes;
}

ImageFolder::ImageFolder(const std::string& root, const ImageFolderOptions& options)
    : root_(root), options_(options) {
  check(options);
  classes_ = folders_of(root);
  for (std::size_t label = 0; label < classes_.size(); ++label) {
    for (std::string& name : pictures_of(fs::path(root) / classes_[label]))
      files_.push_back({std::move(name), static_cast<std::int32_t>(label)});
  }
}

SampleSpec ImageFolder::spec() const {
  return {{3, options_.size, options_.size}, DType::u8, {}, DType::i64};
}

std::string ImageFolder::path(std::int64_t index) const {
  CAIRN_CHECK(index >= 0 && index < size(), kWhere, "expected a sample of [0, ", size(), "), got ",
              index);
  const File& file = files_[static_cast<std::size_t>(index)];
  return (fs::path(root_) / classes_[static_cast<std::size_t>(file.label)] / file.name).string();
}

void ImageFolder::read(std::int64_t index, const TensorView& input, const TensorView& label) const {
  const EncodedPicture file(path(index));
  if (options_.random_resized_crop) {
    read_random(file, options_, input.as<std::uint8_t>());
  } else {
    read_middle(file, options_, input.as<std::uint8_t>());
  }
  *label.as<std::int64_t>() = files_[static_cast<std::size_t>(index)].label;
}

}  // namespace cairn::data

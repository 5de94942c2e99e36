// Pictures against Pillow's bytes (golden/make_pictures.py), and folders of them.
#include "cairn/data/image_folder.h"

#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "cairn/core/generator.h"
#include "cairn/data/loader.h"
#include "picture.h"
#include "support.h"
#include "support/test_folder.h"

namespace cairn::data::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using Bytes = std::vector<std::uint8_t>;

fs::path golden(const std::string& name) {
  return fs::path(test::test_folder()) / "data/golden/pictures" / name;
}

Bytes bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const fs::path& path, const Bytes& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

TEST(ReadImage, HasPillowsBytes) {
  for (const char* name :
       {"colour.jpg", "grey.jpg", "inks.jpg", "palette.png", "see_through.png", "deep.png"}) {
    const Tensor image = read_image(golden(name).string());
    EXPECT_EQ(image.shape(), (Shape{3, 53, 37})) << name;
    const Bytes expected = bytes_of(golden(name).replace_extension(".rgb"));
    ASSERT_EQ(expected.size(), 3u * 53 * 37) << name;
    Bytes seen;
    for (std::size_t pixel = 0; pixel < 53 * 37; ++pixel) {
      for (std::size_t c = 0; c < 3; ++c)
        seen.push_back(image.data<std::uint8_t>()[c * 53 * 37 + pixel]);
    }
    EXPECT_EQ(seen, expected) << name;
  }
}

TEST(ReadImage, TellsWhatIsNoPicture) {
  const TempFolder folder;
  const fs::path path = fs::path(folder.path()) / "file.jpg";
  expect_error<core::IoError>([&] { (void)read_image(path.string()); }, {path.string()});
  write(path, {'G', 'I', 'F', '8'});
  expect_error<core::DataError>([&] { (void)read_image(path.string()); },
                                {"a JPEG or a PNG", path.string()});
  for (const char* name : {"colour.jpg", "see_through.png"}) {
    const Bytes whole = bytes_of(golden(name));
    for (const std::size_t size : {whole.size() - 100, whole.size() / 2, std::size_t{20}}) {
      write(path, Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
      expect_error<core::DataError>([&] { (void)read_image(path.string()); },
                                    {"expected a sound", path.string()});
    }
  }
  Bytes huge = bytes_of(golden("see_through.png"));
  huge[16] = huge[20] = 0x01;  // a header of 16,777,253 x 16,777,269 pixels
  write(path, huge);
  EXPECT_THROW((void)read_image(path.string()), core::DataError);
}

Bytes resized(const detail::Window& from, std::int64_t height, std::int64_t width,
              const detail::Window& part) {
  Bytes planes(static_cast<std::size_t>(3 * part.height * part.width));
  const detail::EncodedPicture file(golden("colour.jpg").string());
  detail::resize(file.decode(), from, height, width, part, planes.data());
  return planes;
}

TEST(Resize, HasPillowsBytes) {
  EXPECT_EQ(resized({5, 7, 23, 21}, 12, 12, {0, 0, 12, 12}), bytes_of(golden("shrunk.planes")));
  EXPECT_EQ(resized({2, 30, 6, 5}, 12, 12, {0, 0, 12, 12}), bytes_of(golden("grown.planes")));
}

/// root/{apple,pear}/... with the middle size of golden's pictures.
class Pictures : public ::testing::Test {
 protected:
  Pictures() {
    for (const char* name : {"pear/b.JPG", "apple/2.jpeg", "apple/10.jpg", "apple/deep/1.jpg"})
      write(root() / name, bytes_of(golden("colour.jpg")));
    write(root() / "pear/notes.txt", {'x'});
    write(root() / "list.txt", {'x'});
  }
  fs::path root() const { return folder_.path(); }
  const TempFolder folder_;
};

TEST_F(Pictures, AreOfClassesInTheOrderOfNames) {
  const ImageFolder images(root().string(), {.size = 12, .resize = 17});
  EXPECT_THAT(images.classes(), ElementsAre("apple", "pear"));
  ASSERT_EQ(images.size(), 4);
  EXPECT_EQ(images.path(0), root() / "apple/10.jpg");
  EXPECT_EQ(images.path(1), root() / "apple/2.jpeg");
  EXPECT_EQ(images.path(2), root() / "apple/deep/1.jpg");
  EXPECT_EQ(images.path(3), root() / "pear/b.JPG");
  EXPECT_THROW((void)images.path(4), core::InvalidArgument);

  SequentialSampler sampler(4);
  DataLoader loader(images, sampler, {.batch_size = 4});
  const DataLoader::Iterator batch = loader.begin();
  EXPECT_EQ(batch->inputs.shape(), (Shape{4, 3, 12, 12}));
  EXPECT_EQ(batch->labels.to_vector(), (std::vector<double>{0, 0, 0, 1}));
  const Bytes middle = bytes_of(golden("middle.planes"));
  const auto* seen = batch->inputs.data<std::uint8_t>();
  EXPECT_EQ(Bytes(seen, seen + middle.size()), middle);
}

TEST_F(Pictures, OfRandomPartsAreDrawnAnewAndTheSameForAnyReader) {
  const ImageFolder images(root().string(), {.size = 12, .random_resized_crop = true});
  const auto read = [&](std::int64_t batch_size, int workers) {
    DistributedSampler sampler(4, {.shuffle = false, .seed = 3});
    DataLoader loader(images, sampler, {.batch_size = batch_size, .workers = workers});
    std::vector<std::vector<double>> all;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const Batch& batch : loader) {
        for (std::int64_t i = 0; i < batch.size(); ++i)
          all.push_back(batch.inputs.alias(batch.inputs.view().select(0, i)).to_vector());
      }
    }
    return all;
  };
  const auto one = read(1, 0);
  EXPECT_EQ(one, read(3, 2));
  EXPECT_EQ(std::set(one.begin(), one.end()).size(), 8u);  // of one picture
}

TEST(RandomParts, HaveTheAreasAndRatiosAskedFor) {
  manual_seed(5);
  const TempFolder folder;
  write(fs::path(folder.path()) / "class/one.jpg", bytes_of(golden("colour.jpg")));
  ImageFolderOptions options{.size = 20, .random_resized_crop = true};
  const Tensor input = Tensor::empty({3, 20, 20}, DType::u8), label = Tensor::empty({}, DType::i64);
  // The whole picture, where nothing else fits.
  options.smallest_area = 1;
  options.smallest_ratio = options.largest_ratio = 37.0 / 53;
  ImageFolder(folder.path(), options).read(0, input.view(), label.view());
  const auto* seen = input.data<std::uint8_t>();
  EXPECT_EQ(Bytes(seen, seen + 1200), resized({0, 0, 53, 37}, 20, 20, {0, 0, 20, 20}));
  // A square of all its width, where no square of such an area fits: its middle.
  options.smallest_ratio = options.largest_ratio = 1;
  ImageFolder(folder.path(), options).read(0, input.view(), label.view());
  EXPECT_EQ(Bytes(seen, seen + 1200), resized({8, 0, 37, 37}, 20, 20, {0, 0, 20, 20}));
}

TEST(RandomParts, OfLargeJpegsAreDecodedSmaller) {
  const detail::EncodedPicture file(golden("grey.jpg").string());
  const detail::Picture half = file.decode(2), whole = file.decode();
  EXPECT_EQ(half.height, 27);
  EXPECT_EQ(half.width, 19);
  double difference = 0;
  for (std::int64_t y = 0; y < 26; ++y) {
    for (std::int64_t x = 0; x < 18; ++x) {
      const auto at = [&](const detail::Picture& p, std::int64_t row, std::int64_t column) {
        return static_cast<double>(p.rgb[static_cast<std::size_t>((row * p.width + column) * 3)]);
      };
      const double mean = (at(whole, 2 * y, 2 * x) + at(whole, 2 * y, 2 * x + 1) +
                           at(whole, 2 * y + 1, 2 * x) + at(whole, 2 * y + 1, 2 * x + 1)) /
                          4;
      difference += std::abs(mean - at(half, y, x)) / (26 * 18);
    }
  }
  EXPECT_LT(difference, 3);
}

TEST(ImageFolder, TellsWhatIsMissing) {
  const TempFolder folder;
  expect_error<core::IoError>([] { ImageFolder images("/no/such/folder"); }, {"/no/such/folder"});
  expect_error<core::DataError>([&] { ImageFolder images(folder.path()); },
                                {"a folder for each class", folder.path(), "got none"});
  const fs::path circle = fs::path(folder.path()) / "circle";
  fs::create_directory_symlink(circle, circle);  // of an entry that cannot be looked at
  expect_error<core::IoError>([&] { ImageFolder images(folder.path()); },
                              {"a folder of classes that can be read", folder.path()});
  fs::remove(circle);
  write(fs::path(folder.path()) / "apple/notes.txt", {'x'});
  expect_error<core::DataError>([&] { ImageFolder images(folder.path()); },
                                {"expected pictures", "apple"});
  const auto refused = [&](const ImageFolderOptions& options, const char* what) {
    expect_error<core::InvalidArgument>([&] { ImageFolder images(folder.path(), options); },
                                        {what});
  };
  refused({.size = 0}, "size > 0");
  refused({.size = 300}, "resize >= size 300, got 256");
  refused({.random_resized_crop = true, .smallest_area = 0}, "areas");
  refused({.random_resized_crop = true, .largest_area = 1.5}, "areas");
  refused({.random_resized_crop = true, .smallest_ratio = 2}, "ratios");
}

TEST_F(Pictures, ThatAreDamagedAreNamedAndCanBeLeftOut) {
  write(root() / "apple/2.jpeg", {0xff, 0xd8, 0xff, 0xe0});
  const ImageFolder images(root().string(), {.size = 12, .resize = 17});
  SequentialSampler sampler(4);
  DataLoader loader(images, sampler, {.batch_size = 1});
  DataLoader::Iterator batch = loader.begin();
  expect_error<core::DataError>([&] { ++batch; }, {"2.jpeg"});
  batch.skip();
  EXPECT_EQ(batch->indices, (std::vector<std::int64_t>{2}));
}

}  // namespace
}  // namespace cairn::data::testing

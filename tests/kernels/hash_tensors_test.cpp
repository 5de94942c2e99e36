#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "cairn/kernels/hash_tensors.h"
#include "cairn/kernels/multi_tensor.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using test::random_tensor;
using Hashes = std::vector<std::uint64_t>;

class HashTensors : public testing::TestWithParam<Device> {
 protected:
  Tensor bytes(const std::vector<std::uint8_t>& values) const {
    return Tensor::from(values, {static_cast<std::int64_t>(values.size())}, DType::u8, GetParam());
  }
  std::uint64_t hash(const TensorView& view) const { return hash_tensors({view})[0]; }
};

/// The definition, written down a second time.
std::uint64_t reference(const std::vector<std::uint8_t>& bytes) {
  const auto mix = [](std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  std::uint64_t sum = 0;
  for (std::size_t at = 0, place = 1; at < bytes.size(); at += 8, ++place) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min<std::size_t>(8, bytes.size() - at));
    sum += mix(word + place * kGolden);
  }
  return mix(sum ^ (bytes.size() * kGolden));
}

TEST_P(HashTensors, IsTheSameOnEveryDeviceAndAddress) {
  for (std::int64_t n : {0, 1, 7, 8, 9, 63, 16384, 16385, 65536, 200003}) {
    std::vector<std::uint8_t> values;
    for (std::int64_t i = 0; i < n; ++i) {
      values.push_back(static_cast<std::uint8_t>(core::philox(1, 0, static_cast<unsigned>(i))[0]));
    }
    const std::uint64_t expected = reference(values);
    for (std::int64_t offset = 0; offset < 8; ++offset) {
      std::vector<std::uint8_t> moved(static_cast<std::size_t>(offset), 0xee);
      moved.insert(moved.end(), values.begin(), values.end());
      moved.push_back(0xee);
      EXPECT_EQ(hash(bytes(moved).view().slice(0, offset, offset + n)), expected) << n << offset;
    }
  }
}

TEST_P(HashTensors, TakesEveryTypeInOneList) {
  std::vector<Tensor> tensors;
  for (DType dtype :
       {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i64, DType::u8, DType::boolean}) {
    tensors.push_back(random_tensor({101}, dtype, GetParam(), 3, 0, 100));
  }
  tensors.push_back(Tensor::empty({0}, DType::f32, GetParam()));
  const Hashes all = hash_tensors({tensors.begin(), tensors.end()});
  ASSERT_EQ(all.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(all[i], hash(tensors[i]));
  EXPECT_EQ(std::set<std::uint64_t>(all.begin(), all.end()).size(), all.size());
  EXPECT_TRUE(hash_tensors({}).empty());
}

TEST_P(HashTensors, EveryBitAndEveryPlaceCounts) {
  std::set<std::uint64_t> seen;
  std::vector<std::uint8_t> values(70, 0);
  seen.insert(hash(bytes(values)));
  for (std::size_t at = 0; at < values.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<std::uint8_t> flipped = values;
      flipped[at] = static_cast<std::uint8_t>(1 << bit);
      EXPECT_TRUE(seen.insert(hash(bytes(flipped))).second) << at << " " << bit;
    }
  }
  values.push_back(0);
  EXPECT_TRUE(seen.insert(hash(bytes(values))).second);  // the length counts too
}

TEST_P(HashTensors, SeesTwoWordsThatChangePlaces) {
  Tensor x = random_tensor({200000}, DType::f64, GetParam(), 1);
  const std::uint64_t before = hash(x);
  std::vector<double> values = x.to_vector();
  std::swap(values[3], values[150000]);
  EXPECT_NE(hash(Tensor::from(values, {200000}, DType::f64, GetParam())), before);
}

TEST_P(HashTensors, WaitsOnce) {
  const Tensor x = random_tensor({10}, DType::f32, GetParam(), 1);
  const std::int64_t before = host_reads();
  hash_tensors({x, x, x});
  EXPECT_EQ(host_reads(), before + 1);
}

TEST_P(HashTensors, ErrorsNameTheTensor) {
  const Tensor x = Tensor::zeros({4, 4}, DType::i32, GetParam());
  EXPECT_THAT(message_of([&] {
                hash_tensors({x, x.view().select(1, 0)});
              }),
              testing::HasSubstr("[hash_tensors] expected a dense tensor 1"));
  EXPECT_THAT(message_of([&] { hash_tensors({TensorView()}); }),
              testing::HasSubstr("expected a defined tensor 0"));
}

INSTANTIATE_TEST_SUITE_P(Devices, HashTensors, testing::ValuesIn(test::devices()),
                         test::device_name);

}  // namespace
}  // namespace cairn::kernels

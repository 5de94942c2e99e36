// What nvcc makes of the functions that nothing else compiles, run by a reader of PTX, against the
// emulator's functions of the same names.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

#include "cairn/core/half.h"
#include "cuda/queue.h"
#include "ptx/machine.h"
#include "ptx/program.h"
#include "ptx/runtime.h"
#include "ptx/twins.h"

namespace cairn::ptx {
namespace {

using core::BFloat16;
using core::Half;
using kernels::cuda::LaunchTwin;
using kernels::cuda::ProductOfLane;
using kernels::cuda::Queue;

constexpr std::size_t kDefaultSharedBytes = 48 << 10;
struct alignas(16) Block {
  std::byte bytes[16];
};
using Memory = std::vector<Block>;

/// A file that nvcc made. CAIRN_PTX_TWINS names another folder.
std::string made_by_nvcc(const char* file) {
  const char* const folder = std::getenv("CAIRN_PTX_TWINS");
  return std::string(folder != nullptr ? folder : CAIRN_PTX_TWINS_FOLDER) + "/" + file;
}

const std::map<std::string, Kernel>& kernels_by_nvcc() {
  static const auto kernels = [] {
    std::stringstream text;
    text << std::ifstream(made_by_nvcc("twins.ptx")).rdbuf();
    return parse(text.str());
  }();
  return kernels;
}

LaunchTwin& launch_by_nvcc() {
  static void* const library = dlopen(made_by_nvcc("twins.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Error(dlerror());
  return *reinterpret_cast<LaunchTwin*>(dlsym(library, "launch_twin"));
}

std::uint64_t address(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}

struct Twin {
  const char* name;
  std::size_t in, out;  // bytes
  std::size_t shared_bytes;
  void (*fill)(void* in, std::mt19937& random);
};

void PrintTo(const Twin& twin, std::ostream* out) {
  *out << twin.name;
}

class Twins : public testing::TestWithParam<Twin> {
 protected:
  Queue queue_{"twin", Device()};
  std::vector<Launch> launches_;
  std::vector<std::size_t> accesses_;

  Memory drawn(unsigned seed) const {
    std::mt19937 random(seed);
    Memory in(GetParam().in / 16);
    GetParam().fill(in.data(), random);
    return in;
  }

  Memory emulated(const Memory& in) {
    Memory out = nan();
    launch_twin(GetParam().name, queue_, GetParam().shared_bytes, in.data(), out.data());
    return out;
  }
  Memory by_nvcc(const Memory& in, std::size_t shared_bytes) {
    Memory out = nan();
    set_launcher([&](const Launch& launch) {
      launches_.push_back(launch);
      const auto parameter = [&](int i) { return *static_cast<void**>(launch.parameters[i]); };
      Warp warp(kernels_by_nvcc().at(launch.kernel), {address(parameter(0)), address(parameter(1))},
                {{address(in.data()), in.size() * sizeof(Block), false},
                 {address(out.data()), out.size() * sizeof(Block), true}},
                launch.shared_bytes);
      warp.run();
      accesses_ = warp.accesses();
    });
    launch_by_nvcc()(GetParam().name, queue_, shared_bytes, in.data(), out.data());
    return out;
  }

 private:
  static Memory nan() {
    Memory memory(GetParam().out / 16);
    std::memset(memory.data(), 0xff, GetParam().out);
    return memory;
  }
};

TEST_P(Twins, ComputeWhatTheEmulatorDoes) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    const Memory in = drawn(seed), expected = emulated(in);
    const Memory found = by_nvcc(in, GetParam().shared_bytes);
    for (std::size_t i = 0; i < GetParam().out / 4; ++i) {
      std::uint32_t words[2];
      std::memcpy(&words[0], reinterpret_cast<const std::byte*>(found.data()) + 4 * i, 4);
      std::memcpy(&words[1], reinterpret_cast<const std::byte*>(expected.data()) + 4 * i, 4);
      ASSERT_EQ(words[0], words[1]) << "word " << i << ", seed " << seed;
    }
  }
}

TEST_P(Twins, AreLaunchedAsAskedFor) {
  for (const std::size_t shared_bytes : {kDefaultSharedBytes, kDefaultSharedBytes + 4096}) {
    by_nvcc(drawn(0), shared_bytes);
    ASSERT_EQ(launches_.size(), 1u);
    EXPECT_EQ(launches_[0].kernel, GetParam().name);
    EXPECT_EQ(launches_[0].blocks, 1u);
    EXPECT_EQ(launches_[0].threads, kLanes);
    EXPECT_EQ(launches_[0].shared_bytes, shared_bytes);
    EXPECT_EQ(launches_[0].stream, queue_.stream());
    launches_.clear();
  }
}

class Moves : public Twins {};

TEST_P(Moves, AreOfSixteenBytes) {
  by_nvcc(drawn(0), 0);
  EXPECT_EQ(accesses_, std::vector<std::size_t>((GetParam().in + GetParam().out) / 16, 16));
}

template <std::size_t Words>
void any_bits(void* in, std::mt19937& random) {
  for (std::size_t i = 0; i < Words; ++i) static_cast<std::uint32_t*>(in)[i] = random();
}

/// A whole number whose products' sums are exact.
float small_number(std::mt19937& random) {
  return static_cast<float>(static_cast<int>(random() % 9) - 4);
}
template <class T>
std::uint32_t two_numbers(std::mt19937& random) {
  const T low(small_number(random)), high(small_number(random));
  return std::uint32_t{high.bits} << 16 | low.bits;
}

template <class T>
void products(void* in, std::mt19937& random) {
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    ProductOfLane& product = static_cast<ProductOfLane*>(in)[lane];
    for (float& sum : product.sums) sum = small_number(random);
    for (std::uint32_t& pair : product.a) pair = two_numbers<T>(random);
    for (std::uint32_t& pair : product.b) pair = two_numbers<T>(random);
  }
}

template <class T>
void matrices(void* in, std::mt19937& random) {
  for (unsigned i = 0; i < 48 * 32 / 2; ++i) {
    static_cast<std::uint32_t*>(in)[i] = two_numbers<T>(random);
  }
}

/// Floats, but for NaN: of any size, near those that halves have, halfway between two of them.
template <class T>
void floats(void* in, std::mt19937& random) {
  const auto half = [](unsigned bits) {
    T x;
    x.bits = static_cast<std::uint16_t>(bits);
    return static_cast<float>(x);
  };
  for (unsigned i = 0; i < 64; ++i) {
    float& x = static_cast<float*>(in)[i];
    do {
      const unsigned bits = random();
      const float near = half(bits), next = half(bits + 1);
      x = i % 4 == 0   ? core::detail::bits_float(random())
          : i % 4 == 1 ? near
          : i % 4 == 2 ? near + (next - near) / 2
                       : near * (1 + static_cast<float>(random() % 4096) / 4096 / 512);
    } while (std::isnan(x));
  }
}

void exponents(void* in, std::mt19937& random) {
  for (unsigned i = 0; i < kLanes; ++i) {
    static_cast<float*>(in)[i] =
        i == 0 ? -INFINITY : -static_cast<float>(random() % 120'000) / 1000;
  }
}

std::string name_of(const testing::TestParamInfo<Twin>& twin) {
  return twin.param.name;
}
constexpr Twin kMoves[] = {{"move_16_bytes", 512, 512, 0, any_bits<128>},
                           {"copy_async", 1024, 1536, 0, any_bits<256>}};
constexpr std::size_t kProducts = kLanes * sizeof(ProductOfLane);
INSTANTIATE_TEST_SUITE_P(Ptx, Moves, testing::ValuesIn(kMoves), name_of);
INSTANTIATE_TEST_SUITE_P(PtxMoves, Twins, testing::ValuesIn(kMoves), name_of);
INSTANTIATE_TEST_SUITE_P(Ptx, Twins,
                         testing::Values(Twin{"load_rows", 512, 512, 0, any_bits<128>},
                                         Twin{"load_columns", 512, 512, 0, any_bits<128>},
                                         Twin{"multiply_f16", kProducts, 512, 0, products<Half>},
                                         Twin{"multiply_bf16", kProducts, 512, 0,
                                              products<BFloat16>},
                                         Twin{"convert_f16", 256, 320, 0, floats<Half>},
                                         Twin{"convert_bf16", 256, 320, 0, floats<BFloat16>},
                                         Twin{"powers_of_two", 128, 128, 0, exponents},
                                         Twin{"tiles_f16", 3072, 3072, 3840, matrices<Half>},
                                         Twin{"tiles_bf16", 3072, 3072, 3840, matrices<BFloat16>}),
                         name_of);

TEST(Ptx, EveryTwinIsTried) {
  EXPECT_EQ(kernels_by_nvcc().size(), 11u);
}

}  // namespace
}  // namespace cairn::ptx

// libtorch's current stream, of a GPU that only libtorch's registry knows: its GPU half is not
// linked.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <array>

#include "cairn/libtorch/tensors.h"
#include "current_stream.h"

namespace cairn::test {
namespace {

/// Two devices, the first of which has stream 5 current.
class TwoGpus : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
 public:
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, device, device.index() == 0 ? 5 : 0);
  }
  void* getStreamNativeHandle(c10::Stream stream) const override {
    return stream.id() == 0 ? nullptr : &natives_[static_cast<std::size_t>(stream.id())];
  }
  static void* native(std::size_t id) { return &natives_[id]; }

 private:
  inline static std::array<int, 8> natives_{};
};

class Streams : public testing::Test {
 protected:
  Streams() { registered().store(&gpus_); }
  ~Streams() override { registered().store(nullptr); }

 private:
  static std::atomic<const c10::impl::DeviceGuardImplInterface*>& registered() {
    return c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::CUDA)];
  }
  TwoGpus gpus_;
};

TEST_F(Streams, AreThoseOfTheDevice) {
  EXPECT_EQ(libtorch::torchs_current_stream(0), TwoGpus::native(5));
  EXPECT_EQ(libtorch::torchs_current_stream(1), nullptr);
}

}  // namespace
}  // namespace cairn::test

#include "ptx/twin_kernels.cu"

#include <string_view>

#include "cuda/launch.cuh"

namespace cairn::kernels::cuda {

__attribute__((visibility("default"))) void launch_twin(const char* name, const Queue& queue,
                                                        std::size_t shared_bytes, const void* in,
                                                        void* out) {
  constexpr struct {
    std::string_view name;
    void (*kernel)(const void*, void*);
  } kTwins[] = {
      {"move_16_bytes", move_16_bytes}, {"copy_async", copy_async},
      {"load_rows", load_rows},         {"load_columns", load_columns},
      {"multiply_f16", multiply_f16},   {"multiply_bf16", multiply_bf16},
      {"convert_f16", convert_f16},     {"convert_bf16", convert_bf16},
      {"powers_of_two", powers_of_two}, {"tiles_f16", tiles_f16},
      {"tiles_bf16", tiles_bf16},
  };
  for (const auto& twin : kTwins) {
    if (twin.name == name) launch(queue, {1, 32, shared_bytes}, twin.kernel, in, out);
  }
}

}  // namespace cairn::kernels::cuda

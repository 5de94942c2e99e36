// A finetune by ggml itself: its tensors, backward and AdamW, saved and resumed by Cairn.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "cairn/checkpointing/foreign_tensors.h"
#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/training_state.h"

namespace cairn {
namespace {

using checkpointing::ForeignTensor;

constexpr std::int64_t kIn = 32, kOut = 4, kRank = 2, kRows = 8;

DType dtype_of(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return DType::f32;
    case GGML_TYPE_F16:
      return DType::f16;
    default:
      return DType::u8;  // blocks of quantised elements
  }
}

std::vector<ForeignTensor> tensors_of(ggml_context* ctx) {
  std::vector<ForeignTensor> tensors;
  for (ggml_tensor* t = ggml_get_first_tensor(ctx); t != nullptr;
       t = ggml_get_next_tensor(ctx, t)) {
    const DType dtype = dtype_of(t->type);
    Shape shape = {t->ne[3], t->ne[2], t->ne[1], t->ne[0]};
    if (dtype == DType::u8) shape = {static_cast<std::int64_t>(ggml_nbytes(t))};
    tensors.push_back(
        {t->name, dtype, shape,
         [t](void* to, std::size_t at, std::size_t n) { ggml_backend_tensor_get(t, to, at, n); },
         [t](const void* from, std::size_t at, std::size_t n) {
           ggml_backend_tensor_set(t, from, at, n);
         }});
  }
  return tensors;
}

std::vector<float> numbers(std::int64_t n, int seed) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(std::sin(static_cast<float>(i * 7 + seed)));
  return values;
}

void set(ggml_tensor* t, const std::vector<float>& values) {
  ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
}

/// y = (base + b a) x, where base is quantised and a, b are learnt.
class Finetune {
 public:
  Finetune() {
    ggml_backend_cpu_set_n_threads(backend_, 1);
    const auto tensor = [&](const char* name, std::int64_t n0, std::int64_t n1,
                            ggml_type type = GGML_TYPE_F32) {
      return ggml_set_name(ggml_new_tensor_2d(weights_, type, n0, n1), name);
    };
    base_ = tensor("blk.0.attn_q.weight", kIn, kOut, GGML_TYPE_Q8_0);
    for (const auto& [name, n0, n1] : {std::tuple{"lora_a", kIn, kRank}, {"lora_b", kRank, kOut}}) {
      learnt_.push_back(tensor(name, n0, n1));
      first_.push_back(tensor((std::string("m.") + name).c_str(), n0, n1));
      second_.push_back(tensor((std::string("v.") + name).c_str(), n0, n1));
      ggml_set_param(learnt_.back());
    }
    weights_memory_ = ggml_backend_alloc_ctx_tensors(weights_, backend_);
    build_graph();
    work_memory_ = ggml_backend_alloc_ctx_tensors(work_, backend_);
    ggml_graph_reset(graph_);
    std::vector<char> blocks(ggml_nbytes(base_));
    const std::vector<float> values = numbers(kIn * kOut, 1);
    ggml_quantize_chunk(GGML_TYPE_Q8_0, values.data(), blocks.data(), 0, kOut, kIn, nullptr);
    ggml_backend_tensor_set(base_, blocks.data(), 0, blocks.size());
    for (std::size_t i = 0; i < learnt_.size(); ++i) {
      set(learnt_[i], numbers(ggml_nelements(learnt_[i]), 2 + static_cast<int>(i)));
      set(first_[i], std::vector<float>(static_cast<std::size_t>(ggml_nelements(first_[i]))));
      set(second_[i], std::vector<float>(static_cast<std::size_t>(ggml_nelements(second_[i]))));
    }
  }
  ~Finetune() {
    ggml_backend_buffer_free(work_memory_);
    ggml_backend_buffer_free(weights_memory_);
    ggml_free(work_);
    ggml_free(weights_);
    ggml_backend_free(backend_);
  }
  Finetune(const Finetune&) = delete;
  Finetune& operator=(const Finetune&) = delete;

  float step(std::int64_t number) {
    set(x_, numbers(kIn * kRows, static_cast<int>(number)));
    set(y_, numbers(kOut * kRows, 100 + static_cast<int>(number)));
    const float n = static_cast<float>(number + 1);
    set(parameters_, {1e-2f, 0.9f, 0.999f, 1e-8f, 0.01f, 1.0f / (1.0f - std::pow(0.9f, n)),
                      1.0f / (1.0f - std::pow(0.999f, n))});
    ggml_graph_reset(graph_);
    EXPECT_EQ(ggml_backend_graph_compute(backend_, graph_), GGML_STATUS_SUCCESS);
    float loss = 0.0f;
    ggml_backend_tensor_get(loss_, &loss, 0, sizeof loss);
    return loss;
  }
  ggml_context* weights() const { return weights_; }

 private:
  static ggml_context* context() {
    return ggml_init({.mem_size = 1 << 22, .mem_buffer = nullptr, .no_alloc = true});
  }

  void build_graph() {
    x_ = ggml_new_tensor_2d(work_, GGML_TYPE_F32, kIn, kRows);
    y_ = ggml_new_tensor_2d(work_, GGML_TYPE_F32, kOut, kRows);
    parameters_ = ggml_new_tensor_1d(work_, GGML_TYPE_F32, 7);
    ggml_tensor* const inner = ggml_mul_mat(work_, learnt_[0], x_);
    ggml_tensor* const out =
        ggml_add(work_, ggml_mul_mat(work_, learnt_[1], inner), ggml_mul_mat(work_, base_, x_));
    loss_ = ggml_sum(work_, ggml_sqr(work_, ggml_sub(work_, out, y_)));
    ggml_set_loss(loss_);
    graph_ = ggml_new_graph_custom(work_, 512, /*grads=*/true);
    ggml_build_forward_expand(graph_, loss_);
    ggml_build_backward_expand(work_, graph_, nullptr);
    for (std::size_t i = 0; i < learnt_.size(); ++i) {
      ggml_tensor* const gradient = ggml_graph_get_grad(graph_, learnt_[i]);
      ggml_build_forward_expand(graph_, ggml_opt_step_adamw(work_, learnt_[i], gradient, first_[i],
                                                            second_[i], parameters_));
    }
  }

  ggml_backend_t backend_ = ggml_backend_cpu_init();
  ggml_context *weights_ = context(), *work_ = context();
  ggml_tensor *base_ = nullptr, *x_ = nullptr, *y_ = nullptr, *parameters_ = nullptr,
              *loss_ = nullptr;
  std::vector<ggml_tensor*> learnt_, first_, second_;
  ggml_cgraph* graph_ = nullptr;
  ggml_backend_buffer_t weights_memory_ = nullptr, work_memory_ = nullptr;
};

std::vector<std::vector<char>> bytes_of(const Finetune& one) {
  std::vector<std::vector<char>> all;
  for (const ForeignTensor& tensor : tensors_of(one.weights())) {
    std::int64_t elements = 1;
    for (const std::int64_t size : tensor.shape) elements *= size;
    all.emplace_back(static_cast<std::size_t>(elements) * core::size_of(tensor.dtype));
    tensor.read(all.back().data(), 0, all.back().size());
  }
  return all;
}

TEST(Ggml, AFinetuneGoesOnWithItsBits) {
  const auto dir = std::filesystem::temp_directory_path() / core::str("cairn-ggml-", getpid());
  std::vector<float> losses;
  Finetune whole;
  for (std::int64_t step = 0; step < 30; ++step) losses.push_back(whole.step(step));
  EXPECT_LT(losses.back(), losses.front());

  for (const std::int64_t end : {12, 30}) {  // a second program goes on where the first ended
    Finetune one;
    checkpointing::ForeignTensors model(tensors_of(one.weights()));
    checkpointing::TrainingState state({{"model", model}});
    EXPECT_EQ(state.resume_latest(dir.string()).has_value(), end == 30);
    while (state.step() < end) {
      EXPECT_EQ(one.step(state.step()), losses[static_cast<std::size_t>(state.step())]);
      state.save_every(6, dir.string());
    }
    if (end == 30) {
      EXPECT_EQ(bytes_of(one), bytes_of(whole));
    }
  }
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace cairn

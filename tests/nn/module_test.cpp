#include "cairn/nn/module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cairn/autograd/autograd.h"
#include "cairn/core/generator.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/master_weight.h"
#include "cairn/kernels/optimizer_update.h"
#include "cairn/nn/nn.h"
#include "support/message_of.h"

namespace cairn::nn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Block : public Module {
 public:
  explicit Block(std::int64_t size)
      : size_(size),
        scale_(add_parameter("scale", Tensor::full({size}, 2.0))),
        fc_(add_module("fc", Linear(size, size))),
        norm_(add_module("norm", BatchNorm1d(size))) {}
  std::string kind() const override { return "Block"; }
  Tensor forward(const Tensor& x) override { return (*norm_)((*fc_)(x)) * scale_; }

 protected:
  std::shared_ptr<Module> make_like() const override { return std::make_shared<Block>(size_); }

 private:
  std::int64_t size_;
  Tensor scale_;
  std::shared_ptr<Linear> fc_;
  std::shared_ptr<BatchNorm1d> norm_;
};

// Without make_like.
class Plain : public Module {
 public:
  std::string kind() const override { return "Plain"; }
  Tensor forward(const Tensor& x) override { return x; }
};

// Two uses of one weight.
class Tied : public Module {
 public:
  Tied() {
    const Tensor weight = add_parameter("first", Tensor::full({2}, 1.0));
    add_parameter("second", weight);
  }
  std::string kind() const override { return "Tied"; }
  Tensor forward(const Tensor& x) override { return x; }
};

Sequential small_net() {
  return Sequential(Conv2d(1, 4, 3, {.padding = 1}), BatchNorm2d(4), ReLU(), MaxPool2d(2),
                    Flatten(), Linear(16, 3));
}

std::vector<std::string> names(const NamedTensors& tensors) {
  std::vector<std::string> all;
  for (const NamedTensor& entry : tensors) all.push_back(entry.name);
  return all;
}

template <class E = core::InvalidArgument, class F>
std::string module_error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(Module, NamesItsParametersBuffersAndChildren) {
  Sequential net(Block(3), Sequential(Linear(3, 2, {.bias = false})));
  EXPECT_THAT(names(net.parameters()), ElementsAre("0.scale", "0.fc.weight", "0.fc.bias",
                                                   "0.norm.weight", "0.norm.bias", "1.0.weight"));
  EXPECT_THAT(names(net.buffers()), ElementsAre("0.norm.running_mean", "0.norm.running_var"));
  std::vector<std::string> paths;
  for (const auto& [path, module] : net.modules()) paths.push_back(path + ":" + module->kind());
  EXPECT_THAT(paths, ElementsAre(":Sequential", "0:Block", "0.fc:Linear", "0.norm:BatchNorm1d",
                                 "1:Sequential", "1.0:Linear"));
  for (const NamedTensor& entry : net.parameters()) {
    EXPECT_TRUE(entry.tensor.requires_grad());
    EXPECT_EQ(entry.tensor.name(), entry.name);
    EXPECT_EQ(entry.tensor.storage()->category(), core::MemoryCategory::parameters);
  }
  EXPECT_THAT(names(Tied().parameters()), ElementsAre("first"));
}

TEST(Module, ATiedParameterKeepsItsFirstNameInEachModule) {
  class Head : public Plain {
   public:
    explicit Head(const Tensor& weight) { add_parameter("weight", weight); }
  };
  const auto embedding = std::make_shared<Linear>(3, 3);
  const Tensor weight = embedding->parameters().front().tensor;
  Sequential inner;
  inner.add(embedding);
  EXPECT_EQ(weight.name(), "0.weight");
  const auto head = std::make_shared<Head>(weight);
  EXPECT_EQ(weight.name(), "weight");
  inner.add(head);
  EXPECT_EQ(weight.name(), "0.weight");
  Sequential net;
  net.add(std::make_shared<Sequential>(std::move(inner)));
  EXPECT_EQ(weight.name(), "0.0.weight");
}

TEST(Module, AnOutputLayerHasTheWeightOfAnEmbedding) {
  manual_seed(1);
  Sequential model;
  const auto words = model.add(Embedding(5, 3));
  model.add(Linear(words->weight()));
  ASSERT_EQ(model.parameters().size(), 1U);
  EXPECT_EQ(model.parameters()[0].name, "0.weight");
  const Tensor index = Tensor::from(std::vector<std::int64_t>{2}, {1}, DType::i64);
  const std::vector<double> weight = words->weight().to_vector();
  const Tensor logits = model(index);
  ASSERT_EQ(logits.shape(), Shape({1, 5}));
  for (std::size_t word = 0; word < 5; ++word) {
    double expected = 0;
    for (std::size_t k = 0; k < 3; ++k) expected += weight[2 * 3 + k] * weight[word * 3 + k];
    EXPECT_NEAR(logits.to_vector()[word], expected, 1e-6);
  }
  // Of the sum of logits: what looked word 2 up adds the sum of all rows to its own.
  autograd::backward(autograd::sum(logits));
  const std::vector<double> gradient = words->weight().grad().to_vector();
  for (std::size_t word = 0; word < 5; ++word) {
    for (std::size_t k = 0; k < 3; ++k) {
      double expected = weight[2 * 3 + k];
      for (std::size_t other = 0; word == 2 && other < 5; ++other)
        expected += weight[other * 3 + k];
      EXPECT_NEAR(gradient[word * 3 + k], expected, 1e-5);
    }
  }
  EXPECT_THAT(test::message_of([] { (void)Linear(Tensor()); }),
              HasSubstr("weight [O, I], got none"));
  EXPECT_THAT(test::message_of([] { (void)Linear(Tensor::zeros({4})); }),
              HasSubstr("expected a weight [O, I], got [4]"));
}

TEST(Module, RejectsNamesThatCannotBe) {
  class Twice : public Plain {
   public:
    explicit Twice(const std::string& name) {
      add_buffer("a", Tensor::zeros({1}));
      add_parameter(name, Tensor::zeros({1}));
    }
  };
  EXPECT_THAT(module_error_of([] { Twice("a"); }), HasSubstr("'a' twice"));
  EXPECT_THAT(module_error_of([] { Twice("a.b"); }), HasSubstr("a.b"));
  EXPECT_THAT(module_error_of([] { Twice(""); }), HasSubstr("''"));
}

TEST(Module, AppliesChildrenFirst) {
  Sequential net(Linear(1, 1), Sequential(ReLU()));
  std::vector<std::string> kinds;
  net.apply([&](Module& module) { kinds.push_back(module.kind()); });
  EXPECT_THAT(kinds, ElementsAre("Linear", "ReLU", "Sequential", "Sequential"));
}

TEST(Module, TrainAndEvalReachEveryChild) {
  Sequential net(Block(2), Dropout(0.5));
  net.eval();
  for (const auto& [path, module] : net.modules()) EXPECT_FALSE(module->training()) << path;
  const Tensor x = Tensor::full({4, 2}, 1.0);
  EXPECT_EQ(net.at(1)(x).to_vector(), x.to_vector());
  net.train();
  for (const auto& [path, module] : net.modules()) EXPECT_TRUE(module->training()) << path;
}

TEST(Module, RunsWrappersOutermostLastAdded) {
  Sequential net{ReLU()};
  std::vector<std::string> order;
  const auto wrapper = [&order](const std::string& name) {
    return [&order, name](const Tensor& x, const Module::Forward& next) {
      order.push_back(name);
      const Tensor y = next(x) * 2.0;
      order.push_back(name + " done");
      return y;
    };
  };
  net.add_forward_wrapper(wrapper("inner"));
  net.add_forward_wrapper(wrapper("outer"));
  EXPECT_EQ(net(Tensor::full({1}, 3.0)).item(), 12.0);
  EXPECT_THAT(order, ElementsAre("outer", "inner", "inner done", "outer done"));
}

TEST(Module, CastsInPlace) {
  Sequential net = small_net();
  const NamedTensors before = net.parameters();
  net.to(DType::bf16);
  const NamedTensors after = net.parameters();
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(after[i].tensor.dtype(), DType::bf16);
    EXPECT_TRUE(after[i].tensor.same(before[i].tensor));
    EXPECT_TRUE(after[i].tensor.requires_grad());
    EXPECT_EQ(after[i].tensor.storage()->category(), core::MemoryCategory::parameters);
  }
  EXPECT_EQ(net.buffers()[0].tensor.dtype(), DType::bf16);
  const Tensor y = net(Tensor::full({2, 1, 4, 4}, 0.5, DType::bf16));
  EXPECT_EQ(y.dtype(), DType::bf16);
  EXPECT_THAT(module_error_of([&] { net.to(DType::i32); }), HasSubstr("i32"));
}

TEST(Module, ClearsGradients) {
  Sequential net = small_net();
  autograd::backward(autograd::sum(net(Tensor::full({2, 1, 4, 4}, 0.5))));
  for (const NamedTensor& entry : net.parameters()) EXPECT_TRUE(entry.tensor.grad().defined());
  net.clear_grad();
  for (const NamedTensor& entry : net.parameters()) EXPECT_FALSE(entry.tensor.grad().defined());
}

TEST(State, ComesBackIntoAnotherModel) {
  manual_seed(1);
  Sequential from = small_net();
  manual_seed(2);
  Sequential to = small_net();
  from(autograd::affine(Tensor::full({2, 1, 4, 4}, 0.5), 3.0, 1.0));  // moves running statistics
  const NamedTensors handles = to.parameters();
  const std::uint64_t version = handles[0].tensor.storage()->version();
  to.load_state_dict(from.state_dict());
  EXPECT_GT(handles[0].tensor.storage()->version(), version);
  const NamedTensors a = from.parameters(), b = to.parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].tensor.to_vector(), b[i].tensor.to_vector()) << a[i].name;
    EXPECT_TRUE(b[i].tensor.same(handles[i].tensor));
  }
  const NamedTensors c = from.buffers(), d = to.buffers();
  for (std::size_t i = 0; i < c.size(); ++i) {
    EXPECT_EQ(c[i].tensor.to_vector(), d[i].tensor.to_vector()) << c[i].name;
  }
}

TEST(State, HoldsMastersInFullPrecisionAndLoadsBoth) {
  Sequential net(Linear(3, 2));
  const Tensor weight = net.parameters()[0].tensor;
  const Tensor exact = Tensor::from(std::vector<float>{1.0001f, 2, 3, 4, 5, 6}, {2, 3});
  net.to(DType::bf16);
  kernels::MasterWeight::assign(weight, exact);
  const Tensor saved = net.state_dict().dict("0").tensor("weight");
  EXPECT_EQ(saved.dtype(), DType::f32);
  EXPECT_EQ(saved.to_vector(), exact.to_vector());

  Sequential other(Linear(3, 2));
  other.load_state_dict(net.state_dict());
  EXPECT_EQ(other.parameters()[0].tensor.to_vector(), exact.to_vector());

  kernels::fill(kernels::MasterWeight::of(weight)->view_to_write(), 0.0);
  net.load_state_dict(other.state_dict());
  EXPECT_EQ(kernels::MasterWeight::of(weight)->tensor().to_vector(), exact.to_vector());
  EXPECT_EQ(weight.dtype(), DType::bf16);
  EXPECT_EQ(weight.to_vector()[0], 1.0);  // rounded
  EXPECT_EQ(weight.to_vector()[5], 6.0);
}

TEST(State, PutsBf16WeightsAndRemaindersTogetherAndSplitsThem) {
  Sequential net(Linear(3, 2)), other(Linear(3, 2));
  const Tensor weight = net.parameters()[0].tensor, twin = other.parameters()[0].tensor;
  const Tensor exact = Tensor::from(std::vector<float>{1.0001f, 2.7f, -3.3f, 4, 1e-30f, 6}, {2, 3});
  for (Sequential* model : {&net, &other}) {
    model->to(DType::bf16);
    const Tensor parameter = model->parameters()[0].tensor;
    kernels::MasterWeight::assign(parameter, Tensor::zeros({2, 3}),
                                  kernels::MasterStorage::remainder);
  }
  kernels::MasterWeight::of(weight)->write(weight, exact);
  const Tensor saved = net.state_dict().dict("0").tensor("weight");
  EXPECT_EQ(saved.dtype(), DType::f32);
  EXPECT_EQ(saved.to_vector<float>(), exact.to_vector<float>());

  other.load_state_dict(net.state_dict());
  EXPECT_EQ(twin.to_vector(), weight.to_vector());
  EXPECT_EQ(kernels::MasterWeight::of(twin)->tensor().to_vector(),
            kernels::MasterWeight::of(weight)->tensor().to_vector());
  other.to(DType::f16);
  EXPECT_FALSE(kernels::MasterWeight::exists(twin));
}

TEST(State, EveryDifferenceIsNamedAtOnceAndNothingChanges) {
  Sequential net(Linear(3, 2), Linear(2, 2));
  const std::vector<double> before = net.parameters()[0].tensor.to_vector();
  StateDict first, surplus, state;
  first.set("weight", Tensor::zeros({3, 3}));
  first.set("bias", Tensor::zeros({2}));
  surplus.set("scale", Tensor::zeros({2}));
  state.set("0", first);
  state.set("2", surplus);
  state.set("step", std::int64_t{3});
  const std::string message = module_error_of<core::DataError>([&] { net.load_state_dict(state); });
  for (const char* text :
       {"'0.weight' has shape [3, 3] instead of [2, 3]", "'1.weight' is missing",
        "'1.bias' is missing", "'2.scale' is not in the model", "'step' is not in the model"}) {
    EXPECT_THAT(message, HasSubstr(text));
  }
  EXPECT_EQ(net.parameters()[0].tensor.to_vector(), before);
}

TEST(Clone, IsIndependent) {
  manual_seed(1);
  Sequential net(Block(3), Sequential(Dropout(0.1), Linear(3, 2, {.bias = false})));
  net.to(DType::bf16);
  net.eval();
  Tensor frozen = net.parameters()[0].tensor;
  frozen.set_requires_grad(false);
  const std::uint64_t offset = Generator::current().offset();
  const std::shared_ptr<Module> copy = net.clone();
  EXPECT_EQ(Generator::current().offset(), offset);
  const NamedTensors a = net.parameters(), b = copy->parameters();
  ASSERT_EQ(names(a), names(b));
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].tensor.to_vector(), b[i].tensor.to_vector());
    EXPECT_EQ(a[i].tensor.dtype(), b[i].tensor.dtype());
    EXPECT_EQ(a[i].tensor.requires_grad(), b[i].tensor.requires_grad());
    EXPECT_NE(a[i].tensor.storage(), b[i].tensor.storage());
  }
  EXPECT_FALSE(copy->training());
  const Tensor x = Tensor::full({4, 3}, 0.5, DType::bf16);
  EXPECT_EQ(net(x).to_vector(), (*copy)(x).to_vector());
  kernels::fill(a[1].tensor, 9.0);
  EXPECT_NE(b[1].tensor.to_vector()[0], 9.0);
}

TEST(Clone, NamesAClassThatCannot) {
  Sequential net(Linear(1, 1), Plain());
  EXPECT_THAT(module_error_of<core::Unsupported>([&] { net.clone(); }),
              ::testing::AllOf(HasSubstr("Plain"), HasSubstr("make_like")));
}

TEST(Summary, ShowsShapesParametersAndBytes) {
  Sequential net = small_net();
  const std::vector<double> before = net.buffers()[0].tensor.to_vector();
  const std::string table = summary(net, {2, 1, 4, 4});
  EXPECT_THAT(table, HasSubstr("0: Conv2d(1 -> 4, 3x3)"));
  EXPECT_THAT(table, HasSubstr("[2, 4, 2, 2]"));
  EXPECT_THAT(table, HasSubstr("5: Linear(16 -> 3)"));
  EXPECT_THAT(table, HasSubstr("99"));   // 40 + 8 + 51 parameters
  EXPECT_THAT(table, HasSubstr("396"));  // bytes
  EXPECT_EQ(net.buffers()[0].tensor.to_vector(), before);
  EXPECT_TRUE(net.training());
  EXPECT_THROW(summary(net, {2, 2, 4, 4}), core::InvalidArgument);
  EXPECT_TRUE(net.training());
  EXPECT_THAT(summary(*std::make_shared<Embedding>(1000, 2), {3}, DType::i64), HasSubstr("2,000"));
}

// ---- A layer that nobody registered

class Forgetful : public Module {
 public:
  std::string kind() const override { return "Forgetful"; }
  Tensor forward(const Tensor& x) override { return forgotten((*known_)(x)); }
  Linear forgotten{3, 3};

 private:
  std::shared_ptr<Linear> known_ = add_module("known", Linear(3, 3));
};

class Unregistered : public ::testing::Test {
 protected:
  void train(const Module& module) {
    for (const NamedTensor& p : module.parameters()) p.tensor.gradient_slot().claim(optimizer_);
  }
  void freeze(const Module& module) {
    for (NamedTensor& p : module.parameters()) p.tensor.set_requires_grad(false);
  }
  std::string error_of(const std::function<void()>& f) {
    return test::message_of<core::InvalidArgument>(f);
  }

  Forgetful model_;
  Tensor x_ = Tensor::zeros({2, 3});
  std::shared_ptr<const void> optimizer_ = std::make_shared<int>();
};

TEST_F(Unregistered, ThrowsInTheForwardOfATrainedModel) {
  train(model_);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(
        error_of([&] { model_(x_); }),
        HasSubstr("[Forgetful] expected layers that are registered children, got a Linear in "
                  "its forward that is not: no optimizer has its 'weight' (register it with "
                  "add_module or nn::Child"));
  }
  Sequential around(Linear(3, 3));
  EXPECT_EQ(around(x_).shape(), x_.shape());  // the error left nothing behind
}

TEST_F(Unregistered, ThrowsInASummaryWhichWouldLeaveItOut) {
  EXPECT_THAT(error_of([&] {
                summary(model_, {2, 3});
              }),
              HasSubstr("the summary would leave out its 'weight'"));
  EXPECT_EQ(model_(x_).shape(), x_.shape());
  freeze(model_.forgotten);
  EXPECT_THAT(summary(model_, {2, 3}), HasSubstr("known: Linear"));
}

TEST_F(Unregistered, IsFineWhereItIsTrainedFrozenOrNotDifferentiated) {
  EXPECT_EQ(model_(x_).shape(), x_.shape());  // nothing is trained yet
  train(model_);
  {
    const autograd::NoGradGuard no_grad;
    EXPECT_EQ(model_(x_).shape(), x_.shape());
  }
  freeze(model_.forgotten);  // a teacher
  EXPECT_EQ(model_(x_).shape(), x_.shape());
  Forgetful shares;
  train(shares);
  train(shares.forgotten);  // an optimizer has it, from wherever
  EXPECT_EQ(shares(x_).shape(), x_.shape());
}

TEST(Module, ALoadThatLacksMemoryForAMasterChangesNothing) {
  Sequential model(Linear(3, 5), Linear(5, 40));
  const StateDict state = Sequential(Linear(3, 5), Linear(5, 40)).state_dict();
  model.to(DType::bf16);
  const auto weights = [&] {
    std::vector<std::vector<double>> all;
    for (const NamedTensor& parameter : model.parameters())
      all.push_back(parameter.tensor.to_vector());
    return all;
  };
  const auto before = weights();
  const Device device = core::default_device();
  int refused = 0;
  for (std::size_t room = 0; room < 4096; room += 64) {
    core::set_memory_capacity(device, core::memory_stats(device).current_total + room);
    try {
      model.load_state_dict(state);
      room = 4096;
    } catch (const core::OutOfMemory&) {
      ++refused;
      EXPECT_EQ(weights(), before) << room;
    }
    core::set_memory_capacity(device, SIZE_MAX);
  }
  EXPECT_GT(refused, 3);
  EXPECT_NE(weights(), before);
}

}  // namespace
}  // namespace cairn::nn

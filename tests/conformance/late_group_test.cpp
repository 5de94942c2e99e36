// A parameter group that comes after amp::initialize, between steps, with and without
// gradients of its own, at every opt level.
#include "cairn/optim/optimizer_access.h"
#include "multi_model.h"

namespace cairn::conformance {
namespace {

constexpr double kMomentum = 0.125;

struct AddCase {
  amp::OptLevel level;
  bool zero_before_add, accumulate_twice;
  int zeroing;  // 0: each gradient dropped, 1: model.clear_grad(), 2: optimizer.clear_grad()
};

std::vector<AddCase> add_cases() {
  std::vector<AddCase> all;
  for (const auto level :
       {amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2, amp::OptLevel::O3}) {
    for (const bool before : {true, false}) {
      for (const bool twice : {true, false}) {
        for (int zeroing = 0; zeroing < 3; ++zeroing)
          all.push_back({level, before, twice, zeroing});
      }
    }
  }
  return all;
}

/// SGD with momentum of one model in double precision.
struct ModelReference {
  explicit ModelReference(double u) : w{Vec{u, u + 1}, Vec{1 + u, 2 + u}} {}
  void step(double lr, double times) {
    const std::array<Vec, 2> before = w;
    for (std::size_t p = 0; p < 2; ++p) {
      for (std::size_t k = 0; k < 2; ++k) {
        const double g = times * before[1 - p][k];
        buffer[p][k] = steps == 0 ? g : kMomentum * buffer[p][k] + g;
        w[p][k] -= lr * buffer[p][k];
      }
    }
    ++steps;
  }
  std::array<Vec, 2> w, buffer{};
  int steps = 0;
};

class AddRun {
 public:
  explicit AddRun(const AddCase& c) : case_(c), first_(1.0), second_(2.0) {
    optimizer_ = std::make_unique<optim::FusedSGD>(
        std::vector<optim::ParameterGroup>{{named(first_, "first"), 0.25, 0.0}},
        optim::SgdOptions{.momentum = kMomentum});
    amp::Options options{.opt_level = c.level};
    // As in several_losses_test.cpp, models are not cast.
    if (c.level != amp::OptLevel::O1) options.cast_model_type = DType::f32;
    options.loss_scale = 4.0;
    precision_ = std::make_unique<amp::Amp>(
        amp::initialize({&first_, &second_}, {optimizer_.get()}, options));
    first_.halve();
    second_.halve();
    optimizer_->set_master_weights(c.level == amp::OptLevel::O2);
    optim::OptimizerAccess(*optimizer_).refresh();
  }

  void train() {
    zero();
    backward(false);
    EXPECT_TRUE(precision_->step().applied);
    expected_first_.step(0.25, 1);
    check();

    if (case_.zero_before_add) zero();
    leave_gradients(second_);  // as a backward of another loss may have
    optimizer_->add_group({named(second_, "second"), 0.5, 0.0});
    EXPECT_TRUE(second_.w0().grad().defined());
    if (case_.zero_before_add) second_.clear_grad();  // else zeroed by what follows
    if (!case_.zero_before_add) zero();
    backward(true);
    if (case_.accumulate_twice) backward(true);
    EXPECT_TRUE(precision_->step().applied);
    expected_first_.step(0.25, case_.accumulate_twice ? 2 : 1);
    expected_second_.step(0.5, case_.accumulate_twice ? 2 : 1);
    check();

    zero();
    backward(true);
    EXPECT_TRUE(precision_->step().applied);
    expected_first_.step(0.25, 1);
    expected_second_.step(0.5, 1);
    check();
  }

 private:
  static NamedTensors named(MyModel& model, const std::string& name) {
    NamedTensors parameters;
    for (const auto& [own, tensor] : model.parameters()) {
      parameters.push_back({name + "_" + own, tensor});
    }
    return parameters;
  }

  static void leave_gradients(MyModel& model) {
    for (Tensor tensor : {model.w0(), model.w1()}) {
      tensor.set_grad(Tensor::full({2}, 7.0, tensor.dtype()));
    }
  }

  void zero() {
    for (MyModel* model : {&first_, &second_}) {
      if (case_.zeroing == 0) model->w0().clear_grad(), model->w1().clear_grad();
      if (case_.zeroing == 1) model->clear_grad();
    }
    if (case_.zeroing == 2) optimizer_->clear_grad();
  }

  void backward(bool both) {
    const Tensor x = Tensor::full({2}, 1.0);
    Tensor loss = first_(x);
    if (both) loss = autograd::add(loss, second_(x));
    precision_->backward(loss);
  }

  void check() {
    for (std::size_t p = 0; p < 2; ++p) {
      check_one(p == 0 ? first_.w0() : first_.w1(), expected_first_.w[p]);
      check_one(p == 0 ? second_.w0() : second_.w1(), expected_second_.w[p]);
    }
    const bool masters = case_.level == amp::OptLevel::O2;
    EXPECT_EQ(kernels::MasterWeight::exists(first_.w1()), masters);
    EXPECT_EQ(kernels::MasterWeight::exists(second_.w1()), masters && expected_second_.steps > 0);
  }
  static void check_one(const Tensor& tensor, const Vec& expected) {
    expect_close(tensor.to_vector<double>(), expected, DType::f16);
  }

  AddCase case_;
  MyModel first_, second_;
  ModelReference expected_first_{1.0}, expected_second_{2.0};
  std::unique_ptr<optim::FusedSGD> optimizer_;
  std::unique_ptr<amp::Amp> precision_;
};

TEST(LateGroup, TrainsAsTheReferenceAtEveryLevel) {
  const std::vector<AddCase> cases = add_cases();
  EXPECT_EQ(cases.size(), 48u);
  for (const AddCase& c : cases) {
    SCOPED_TRACE(core::str(amp::name(c.level), ", zeroed ", c.zero_before_add ? "before" : "after",
                           ", ", c.accumulate_twice ? 2 : 1, " backwards, zeroing ", c.zeroing));
    AddRun(c).train();
  }
}

}  // namespace
}  // namespace cairn::conformance

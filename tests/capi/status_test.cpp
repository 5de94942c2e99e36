// Errors as codes and texts; handles that are none.
#include <fstream>
#include <new>
#include <set>
#include <sstream>
#include <thread>

#include "cairn/amp/overflow.h"
#include "cairn/core/error.h"
#include "cairn/core/version.h"
#include "calls.h"
#include "guard.h"
#include "support/test_folder.h"

namespace cairn::test {
namespace {

template <class E, class... More>
void expect_code(cairn_status code, const More&... more) {
  EXPECT_EQ(capi::guard("f", [&](const char*) { throw E("what went wrong", more...); }), code);
  EXPECT_STREQ(cairn_last_error(), "what went wrong");
}

TEST(CapiStatus, EachErrorHasItsCode) {
  expect_code<core::Error>(CAIRN_ERROR);
  expect_code<core::InvalidArgument>(CAIRN_INVALID_ARGUMENT);
  expect_code<core::Unsupported>(CAIRN_UNSUPPORTED);
  expect_code<core::OutOfMemory>(CAIRN_OUT_OF_MEMORY);
  expect_code<core::IoError>(CAIRN_IO_ERROR);
  expect_code<core::DataError>(CAIRN_DATA_ERROR);
  expect_code<core::DeviceError>(CAIRN_DEVICE_ERROR);
  expect_code<core::CommunicationError>(CAIRN_COMMUNICATION_ERROR);
  const std::vector<std::string> parameters = {"w"};
  expect_code<optim::GradientCollapse>(CAIRN_GRADIENT_COLLAPSE, parameters);
  expect_code<amp::LossScaleCollapse>(CAIRN_GRADIENT_COLLAPSE, parameters);
  EXPECT_EQ(capi::guard("f", [](const char*) {}), CAIRN_OK);
}

TEST(CapiStatus, NoExceptionCrosses) {
  expect_code<std::runtime_error>(CAIRN_UNEXPECTED);
  EXPECT_EQ(capi::guard("f", [](const char*) { throw std::bad_alloc(); }), CAIRN_OUT_OF_MEMORY);
  EXPECT_EQ(capi::guard("f", [](const char*) { throw 7; }), CAIRN_UNEXPECTED);
  EXPECT_STREQ(cairn_last_error(), "an exception that is no std::exception");
}

TEST(CapiStatus, TheTextIsTheThreads) {
  std::thread([] { EXPECT_STREQ(cairn_last_error(), ""); }).join();
  expect_failed(cairn_scaler_scale(nullptr, nullptr), CAIRN_INVALID_ARGUMENT, {"a scaler"});
  const std::string own = cairn_last_error();
  std::thread([] {
    expect_failed(cairn_group_wait(nullptr), CAIRN_INVALID_ARGUMENT, {"a group"});
  }).join();
  EXPECT_EQ(cairn_last_error(), own);
  expect_ok(cairn_free(nullptr));  // a success leaves it
  EXPECT_EQ(cairn_last_error(), own);
}

// docs/errors.md has a row for each code, and each type of the page that can come has a code.
TEST(CapiStatus, NamesAreThoseOfThePageOfErrors) {
  std::stringstream page;
  page << std::ifstream(test_folder() + "/../docs/errors.md").rdbuf();
  std::set<std::string> rows, names = {"LossScaleCollapse", "AnomalyError"};  // of the graph
  for (std::string line; std::getline(page, line);) {
    const std::size_t begin = line.rfind("| `", 0) == 0 ? line.find("::") : std::string::npos;
    if (begin != std::string::npos)
      rows.insert(line.substr(begin + 2, line.find('`', begin) - begin - 2));
  }
  for (int32_t code = CAIRN_ERROR; code < CAIRN_UNEXPECTED; ++code)
    names.insert(cairn_status_name(code));
  EXPECT_EQ(rows, names);
  EXPECT_STREQ(cairn_status_name(CAIRN_OK), "OK");
  EXPECT_STREQ(cairn_status_name(-1), "unknown");
  EXPECT_STREQ(cairn_status_name(11), "unknown");
}

TEST(CapiStatus, TheVersionIsTheLibrarys) {
  EXPECT_STREQ(cairn_version(), core::version());
}

TEST(CapiHandles, WrongOnesAreTold) {
  cairn_scaler* scaler = nullptr;
  expect_ok(cairn_scaler_create(nullptr, &scaler));
  int64_t steps = 0;
  expect_failed(cairn_optimizer_steps(reinterpret_cast<cairn_optimizer*>(scaler), &steps),
                CAIRN_INVALID_ARGUMENT,
                {"[cairn_optimizer_steps] expected a handle of an optimizer", "of another kind"});
  double scale = 0;
  int stranger = 0;
  expect_failed(cairn_scaler_scale(reinterpret_cast<cairn_scaler*>(&stranger), &scale),
                CAIRN_INVALID_ARGUMENT, {"a scaler"});
  expect_failed(cairn_scaler_scale(nullptr, &scale), CAIRN_INVALID_ARGUMENT, {"got NULL"});
  cairn_state* state = nullptr;
  expect_failed(cairn_state_create(nullptr, scaler, &state), CAIRN_INVALID_ARGUMENT,
                {"a group or a reducer"});
  EXPECT_EQ(state, nullptr);
  expect_ok(cairn_free(scaler));
  expect_failed(cairn_scaler_scale(scaler, &scale), CAIRN_INVALID_ARGUMENT, {"freed"});
  expect_failed(cairn_free(scaler), CAIRN_INVALID_ARGUMENT, {"freed"});
}

TEST(CapiHandles, MayBeFreedInAnyOrder) {
  Array<float> w("w", {4}, values_of<float>(4, 1)), g("g", {4}, values_of<float>(4, 2));
  const cairn_tensor weight = w.tensor(), gradient = g.tensor();
  cairn_optimizer* optimizer = nullptr;
  cairn_scaled_step* scaled = nullptr;
  expect_ok(cairn_optimizer_create("sgd", nullptr, &weight, &gradient, 1, &optimizer));
  expect_ok(cairn_scaled_step_create(optimizer, nullptr, nullptr, &scaled));
  expect_ok(cairn_free(optimizer));
  cairn_step_result result;
  expect_ok(cairn_scaled_step_run(scaled, nullptr, &result));
  EXPECT_EQ(result.applied, 1);
  expect_ok(cairn_free(scaled));
}

TEST(CapiHandles, ThreadsHaveTheirOwn) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      for (int times = 0; times < 100; ++times) {
        cairn_scaler* scaler = nullptr;
        const std::string options = "init_scale=" + std::to_string(8 << i);
        expect_ok(cairn_scaler_create(options.c_str(), &scaler));
        expect_ok(cairn_scaler_update(scaler, 1));
        double scale = 0;
        expect_ok(cairn_scaler_scale(scaler, &scale));
        EXPECT_EQ(scale, 4 << i);
        expect_ok(cairn_free(scaler));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CapiHandles, NullIsAnErrorEverywhere) {
  Array<float> w("w", {4}, values_of<float>(4, 1));
  const cairn_tensor weight = w.tensor();
  cairn_optimizer* optimizer = nullptr;
  expect_ok(cairn_optimizer_create("sgd", nullptr, &weight, &weight, 1, &optimizer));
  cairn_state* state = nullptr;
  expect_ok(cairn_state_create(nullptr, nullptr, &state));
  cairn_scaler* scaler = nullptr;
  expect_ok(cairn_scaler_create(nullptr, &scaler));
  for (const cairn_status status :
       {cairn_tensor_from_dlpack(nullptr, nullptr),
        cairn_tensors_norm(&weight, 1, 2, nullptr, nullptr),
        cairn_tensors_norm(nullptr, 1, 2, nullptr, nullptr),
        cairn_tensors_scale(&weight, nullptr, 1, 2),
        cairn_tensors_clip(nullptr, 1, 1, 2, nullptr),
        cairn_group_from_environment(nullptr),
        cairn_group_ranks(nullptr, nullptr, nullptr, nullptr, nullptr),
        cairn_group_barrier(nullptr, nullptr),
        cairn_group_all_reduce(nullptr, nullptr, 0),
        cairn_group_broadcast(nullptr, nullptr, 0),
        cairn_group_all_gather(nullptr, nullptr, nullptr, nullptr),
        cairn_group_sum(nullptr, nullptr, nullptr),
        cairn_group_wait(nullptr),
        cairn_group_abort(nullptr, nullptr),
        cairn_optimizer_create("sgd", nullptr, &weight, &weight, 1, nullptr),
        cairn_optimizer_create(nullptr, nullptr, &weight, &weight, 1, &optimizer),
        cairn_optimizer_create("sgd", nullptr, nullptr, &weight, 1, &optimizer),
        cairn_optimizer_create("sgd", nullptr, &weight, nullptr, 1, &optimizer),
        cairn_optimizer_add_group(nullptr, nullptr, &weight, &weight, 1),
        cairn_optimizer_set(nullptr, 0, nullptr),
        cairn_optimizer_keep_state(nullptr, nullptr, nullptr),
        cairn_optimizer_step(optimizer, nullptr, nullptr),
        cairn_optimizer_steps(optimizer, nullptr),
        cairn_optimizer_weights_written(nullptr),
        cairn_scaler_create(nullptr, nullptr),
        cairn_scaler_scale(scaler, nullptr),
        cairn_scaler_update(nullptr, 0),
        cairn_scaled_step_create(optimizer, nullptr, nullptr, nullptr),
        cairn_scaled_step_create(nullptr, nullptr, nullptr, nullptr),
        cairn_scaled_step_scale(nullptr, nullptr),
        cairn_scaled_step_run(nullptr, nullptr, nullptr),
        cairn_reducer_create(nullptr, nullptr, nullptr, nullptr, 0, nullptr),
        cairn_reducer_mark_ready(nullptr, 0),
        cairn_reducer_mark_unused(nullptr, 0),
        cairn_reducer_wait(nullptr),
        cairn_reducer_abandon(nullptr),
        cairn_even_part(10, 0, 2, nullptr, nullptr),
        cairn_state_create(nullptr, nullptr, nullptr),
        cairn_state_add(state, "part", nullptr),
        cairn_state_add(state, nullptr, nullptr),
        cairn_state_add_weights(state, "part", nullptr),
        cairn_state_add_tensors(state, "part", nullptr, 1),
        cairn_state_resume(state, nullptr, nullptr),
        cairn_state_save(state, nullptr, 1),
        cairn_state_save_every(state, 1, nullptr, nullptr),
        cairn_state_save_on_signal(state, 15, nullptr),
        cairn_state_finish(nullptr)})
    EXPECT_EQ(status, CAIRN_INVALID_ARGUMENT);
  for (void* handle : std::initializer_list<void*>{optimizer, state, scaler})
    expect_ok(cairn_free(handle));
}

}  // namespace
}  // namespace cairn::test

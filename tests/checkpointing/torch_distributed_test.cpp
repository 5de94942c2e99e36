// Folders of torch.distributed.checkpoint's, of golden/make_torch_distributed.py.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cairn/autograd/autograd.h"
#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/model_file.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/core/error.h"
#include "cairn/nn/nn.h"
#include "cairn/optim/adam.h"
#include "checkpointing/temporary_folder.h"
#include "support/expect_error.h"
#include "support/test_folder.h"

namespace cairn::checkpointing {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

std::string saved_by_torch() {
  return test::golden_file("torch_distributed");
}
StateDict whole_of_torch() {
  return read_torch(saved_by_torch() + "/whole.pt");
}

void expect_same(const StateDict::Value& ours, const StateDict::Value& theirs,
                 const std::string& name) {
  const auto* tensor = std::get_if<Tensor>(&ours);
  ASSERT_EQ(ours.index(), theirs.index()) << name;
  if (tensor != nullptr) {
    const auto& other = std::get<Tensor>(theirs);
    EXPECT_EQ(tensor->dtype(), other.dtype()) << name;
    EXPECT_EQ(tensor->shape(), other.shape()) << name;
    EXPECT_EQ(tensor->to_vector(), other.to_vector()) << name;
  } else if (const auto* text = std::get_if<std::string>(&ours)) {
    EXPECT_EQ(*text, std::get<std::string>(theirs)) << name;
  } else if (const auto* number = std::get_if<double>(&ours)) {
    EXPECT_EQ(*number, std::get<double>(theirs)) << name;
  } else if (const auto* integer = std::get_if<std::int64_t>(&ours)) {
    EXPECT_EQ(*integer, std::get<std::int64_t>(theirs)) << name;
  }
}

TEST(TorchDistributed, PutsTogetherWhatFourProcessesSaved) {
  const auto ours = flatten(read_torch_distributed(saved_by_torch()));
  auto theirs = flatten(whole_of_torch());
  std::erase_if(theirs, [](const auto& entry) {
    return entry.first == "x" || entry.first.starts_with("after.");
  });
  EXPECT_EQ(ours.size(), theirs.size());
  EXPECT_GT(ours.size(), 20u);
  for (const auto& [name, value] : ours) {
    const auto same = std::find_if(theirs.begin(), theirs.end(),
                                   [&](const auto& entry) { return entry.first == name; });
    ASSERT_NE(same, theirs.end()) << name;
    expect_same(value, same->second, name);
  }
}

TEST(TorchDistributed, ATrainingContinues) {
  nn::Sequential model(nn::Linear(3, 5), nn::Tanh{});
  EXPECT_EQ(kind_of_file(saved_by_torch()), FileKind::torch_distributed);
  load(model, saved_by_torch(), {.part = "model"});
  optim::FusedAdam optimizer(model.parameters(), {.lr = 1.0, .beta1 = 0.8, .beta2 = 0.95});
  optimizer.load_torch_state_dict(read_state(saved_by_torch()).dict("optimizer"));
  EXPECT_EQ(optimizer.lr(), 1e-2);

  const StateDict torch = whole_of_torch();
  const Tensor y = model.forward(std::get<Tensor>(*torch.find("x")));
  autograd::backward(autograd::sum(autograd::mul(y, y)));
  EXPECT_TRUE(optimizer.step().applied);
  for (const auto& [name, value] : flatten(torch.dict("after"))) {
    const auto theirs = std::get<Tensor>(value).to_vector();
    const auto all = flatten(model.state_dict());
    const auto same = std::find_if(all.begin(), all.end(),
                                   [&, key = name](const auto& one) { return one.first == key; });
    ASSERT_NE(same, all.end()) << name;
    const auto ours = std::get<Tensor>(same->second).to_vector();
    for (std::size_t i = 0; i < theirs.size(); ++i) EXPECT_NEAR(ours[i], theirs[i], 1e-6) << name;
  }
}

void replace_first(std::string& bytes, std::string_view from, std::string_view to) {
  const std::size_t at = bytes.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  bytes.replace(at, from.size(), to);
}

/// Of a copy of the folder, one file changed.
template <class Error>
void expect_refused(const std::string& name, const std::function<void(std::string&)>& change,
                    const std::vector<std::string>& words) {
  const TemporaryFolder copy;
  const std::string folder = copy / "saved", path = folder + "/" + name;
  fs::copy(saved_by_torch(), folder);
  std::ifstream in(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(in), {});
  change(bytes);
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  expect_error<Error>([&] { read_torch_distributed(folder); }, words);
}

TEST(TorchDistributed, NamesWhatIsMissingDamagedOrElsewhere) {
  using core::DataError;
  expect_refused<DataError>(
      ".metadata", [](std::string& bytes) { replace_first(bytes, "__0_0.distcp", "../0_0.distc"); },
      {"a file of the folder", "../0_0.distc"});
  expect_refused<core::IoError>(
      ".metadata", [](std::string& bytes) { replace_first(bytes, "__0_0.distcp", "__9_0.distcp"); },
      {"__9_0.distcp"});
  expect_refused<DataError>("__1_0.distcp", [](std::string& bytes) { bytes.resize(3000); },
                            {"__1_0.distcp", "got a file of 3000"});
  expect_refused<DataError>("__0_0.distcp",
                            [](std::string& bytes) {  // in a tensor, which begins at such a place
                              const std::size_t name = bytes.find("data/0");
                              bytes[(name + 69) / 64 * 64 + 3] ^= 1;
                            },
                            {"__0_0.distcp from byte 0", "data/0", "damaged"});
  expect_refused<DataError>(".metadata",
                            [](std::string& bytes) {
                              replace_first(bytes, "ChunkStorageMetadata", "ChunkStorageMetadatX");
                            },
                            {"expected a name", "ChunkStorageMetadatX", "nothing is executed"});
  expect_refused<DataError>(".metadata", [](std::string& bytes) { bytes.resize(bytes.size() / 2); },
                            {".metadata"});
  expect_refused<DataError>(
      ".metadata",
      [](std::string& bytes) {
        std::ifstream moved(saved_by_torch() + "/overlap.metadata", std::ios::binary);
        bytes.assign(std::istreambuf_iterator<char>(moved), {});
      },
      {"pieces that fill 'grid' [5, 7]", "got 4 with 35 elements that do not"});
  expect_error<DataError>([] { read_state(test::golden_file("")); },
                          {"torch.distributed.checkpoint"});
}

/// Hostile or damaged: whatever a byte says, nothing is read outside of the files.
TEST(TorchDistributed, AnyByteOfItsMetadataEndsInAnErrorOrAState) {
  const TemporaryFolder copy;
  const std::string folder = copy / "saved", path = folder + "/.metadata";
  fs::copy(saved_by_torch(), folder);
  std::ifstream in(path, std::ios::binary);
  const std::string intact(std::istreambuf_iterator<char>(in), {});
  int refused = 0, read = 0;
  for (std::size_t at = 0; at < intact.size(); at += 7) {
    std::string bytes = intact;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << (at % 8)));
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    try {
      read_torch_distributed(folder);
      ++read;
    } catch (const core::Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, read);
}

}  // namespace
}  // namespace cairn::checkpointing

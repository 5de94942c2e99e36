// The one table of cast policies against the operations themselves, against the lists of Apex and
// torch.amp, and against the documentation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cairn/autograd/autocast.h"
#include "support/test_folder.h"

namespace cairn::autograd {
namespace {

using List = std::vector<std::string>;

/// The names of a row: "mm, bmm" has two.
List names_of(std::string_view row) {
  List names;
  while (!row.empty()) {
    const std::size_t comma = row.find(", ");
    names.emplace_back(row.substr(0, comma));
    row = comma == row.npos ? std::string_view() : row.substr(comma + 2);
  }
  return names;
}

std::map<std::string, OpRow> rows_by_name() {
  std::map<std::string, OpRow> rows;
  for (const OpRow& row : op_table()) {
    for (const std::string& name : names_of(row.name)) {
      EXPECT_TRUE(rows.emplace(name, row).second) << name << " stands in the table twice";
    }
  }
  return rows;
}

// test_conformance links the whole of cairn::autograd, so an operation is seen whether or not
// anything here uses it.
TEST(OpTable, HasEveryOperationOfCairnWithItsPolicy) {
  const std::vector<Operation> all = operations();
  EXPECT_GE(all.size(), 45u);
  for (const Operation& operation : all) {
    const OpRow* row = find_op(operation.name);
    ASSERT_NE(row, nullptr) << "no row for '" << operation.name << "' in op_table.cpp";
    EXPECT_EQ(name(row->policy), name(operation.policy)) << operation.name;
  }
}

TEST(OpTable, NamesNoOperationThatCairnHasNot) {
  std::map<std::string, CastPolicy> known;
  for (const Operation& operation : operations()) known[operation.name] = operation.policy;
  for (const OpRow& row : op_table()) {
    if (row.cairn.empty()) continue;
    const auto found = known.find(std::string(row.cairn));
    ASSERT_NE(found, known.end()) << row.cairn;
    EXPECT_EQ(found->second, row.policy) << row.cairn << " in the row " << row.name;
  }
}

ListPolicy as_list_policy(CastPolicy policy) {
  switch (policy) {
    case CastPolicy::keep:
      return ListPolicy::unlisted;
    case CastPolicy::half:
      return ListPolicy::half;
    case CastPolicy::f32:
      return ListPolicy::f32;
    case CastPolicy::promote:
      return ListPolicy::promote;
    case CastPolicy::banned:
      return ListPolicy::banned;
  }
  return ListPolicy::unlisted;
}

TEST(OpTable, SaysWhyWhereCairnDiffersFromBothLists) {
  for (const OpRow& row : op_table()) {
    if (row.cairn.empty() || row.apex != row.torch) continue;
    if (row.apex == as_list_policy(row.policy)) continue;
    EXPECT_FALSE(row.note.empty()) << row.name;
  }
}

TEST(OpTable, GivesAReasonForEveryPolicyThatCasts) {
  for (const OpRow& row : op_table()) {
    const bool casts =
        !row.cairn.empty() && row.policy != CastPolicy::keep && row.policy != CastPolicy::promote;
    EXPECT_TRUE(!casts || !row.reason.empty()) << row.name;
  }
}

void expect_listed(const List& list, ListPolicy OpRow::*column, ListPolicy policy) {
  const auto rows = rows_by_name();
  for (const std::string& op : list) {
    const auto row = rows.find(op);
    ASSERT_NE(row, rows.end()) << op << " is not in the table";
    EXPECT_EQ(name(row->second.*column), name(policy)) << op;
  }
}

void expect_nothing_else(const std::vector<List>& lists, ListPolicy OpRow::*column) {
  std::set<std::string> listed;
  for (const List& list : lists) listed.insert(list.begin(), list.end());
  for (const auto& [op, row] : rows_by_name()) {
    EXPECT_TRUE(row.*column == ListPolicy::unlisted || listed.count(op)) << op;
  }
}

// Apex at its last release with amp: amp/lists/{functional,torch,tensor}_overrides.py. Its `mean`
// is for torch before 1.1 only.
const List kApexHalf{"conv1d",
                     "conv2d",
                     "conv3d",
                     "conv_transpose1d",
                     "conv_transpose2d",
                     "conv_transpose3d",
                     "conv_tbc",
                     "linear",
                     "prelu",
                     "addmm",
                     "addmv",
                     "addr",
                     "matmul",
                     "mm",
                     "mv",
                     "addbmm",
                     "baddbmm",
                     "bmm",
                     "__matmul__",
                     "rnn",
                     "gru",
                     "lstm",
                     "lstm_cell",
                     "gru_cell",
                     "rnn_tanh_cell",
                     "rnn_relu_cell"};
const List kApexF32{"interpolate",
                    "grid_sample",
                    "softplus",
                    "softmin",
                    "log_softmax",
                    "softmax",
                    "gelu",
                    "layer_norm",
                    "group_norm",
                    "local_response_norm",
                    "normalize",
                    "cosine_similarity",
                    "poisson_nll_loss",
                    "cosine_embedding_loss",
                    "cross_entropy",
                    "hinge_embedding_loss",
                    "kl_div",
                    "l1_loss",
                    "mse_loss",
                    "margin_ranking_loss",
                    "multilabel_margin_loss",
                    "multilabel_soft_margin_loss",
                    "multi_margin_loss",
                    "nll_loss",
                    "binary_cross_entropy_with_logits",
                    "smooth_l1_loss",
                    "soft_margin_loss",
                    "triplet_margin_loss",
                    "ctc_loss",
                    "acos",
                    "asin",
                    "cosh",
                    "erfinv",
                    "exp",
                    "expm1",
                    "log",
                    "log10",
                    "log2",
                    "reciprocal",
                    "rsqrt",
                    "sinh",
                    "tan",
                    "pow",
                    "cumprod",
                    "cumsum",
                    "dist",
                    "norm",
                    "prod",
                    "std",
                    "sum",
                    "var",
                    "renorm",
                    "__ipow__",
                    "__pow__",
                    "__rpow__",
                    "cpu"};
const List kApexPromote{
    "addcdiv",      "addcmul",  "atan2",      "cross",    "bilinear", "dot",          "add",
    "div",          "mul",      "sub",        "eq",       "equal",    "ge",           "gt",
    "le",           "lt",       "ne",         "__add__",  "__div__",  "__eq__",       "__ge__",
    "__gt__",       "__iadd__", "__idiv__",   "__imul__", "__isub__", "__itruediv__", "__le__",
    "__lt__",       "__mul__",  "__ne__",     "__radd__", "__rdiv__", "__rmul__",     "__rsub__",
    "__rtruediv__", "__sub__",  "__truediv__"};
const List kApexSequence{"cat", "stack"}, kBanned{"binary_cross_entropy"};

TEST(OpTable, CarriesTheListsOfApex) {
  expect_listed(kApexHalf, &OpRow::apex, ListPolicy::half);
  expect_listed(kApexF32, &OpRow::apex, ListPolicy::f32);
  expect_listed(kApexPromote, &OpRow::apex, ListPolicy::promote);
  expect_listed(kApexSequence, &OpRow::apex, ListPolicy::sequence);
  expect_listed(kBanned, &OpRow::apex, ListPolicy::banned);
  expect_nothing_else({kApexHalf, kApexF32, kApexPromote, kApexSequence, kBanned}, &OpRow::apex);
}

// torch.amp's CUDA lists: autocast_mode.h. Its fp32, fp32_set_opt_dtype and fp32_append_dtype are
// f32 here.
const List kTorchHalf{"_convolution",
                      "conv1d",
                      "conv2d",
                      "conv3d",
                      "conv_tbc",
                      "conv_transpose1d",
                      "conv_transpose2d",
                      "conv_transpose3d",
                      "convolution",
                      "cudnn_convolution",
                      "cudnn_convolution_transpose",
                      "prelu",
                      "addmm",
                      "addmv",
                      "addr",
                      "matmul",
                      "einsum",
                      "mm",
                      "mv",
                      "linalg_vecdot",
                      "linear",
                      "addbmm",
                      "baddbmm",
                      "bmm",
                      "chain_matmul",
                      "linalg_multi_dot",
                      "_thnn_fused_lstm_cell",
                      "_thnn_fused_gru_cell",
                      "lstm_cell",
                      "gru_cell",
                      "rnn_tanh_cell",
                      "rnn_relu_cell",
                      "scaled_dot_product_attention",
                      "__matmul__"};
const List kTorchF32{"acos",
                     "asin",
                     "cosh",
                     "erfinv",
                     "exp",
                     "expm1",
                     "log",
                     "log10",
                     "log2",
                     "log1p",
                     "reciprocal",
                     "rsqrt",
                     "sinh",
                     "tan",
                     "pow",
                     "__pow__",
                     "__rpow__",
                     "__ipow__",
                     "softplus",
                     "layer_norm",
                     "native_layer_norm",
                     "group_norm",
                     "frobenius_norm",
                     "nuclear_norm",
                     "cosine_similarity",
                     "poisson_nll_loss",
                     "cosine_embedding_loss",
                     "nll_loss",
                     "nll_loss2d",
                     "hinge_embedding_loss",
                     "kl_div",
                     "l1_loss",
                     "smooth_l1_loss",
                     "huber_loss",
                     "mse_loss",
                     "margin_ranking_loss",
                     "multilabel_margin_loss",
                     "soft_margin_loss",
                     "triplet_margin_loss",
                     "multi_margin_loss",
                     "binary_cross_entropy_with_logits",
                     "dist",
                     "pdist",
                     "cdist",
                     "renorm",
                     "logsumexp",
                     "upsample_nearest",
                     "upsample_bilinear",
                     "upsample_bicubic",
                     "upsample_linear",
                     "upsample_trilinear",
                     "prod",
                     "softmax",
                     "log_softmax",
                     "cumprod",
                     "cumsum",
                     "linalg_vector_norm",
                     "linalg_matrix_norm",
                     "sum",
                     "norm"};
const List kTorchPromote{"addcdiv", "addcmul",      "atan2",     "bilinear",  "cross",      "dot",
                         "vdot",    "grid_sampler", "index_put", "tensordot", "scatter_add"};

TEST(OpTable, CarriesTheListsOfTorchAmp) {
  expect_listed(kTorchHalf, &OpRow::torch, ListPolicy::half);
  expect_listed(kTorchF32, &OpRow::torch, ListPolicy::f32);
  expect_listed(kTorchPromote, &OpRow::torch, ListPolicy::promote);
  expect_listed(kBanned, &OpRow::torch, ListPolicy::banned);
  expect_nothing_else({kTorchHalf, kTorchF32, kTorchPromote, kBanned}, &OpRow::torch);
}

TEST(OpTable, IsTheOneInTheDocumentation) {
  const std::string path = test::test_folder() + "/../docs/autocast.md";
  std::ifstream page(path);
  ASSERT_TRUE(page) << "no " << path;
  std::stringstream whole;
  whole << page.rdbuf();
  const std::string text = whole.str(), table = op_table_markdown();
  const std::size_t begin = text.find(table.substr(0, table.find('\n') + 1));
  ASSERT_NE(begin, text.npos) << "no table in the page; it should be\n" << table;
  const std::size_t end = text.find("\n\n", begin);
  EXPECT_EQ(text.substr(begin, end + 1 - begin), table) << "put this table into the page:\n"
                                                        << table;
}

}  // namespace
}  // namespace cairn::autograd

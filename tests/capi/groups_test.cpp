// Groups and reducers between processes.
#include <cmath>

#include "calls.h"
#include "parallel/ranks.h"

namespace cairn::test {
namespace {

using core::BFloat16;

struct Job {
  cairn_group* group = nullptr;
  int32_t rank = -1, size = -1;

  Job() {
    expect_ok(cairn_group_from_environment(&group));
    expect_ok(cairn_group_ranks(group, &rank, &size, nullptr, nullptr));
  }
  ~Job() { expect_ok(cairn_free(group)); }
};

void expect_all_ended(const std::vector<RankResult>& ranks) {
  for (const RankResult& rank : ranks) EXPECT_EQ(rank.status, 0) << rank.output;
}

TEST(CapiGroups, AloneIsAGroupOfOne) {
  Job job;
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.size, 1);
  double sum = 2.5;
  expect_ok(cairn_group_sum(job.group, &sum, "loss"));
  EXPECT_EQ(sum, 2.5);
}

TEST(CapiGroups, CollectivesAreThoseOfTheirNames) {
  expect_all_ended(start_ranks(2, [](int) {
    Job job;
    ASSERT_EQ(job.size, 2);
    int32_t local = -1, local_size = -1;
    expect_ok(cairn_group_ranks(job.group, nullptr, nullptr, &local, &local_size));
    EXPECT_EQ(local, job.rank);
    EXPECT_EQ(local_size, 2);
    expect_ok(cairn_group_barrier(job.group, "start"));
    const float own = job.rank == 0 ? 3.0f : -5.0f;
    const float expected[] = {-2.0f, -1.0f, 3.0f, -5.0f, -15.0f};
    for (int32_t op = CAIRN_SUM; op <= CAIRN_PRODUCT; ++op) {
      Array<float> x("x", {2}, {own, own});
      const cairn_tensor tensor = x.tensor();
      expect_ok(cairn_group_all_reduce(job.group, &tensor, op));
      EXPECT_EQ(x.values[1], expected[op]) << op;
    }
    Array<int64_t> x("x", {1}, {job.rank + 7});
    const cairn_tensor tensor = x.tensor();
    expect_failed(cairn_group_all_reduce(job.group, &tensor, 5), CAIRN_INVALID_ARGUMENT, {"got 5"});
    expect_failed(cairn_group_all_reduce(job.group, &tensor, -1), CAIRN_INVALID_ARGUMENT,
                  {"got -1"});
    expect_ok(cairn_group_broadcast(job.group, &tensor, 1));
    EXPECT_EQ(x.values[0], 8);
    expect_failed(cairn_group_broadcast(job.group, &tensor, 2), CAIRN_INVALID_ARGUMENT, {"2"});

    const std::vector<int64_t> counts = {1, 3};
    const auto own_count = static_cast<std::size_t>(counts[static_cast<std::size_t>(job.rank)]);
    Array<float> part("part", {static_cast<int64_t>(own_count)},
                      std::vector<float>(own_count, own));
    Array<float> whole("whole", {4}, std::vector<float>(4)), even("even", {2}, {0, 0});
    const cairn_tensor from = part.tensor(), to = whole.tensor();
    expect_ok(cairn_group_all_gather(job.group, &from, &to, counts.data()));
    EXPECT_THAT(whole.values, testing::ElementsAre(3, -5, -5, -5));
    Array<float> one("one", {1}, {own});
    const cairn_tensor single = one.tensor(), both = even.tensor();
    expect_ok(cairn_group_all_gather(job.group, &single, &both, nullptr));
    EXPECT_THAT(even.values, testing::ElementsAre(3, -5));
    double sum = own;
    expect_ok(cairn_group_sum(job.group, &sum, "loss"));
    EXPECT_EQ(sum, -2.0);
    expect_ok(cairn_group_wait(job.group));
  }));
}

TEST(CapiGroups, WhoGivesUpTellsTheOthersWhy) {
  expect_all_ended(start_ranks(2, [](int) {
    Job job;
    if (job.rank == 1) {
      expect_ok(cairn_group_abort(job.group, "the data are gone"));
      return;
    }
    expect_failed(cairn_group_barrier(job.group, "end"), CAIRN_COMMUNICATION_ERROR,
                  {"rank 1", "the data are gone"});
  }));
}

TEST(CapiReducer, AveragesAndSays) {
  expect_all_ended(start_ranks(2, [](int) {
    Job job;
    Array<float> a("a", {3}, std::vector<float>(3));
    Array<BFloat16> b("b", {2, 2}, std::vector<BFloat16>(4));
    const cairn_tensor gradients[] = {a.tensor(), b.tensor()};
    cairn_reducer* reducer = nullptr;
    expect_ok(cairn_reducer_create(job.group, "bucket_bytes=8 first_bucket_bytes=4", gradients,
                                   nullptr, 2, &reducer));
    for (int pass = 0; pass < 3; ++pass) {
      a.fill(2 * pass + job.rank);
      b.fill(7 + job.rank);
      expect_ok(cairn_reducer_mark_ready(reducer, 1));
      if (pass == 2 && job.rank == 0) {
        expect_ok(cairn_reducer_mark_unused(reducer, 0));
      } else {
        expect_ok(cairn_reducer_mark_ready(reducer, 0));
      }
      expect_ok(cairn_reducer_wait(reducer));
      for (std::size_t i = 0; i < 3; ++i) {
        const float first = pass == 2 ? 0.0f : value_of(i, 2 * pass);
        EXPECT_EQ(a.values[i], (first + value_of(i, 2 * pass + 1)) / 2) << pass;
      }
      EXPECT_EQ(static_cast<float>(b.values[3]), (value_of(3, 7) + value_of(3, 8)) / 2);
    }
    expect_ok(cairn_reducer_mark_ready(reducer, 1));
    expect_ok(cairn_reducer_abandon(reducer));
    cairn_reducer* none = nullptr;
    expect_failed(cairn_reducer_create(job.group, "bucket=8", gradients, nullptr, 2, &none),
                  CAIRN_INVALID_ARGUMENT, {"got 'bucket'"});
    expect_failed(cairn_reducer_create(job.group, nullptr, gradients, gradients, 2, &none),
                  CAIRN_INVALID_ARGUMENT, {"NULL without"});
    expect_ok(cairn_free(reducer));
  }));
}

TEST(CapiReducer, AMistakeIsToldOnEachRank) {
  expect_all_ended(start_ranks(2, [](int) {
    Job job;
    Array<float> a("a", {3}, std::vector<float>(3));
    const cairn_tensor gradient = a.tensor();
    cairn_reducer* reducer = nullptr;
    const cairn_status made =
        cairn_reducer_create(job.group, nullptr, &gradient, nullptr, 1, &reducer);
    if (job.rank == 0) {
      expect_ok(made);
      expect_failed(cairn_reducer_wait(reducer), CAIRN_INVALID_ARGUMENT, {"a"});
    } else if (made != CAIRN_OK) {  // rank 0 has given up while this one leaves that exchange
      expect_failed(made, CAIRN_COMMUNICATION_ERROR, {"rank 0"});
    } else {
      expect_ok(cairn_reducer_mark_ready(reducer, 0));
      expect_failed(cairn_reducer_wait(reducer), CAIRN_COMMUNICATION_ERROR, {"rank 0"});
    }
    expect_ok(cairn_free(reducer));
  }));
}

TEST(CapiReducer, PartsGoWhereTheyWereAsked) {
  expect_all_ended(start_ranks(2, [](int) {
    Job job;
    const std::size_t sizes[] = {5000, 3};  // the second is rank 1's whole
    Array<float> a("a", {5, 1000}, values_of<float>(sizes[0], job.rank));
    Array<float> b("b", {3}, values_of<float>(sizes[1], 5 + job.rank));
    int64_t begin[2], size[2];
    std::vector<Array<float>> parts;
    for (int i = 0; i < 2; ++i) {
      expect_ok(cairn_even_part(static_cast<int64_t>(sizes[i]), job.rank, 2, &begin[i], &size[i]));
      parts.emplace_back("part", std::vector<int64_t>{size[i]},
                         std::vector<float>(static_cast<std::size_t>(size[i]), 9.0f));
    }
    EXPECT_EQ(size[1], job.rank == 0 ? 0 : 3);
    const cairn_tensor gradients[] = {a.tensor(), b.tensor()};
    cairn_tensor places[] = {parts[0].tensor(), parts[1].tensor()};
    cairn_reducer* reducer = nullptr;
    expect_failed(cairn_reducer_create(job.group, "shard=1", gradients, nullptr, 2, &reducer),
                  CAIRN_INVALID_ARGUMENT, {"parts with shard=1"});
    const int64_t wrong = size[0] - 1;
    places[0].shape = &wrong;
    expect_failed(cairn_reducer_create(job.group, "shard=1", gradients, places, 2, &reducer),
                  CAIRN_INVALID_ARGUMENT, {"for 'a'"});
    places[0] = parts[0].tensor();
    expect_ok(cairn_reducer_create(job.group, "shard=1", gradients, places, 2, &reducer));
    for (int i = 1; i >= 0; --i)
      expect_ok(cairn_reducer_mark_ready(reducer, static_cast<size_t>(i)));
    expect_ok(cairn_reducer_wait(reducer));
    for (int i = 0; i < 2; ++i) {
      for (std::size_t j = 0; j < parts[static_cast<std::size_t>(i)].values.size(); ++j) {
        const std::size_t at = static_cast<std::size_t>(begin[i]) + j;
        ASSERT_EQ(parts[static_cast<std::size_t>(i)].values[j],
                  (value_of(at, i * 5) + value_of(at, i * 5 + 1)) / 2)
            << i << " " << j;
      }
    }
    // An optimizer of parts is each rank's own: a state of all would keep the first rank's.
    Array<float> w("w", {size[0]}, std::vector<float>(static_cast<std::size_t>(size[0])));
    const cairn_tensor weight = w.tensor();
    cairn_optimizer* optimizer = nullptr;
    expect_ok(cairn_optimizer_create("sgd", "lr=1", &weight, &places[0], 1, &optimizer));
    cairn_step_result result;
    expect_ok(cairn_optimizer_step(optimizer, nullptr, &result));
    EXPECT_EQ(w.values[1], -parts[0].values[1]);
    cairn_state *shared = nullptr, *own = nullptr;
    expect_ok(cairn_state_create(nullptr, job.group, &shared));
    expect_failed(cairn_state_add(shared, "optimizer", optimizer), CAIRN_UNSUPPORTED, {"'w'"});
    expect_failed(cairn_state_add_weights(shared, "model", optimizer), CAIRN_UNSUPPORTED, {"'w'"});
    expect_ok(cairn_state_create(nullptr, nullptr, &own));
    expect_ok(cairn_state_add(own, "optimizer", optimizer));
    for (void* handle : std::initializer_list<void*>{shared, own, optimizer, reducer})
      expect_ok(cairn_free(handle));
  }));
}

// Groups of one rank of the two: each has all of the averages.
TEST(CapiReducer, PartsAreOfShardWithinRanks) {
  expect_all_ended(start_ranks(2, [](int) {
    Job job;
    Array<float> a("a", {5000}, values_of<float>(5000, job.rank)),
        part("part", {5000}, std::vector<float>(5000));
    const cairn_tensor gradient = a.tensor(), place = part.tensor();
    cairn_reducer* reducer = nullptr;
    const char* const options = "shard=1 shard_within=1";
    expect_ok(cairn_reducer_create(job.group, options, &gradient, &place, 1, &reducer));
    expect_ok(cairn_reducer_mark_ready(reducer, 0));
    expect_ok(cairn_reducer_wait(reducer));
    for (std::size_t i = 0; i < part.values.size(); ++i)
      ASSERT_EQ(part.values[i], (value_of(i, 0) + value_of(i, 1)) / 2) << i;
    expect_ok(cairn_free(reducer));
  }));
}

TEST(CapiReducer, EvenPartsAreTold) {
  int64_t begin = -1, size = -1;
  expect_ok(cairn_even_part(5000, 1, 2, &begin, &size));
  EXPECT_EQ(begin + size, 5000);
  expect_failed(cairn_even_part(-1, 0, 1, &begin, &size), CAIRN_INVALID_ARGUMENT, {"-1"});
  expect_failed(cairn_even_part(8, 2, 2, &begin, &size), CAIRN_INVALID_ARGUMENT, {"rank 2 of 2"});
}

}  // namespace
}  // namespace cairn::test

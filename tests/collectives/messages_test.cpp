// How many messages and bytes a rank sends in each collective, from 2 to 256 ranks: as
// docs/parallel.md says.
#include <gtest/gtest.h>

#include <bit>
#include <numeric>

#include "cairn/core/tensor.h"
#include "collectives/cpu/mesh_collectives.h"
#include "meshes.h"
#include "suite.h"

namespace cairn::parallel {
namespace {

using test::CountingMesh;
using test::Post;

constexpr int kWorlds[] = {2, 3, 5, 8, 9, 16, 33, 64, 256};

int log2_up(int n) {
  return std::bit_width(static_cast<unsigned>(n - 1));
}

using Body = std::function<void(Collectives&, int rank)>;

/// Each rank's counts after body.
template <class SomeMesh = CountingMesh>
std::vector<Post::Count> counts_of(int world, const Body& body) {
  Post post(world);
  test::in_threads(world, [&](int rank) {
    const auto collectives = make_mesh_collectives(std::make_unique<SomeMesh>(post, rank));
    collectives->begin({.fingerprint = 77});
    body(*collectives, rank);
  });
  std::vector<Post::Count> counts;
  for (int rank = 0; rank < world; ++rank) counts.push_back(post.count(rank));
  return counts;
}

Counts even(int world, std::int64_t n) {
  return Counts(static_cast<std::size_t>(world), n);
}

TEST(Messages, BarrierTakesLogRounds) {
  for (const int world : kWorlds) {
    for (const auto& count : counts_of(world, [](Collectives&c, int) { c.barrier(); })) {
      EXPECT_EQ(count.messages, log2_up(world)) << world;
      EXPECT_EQ(count.bytes, static_cast<std::size_t>(log2_up(world)));
    }
  }
}

TEST(Messages, SmallAllGatherTakesLogRoundsAndNoByteTwice) {
  for (const int world : kWorlds) {
    const auto counts = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, 8, DType::f64),
                   y = Tensor::zeros({8 * world}, DType::f64);
      c.all_gather(x, y, even(world, 8));
      for (int r = 0; r < world; ++r)
        EXPECT_EQ(Tensor(y).to_vector()[static_cast<std::size_t>(8 * r)],
                  test::pattern(r, 8, DType::f64).to_vector()[0]);
    });
    for (const auto& count : counts) {
      EXPECT_EQ(count.messages, log2_up(world)) << world;
      EXPECT_EQ(count.bytes, static_cast<std::size_t>(world - 1) * 64);
    }
  }
}

TEST(Messages, LargeAllGatherGoesStraight) {
  for (const int world : {2, 5, 16}) {
    const auto counts = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, 40'000, DType::f32), y = Tensor::zeros({40'000 * world});
      c.all_gather(x, y, even(world, 40'000));
    });
    for (const auto& count : counts) {
      EXPECT_EQ(count.messages, world - 1);
      EXPECT_EQ(count.transfers, 1);
      EXPECT_EQ(count.bytes, static_cast<std::size_t>(world - 1) * 160'000);
    }
  }
}

TEST(Messages, SmallAllReduceGoesToAllUpToEightRanksAndInLogRoundsBeyond) {
  for (const int world : kWorlds) {
    const auto counts = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, 16, DType::f32);
      c.all_reduce(x, ReduceOp::sum);
      EXPECT_EQ(x.to_vector(), test::reduced(world, 16, DType::f32, ReduceOp::sum));
    });
    for (const auto& count : counts) {
      EXPECT_EQ(count.messages, world <= 8 ? world - 1 : log2_up(world)) << world;
      EXPECT_EQ(count.bytes, static_cast<std::size_t>(world - 1) * 64);
    }
  }
}

TEST(Messages, LargeAllReduceSendsTwiceTheTensorAtMost) {
  for (const int world : {2, 3, 8, 16}) {
    const std::int64_t n = 64 * 16 * 100;
    const auto counts = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, n, DType::f32);
      c.all_reduce(x, ReduceOp::sum);
      EXPECT_EQ(x.to_vector(), test::reduced(world, n, DType::f32, ReduceOp::sum));
    });
    std::size_t total = 0;
    for (const auto& count : counts) {
      EXPECT_EQ(count.messages, 2 * (world - 1)) << world;
      total += count.bytes;
    }
    EXPECT_EQ(total, 2u * static_cast<std::size_t>(world - 1) * static_cast<std::size_t>(n) * 4u);
  }
}

class SmallSegments : public CountingMesh {
 public:
  using CountingMesh::CountingMesh;
  std::size_t segment_bytes() const override { return 64 << 10; }
};

// A rank's piece is never cut smaller than 64 KiB, so the messages do not grow with ranks and bytes
// alike.
TEST(Messages, SegmentsGrowWithTheRanks) {
  for (const int world : {2, 4, 6}) {
    const std::int64_t n = (64 << 10) / 4 * world;
    const auto reduced = counts_of<SmallSegments>(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, n, DType::f32);
      c.all_reduce(x, ReduceOp::sum);
      EXPECT_EQ(x.to_vector(), test::reduced(world, n, DType::f32, ReduceOp::sum));
    });
    const auto scattered = counts_of<SmallSegments>(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, n, DType::f32), y = Tensor::zeros({n / world});
      c.reduce_scatter(x, y, even(world, n / world), ReduceOp::sum);
    });
    for (const auto& count : reduced) EXPECT_EQ(count.messages, 2 * (world - 1)) << world;
    for (const auto& count : scattered) EXPECT_EQ(count.messages, world - 1) << world;
  }
}

TEST(Messages, RootsSendOrGetTheRestOnce) {
  for (const int world : kWorlds) {
    const Counts counts = even(world, 4);
    const auto scattered = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(0, 4 * world, DType::f32), y = Tensor::zeros({4});
      c.scatter(x, y, counts, 1);
    });
    const auto gathered = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, 4, DType::f32), y = Tensor::zeros({4 * world});
      c.gather(x, y, counts, 1);
    });
    const auto reduced = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, 4, DType::f32), y = Tensor::zeros({4});
      c.reduce(x, y, ReduceOp::sum, 1);
    });
    for (int rank = 0; rank < world; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      EXPECT_EQ(scattered[r].messages, rank == 1 ? world - 1 : 0);
      EXPECT_EQ(gathered[r].messages, rank == 1 ? 0 : 1);
      EXPECT_EQ(reduced[r].messages, rank == 1 ? 0 : 1);
    }
  }
}

TEST(Messages, BroadcastIsATree) {
  for (const int world : kWorlds) {
    const auto counts = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, 4, DType::f32);
      c.broadcast(x, world - 1);
    });
    int all = 0;
    for (const auto& count : counts) {
      EXPECT_LE(count.messages, log2_up(world));
      all += count.messages;
    }
    EXPECT_EQ(all, world - 1);
  }
}

TEST(Messages, AllToAllAndReduceScatterSendEachPeerItsPart) {
  for (const int world : {2, 5, 64}) {
    const Counts counts = even(world, 4);
    for (const bool is_even : {true, false}) {
      const auto moved = counts_of(world, [&](Collectives& c, int rank) {
        const Tensor x = test::pattern(rank, 4 * world, DType::f32), y = Tensor::zeros({4 * world});
        c.all_to_all(x, counts, y, counts, is_even);
      });
      for (const auto& count : moved) EXPECT_EQ(count.messages, (world - 1) * (is_even ? 1 : 2));
    }
    const auto scattered = counts_of(world, [&](Collectives& c, int rank) {
      const Tensor x = test::pattern(rank, 4 * world, DType::f32), y = Tensor::zeros({4});
      c.reduce_scatter(x, y, counts, ReduceOp::sum);
    });
    for (const auto& count : scattered) {
      EXPECT_EQ(count.messages, world - 1);
      EXPECT_EQ(count.bytes, static_cast<std::size_t>(world - 1) * 16);
    }
  }
}

}  // namespace
}  // namespace cairn::parallel

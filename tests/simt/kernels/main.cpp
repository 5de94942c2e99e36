// The tests of the kernels run here over the emulator, but for those of what only the CPU backend
// does (threads, reporting a wrong index), of vendor libraries' work (convolutions), and one whose
// size says nothing here.
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  GTEST_FLAG_SET(
      filter,
      "-*Threads.*:EmbeddingIndices.*:CrossEntropyTargets.*:*LongSums*:GoldenImages.*Conv*"
      ":*/GoldenImages.*Conv*:*Ctc.SaysWhatIsOutOfRange*");
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

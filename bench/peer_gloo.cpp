// peer_gloo RANKS BYTES FOLDER: times Gloo's own ring all_reduce of f32 (sum, in place) between
// processes of this host over loopback. They meet in FOLDER, which is empty. One JSON line.
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdlib>

#include "ranks.h"

namespace {

template <class T>
void add(void* out, const void* a, const void* b, std::size_t n) {
  gloo::sum<T>(out, a, b, n);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "expected RANKS BYTES FOLDER\n");
    return 2;
  }
  const int ranks = std::atoi(argv[1]);
  const auto bytes = static_cast<std::size_t>(std::atoll(argv[2]));
  const std::string folder = argv[3];
  return bench::run_ranks(ranks, [&](int rank) {
    bench::bind_to_core(rank);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    gloo::rendezvous::FileStore store(folder);
    gloo::transport::tcp::attr address;
    address.hostname = "127.0.0.1";
    auto device = gloo::transport::tcp::CreateDevice(address);
    context->connectFullMesh(store, device);

    std::vector<float> x(bytes / 4, 0.0f);
    gloo::AllreduceOptions options(context);
    options.setOutput(x.data(), x.size());
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options.setReduceFunction(add<float>);
    const bench::Times times =
        bench::time_runs(bench::repeats_of(bytes), [&] { gloo::allreduce(options); });
    gloo::BarrierOptions barrier(context);
    gloo::barrier(barrier);
    if (rank == 0) bench::print(times);
  });
}

#include "transports/authenticate.h"

#include <sodium.h>

#include <array>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

using Nonce = std::array<unsigned char, 32>;
using Proof = std::array<unsigned char, crypto_auth_BYTES>;
using Key = std::array<unsigned char, crypto_auth_KEYBYTES>;

Key key_of(const std::string& token) {
  constexpr std::string_view kPurpose =
      "cairn: connections of engines";  // the store's keys are others
  Key key{};
  crypto_generichash(key.data(), key.size(), reinterpret_cast<const unsigned char*>(token.data()),
                     token.size(), reinterpret_cast<const unsigned char*>(kPurpose.data()),
                     kPurpose.size());
  return key;
}

/// What `from` says to `to`: neither can be replayed to somebody else.
std::string statement(int from, int to, const Nonce& own, const Nonce& challenge) {
  std::string text = core::str("cairn ", from, " to ", to, " ");
  text.append(own.begin(), own.end());
  text.append(challenge.begin(), challenge.end());
  return text;
}

const unsigned char* bytes_of(const std::string& text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

/// One message to each peer and one back.
template <class T>
void exchange(Mesh& mesh, int round, const std::vector<T>& out, std::vector<T>& in,
              std::chrono::milliseconds timeout) {
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for (int peer = 0; peer < mesh.size(); ++peer) {
    if (peer == mesh.rank()) continue;
    const auto p = static_cast<std::size_t>(peer);
    sends.push_back({peer, out[p].data(), out[p].size()});
    receives.push_back({peer, in[p].data(), in[p].size()});
  }
  mesh.start(round, sends, receives)->wait(timeout);
}

}  // namespace

void authenticate(Mesh& mesh, const std::string& token, std::chrono::milliseconds timeout) {
  if (sodium_init() < 0) core::fail<core::CommunicationError>("group", "libsodium cannot start");
  const Key key = key_of(token);
  const auto n = static_cast<std::size_t>(mesh.size());
  std::vector<Nonce> own(n), theirs(n);
  std::vector<Proof> sent(n), got(n);
  for (Nonce& nonce : own) randombytes_buf(nonce.data(), nonce.size());
  exchange(mesh, 0, own, theirs, timeout / 2);
  for (std::size_t p = 0; p < n; ++p) {
    const std::string text = statement(mesh.rank(), static_cast<int>(p), own[p], theirs[p]);
    crypto_auth(sent[p].data(), bytes_of(text), text.size(), key.data());
  }
  exchange(mesh, 1, sent, got, timeout / 2);
  for (std::size_t p = 0; p < n; ++p) {
    if (static_cast<int>(p) == mesh.rank()) continue;
    const std::string text = statement(static_cast<int>(p), mesh.rank(), theirs[p], own[p]);
    if (crypto_auth_verify(got[p].data(), bytes_of(text), text.size(), key.data()) != 0)
      core::fail<core::CommunicationError>("group", "who answers in place of rank ", p,
                                           " does not know the job's token (CAIRN_JOB_TOKEN)");
  }
}

}  // namespace cairn::parallel

// cairn-ckpt: inspect PATH | verify PATH | diff A B.
#include <CLI/CLI.hpp>
#include <iostream>

#include "cairn/core/error.h"
#include "commands.h"

int main(int argc, char** argv) {
  CLI::App app{
      "Shows, verifies and compares Cairn checkpoints.\n"
      "PATH is a checkpoint (step-...), a folder of checkpoints (its newest, for verify: each), or "
      "a "
      ".safetensors file.\n"
      "Exit status: 0; 1 where something is damaged or differs; 2 for wrong usage.",
      "cairn-ckpt"};
  app.require_subcommand(1);
  std::string a, b;
  const auto path = [](CLI::App* command, const char* name, std::string& value) {
    command->add_option(name, value)->required()->check(CLI::ExistingPath);
  };
  CLI::App* inspect = app.add_subcommand("inspect", "list every entry, with shapes and values");
  path(inspect, "PATH", a);
  CLI::App* verify = app.add_subcommand("verify", "check every checksum and name what is damaged");
  path(verify, "PATH", a);
  CLI::App* diff = app.add_subcommand("diff", "name every entry that differs, bit for bit");
  path(diff, "A", a);
  path(diff, "B", b);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help
    return app.exit(done);
  } catch (const CLI::ParseError& e) {
    std::cerr << "cairn-ckpt: " << e.what() << " (see cairn-ckpt --help)\n";
    return 2;
  }
  try {
    if (inspect->parsed()) return cairn::tools::inspect(a);
    if (verify->parsed()) return cairn::tools::verify(a);
    return cairn::tools::diff(a, b);
  } catch (const std::exception& e) {
    std::cerr << "cairn-ckpt: " << e.what() << '\n';
    return 1;
  }
}

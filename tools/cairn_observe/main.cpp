// cairn-observe: compare RUN RUN... [--out PAGE]
#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/observe/comparison.h"
#include "command_line/command_line.h"

namespace {

void compare(const std::vector<std::string>& folders, const std::string& out) {
  const std::string page = cairn::observe::comparison(folders);
  std::ofstream file(out);
  if (!(file << page << std::flush)) {
    cairn::core::fail<cairn::core::IoError>("observe", "expected to write ", out,
                                            ", got an error (may this user write there?)");
  }
  std::cout << "wrote " << out << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Compares what runs told (the folders of --observe).", "cairn-observe");
  app.require_subcommand(1);
  std::vector<std::string> folders;
  std::string out = "compare.html";
  CLI::App* command = app.add_subcommand(
      "compare", "write one page with the curves of several runs over one another");
  command->add_option("RUN", folders, "folders of runs, two or more")->required();
  command->add_option("--out", out, "the page")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    std::cerr << "cairn-observe: " << cairn::command_line::explain(app, error)
              << " (see cairn-observe --help)\n";
    return 2;
  }
  try {
    compare(folders, out);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "cairn-observe: " << error.what() << "\n";
    return 1;
  }
}

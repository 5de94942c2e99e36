// cairn-ckpt: inspect PATH | verify PATH | diff A B | convert IN OUT | merge IN OUT |
// reshard IN OUT --world N | prune DIR | repair IN OUT | prove-resume -- PROGRAM ARGS...
#include <CLI/CLI.hpp>
#include <functional>
#include <iostream>

#include "cairn/core/error.h"
#include "command_line/command_line.h"
#include "commands.h"
#include "contents.h"

namespace {

using cairn::tools::ProveResume;

struct Arguments {
  std::string a, b, part;
  int world_size = 1;
  cairn::checkpointing::RetentionPolicy rules;
  std::string best;
  bool dry_run = false;
  ProveResume prove;
};

// The chosen command.
std::function<int()> add_commands(CLI::App& app, Arguments& given) {
  const auto path = [](CLI::App* command, const char* name, std::string& value) {
    command->add_option(name, value)->required()->check(CLI::ExistingPath);
  };
  CLI::App* inspect = app.add_subcommand("inspect", "list every entry, with shapes and values");
  path(inspect, "PATH", given.a);
  CLI::App* verify = app.add_subcommand("verify", "check every checksum and name what is damaged");
  path(verify, "PATH", given.a);
  CLI::App* diff = app.add_subcommand("diff", "name every entry that differs, bit for bit");
  path(diff, "A", given.a);
  path(diff, "B", given.b);
  CLI::App* convert = app.add_subcommand(
      "convert",
      "write IN as the kind of file that OUT's name says: .pt, .safetensors, step-<8 digits> (a "
      "checkpoint), or a folder (a model in Hugging Face's layout)");
  path(convert, "IN", given.a);
  convert->add_option("OUT", given.b)->required();
  convert->add_option("--part", given.part, "only this dictionary of IN (model)");
  CLI::App* merge = app.add_subcommand(
      "merge",
      "write a checkpoint whose ranks hold shards as one of a single rank, whole, and compare");
  path(merge, "IN", given.a);
  merge->add_option("OUT", given.b, "step-<8 digits>, or a folder for it")->required();
  CLI::App* reshard = app.add_subcommand(
      "reshard", "write a checkpoint as a job of another size would have saved it, and compare");
  path(reshard, "IN", given.a);
  reshard->add_option("OUT", given.b, "step-<8 digits>, or a folder for it")->required();
  reshard->add_option("--world", given.world_size, "ranks")
      ->required()
      ->check(CLI::Range(1, 1 << 20));
  CLI::App* prune = app.add_subcommand(
      "prune", "remove old checkpoints, but not the newest good ones; nobody may save there");
  path(prune, "DIR", given.a);
  prune->add_option("--keep", given.rules.keep, "good ones that stay")
      ->check(CLI::Range(1, 1000000));
  prune->add_option("--keep-every", given.rules.keep_every, "and every one of a step it divides")
      ->check(cairn::command_line::not_below_zero());
  CLI::Option* best = prune->add_option("--best", given.best, "lowest or highest")
                          ->check(CLI::IsMember({"lowest", "highest"}));
  prune->add_option("--keep-best", given.rules.keep_best, "and so many with the best metric")
      ->check(cairn::command_line::not_below_zero())
      ->needs(best);
  prune->add_flag("--dry-run", given.dry_run, "only say what would go");
  CLI::App* repair = app.add_subcommand(
      "repair", "write what can be read of a damaged checkpoint to OUT, and name what is lost");
  path(repair, "IN", given.a);
  repair->add_option("OUT", given.b)->required();
  CLI::App* prove = app.add_subcommand(
      "prove-resume",
      "run PROGRAM unbroken, and again with a kill and a second start, and compare every entry. "
      "It must save to the folder of --checkpoint-dir (or {dir} in ARGS) and resume from it");
  prove->add_option("--steps", given.prove.steps, "passed on as --steps")
      ->check(cairn::command_line::above_zero());
  prove
      ->add_option("--kill-at", given.prove.kill_at,
                   "kill once a checkpoint of this step or a later one stands")
      ->check(cairn::command_line::above_zero());
  prove->add_option("--out", given.prove.folder, "keep both runs here");
  prove->add_option("PROGRAM", given.prove.command, "and its ARGS, after --")->required();
  return [=, &given] {
    if (inspect->parsed()) return cairn::tools::inspect(given.a);
    if (verify->parsed()) return cairn::tools::verify(given.a);
    if (diff->parsed()) return cairn::tools::diff(given.a, given.b);
    if (convert->parsed()) return cairn::tools::convert(given.a, given.b, given.part);
    if (merge->parsed()) return cairn::tools::reshard(given.a, given.b, 1);
    if (reshard->parsed()) return cairn::tools::reshard(given.a, given.b, given.world_size);
    using cairn::checkpointing::Best;
    if (!given.best.empty()) {
      given.rules.best = given.best == "lowest" ? Best::lowest : Best::highest;
    }
    if (prune->parsed()) return cairn::tools::prune(given.a, given.rules, given.dry_run);
    if (repair->parsed()) return cairn::tools::repair(given.a, given.b);
    return cairn::tools::prove_resume(given.prove);
  };
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Shows, verifies, compares, converts and mends checkpoints and files of weights.\n"
      "PATH is a checkpoint (step-...), a folder of checkpoints (its newest; for verify: each), a "
      ".safetensors file, a file of torch.save's, or a model's folder in Hugging Face's layout.\n"
      "Exit status: 0; 1 where something is damaged or differs; 2 for wrong usage.",
      "cairn-ckpt"};
  app.require_subcommand(1);
  Arguments given;
  const std::function<int()> command = add_commands(app, given);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help
    return app.exit(done);
  } catch (const CLI::ParseError& e) {
    std::cerr << "cairn-ckpt: " << cairn::command_line::explain(app, e)
              << " (see cairn-ckpt --help)\n";
    return 2;
  }
  try {
    return command();
  } catch (const std::exception& e) {
    std::cerr << "cairn-ckpt: " << cairn::tools::printable_lines(e.what()) << '\n';
    return 1;
  }
}

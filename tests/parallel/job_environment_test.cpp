// A process's place in its job, as launchers tell it, and a job that a launcher really starts.
#include "group/job_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "cairn/core/error.h"
#include "cairn/parallel/process_group.h"
#include "environment.h"
#include "support/expect_error.h"
#include "tools/shell.h"

namespace cairn::parallel {
namespace {

using core::InvalidArgument;
using test::expect_error;
using test::JobVariables;
using testing::HasSubstr;
using Values = std::map<std::string, std::string>;

TEST(JobEnvironment, AloneIsAJobOfOne) {
  const JobVariables variables({});
  const JobEnvironment job = read_job_environment();
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.world_size, 1);
}

TEST(JobEnvironment, ReadsWhatLaunchersSet) {
  const JobVariables variables({{"RANK", "5"},
                                {"WORLD_SIZE", "8"},
                                {"LOCAL_RANK", "1"},
                                {"LOCAL_WORLD_SIZE", "4"},
                                {"MASTER_ADDR", "10.0.0.1"},
                                {"MASTER_PORT", "29500"},
                                {"CAIRN_JOB_TOKEN", "t"}});
  const JobEnvironment job = read_job_environment();
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.world_size, 8);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_world_size, 4);
  EXPECT_EQ(job.master_addr, "10.0.0.1");
  EXPECT_EQ(job.master_port, 29500);
  EXPECT_EQ(job.token, "t");
}

TEST(JobEnvironment, LeavesTorchrunsStoreItsPort) {
  const auto port = [](const char* rank, const char* run, const char* master_port) {
    const JobVariables variables({{"RANK", rank},
                                  {"WORLD_SIZE", "2"},
                                  {"MASTER_ADDR", "localhost"},
                                  {"MASTER_PORT", master_port},
                                  {"TORCHELASTIC_RUN_ID", run},
                                  {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
    return read_job_environment().master_port;
  };
  EXPECT_EQ(port("0", "a", "29500"), port("1", "a", "29500"));
  EXPECT_NE(port("0", "a", "29500"), port("0", "b", "29500"));
  std::set<int> ports;
  for (int master_port = 29500; master_port < 29600; ++master_port) {
    const int derived = port("0", "none", std::to_string(master_port).c_str());
    EXPECT_GE(derived, 20000);
    EXPECT_LE(derived, 32767);
    EXPECT_NE(derived, master_port);
    ports.insert(derived);
  }
  EXPECT_GE(ports.size(), 98U) << "neighbours among MASTER_PORTs meet elsewhere";
}

TEST(JobEnvironment, TakesThePortItIsTold) {
  const JobVariables variables({{"RANK", "0"},
                                {"WORLD_SIZE", "2"},
                                {"MASTER_ADDR", "localhost"},
                                {"MASTER_PORT", "29500"},
                                {"CAIRN_STORE_PORT", "31000"},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_EQ(read_job_environment().master_port, 31000);
}

TEST(JobEnvironment, TakesAnAddressInBrackets) {
  const JobVariables variables(
      {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "[::1]"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(read_job_environment().master_addr, "::1");
}

TEST(JobEnvironment, NamesTheVariableAndItsValue) {
  const Values good = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29500"}};
  const auto replaced = [&](const std::string& name, const std::string& value) {
    Values values = good;
    values[name] = value;
    return values;
  };
  const auto without = [&](const std::string& name) {
    Values values = good;
    values.erase(name);
    return values;
  };
  const std::pair<Values, std::vector<std::string>> cases[] = {
      {replaced("RANK", "2"), {"RANK=2", "WORLD_SIZE=2"}},
      {replaced("RANK", "-1"), {"RANK", "'-1'"}},
      {replaced("RANK", "one"), {"RANK", "'one'"}},
      {replaced("RANK", "1x"), {"RANK", "'1x'"}},
      {replaced("WORLD_SIZE", "0"), {"WORLD_SIZE", "'0'"}},
      {replaced("MASTER_PORT", "99999"), {"MASTER_PORT", "'99999'"}},
      {replaced("LOCAL_RANK", "7"), {"LOCAL_RANK=7"}},
      {replaced("CAIRN_STORE_PORT", "0"), {"CAIRN_STORE_PORT", "'0'"}},
      {without("RANK"), {"RANK"}},
      {without("WORLD_SIZE"), {"WORLD_SIZE"}},
      {without("MASTER_PORT"), {"MASTER_PORT"}},
      {without("MASTER_ADDR"), {"MASTER_ADDR"}},
  };
  for (const auto& [values, texts] : cases) {
    const JobVariables variables(values);
    for (const std::string& text : texts)
      expect_error<InvalidArgument>([] { read_job_environment(); }, {"[from_environment]", text});
  }
}

Values with(Values values, const Values& more) {
  for (const auto& [name, value] : more) values[name] = value;
  return values;
}

const Values kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},       {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "3"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                         {"PMIX_NAMESPACE", "1462829057"},    {"PMIX_RANK", "3"}};
const Values kMpich = {
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Values kSlurm = {{"SLURM_PROCID", "5"},
                       {"SLURM_NTASKS", "7"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "2"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                       {"SLURM_STEP_NODELIST", "gpu[003-005,9]"},
                       {"SLURM_JOB_ID", "77"},
                       {"SLURM_STEP_ID", "0"}};

JobEnvironment read_with(const Values& values) {
  const JobVariables variables(values);
  return read_job_environment();
}

TEST(Launchers, OpenMpisVariablesAreAJob) {
  const JobEnvironment job = read_with(kOpenMpi);
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 4);
  EXPECT_EQ(job.local_rank, 3);
  EXPECT_EQ(job.local_world_size, 4);
  EXPECT_EQ(job.master_addr, "127.0.0.1");
  EXPECT_EQ(job.master_port,
            read_with(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}})).master_port);
  EXPECT_NE(job.master_port, read_with(with(kOpenMpi, {{"PMIX_NAMESPACE", "2"}})).master_port);
}

TEST(Launchers, MpichsVariablesAreAJob) {
  const JobEnvironment job = read_with(kMpich);
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.world_size, 2);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_world_size, 2);
  EXPECT_EQ(job.master_addr, "127.0.0.1");
  EXPECT_GE(job.master_port, 20000);
}

TEST(Launchers, ASlurmStepIsAJob) {
  const JobEnvironment job = read_with(kSlurm);
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.world_size, 7);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_world_size, 2);
  EXPECT_EQ(job.master_addr, "gpu003");
  EXPECT_NE(job.master_port, read_with(with(kSlurm, {{"SLURM_JOB_ID", "78"}})).master_port);
  EXPECT_NE(job.master_port, read_with(with(kSlurm, {{"SLURM_STEP_ID", "1"}})).master_port);
  EXPECT_EQ(
      read_with(with(kSlurm, {{"SLURM_NODEID", "3"}, {"SLURM_LOCALID", "0"}})).local_world_size, 1);
}

TEST(Launchers, ASlurmStepOnOneMachineMeetsOnLoopback) {
  const JobEnvironment job = read_with({{"SLURM_PROCID", "1"},
                                        {"SLURM_NTASKS", "2"},
                                        {"SLURM_LOCALID", "1"},
                                        {"SLURM_NTASKS_PER_NODE", "2"},
                                        {"SLURM_NODELIST", "login1"},
                                        {"SLURM_JOB_ID", "77"},
                                        {"SLURM_STEP_ID", "0"}});
  EXPECT_EQ(job.local_world_size, 2);
  EXPECT_EQ(job.master_addr, "127.0.0.1");
}

TEST(Launchers, ABatchScriptOutsideOfAStepIsAlone) {
  EXPECT_EQ(
      read_with({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "77"}}).world_size,
      1);
}

TEST(Launchers, PrecedeOneAnother) {
  Values all = with(with(kSlurm, kMpich), kOpenMpi);
  EXPECT_EQ(read_with(with(kSlurm, kMpich)).world_size, 2);
  EXPECT_EQ(read_with(all).world_size, 4);
  all = with(all,
             {{"RANK", "0"}, {"WORLD_SIZE", "9"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(read_with(all).world_size, 9);
  EXPECT_EQ(read_with(all).master_port, 29500);
}

TEST(Launchers, TakeAnAddressThatIsGiven) {
  const Values given = {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}};
  for (const Values& launcher : {kOpenMpi, kMpich, kSlurm}) {
    const JobEnvironment job = read_with(with(launcher, given));
    EXPECT_EQ(job.master_addr, "10.0.0.1");
    EXPECT_EQ(job.master_port, 29500);
  }
}

TEST(Launchers, NameWhatTheyLack) {
  const std::pair<Values, std::vector<std::string>> cases[] = {
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
       {"MASTER_ADDR"}},
      {{{"OMPI_COMM_WORLD_RANK", "0"}}, {"OMPI_COMM_WORLD_SIZE"}},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "4"}}),
       {"OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"}},
      {with(kMpich, {{"PMI_SIZE", "8"}, {"MASTER_ADDR", "h"}}), {"MASTER_PORT", "MPICH"}},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(x1)"}}),
       {"SLURM_STEP_TASKS_PER_NODE", "2(x1)"}},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "two"}}), {"SLURM_STEP_TASKS_PER_NODE", "two"}},
      {with(kSlurm, {{"SLURM_LOCALID", "2"}}), {"SLURM_LOCALID=2"}},
  };
  for (const auto& [values, texts] : cases) {
    const JobVariables variables(values);
    for (const std::string& text : texts)
      expect_error<InvalidArgument>([] { read_job_environment(); }, {"[from_environment]", text});
  }
}

TEST(Launchers, ReadSlurmsNodeLists) {
  const std::pair<const char*, const char*> cases[] = {{"a", "a"},
                                                       {"a,b", "a"},
                                                       {"gpu[003-005,9],login1", "gpu003"},
                                                       {"n[7,9]", "n7"},
                                                       {"n-[3-5]-ib,x", "n-3-ib"},
                                                       {"rack[1-2]node[03,4]", "rack1node03"}};
  for (const auto& [list, host] : cases) EXPECT_EQ(first_host(list), host) << list;
}

// Rank of the jobs that the tests below start.
TEST(Launchers, DISABLED_Rank) {
  const ProcessGroup group = ProcessGroup::from_environment();
  const double sum = group.all_reduce_sum(group.rank() + 1);
  std::printf("rank %d of %d: sum %g\n", group.rank(), group.world_size(), sum);
}

TEST(Launchers, DISABLED_HasNoTokenLeft) {
  const std::string before = test::read_text("/proc/self/environ");
  ASSERT_THAT(before, HasSubstr("a-secret-text"));
  EXPECT_EQ(read_job_environment().token, "a-secret-text");
  EXPECT_EQ(std::getenv("CAIRN_JOB_TOKEN"), nullptr);
  EXPECT_THAT(test::read_text("/proc/self/environ"), testing::Not(HasSubstr("a-secret-text")));
  EXPECT_THAT(test::shell("env").out, testing::Not(HasSubstr("a-secret-text")));
  EXPECT_EQ(read_job_environment().token, "a-secret-text") << "a later group of this process";
}

/// This program, to run one of the tests above.
std::string rank_program(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").string() +
         " --gtest_also_run_disabled_tests --gtest_brief=1 --gtest_filter=Launchers.DISABLED_" +
         name;
}

TEST(Launchers, LeaveNoTokenBehind) {
  const JobVariables variables({});
  const test::ShellResult result = test::shell(
      "RANK=0 WORLD_SIZE=1 CAIRN_JOB_TOKEN=a-secret-text " + rank_program("HasNoTokenLeft"));
  EXPECT_EQ(result.status, 0) << result.out << result.err;
}

TEST(Launchers, OpenMpiNeedsNoWrapper) {
  if (test::shell("mpirun --version").out.find("Open MPI") == std::string::npos) {
    GTEST_SKIP() << "Open MPI's mpirun is not installed";
  }
  const JobVariables variables({});
  const test::ShellResult result =
      test::shell("OMP_NUM_THREADS=1 timeout 90 mpirun --allow-run-as-root --oversubscribe -np 2 " +
                  rank_program("Rank"));
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("rank 0 of 2: sum 3\n"));
  EXPECT_THAT(result.out, HasSubstr("rank 1 of 2: sum 3\n"));
}

}  // namespace
}  // namespace cairn::parallel

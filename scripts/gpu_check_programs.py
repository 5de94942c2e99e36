"""How scripts/gpu_check runs programs: Cairn's, with the libraries that they need, and PyTorch's side; each bounded in time."""
import json
import os
import selectors
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACK = ROOT / "build/gpu_pack"


class WorkFailed(Exception):
    pass


def folder_of(options):
    """What holds bin/, and, of a pack, lib/ and cuda_report.json. A pack that is still packed is unpacked."""
    if options.programs:
        return options.programs.resolve()
    if (ROOT / "bin").is_dir():  # this script lies in the pack
        return ROOT
    unpacked = PACK / "files"
    if not unpacked.is_dir():
        if not (PACK / "pack.tar.xz").exists():
            sys.exit(f"gpu_check: expected {PACK / 'pack.tar.xz'}, found none; 'scripts/gpu_check pack' makes it")
        with tarfile.open(PACK / "pack.tar.xz") as archive:
            archive.extractall(unpacked, filter="data")
    return unpacked


def library_folders(options):
    """The pack's, CUDA's, and those of the packages that PyTorch brings CUDA's libraries in."""
    folders = [folder_of(options) / "lib", Path("/usr/local/cuda/lib64")]
    for packages in [*site.getsitepackages(), *sys.path]:
        folders += sorted(Path(packages).glob("nvidia/*/lib"))
    return [str(f) for f in dict.fromkeys(folders) if f.is_dir()]


def environment_of(options, more=None):
    folders = library_folders(options) + [f for f in [os.environ.get("LD_LIBRARY_PATH")] if f]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders), "CAIRN_LOG": "warn", "OMP_WAIT_POLICY": "PASSIVE",
            **(more or {})}


def gpu_count(options):
    if options.sim:
        return options.sim_gpus
    listed = answer_of(["nvidia-smi", "-L"])
    return sum(line.startswith("GPU ") for line in listed.split("\n"))


def find_program(name):
    beside = Path("/usr/local/cuda/bin") / name
    return shutil.which(name) or (str(beside) if beside.exists() else None)


def end(process):
    """With all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(options, log, command, seconds, environment):
    """(status, output); status None where time was up. bin/ is the folder of programs."""
    folder = folder_of(options)
    command = [str(folder / c) if str(c).startswith("bin/") else str(c) for c in command]
    with open(f"{log}.log", "w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment_of(options, environment),
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            status = process.wait(max(1, seconds))
        except subprocess.TimeoutExpired:
            status = None
        end(process)
        output.seek(0)
        return status, output.read()


class Server:
    """A program that reads 'NAME SECONDS' and answers with a line of JSON. Started when it is first asked,
    and again after a failure."""

    def __init__(self, label, command, environment, log):
        self.label, self.command, self.environment, self.log = label, [str(c) for c in command], environment, log
        self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        if self.process:
            end(self.process)
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None

    def start(self):
        with open(self.log, "a") as errors:
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=self.environment, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=errors, start_new_session=True)

    def ask(self, name, seconds, limit):
        if self.process is None:
            self.start()
        try:
            self.process.stdin.write(f"{name} {seconds}\n".encode())
            self.process.stdin.flush()
            return json.loads(self.line(limit))
        except (OSError, ValueError) as error:
            self.stop()
            raise WorkFailed(f"{error}; {self.last_error()}") from error

    def line(self, limit):
        until, text = time.monotonic() + limit, b""
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise OSError("time was up")
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                if not part:
                    raise OSError("it ended")
                text += part
        return text

    def last_error(self):
        lines = Path(self.log).read_text(errors="replace").strip().split("\n")
        return lines[-1][:200]


class Works(Server):
    def __init__(self, options, logs, environment=None):
        command = [folder_of(options) / "bin/cairn_works", "--device", "cuda", *(["--tiny"] if options.sim else [])]
        super().__init__("Cairn", [*command, "-"], environment_of(options, environment), logs / "cairn_works.log")
        self.list_command = [str(c) for c in [*command, "--list"]]

    def names(self):
        done = subprocess.run(self.list_command, env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise WorkFailed(done.stderr.strip())
        return done.stdout.split()


class Peer(Server):
    def __init__(self, options, logs):
        python = None if options.sim else self.python_with_torch(options)
        self.present = python is not None
        super().__init__("PyTorch", [python, ROOT / "bench/peer_torch.py", "--device", "cuda", "-"], dict(os.environ),
                         logs / "peer_torch.log")

    @staticmethod
    def python_with_torch(options):
        test = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)"
        for python in [options.python] if options.python else [sys.executable, shutil.which("python3")]:
            if python and subprocess.run([python, "-c", test], capture_output=True).returncode == 0:
                return python
        return None

    @staticmethod
    def knows(name):
        return f'"{name}":' in (ROOT / "bench/peer_torch.py").read_text()


# Each library tells its version as an integer, by return value or through a pointer. A process of its own,
# since it needs the search path.
ASK_LIBRARIES = """
import ctypes
for what, name, function in [("CUDA runtime", "libcudart.so.13", "cudaRuntimeGetVersion"), ("CUDA of the driver", "libcudart.so.13", "cudaDriverGetVersion"),
                             ("cuBLASLt", "libcublasLt.so.13", "cublasLtGetVersion"), ("cuDNN", "libcudnn.so.9", "cudnnGetVersion"),
                             ("NCCL", "libnccl.so.2", "ncclGetVersion")]:
    try:
        call, value = getattr(ctypes.CDLL(name), function), ctypes.c_int()
        call.restype = ctypes.c_size_t
        code = call() if name[3:8] in ("cubla", "cudnn") else call(ctypes.byref(value))
        print(what, value.value or code, sep="=")
    except OSError as error:
        print(what, error, sep="=")
"""


def answer_of(command, environment=None):
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return (done.stdout or done.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def versions(options):
    commit = folder_of(options) / "commit"
    found = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
             "Cairn": commit.read_text().strip() if commit.exists() else "a build folder"}
    if options.sim:
        return {**found, "GPU": "simulated: a dry run without figures"}
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    found["GPU, driver, memory, capability"] = answer_of(asked)
    libraries = answer_of([sys.executable, "-c", ASK_LIBRARIES], environment_of(options))
    found |= dict(line.split("=", 1) for line in libraries.split("\n") if "=" in line)
    python = Peer.python_with_torch(options)
    if python:
        asked = "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
        found["PyTorch, its CUDA and cuDNN"] = answer_of([python, "-c", asked])
    return found

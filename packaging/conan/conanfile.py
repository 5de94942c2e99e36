"""Conan 2 recipe that builds from this tree: `conan create packaging/conan`. The libraries below Cairn come from the system's packages
(scripts/install_dependencies), because not all of them have recipes."""
import pathlib
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy
from conan.tools.system.package_manager import Apt

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPONENTS = {"core": [], "kernels": ["core"], "gradients": ["core", "kernels"], "autograd": ["gradients"],
              "nn": ["autograd"], "data": ["core"], "observe": ["core"], "optim": ["gradients"],
              "amp": ["autograd", "nn", "optim"], "checkpointing": ["autograd", "nn"],
              "parallel": ["autograd", "nn", "optim"], "capi": ["amp", "checkpointing", "parallel"]}


class Cairn(ConanFile):
    name = "cairn"
    license = "Apache-2.0"
    description = "Mixed-precision, multi-device, low-memory training for C++"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False]}
    default_options = {"shared": True}
    package_type = "library"

    def set_version(self):
        header = (ROOT / "core/include/cairn/core/version.h").read_text()
        self.version = ".".join(re.findall(r"#define CAIRN_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))

    def export_sources(self):
        for folder in ["cmake", "packaging", "tools", "tests/gpu", *COMPONENTS]:
            copy(self, f"{folder}/*", ROOT, self.export_sources_folder)
        for file in ["CMakeLists.txt", "LICENSE"]:
            copy(self, file, ROOT, self.export_sources_folder)

    def system_requirements(self):
        Apt(self).check(["libdnnl-dev", "libhwy-dev", "libgloo-dev", "libzmq3-dev", "cppzmq-dev", "nlohmann-json3-dev",
                         "libcli11-dev", "libspdlog-dev", "libxxhash-dev", "libdlpack-dev", "libprotozero-dev",
                         "zlib1g-dev", "libpng-dev", "libpcre2-dev", "libturbojpeg0-dev", "libsodium-dev", "libopenmpi-dev"])

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables.update({"CAIRN_BUILD_TESTS": "OFF", "CAIRN_BUILD_EXAMPLES": "OFF",
                                          "CAIRN_TORCH": "OFF", "CMAKE_UNITY_BUILD": "ON"})
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, pathlib.Path(self.package_folder) / "licenses")
        CMake(self).install()

    def package_info(self):
        # Cairn's own package files say what its targets are.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/cairn"]

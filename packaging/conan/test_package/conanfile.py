"""Builds tests/install's trainer against the package and runs it."""
import pathlib

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class Trains(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["HOW"] = "INSTALLED"
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=pathlib.Path(self.recipe_folder).parents[2] / "tests/install")
        cmake.build()

    def test(self):
        if can_run(self):
            self.run(str(pathlib.Path(self.build_folder) / "trains"), env="conanrun")

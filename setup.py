"""Finds the packages to install, so that a new folder with an `__init__.py` needs no entry anywhere.

The repository keeps the subpackages of `plait` as folders of its root; `packages.find` of pyproject.toml cannot map
them. All other settings are in pyproject.toml.
"""

from setuptools import find_packages, setup

SUBPACKAGES = ("lang", "runtime", "constrained", "kernels")  # plait.lang is the folder lang/, and so on

packages = ["plait"]
for folder in SUBPACKAGES:
    packages += [f"plait.{folder}", *(f"plait.{folder}.{package}" for package in find_packages(folder))]

setup(packages=packages, package_dir={"plait": "plait"} | {f"plait.{folder}": folder for folder in SUBPACKAGES})

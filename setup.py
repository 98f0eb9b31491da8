"""Refuses a copy of the repository without its symbolic links; all settings are in pyproject.toml."""

from pathlib import Path

from setuptools import setup

PACKAGES = [f".path/plait/{name}" for name in ("lang", "runtime", "constrained", "kernels", "host")]

if missing := [package for package in PACKAGES if not Path(package).is_dir()]:
    raise SystemExit(
        f"There are no folders {', '.join(missing)}: .path/plait and plait/lang, for instance, are symbolic links in "
        "plait's repository, and this copy has none. Clone it with `git clone -c core.symlinks=true`, give pip the "
        ".tar.gz archive and not the .zip, or unpack one with a program and on a file system that keep symbolic links."
    )

setup()

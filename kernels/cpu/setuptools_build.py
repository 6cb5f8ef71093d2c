"""The build step of an installation. setuptools loads this file by its path: our packages are not to be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Builds the CPU kernels. Without a working C++ compiler the package installs without them."""

    def build_extension(self, ext: Extension) -> None:
        script, target = Path(__file__).with_name("build.py"), Path(self.get_ext_fullpath(ext.name))
        # What an earlier build left in build/ is not to be taken for this one's.
        target.unlink(missing_ok=True)
        # -P: modules beside the script do not stand in for the standard library's.
        subprocess.run([sys.executable, "-P", str(script), "--verbose", "--output", str(target)], check=True)

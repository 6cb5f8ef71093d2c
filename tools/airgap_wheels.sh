#!/bin/sh
# Collects the wheels that a machine without a network needs to install the engine: see --help.
# BUILD_PYTHON= names the interpreter that runs this; it needs pip and `packaging`.
set -eu
here=$(dirname "$0")
if [ -z "${BUILD_PYTHON:-}" ] && [ -x "$here/../.venv/bin/python" ]; then BUILD_PYTHON=$here/../.venv/bin/python; fi
exec "${BUILD_PYTHON:-python3}" "$here/airgap_wheels.py" "$@"

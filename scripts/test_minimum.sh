#!/usr/bin/env bash
# The library with the oldest versions it allows, in an environment of its own: $1 is the Python to use.
set -euo pipefail
home=.venv-minimum
"${1:-python3}" -m venv "$home"
"${1:-python3}" scripts/minimum_versions.py > "$home/constraints.txt"
grep '^torch==' constraints.txt >> "$home/constraints.txt"
"$home/bin/pip" install --quiet --disable-pip-version-check torch -c "$home/constraints.txt"
"$home/bin/pip" install --quiet --disable-pip-version-check . -c "$home/constraints.txt"
"$home/bin/python" -W error::DeprecationWarning:plot_ot scripts/smoke.py

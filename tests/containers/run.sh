#!/usr/bin/env bash
# Builds the CPU images and runs the tests that need them, on the engine that answers, else on one set up here for that.
#
#   tests/containers/run.sh [arguments of pytest]      PYTHON: an interpreter with rlpipe and its tests' packages
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

answers() { "$PYTHON" -c 'import docker; docker.from_env(timeout=10).ping()' >/dev/null 2>&1; }

if answers; then
  engine="the Docker-compatible engine at ${DOCKER_HOST:-its usual place}"
elif command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  variables=$(tests/containers/lab.sh up)
  eval "$variables"
  engine="podman, buildah and runc, set up by tests/containers/lab.sh: no Docker-compatible engine answered"
  answers || { echo "containers: the engine set up at $DOCKER_HOST does not answer" >&2; exit 1; }
else
  echo "containers: no Docker-compatible engine answers, and none can be set up here; do: start Docker or a podman socket (DOCKER_HOST), or run as root on Debian" >&2
  exit 1
fi
echo "containers: using $engine"
status=0
"$PYTHON" -m pytest tests/containers -m containers --timeout 1500 "$@" || status=$?
echo "containers: used $engine"
exit $status

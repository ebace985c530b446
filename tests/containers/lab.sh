#!/usr/bin/env bash
# A Docker-compatible engine and a stand-in for python:3.11-slim on a Debian machine that has no engine and no registry to pull from.
# Idempotent; about two minutes the first time, a second after that.
#
#   eval "$(tests/containers/lab.sh up)"      sets DOCKER_HOST, CONTAINERS_CONF, BUILDER and BUILD_FLAGS
#   tests/containers/lab.sh down
#
# What differs from a plain engine, and why:
#   - buildah builds with chroot isolation: the usual one fails without a delegated cgroup tree;
#   - runc runs containers with nofile and nproc limits that need no extra privilege;
#   - python:3.11-slim is imported from a debootstrap tree, with `python` and `pip` as the real image has them;
#   - this machine's settings of pip and uv, and a folder of wheels if it has one, are mounted while building, never copied into an image.
set -euo pipefail
LAB=${CONTAINER_LAB_DIR:-${TMPDIR:-/tmp}/container-lab}
BASE=docker.io/library/python:3.11-slim
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
CONF=$LAB/containers.conf
SOCK=$LAB/podman.sock
say() { echo "container-lab: $*" >&2; }

packages() {
  local tool missing=
  for tool in podman buildah runc debootstrap curl; do command -v $tool >/dev/null || missing=1; done
  [ -n "$missing" ] || return 0
  say "installing podman, buildah, runc, debootstrap"
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    podman buildah runc debootstrap netavark aardvark-dns uidmap fuse-overlayfs curl ca-certificates >/dev/null 2>"$LAB/apt.log" \
    || { say "apt-get failed; see $LAB/apt.log"; exit 1; }
}

# A setting of pip without what lies on this machine's disk, but for folders of wheels.
setting() { python3 -m pip config list 2>/dev/null | sed -n "s/^\(global\|:env:\)\.$1='\(.*\)'\$/\2/p" | tail -n 1 | xargs -n 1 | grep -v '^file:' || true; }

config() {
  cat > "$CONF" <<CONF
[containers]
netns = "host"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
CONF
  local links index extra; links=$(setting find-links) index=$(setting index-url) extra=$(setting extra-index-url)
  {
    echo "[global]"; echo "timeout = 180"
    if [ -n "$links" ]; then echo "find-links = "$links; fi
    if [ -n "$index" ]; then echo "index-url = $index"; fi
    if [ -n "$extra" ]; then echo "extra-index-url = "$extra; fi
  } > "$LAB/pip.conf"
  {
    echo "system-certs = true"; echo "[pip]"
    if [ -n "$links" ]; then printf 'find-links = [%s]\n' "$(quoted $links)"; fi
    if [ -n "$index" ]; then echo "index-url = \"$index\""; fi
    if [ -n "$extra" ]; then printf 'extra-index-url = [%s]\nindex-strategy = "unsafe-best-match"\n' "$(quoted $extra)"; fi
  } > "$LAB/uv.toml"
}

quoted() { printf '"%s", ' "$@"; }

flags() {
  local folder
  printf '%s ' --isolation chroot --network host --pull-never
  printf -- '--volume %s ' "$LAB/pip.conf:/etc/pip.conf:ro" "$LAB/uv.toml:/etc/uv/uv.toml:ro" "$CERTIFICATES:$CERTIFICATES:ro"
  for folder in $(setting find-links); do if [ -d "$folder" ]; then printf -- '--volume %s ' "$folder:$folder:ro"; fi; done
}

base() {
  if podman image exists "$BASE" 2>/dev/null; then return; fi
  local mirror; mirror=$(awk '/^URIs/ {print $2; exit}' /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
  [ -n "$mirror" ] || mirror=$(awk '/^deb / {print $2; exit}' /etc/apt/sources.list)
  say "importing $BASE from a debootstrap tree"
  rm -rf "$LAB/rootfs"
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$LAB/rootfs" "$mirror" >"$LAB/debootstrap.log" 2>&1 \
    || { say "debootstrap failed; see $LAB/debootstrap.log"; exit 1; }
  rm -f "$LAB"/rootfs/usr/lib/python3*/EXTERNALLY-MANAGED
  ln -sf python3 "$LAB/rootfs/usr/bin/python"
  cp "$CERTIFICATES" "$LAB/rootfs$CERTIFICATES"
  tar -C "$LAB/rootfs" -c . | podman import - "$BASE" >"$LAB/import.log" 2>&1
  rm -rf "$LAB/rootfs"
}

answers() { curl -fs --max-time 2 --unix-socket "$SOCK" http://d/_ping >/dev/null 2>&1; }

service() {
  if answers; then return; fi
  rm -f "$SOCK"
  setsid podman --runtime runc system service --time=0 "unix://$SOCK" >"$LAB/service.log" 2>&1 </dev/null &
  echo $! > "$LAB/service.pid"
  for _ in $(seq 50); do if answers; then return; fi; sleep 0.2; done
  say "the engine did not answer; see $LAB/service.log"; exit 1
}

case ${1:-} in
  up)
    mkdir -p "$LAB"; packages; config; export CONTAINERS_CONF=$CONF; base; service
    echo "export DOCKER_HOST=unix://$SOCK CONTAINERS_CONF=$CONF BUILDER=buildah BUILD_FLAGS='$(flags)'" ;;
  down)
    if [ -f "$LAB/service.pid" ]; then kill "$(cat "$LAB/service.pid")" 2>/dev/null || true; rm -f "$LAB/service.pid" "$SOCK"; fi ;;
  *) sed -n 2,14p "$0"; exit 2 ;;
esac

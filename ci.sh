#!/usr/bin/env bash
# All checks of the project. Runs on any Linux with cargo; as root on Debian it installs what else it needs.
#
#   ./ci.sh                          what a change must pass
#   WARPWIRE_REQUIRE=cuda,ptx,scapy,tshark,fuzz,valgrind,rxe,g++ ./ci.sh    what is absent is then a failure
set -euo pipefail
cd "$(dirname "$0")"

need() { # need COMMAND DEBIAN-PACKAGE...
  command -v "$1" >/dev/null && return
  shift
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
  else
    echo "missing: install $* (on Debian: sudo apt-get install $*)" >&2
    exit 1
  fi
}

want() { (need "$@" 2>/dev/null) || true; } # whoever uses it says what it skips

step() { printf '\n== %s\n' "$*"; "$@"; }

export PATH="$PATH:$HOME/.cargo/bin"
if ! command -v cargo >/dev/null; then
  echo "missing: cargo 1.88 or newer, with rustfmt and clippy; see https://rustup.rs" >&2
  exit 1
fi
need cc gcc libc6-dev
need python3 python3 python3-pip

export INSTA_UPDATE=no
step cargo fmt --all -- --check
step cargo fmt --manifest-path fuzz/Cargo.toml -- --check
step cargo clippy --workspace --all-targets --quiet -- -D warnings
step cargo test --workspace --quiet
RUSTDOCFLAGS=-Dwarnings step cargo doc --workspace --no-deps --quiet
step tools/ptx --check
want g++ g++
step tools/header-tests
step tools/sock-judges
step tools/sock-sanitizers
want tshark tshark
step tools/wire-oracles
step tools/rxe-lab test
step tools/fuzz
step tools/instructions
step cargo run --quiet -- demo
# As the tests' build left them: asked for by their package, they would be built once more.
step "${CARGO_TARGET_DIR:-target}"/debug/examples/01_move
step "${CARGO_TARGET_DIR:-target}"/debug/examples/12_together
step cargo run --quiet -- doctor
printf '\nall checks passed\n'

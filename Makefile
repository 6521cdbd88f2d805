# One target, one thing; `make help` lists them.
SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-print-directory

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)

# Static, and the same from any directory. For all targets alike: a difference would compile every
# dependency once more.
export CGO_ENABLED := 0
# grpc, which the client of etcd needs, would bring templates along for a page that nobody opens, and with them the linker keeps
# every exported method: more than twice what etcd's client adds to ebpf-agent without them.
export GOFLAGS     := $(strip $(GOFLAGS) -trimpath -tags=grpcnotrace)

# Root has no excuse to skip a privileged test; for anybody else only ring 1 runs.
ROOT := $(filter 0,$(shell id -u))

# More arguments for go test, and whose tests, in whichever module: make test TESTFLAGS='-v -run TestGatewayIsAnswered' PACKAGES=./test/e2e
TESTFLAGS ?=
PACKAGES  ?= ./...
# The families of the labs in which a test names none, and of the demo: ipv4, ipv6 or dual.
FAMILY    ?=
export EBPF_CNI_FAMILY = $(FAMILY)
# How long each fuzz target runs.
FUZZTIME  ?= 20s
# Where bench writes, if not to bench-out/quick, bench-out/full and bench-out/cluster.
OUT       ?=
# What test-kernels boots: series of Debian's kernels, or the path of one image, with the directory of its modules.
KERNEL    ?= 6.1 6.12
MODULES   ?=
# So many failed tests at most of a machine's run once more.
AGAIN     ?= 0
# What the image is called. That of a release has the version as its tag.
TAG       ?= latest
IMAGE     ?= localhost/ebpf-cni:$(TAG)
# More arguments for the benchmark or for conformance; PUBLISH=1 writes the project's documents from a whole run.
ARGS      ?=
bench_out  = $(if $(OUT),--out $(OUT)) $(if $(PUBLISH),--publish .)

##@ Build

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the static binaries into bin/
	@mkdir -p bin
	go build -ldflags '-s -w -X main.version=$(VERSION)' -o bin/ ./cmd/...

.PHONY: image
image: ## Build the container image for amd64 and arm64 without Docker: bin/ebpf-cni.tar, an OCI archive; IMAGE=NAME:TAG
	@for arch in amd64 arm64; do \
		mkdir -p bin/image/$$arch; \
		GOARCH=$$arch go build -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)' -o bin/image/$$arch/ ./cmd/...; \
	done
	@go -C tools/deploy run ./image -name '$(IMAGE)' -version '$(VERSION)' -out '$(CURDIR)/bin/ebpf-cni.tar' \
		amd64='$(CURDIR)/bin/image/amd64' arm64='$(CURDIR)/bin/image/arm64'

.PHONY: release
release: TAG = $(VERSION)
release: image ## Write a release's files into dist/: manifests, chart, image, binaries, checksums; IMAGE=NAME:TAG, where nodes find it
	rm -rf dist
	@go -C tools/deploy run ./release -image '$(IMAGE)' -version '$(VERSION)' -out '$(CURDIR)/dist' \
		'$(CURDIR)/bin/image/amd64' '$(CURDIR)/bin/image/arm64'
	@cp bin/ebpf-cni.tar dist/ebpf-cni-image.tar
	cd dist && sha256sum * >SHA256SUMS

.PHONY: generate
generate: ## Compile the BPF programs and make the Go enums (installs clang-19 at need)
	@tools/setup.sh generate
	go generate ./bpf ./maps/...

.PHONY: clean
clean: ## Remove what make has built, and the labs that this checkout kept or a killed test left (root)
ifdef ROOT
	go -C tools/demo run . -clean
endif
	rm -rf bin bench-out dist

##@ Prove

.PHONY: test
test: build ## Run the tests; the privileged ones too when root (installs what they need)
	@tools/setup.sh test
ifdef ROOT
	@BESIDE=./test/prog REQUIRE_PRIVILEGED=1 tools/in-modules.sh '$(PACKAGES)' '$(CURDIR)/tools/go-test.sh' {} -timeout 35m $(TESTFLAGS)
else
	@echo 'test: not root: the tests that need the kernel are skipped'
	@tools/in-modules.sh '$(PACKAGES)' go test {} $(TESTFLAGS)
endif

.PHONY: test-all
test-all: build ## Run the tests in their long form, those of the lab in each family and in both, in hours (root)
	@tools/setup.sh test
	@status=0; export TEST_LONG=1 REQUIRE_PRIVILEGED=1 BESIDE=./test/prog; \
	tools/in-modules.sh '$(PACKAGES)' '$(CURDIR)/tools/go-test.sh' {} -timeout 60m $(TESTFLAGS) || status=1; \
	for family in $(if $(filter $(FAMILY)$(PACKAGES),./...),ipv6 dual); do \
		EBPF_CNI_FAMILY=$$family tools/in-modules.sh ./test/e2e '$(CURDIR)/tools/go-test.sh' {} -timeout 60m $(TESTFLAGS) || status=1; \
	done; exit $$status

.PHONY: test-kernels
test-kernels: ## Run the tests that need a kernel on Linux 6.1 and 6.12, emulated; KERNEL=6.1, or KERNEL=FILE MODULES=DIR
	@tools/setup.sh test-kernels
	go run ./test/vm -kernel '$(KERNEL)' -modules '$(MODULES)' -again '$(AGAIN)' \
		-packages '$(filter-out ./...,$(PACKAGES))' -testflags '$(TESTFLAGS)'

.PHONY: test-cluster
test-cluster: build ## Run the tests on a real Kubernetes on this machine (root; the first time it is built, in minutes)
	@tools/setup.sh cluster
	cd test/cluster && go run ./play programs
# One package after the other: clusters leave nothing of the processors to others.
	cd test/cluster && REQUIRE_PRIVILEGED=1 go test -count 1 -p 1 -timeout 40m $(TESTFLAGS) ./...

.PHONY: conformance
conformance: build ## Run Kubernetes' own tests of the network without kube-proxy, in an hour or more (root); ARGS='-families=dual -nodes=2 -focus=REGEXP'; PUBLISH=1 writes the page of whole runs
	@tools/setup.sh cluster
	@cd test/cluster && go run ./conform -version='$(VERSION)' $(if $(PUBLISH),-publish) $(ARGS)

.PHONY: conformance-short
conformance-short: build ## Run those of them that test/cluster/conform/short.txt names, on two nodes, in minutes (root)
	@tools/setup.sh cluster
	@cd test/cluster && go run ./conform -version='$(VERSION)' -families=dual -nodes=2 -tests=conform/short.txt -out=../../bin/conformance-short $(ARGS)

.PHONY: cluster
cluster: build ## Start a real Kubernetes of two nodes on this machine, with this network (root); FAMILY=dual or ipv6; MODE=vxlan; PROXY=nftables or none
	@tools/setup.sh cluster
	@cd test/cluster && go run ./play up $(if $(FAMILY),-family=$(FAMILY)) $(if $(MODE),-mode=$(MODE)) $(if $(PROXY),-proxy=$(PROXY))

.PHONY: cluster-down
cluster-down: ## End what make cluster started
	@cd test/cluster && go run ./play down

.PHONY: demo
demo: build ## Three nodes, their pods and a host outside on this machine (root); FAMILY=dual or ipv6; MODE=vxlan, LINKS=2: through the tunnel; MODE=docker: without Kubernetes; KEEP=1 leaves them running
	@tools/setup.sh $(if $(filter docker,$(MODE)),docker,demo)
	$(if $(filter docker,$(MODE)),go -C test/cluster/flannel build -o '$(CURDIR)/bin/' ./flanneld-etcd)
	KEEP=$(KEEP) FAMILY=$(FAMILY) MODE=$(MODE) LINKS=$(LINKS) go -C tools/demo run .

.PHONY: bench
bench: build ## Measure the main rows against the classical networks, in minutes (root); ARGS='--modes ... --workloads ...'
	@tools/setup.sh bench
	@go -C tools/bench build -o ../../bin/bench .
	@bin/bench $(bench_out) $(ARGS)

.PHONY: bench-full
bench-full: build ## Measure all that budgets ask for (root); PUBLISH=1 writes BENCHMARKS.md, its plots and tables, and README's figures
	@tools/setup.sh bench
	@go -C tools/bench build -o ../../bin/bench .
	@bin/bench --profile full $(bench_out) $(ARGS)

.PHONY: bench-cluster
bench-cluster: build ## Measure on a real Kubernetes on this machine (root); PUBLISH=1 as for bench-full
	@tools/setup.sh cluster
	@tools/setup.sh bench
	@go -C tools/bench build -o ../../bin/bench .
	@bin/bench cluster $(bench_out) $(ARGS)

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (20s) each, and random packets through the programs
	@tools/fuzz.sh $(FUZZTIME)
	go -C test/prog test -count=1 -run '^TestRandomPackets$$' -timeout 30m -seed=0 -packets=3000000

.PHONY: verify-generate
verify-generate: ## Fail unless what is generated is what the sources make
	@tools/setup.sh generate
	@tools/verify-generate.sh

##@ Tidy

.PHONY: fmt
fmt: ## Format Go and C
	@tools/setup.sh lint
	git ls-files -coz --exclude-standard '*.go' | xargs -0r gofmt -w
	git ls-files -coz --exclude-standard '*.c' '*.h' | xargs -0r clang-format-19 -i

# make -k lint goes on after the first kind of finding.
.PHONY: lint lint-format lint-c lint-modules lint-go lint-arm64
lint: lint-format lint-c lint-modules lint-go lint-arm64 ## Check format, modules and code (installs clang-19 and clang-format-19 at need)

lint-format:
	@tools/setup.sh lint
	@unformatted=$$(git ls-files -coz --exclude-standard '*.go' | xargs -0r gofmt -l); \
	[ -z "$$unformatted" ] || { echo "make fmt would change:"; echo "$$unformatted"; exit 1; }
	git ls-files -coz --exclude-standard '*.c' '*.h' | xargs -0r clang-format-19 --dry-run --Werror
	git diff --check "$$(git hash-object -t tree /dev/null)"

# Each C file and header includes what it needs, so it compiles alone.
lint-c:
	@tools/setup.sh generate
	@cd bpf && flags=$$(sed -n 's/.*-cflags "\([^"]*\)".*/\1/p' gen.go) && [ -n "$$flags" ] && \
	for file in *.c lib/*.h ../maps/*/*.h; do \
		clang-19 -target bpf -fsyntax-only $$flags -Wno-unused-function -include "$$file" -x c /dev/null || exit 1; \
	done

lint-modules:
	@tools/in-modules.sh './... ./test/cluster/...' go mod tidy -diff

lint-go:
	@tools/in-modules.sh './... ./test/cluster' go tool -modfile='$(CURDIR)/tools/lint/go.mod' golangci-lint run

# Nothing runs there yet, but it has to compile.
lint-arm64:
	@GOARCH=arm64 tools/in-modules.sh '. ./tools/bench ./tools/demo' go build -o /dev/null ./...

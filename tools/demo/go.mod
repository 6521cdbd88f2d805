module github.com/ebpf-cni/ebpf-cni/tools/demo

go 1.26.8

require (
	github.com/ebpf-cni/ebpf-cni v0.0.0
	github.com/ebpf-cni/ebpf-cni/test/lab v0.0.0
	github.com/google/go-cmp v0.7.0
	golang.org/x/sys v0.49.0
)

require (
	github.com/Masterminds/semver/v3 v3.4.0 // indirect
	github.com/cilium/ebpf v0.22.0 // indirect
	github.com/containernetworking/cni v1.3.1 // indirect
	github.com/google/pprof v0.0.0-20250820193118-f64d9cf942d6 // indirect
	github.com/gopacket/gopacket v1.7.7 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	go.opentelemetry.io/otel v1.29.0 // indirect
	go.opentelemetry.io/otel/trace v1.29.0 // indirect
	go.uber.org/automaxprocs v1.6.0 // indirect
	go.yaml.in/yaml/v2 v2.4.4 // indirect
	golang.org/x/tools v0.49.0 // indirect
	sigs.k8s.io/yaml v1.6.0 // indirect
)

replace (
	github.com/ebpf-cni/ebpf-cni => ../..
	github.com/ebpf-cni/ebpf-cni/test/lab => ../../test/lab
)

module github.com/ebpf-cni/ebpf-cni/test/prog

go 1.26.8

require (
	github.com/cilium/ebpf v0.22.0
	github.com/ebpf-cni/ebpf-cni v0.0.0
	github.com/gopacket/gopacket v1.7.7
	github.com/vishvananda/netlink v1.3.1
	golang.org/x/sys v0.49.0
)

require (
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/sync v0.24.0 // indirect
)

replace github.com/ebpf-cni/ebpf-cni => ../..

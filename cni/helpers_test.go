package cni

import (
	"net/netip"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func whole(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// eventually waits for what the kernel does in its own time.
func (w *fixture) eventually(what string, is func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(priv.Patience(10 * time.Second)); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if is() {
			return
		}
	}
	w.t.Fatalf("timeout: %s", what)
}

// dropAddress takes an address from eth0 inside ns.
func dropAddress(t testing.TB, ns *device.NetNS, a netip.Addr) {
	t.Helper()
	err := ns.Do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(whole(a).String())
		if err != nil {
			return err
		}
		return netlink.AddrDel(l, addr)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// skelArgs are those of a call within the test's process.
func (p *pod) skelArgs(conf []byte) *skel.CmdArgs {
	return &skel.CmdArgs{ContainerID: p.id.ContainerID, Netns: p.path(), IfName: p.id.IfName, StdinData: conf}
}

//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// prepareNetwork sets the loopback interface up, and has clsact and tcx in use for as long as what it returns is alive: their
// first user makes the kernel rewrite code that the other processor is just executing, and their last one does so again. The
// emulator does not stand that under load: it meets the breakpoint of the rewriting after the kernel has taken it back ("Oops:
// int3" in __netif_receive_skb_core).
func prepareNetwork() ([]link.Link, error) {
	// A kernel that waits for a device's last user says so, and that is a failure; but emulated it may need more than the
	// 10 s after which it does.
	if err := os.WriteFile("/proc/sys/net/core/netdev_unregister_timeout_secs", []byte("60"), 0); err != nil {
		return nil, fmt.Errorf("have the kernel wait longer for devices that go: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find the loopback interface: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return nil, fmt.Errorf("set the loopback interface up: %w", err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "keep0"
	keep := &netlink.Dummy{LinkAttrs: attrs}
	if err := netlink.LinkAdd(keep); err != nil {
		return nil, fmt.Errorf("make a dummy interface: %w", err)
	}
	err = netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: keep.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err != nil {
		return nil, fmt.Errorf("add a clsact qdisc: %w", err)
	}
	return keepTCX(keep.Attrs().Index)
}

// keepTCX attaches a program that does nothing, both ways.
func keepTCX(ifindex int) ([]link.Link, error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "keep", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		return nil, fmt.Errorf("load a program: %w", err)
	}
	defer p.Close()
	var links []link.Link
	for _, way := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		l, err := link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: p, Attach: way})
		if errors.Is(err, ebpf.ErrNotSupported) {
			return nil, nil // before Linux 6.6
		}
		if err != nil {
			return nil, fmt.Errorf("attach a program: %w", err)
		}
		links = append(links, l)
	}
	return links, nil
}

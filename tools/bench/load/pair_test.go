package load

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// inEachFamily runs a test on a pair of IPv4, and on one of IPv6.
func inEachFamily(t *testing.T, test func(t *testing.T, target Target)) {
	for family := range wire.Families {
		t.Run(family.String(), func(t *testing.T) { test(t, pairOf(t, family)) })
	}
}

func pair(t *testing.T) Target {
	t.Helper()
	return pairOf(t, wire.IPv4)
}

// pairOf is a Target of two hosts with nothing between but a veth pair.
func pairOf(t *testing.T, family wire.Family) Target {
	t.Helper()
	l := lab.ForTest(t, lab.Options{Nodes: 1, Families: []wire.Family{family}})
	var hosts [2]*lab.Namespace
	network := [wire.Families]string{"192.0.2.0/24", "2001:db8::/64"}[family]
	addr := netip.MustParsePrefix(network).Addr()
	for i, name := range []string{"a", "b"} {
		var err error
		addr = addr.Next()
		if hosts[i], err = l.NewHost(name, addr); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Wire(hosts[0], hosts[1], netip.MustParsePrefix(network).Bits()); err != nil {
		t.Fatal(err)
	}
	return Target{
		Client: hosts[0], Server: hosts[1], ClientCPU: 0, ServerCPU: runtime.NumCPU() - 1,
		Duration: 150 * time.Millisecond, Warmup: 30 * time.Millisecond,
	}
}

// lossy has the link of a host drop one in fifty of the packets that it receives.
func lossy(t *testing.T, host *lab.Namespace) {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{
		asm.FnGetPrandomU32.Call(),
		asm.JGT.Imm32(asm.R0, math.MaxUint32/50, "pass"),
		asm.Mov.Imm(asm.R0, 1), // XDP_DROP
		asm.Return(),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"), // XDP_PASS
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	err = host.Do(func() error {
		eth0, err := netlink.LinkByName(lab.Uplink)
		if err != nil {
			return err
		}
		l, err := link.AttachXDP(link.XDPOptions{Program: program, Interface: eth0.Attrs().Index, Flags: link.XDPGenericMode})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// received is how many packets a host's end of the pair has received.
func received(t *testing.T, host *lab.Namespace) uint64 {
	t.Helper()
	link, err := host.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().Statistics.RxPackets
}

// sockets counts a host's TCP sockets of its family, those in TIME_WAIT too.
func sockets(t *testing.T, host *lab.Namespace) (lines int) {
	t.Helper()
	table := [wire.Families]string{"tcp", "tcp6"}[wire.FamilyOf(host.Addr())]
	err := host.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/" + table)
		lines = strings.Count(string(text), "\n") - 1
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// tap is a packet socket that keeps the packets of its family that reach a host's end of the pair.
func tap(t *testing.T, host *lab.Namespace) (fd int) {
	t.Helper()
	protocol := [wire.Families]uint16{unix.ETH_P_IP, unix.ETH_P_IPV6}[wire.FamilyOf(host.Addr())]
	err := host.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(bits.ReverseBytes16(protocol))); err != nil {
			return fmt.Errorf("open a packet socket: %w", err)
		}
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// tuples counts the UDP packets of a size that a tap has, by source and destination port.
func tuples(t *testing.T, fd, size int) map[[4]byte]int {
	t.Helper()
	seen := map[[4]byte]int{}
	packet := make([]byte, 2048)
	for {
		n, _, err := unix.Recvfrom(fd, packet, 0)
		if errors.Is(err, unix.EAGAIN) {
			return seen
		}
		if err != nil {
			t.Fatal(err)
		}
		header, protocol := 20, packet[9]
		if packet[0]>>4 == 6 {
			header, protocol = 40, packet[6]
		}
		if n == header+8+size && protocol == unix.IPPROTO_UDP {
			seen[[4]byte(packet[header:])]++
		}
	}
}

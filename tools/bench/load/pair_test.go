package load

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// pair is a Target of two namespaces with nothing between but a veth pair. The namespaces have no name: they end with the test's
// process, however that ends.
func pair(t *testing.T) Target {
	t.Helper()
	priv.Require(t)
	client, server := namespace(t), namespace(t)
	// Made inside one of them: the machine's own namespace never sees the pair.
	clientSide, serverSide := handle(t, client), handle(t, server)
	veth := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "eth0", Namespace: netlink.NsFd(int(client))},
		PeerName:  "eth0", PeerNamespace: netlink.NsFd(int(server)),
	}
	if err := clientSide.LinkAdd(veth); err != nil {
		t.Fatalf("make the veth pair: %v", err)
	}
	plug(t, clientSide, "192.0.2.1/24", "2001:db8::1/64")
	plug(t, serverSide, "192.0.2.2/24", "192.0.2.3/24", "2001:db8::2/64")
	settle(t, clientSide)
	settle(t, serverSide)
	path := func(ns netns.NsHandle) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), int(ns)) }
	return Target{
		Client: path(client), Server: path(server), Address: netip.MustParseAddr("192.0.2.2"),
		ClientCPU: 0, ServerCPU: runtime.NumCPU() - 1,
		Duration: 200 * time.Millisecond, Warmup: 50 * time.Millisecond,
	}
}

func namespace(t *testing.T) netns.NsHandle {
	t.Helper()
	type made struct {
		ns  netns.NsHandle
		err error
	}
	result := make(chan made)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err != nil {
			result <- made{err: err}
			return
		}
		ns, err := netns.Get()
		result <- made{ns, err}
	}()
	m := <-result
	if m.err != nil {
		t.Fatalf("make a network namespace: %v", m.err)
	}
	t.Cleanup(func() { m.ns.Close() })
	return m.ns
}

func handle(t *testing.T, ns netns.NsHandle) *netlink.Handle {
	t.Helper()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func plug(t *testing.T, h *netlink.Handle, addresses ...string) {
	t.Helper()
	link, err := h.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	for _, address := range addresses {
		a, err := netlink.ParseAddr(address)
		if err != nil {
			t.Fatal(err)
		}
		a.Flags |= unix.IFA_F_NODAD
		if err := h.AddrAdd(link, a); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
}

// lossy has the link of a namespace drop one in fifty of the packets that it receives.
func lossy(t *testing.T, path string) {
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
	within(t, path, func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		l, err := link.AttachXDP(link.XDPOptions{Program: program, Interface: eth0.Attrs().Index, Flags: link.XDPGenericMode})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
}

// settle waits until the kernel has taken notice that the other end is up too, for which it may take a second: before that it
// finds no IPv6 neighbour.
func settle(t *testing.T, h *netlink.Handle) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		link, err := h.LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("eth0 is still %s", link.Attrs().OperState)
		}
	}
}

// received is how many packets a namespace's end of the pair has received.
func received(t *testing.T, path string) uint64 {
	t.Helper()
	ns, err := netns.GetFromPath(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	link, err := handle(t, ns).LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().Statistics.RxPackets
}

// sockets counts a namespace's TCP sockets, those in TIME_WAIT too.
func sockets(t *testing.T, path string) int {
	t.Helper()
	lines := 0
	within(t, path, func() error {
		text, err := os.ReadFile("/proc/thread-self/net/tcp")
		lines = strings.Count(string(text), "\n") - 1
		return err
	})
	return lines
}

// within runs fn on a thread of its own in a namespace.
func within(t *testing.T, path string, fn func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		ns, err := netns.GetFromPath(path)
		if err == nil {
			err = netns.Set(ns)
			ns.Close()
		}
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// tap is a packet socket that keeps the IPv4 packets that reach a namespace's end of the pair.
func tap(t *testing.T, path string) (fd int) {
	t.Helper()
	within(t, path, func() (err error) {
		protocol := uint16(unix.ETH_P_IP>>8 | unix.ETH_P_IP<<8&0xff00)
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(protocol)); err != nil {
			return fmt.Errorf("open a packet socket: %w", err)
		}
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20)
	})
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
		if n == 20+8+size && packet[9] == unix.IPPROTO_UDP {
			seen[[4]byte(packet[20:24])]++
		}
	}
}

// children lists the processes that any thread of a process has started.
func children(t *testing.T, pid int) (pids []int) {
	t.Helper()
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, thread.Name())) // a thread may have ended
		for field := range strings.FieldsSeq(string(text)) {
			child, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, child)
		}
	}
	return pids
}

// running says whether a process exists and is no zombie.
func running(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, ok := strings.Cut(string(text), ") ")
	return ok && !strings.HasPrefix(rest, "Z")
}

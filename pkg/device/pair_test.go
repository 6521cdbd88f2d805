package device

import (
	"net"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

var (
	macA = net.HardwareAddr{0x02, 0xec, 0, 0, 0, 1}
	macB = net.HardwareAddr{0x02, 0xec, 0, 0, 0, 2}
)

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("REQUIRE_PRIVILEGED") == "1" {
		t.Fatal("this test needs root, and REQUIRE_PRIVILEGED=1")
	}
	t.Skip("needs root")
}

// newNS makes a namespace without a name: it dies with its last user, also when the test is killed.
func newNS(t *testing.T) *NetNS {
	t.Helper()
	requireRoot(t)
	type result struct {
		ns  *NetNS
		err error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread() // the thread stays in the new namespace and ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			made <- result{nil, err}
			return
		}
		ns, err := CurrentNetNS()
		made <- result{ns, err}
	}()
	r := <-made
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() { r.ns.Close() })
	return r.ns
}

func openIn(t *testing.T, ns *NetNS) *Handle {
	t.Helper()
	h, err := OpenIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pair is a veth between two fresh namespaces, both ends up.
type pair struct {
	hostNS, podNS *NetNS
	host, pod     *Handle
	link, peer    Link
}

func newPair(t *testing.T) pair {
	t.Helper()
	p := pair{hostNS: newNS(t), podNS: newNS(t)}
	p.host, p.pod = openIn(t, p.hostNS), openIn(t, p.podNS)
	var err error
	p.link, err = p.host.CreateVeth(Veth{
		Name: "eccni0", MAC: macA, PeerName: "eth0", PeerMAC: macB, PeerNS: p.podNS, MTU: 1400,
	})
	must(t, err)
	p.peer, err = p.pod.LinkByName("eth0")
	must(t, err)
	must(t, p.pod.SetUp(p.peer.Index))
	must(t, p.host.SetUp(p.link.Index))
	return p
}

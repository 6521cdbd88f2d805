package cni

import (
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// listen opens a socket of the node, of "tcp4", "tcp6" or "tcp" for both families, or the same of UDP.
func (w *fixture) listen(network, at string) (closeIt func()) {
	w.t.Helper()
	config := net.ListenConfig{}
	if network == "tcp" || network == "udp" { // where Go itself decides what it is, it goes by the namespace in which it first did
		network += "6"
		config.Control = func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0) })
		}
	}
	if strings.HasPrefix(network, "tcp") {
		l, err := config.Listen(w.t.Context(), network, at)
		w.must(err)
		return func() { _ = l.Close() }
	}
	p, err := config.ListenPacket(w.t.Context(), network, at)
	w.must(err)
	return func() { _ = p.Close() }
}

// ownAddresses writes what the agent does of addresses of the node: those that have host ports, and a ClusterIP that the node holds.
func (w *fixture) ownAddresses(clusterIP netip.Addr) {
	w.t.Helper()
	m, err := typed.Open[services.Key, services.Value](w.pins.Map(services.Name))
	w.must(err)
	defer m.Close()
	for _, a := range nodeIPs {
		w.must(m.Put(services.Key{Address: wire.AddrFrom(a)}, services.Value{Flags: services.Own | services.Node}))
	}
	w.must(m.Put(services.Key{Address: wire.AddrFrom(clusterIP)}, services.Value{Flags: services.Own | services.ClusterIP}))
}

// A port that a socket of the node has is no pod's.
func TestHostPortIsASockets(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	w.ownAddresses(netip.MustParseAddr("127.9.9.9"))
	four, six := nodeIPs[0].String(), nodeIPs[1].String()
	var none []string
	for _, protocol := range []string{"tcp", "udp"} {
		for _, tt := range []struct {
			network, at string
			taken, free []string // by hostIP
		}{
			{"4", "0.0.0.0:8088", []string{"0.0.0.0", four, "127.0.0.1", ""}, []string{"::", six, "::1"}},
			{"6", "[::]:8088", []string{"::", six, "::1", ""}, []string{"0.0.0.0", four, "127.0.0.1"}},
			{"", "[::]:8088", []string{"0.0.0.0", four, "127.0.0.1", "::", six, "::1", ""}, none},
			{"4", four + ":8088", []string{four}, []string{"0.0.0.0", "", "::", six, "127.0.0.1", "192.0.2.2"}},
			{"6", "[" + six + "]:8088", []string{six}, []string{"::", "", "0.0.0.0", four, "::1", "2001:db8::2"}},
			{"4", "127.0.0.1:8088", []string{"127.0.0.1"}, []string{"", four}},
			{"6", "[::1]:8088", []string{"::1"}, []string{"", six}},
			{"4", "127.0.0.53:8088", none, []string{"", "127.0.0.1"}},
		} {
			closeIt := w.listen(protocol+tt.network, tt.at)
			for _, host := range tt.taken {
				w.refusedPort(mapped(hostPort(7070, 70), hostPort(8088, 80, protocol, host)), "host port 8088/"+protocol, "is taken by a "+protocol+" socket of the node at "+tt.at, "number 0")
			}
			for _, host := range tt.free {
				p := w.newPod()
				w.add(p, mapped(hostPort(8088, 80, protocol, host)))
				w.ok("DEL", p, nil)
			}
			other := map[string]string{"tcp": "udp", "udp": "tcp"}[protocol]
			p := w.newPod()
			w.add(p, mapped(hostPort(8088, 80, other), hostPort(8089, 80, protocol), hostPort(8088, 8088, "sctp")))
			w.ok("DEL", p, nil)
			closeIt()
		}
	}
}

// A socket that comes later takes nothing from an ADD that is repeated, from CHECK, or from an entry that is made again.
func TestSocketComesLater(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	p, conf := w.newPod(), mapped(hostPort(8088, 80), hostPort(8088, 80, "udp"))
	r := w.add(p, conf)
	for _, protocol := range []string{"tcp", "udp"} {
		t.Cleanup(w.listen(protocol, "[::]:8088"))
	}
	w.add(p, conf)
	w.ok("CHECK", p, merged(prevResult(t, r), conf))
	m := w.openHostPorts()
	for e, err := range m.All() {
		w.must(err)
		w.must(m.Delete(e.Key))
	}
	w.repair(p)
	w.ok("CHECK", p, merged(prevResult(t, r), conf))
	w.ok("DEL", p, nil)
	w.refusedPort(conf, "is taken by a", "socket of the node at [::]:8088")
}

// A socket of a ClusterIP that the node holds, as of a cache of DNS, keeps a port of all addresses from no pod.
func TestSocketOfAClusterIP(t *testing.T) {
	w := newServing(t)
	held := netip.MustParseAddr("192.0.2.10")
	lo, err := w.host.LinkByName("lo")
	w.must(err)
	w.must(w.host.AddAddress(lo.Index, netip.PrefixFrom(held, 32)))
	w.ownAddresses(held)
	t.Cleanup(w.listen("udp4", held.String()+":53"))
	w.refusedPort(mapped(hostPort(53, 53, "udp", held.String())), "is taken by a udp socket of the node at 192.0.2.10:53")
	p := w.newPod()
	w.add(p, mapped(hostPort(53, 53, "udp")))
	w.ok("DEL", p, nil)
}

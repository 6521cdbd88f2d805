package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// The second subnet on the fabric, and the one of the second uplink: the node's address and the outside host's, by family.
var (
	secondSubnet = [wire.Families][2]string{{"10.77.0.11/24", "10.77.0.254/24"}, {"2001:db8:77::11/64", "2001:db8:77::254/64"}}
	secondUplink = [wire.Families][2]string{{"10.78.0.11/24", "10.78.0.254/24"}, {"2001:db8:78::11/64", "2001:db8:78::254/64"}}
)

// endLimit is how long a flow may outlive its address: passes of the agent follow each other after a second, and flows are looked at as often.
const endLimit = 3 * answerLimit

func addrOf(text string) netip.Addr { return netip.MustParsePrefix(text).Addr() }

// join gives both ends of a link an address of a subnet.
func join(t *testing.T, l *lab.Lab, nodeLink, outsideLink string, subnet [2]string) {
	t.Helper()
	runOn(t, l.Nodes[0], "ip", "addr", "add", subnet[0], "dev", nodeLink, "nodad")
	nl := l.Outside.Netlink()
	link, err := nl.LinkByName(outsideLink)
	if err != nil {
		t.Fatal(err)
	}
	const noDAD = 2 // IFA_F_NODAD
	if err := nl.AddrAdd(link, &netlink.Addr{IPNet: prefix(netip.PrefixFrom(addrOf(subnet[1]), netip.MustParsePrefix(subnet[1]).Bits()).String()), Flags: noDAD}); err != nil {
		t.Fatal(err)
	}
}

// assertKernelsChoice waits until a pod's datagrams come from the address that the node's own would have.
func assertKernelsChoice(t *testing.T, pod *lab.Pod, l *lab.Lab, want netip.Addr) {
	t.Helper()
	family := wire.FamilyOf(want)
	at := serveOver(t, l.Outside, family) // live flows keep another address
	routes, err := pod.Node.Netlink().RouteGet(at.Addr().AsSlice())
	if err != nil || len(routes) == 0 || !routes[0].Src.Equal(want.AsSlice()) {
		t.Fatalf("the kernel's choice to %s: %v, %v; want %s", at.Addr(), routes, err, want)
	}
	var seen netip.AddrPort
	eventually(t, answerLimit, "the pod comes from "+want.String(), func() bool {
		seen, err = pod.UDP(within(t, time.Second), at, 100)
		return seen.Addr() == want
	})
	time.Sleep(50 * time.Millisecond) // longer than another CPU may remember the path
	assertReaches(t, pod.Namespace, serveOver(t, l.Outside, family), want)
}

// Packets to the world come from the address that the kernel would choose: that of the next hop's subnet, the route's src, and
// where the uplink has no address, another of the node's.
func TestSourceIsTheKernelsChoice(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: families}, drops.NoSnatAddress, drops.NoMapping)
	node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		at, all := serveOver(t, l.Outside, family), everywhere[family].String()
		internal := node.AddrOf(family)
		assertReaches(t, pod.Namespace, at, internal)
		subnet := secondSubnet[family]
		join(t, l, lab.Uplink, lab.Uplink, subnet)
		runOn(t, node, "ip", "route", "replace", all, "via", addrOf(subnet[1]).String())
		assertKernelsChoice(t, pod, l, addrOf(subnet[0]))
		runOn(t, node, "ip", "route", "replace", all, "via", addrOf(subnet[1]).String(), "src", internal.String())
		assertKernelsChoice(t, pod, l, internal)
		runOn(t, node, "ip", "addr", "add", netip.PrefixFrom(internal, internal.BitLen()).String(), "dev", "lo")
		for _, gone := range []string{subnet[0], netip.PrefixFrom(internal, lab.FabricPrefix[family].Bits()).String()} {
			runOn(t, node, "ip", "addr", "del", gone, "dev", lab.Uplink)
		}
		gateway := lab.GatewayAddr[family]
		if family == wire.IPv6 { // the node answers no neighbour for an address on lo
			near, err := node.LinkLocal(lab.Uplink)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Outside.AddRoute(netip.PrefixFrom(internal, internal.BitLen()), near, lab.Uplink); err != nil {
				t.Fatal(err)
			}
			if gateway, err = l.Outside.LinkLocal(lab.Uplink); err != nil {
				t.Fatal(err)
			}
		}
		runOn(t, node, "ip", "route", "replace", all, "via", gateway.String(), "dev", lab.Uplink, "onlink")
		assertKernelsChoice(t, pod, l, internal)
	})
}

// old are a connection and datagrams from one port that began before something changed.
type old struct {
	tcp *lab.TCPConn
	udp *lab.UDPConn
}

func openOld(t *testing.T, pod *lab.Pod, at netip.AddrPort) (o old) {
	t.Helper()
	var err error
	if o.tcp, err = pod.DialTCP(t.Context(), at, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.tcp.Close() })
	if o.udp, err = pod.DialUDP(at, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.udp.Close() })
	if _, err := o.udp.Echo(within(t, time.Second), 100); err != nil {
		t.Fatal(err)
	}
	return o
}

// keeps asserts that both go on from an address.
func (o old) keeps(t *testing.T, address netip.Addr) {
	t.Helper()
	seen, err := o.udp.Echo(within(t, 2*time.Second), 100)
	assertSeen(t, "UDP", seen, err, address)
	if err := o.tcp.Echo(within(t, 2*time.Second), 100); err != nil {
		t.Error(err)
	}
}

// comesFrom waits until datagrams of a flow come from an address.
func comesFrom(t *testing.T, flow *lab.UDPConn, address netip.Addr) {
	t.Helper()
	eventually(t, endLimit, "datagrams come from "+address.String(), func() bool {
		seen, err := flow.Echo(within(t, time.Second/2), 100)
		if err != nil {
			flow.Drain()
		}
		return err == nil && seen.Addr() == address
	})
}

// ends asserts that the datagrams go on from another address, and that the connection is reset.
func (o old) ends(t *testing.T, address netip.Addr) {
	t.Helper()
	comesFrom(t, o.udp, address)
	eventually(t, endLimit, "the connection is reset", func() bool {
		err := o.tcp.Echo(within(t, 3*time.Second), 100)
		return err != nil && strings.Contains(err.Error(), "reset")
	})
}

// addUplink joins the first node and the outside host by a second link, of the same name at both.
func addUplink(t *testing.T, l *lab.Lab, name string) {
	t.Helper()
	outside, err := os.Open(l.Outside.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name, PeerNamespace: netlink.NsFd(outside.Fd())}
	if err := l.Nodes[0].Netlink().LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	runOn(t, l.Nodes[0], "ip", "link", "set", name, "up")
	peer, err := l.Outside.Netlink().LinkByName(name)
	if err == nil {
		err = l.Outside.Netlink().LinkSetUp(peer)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Flows keep their address as long as their uplink has it. When it has another instead, or the route leads over another uplink,
// they end at once.
func TestFlowsEndWithTheirAddress(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: families}, drops.NoSnatAddress, drops.NoMapping)
	node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
	addUplink(t, l, "second")
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		at, all := serveOver(t, l.Outside, family), everywhere[family].String()
		internal, subnet := node.AddrOf(family), secondSubnet[family]
		first := openOld(t, pod, at)
		join(t, l, lab.Uplink, lab.Uplink, subnet)
		runOn(t, node, "ip", "route", "replace", all, "via", addrOf(subnet[1]).String())
		assertKernelsChoice(t, pod, l, addrOf(subnet[0]))
		first.keeps(t, internal)
		runOn(t, node, "ip", "addr", "del", netip.PrefixFrom(internal, lab.FabricPrefix[family].Bits()).String(), "dev", lab.Uplink)
		first.ends(t, addrOf(subnet[0]))

		next := openOld(t, pod, at)
		join(t, l, "second", "second", secondUplink[family])
		runOn(t, node, "ip", "route", "replace", all, "via", addrOf(secondUplink[family][1]).String())
		next.ends(t, addrOf(secondUplink[family][0]))
	})
}

// The administrator's address is the only one that packets leave with: while the node does not have it they are dropped, and status
// says so.
func TestSnatAddress(t *testing.T) {
	t.Parallel()
	chosen := [wire.Families]netip.Addr{wire.IPv4: addrOf(secondSubnet[wire.IPv4][0]), wire.IPv6: addrOf(secondSubnet[wire.IPv6][0])}
	flags := []string{"--snat-address=" + lab.Uplink + "=" + chosen[wire.IPv4].String() + "," + chosen[wire.IPv6].String()}
	l := lab.ForTest(t, lab.Options{Nodes: 1, Families: families, AgentFlags: flags}, drops.NoSnatAddress, drops.NoMapping)
	for family := range wire.Families {
		join(t, l, lab.Uplink, lab.Uplink, secondSubnet[family])
	}
	startAgents(t, l)
	node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		at, all, lost := serveOver(t, l.Outside, family), everywhere[family].String(), "this node has lost "+chosen[family].String()
		assertReaches(t, pod.Namespace, at, chosen[family])
		runOn(t, node, "ip", "route", "replace", all, "via", lab.GatewayAddr[family].String(), "src", node.AddrOf(family).String())
		live := openOld(t, pod, at)
		live.keeps(t, chosen[family])
		text, err := node.Ebpfctl(t.Context(), "status")
		if err != nil || strings.Contains(string(text), lost) {
			t.Errorf("status while the node has the address: %v\n%s", err, text)
		}

		runOn(t, node, "ip", "addr", "del", secondSubnet[family][0], "dev", lab.Uplink)
		eventually(t, answerLimit, "status says that the address is gone", func() bool {
			text, err = node.Ebpfctl(t.Context(), "status")
			return err != nil && strings.Contains(string(text), lost)
		})
		if seen, err := pod.UDP(within(t, time.Second), at, 100); err == nil {
			t.Errorf("without the address packets leave as %s", seen)
		}
		runOn(t, node, "ip", "addr", "add", secondSubnet[family][0], "dev", lab.Uplink, "nodad")
		eventually(t, answerLimit, "packets leave with the address that is back", func() bool {
			seen, err := pod.UDP(within(t, time.Second), at, 100)
			return err == nil && seen.Addr() == chosen[family]
		})
		live.keeps(t, chosen[family])
	})
}

// Of datagrams over two next hops those over the one that goes have the other's address from then on, and the others go on.
func TestFlowsEndWithTheirNextHop(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: families}, drops.NoMapping)
	node := l.Nodes[0]
	addUplink(t, l, "second")
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		at, all, gateway := serveOver(t, l.Outside, family), everywhere[family].String(), lab.GatewayAddr[family].String()
		stays, goes := node.AddrOf(family), addrOf(secondUplink[family][0])
		join(t, l, "second", "second", secondUplink[family])
		runOn(t, node, "ip", "route", "replace", all, "nexthop", "via", gateway, "dev", lab.Uplink,
			"nexthop", "via", addrOf(secondUplink[family][1]).String(), "dev", "second")
		flows := map[netip.Addr]*lab.UDPConn{}
		eventually(t, 4*answerLimit, "pods come from both uplinks", func() bool {
			pod := addPod(t, node, fmt.Sprintf("%s-%d", strings.ToLower(family.Name()), len(node.Pods())))
			flow, err := pod.DialUDP(at, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { flow.Close() })
			seen, err := flow.Echo(within(t, time.Second), 100)
			if err == nil { // not lost before the programs were on the new uplink
				flows[seen.Addr()] = flow
			}
			return flows[stays] != nil && flows[goes] != nil
		})
		runOn(t, node, "ip", "route", "replace", all, "via", gateway, "dev", lab.Uplink)
		comesFrom(t, flows[goes], stays)
		seen, err := flows[stays].Echo(within(t, time.Second), 100)
		assertSeen(t, "over the other next hop", seen, err, stays)
	})
}

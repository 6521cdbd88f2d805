package e2e

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// awayFor is how long the uplink is without its address: longer than programs look at a flow again.
const awayFor = 1500 * time.Millisecond

// A DHCP client that renews, or a network service that starts again, takes the uplink's address and routes away and puts
// them back. Connections to the world live through it, and no packet leaves with a pod's address.
func TestUplinkWithoutItsAddressForAMoment(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{flag}}, drops.NoSnatAddress, drops.NodeOffLink, drops.NoMapping)
		pod := addPod(t, l.Nodes[0], "a")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) { assertOutlivesAway(t, l, pod, family) })
	})
}

// assertOutlivesAway takes the address of one family away and puts it back.
func assertOutlivesAway(t *testing.T, l *lab.Lab, pod *lab.Pod, family wire.Family) {
	t.Helper()
	node, at := pod.Node, serveOver(t, l.Outside, family)
	conn, err := pod.DialTCP(t.Context(), at, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	capture, err := l.Outside.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	attached := attachments(t, node)
	restore := takeAddress(t, node, family)
	began := time.Now()
	echoed := make(chan error, 1)
	go func() { echoed <- conn.Echo(within(t, 20*time.Second), 100) }() // repeated by TCP until it gets through
	ctx, cancel := context.WithTimeout(t.Context(), awayFor)
	defer cancel()
	if _, err := pod.TCP(ctx, at); err == nil {
		t.Error("a new connection without an address to masquerade to")
	}
	if now := attachments(t, node); !slices.Equal(now, attached) {
		t.Errorf("attached while it is away: %v, before: %v", now, attached)
	}
	time.Sleep(awayFor - time.Since(began))
	restore()
	if err := <-echoed; err != nil {
		t.Errorf("the connection from before: %v", err)
	}
	if now := attachments(t, node); !slices.Equal(now, attached) {
		t.Errorf("attached afterwards: %v, before: %v", now, attached)
	}
	assertReaches(t, pod.Namespace, at, node.AddrOf(family))
	for _, packet := range capture.Close() {
		if from := packet.NetworkLayer(); from != nil && from.NetworkFlow().Src().String() == pod.AddrOf(family).String() {
			t.Errorf("left with the pod's address:\n%s", packet)
		}
	}
}

// attachments are the programs on the uplink as ebpfctl shows them; a program that is replaced has another id.
func attachments(t *testing.T, node *lab.Node) (out []string) {
	t.Helper()
	snapshot, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return snapshot.Only("filter", "tcx", "qdisc")
}

// takeAddress takes the uplink's address of a family and its default route, as a DHCP client does, and returns what puts both back.
func takeAddress(t *testing.T, node *lab.Node, family wire.Family) (restore func()) {
	t.Helper()
	nl := node.Netlink()
	link, err := nl.LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	network := netip.PrefixFrom(node.AddrOf(family), lab.FabricPrefix[family].Bits())
	address := &netlink.Addr{IPNet: prefix(network.String()), Flags: unix.IFA_F_NODAD}
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: prefix(everywhere[family].String()), Gw: lab.GatewayAddr[family].AsSlice()}
	if err := errors.Join(nl.RouteDel(route), nl.AddrDel(link, address)); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := errors.Join(nl.AddrAdd(link, address), nl.RouteAdd(route)); err != nil {
			t.Fatal(err)
		}
	}
}

// The host's network service puts the uplink into a bridge: pods of other nodes are there again as soon as the agent has seen it.
func TestUplinkBecomesAPort(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2}, drops.NoSnatAddress, drops.NodeOffLink, drops.NoMapping, drops.WrongUplink)
	node := l.Nodes[0]
	a, b := addPod(t, node, "a"), addPod(t, l.Nodes[1], "b")
	commands := []string{"ip link add br0 type bridge", "ip link set br0 up", "ip link set " + lab.Uplink + " master br0"}
	for _, family := range l.Options.Families {
		address := netip.PrefixFrom(node.AddrOf(family), lab.FabricPrefix[family].Bits()).String()
		commands = append(commands, "ip addr del "+address+" dev "+lab.Uplink, "ip addr add "+address+" dev br0 nodad",
			"ip route replace "+everywhere[family].String()+" via "+lab.GatewayAddr[family].String())
	}
	for _, command := range commands {
		words := strings.Fields(command)
		runOn(t, node, words[0], words[1:]...)
	}
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		eventually(t, answerLimit, "pods of different nodes talk", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := b.Ping(ctx, a.AddrOf(family), lab.PingOptions{})
			return err == nil
		})
	})
}

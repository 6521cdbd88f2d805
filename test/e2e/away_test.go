package e2e

import (
	"context"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// awayFor is how long the uplink is without its address: longer than programs look at a flow again.
const awayFor = 1500 * time.Millisecond

// A DHCP client that renews, or a network service that starts again, takes the uplink's address and routes away and puts
// them back. Connections to the world live through it, and no packet leaves with a pod's address.
func TestUplinkWithoutItsAddressForAMoment(t *testing.T) {
	forEachAttach(t, func(t *testing.T, flag string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{flag}}, drops.NoSnatAddress, drops.NodeOffLink, drops.NoMapping)
		node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
		at := serve(t, l.Outside)
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
		restore := takeAddress(t, node)
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
		assertReaches(t, pod.Namespace, at, node.Addr())
		for _, packet := range capture.Close() {
			if from := packet.NetworkLayer(); from != nil && from.NetworkFlow().Src().String() == pod.Addr().String() {
				t.Errorf("left with the pod's address:\n%s", packet)
			}
		}
	})
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

// takeAddress takes the uplink's address, and with it the routes, as a DHCP client does, and returns what puts both back.
func takeAddress(t *testing.T, node *lab.Node) (restore func()) {
	t.Helper()
	link, err := node.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := node.Netlink().AddrList(link, netlink.FAMILY_V4)
	if err != nil || len(addrs) != 1 {
		t.Fatalf("addresses of the uplink: %v, error %v", addrs, err)
	}
	address := &netlink.Addr{IPNet: addrs[0].IPNet}
	if err := node.Netlink().AddrDel(link, address); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		err := node.Netlink().AddrAdd(link, address)
		if err == nil {
			_, everywhere, _ := net.ParseCIDR("0.0.0.0/0")
			err = node.Netlink().RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: everywhere, Gw: lab.GatewayAddr[wire.IPv4].AsSlice()})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The host's network service puts the uplink into a bridge: pods of other nodes are there again as soon as the agent has seen it.
func TestUplinkBecomesAPort(t *testing.T) {
	l := startCluster(t, lab.Options{Nodes: 2}, drops.NoSnatAddress, drops.NodeOffLink, drops.NoMapping, drops.WrongUplink)
	node := l.Nodes[0]
	a, b := addPod(t, node, "a"), addPod(t, l.Nodes[1], "b")
	address := node.Addr().String() + "/24"
	for _, command := range []string{
		"ip link add br0 type bridge", "ip link set br0 up", "ip addr del " + address + " dev " + lab.Uplink,
		"ip link set " + lab.Uplink + " master br0", "ip addr add " + address + " dev br0", "ip route add default via " + lab.GatewayAddr[wire.IPv4].String(),
	} {
		words := strings.Fields(command)
		if out, err := node.Exec(t.Context(), words[0], words[1:]...); err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
	}
	eventually(t, answerLimit, "pods of different nodes talk", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := b.Ping(ctx, a.Addr(), lab.PingOptions{})
		return err == nil
	})
}

package modes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// built builds a mode for a test, and has nothing of it remain.
func built(t *testing.T, mode string) *Network {
	t.Helper()
	priv.Require(t)
	n, err := Build(t.Context(), mode, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			left, err := lab.Remains(n.lab.ID)
			if err == nil && len(left) == 0 {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("mode %s left behind: %q; error %v", mode, left, err)
				return
			}
		}
	})
	return n
}

// hosts are the namespaces at the ends of a path.
func hosts(t *testing.T, n *Network, path Path) (from, to *lab.Namespace, at netip.AddrPort) {
	t.Helper()
	if _, _, ok := n.Ends(path); !ok {
		t.Fatalf("mode %s has no path %s", n.Mode, path)
	}
	byPath := map[string]*lab.Namespace{n.lab.Outside.Path(): n.lab.Outside}
	for _, node := range n.lab.Nodes {
		byPath[node.Path()] = node.Namespace
		for _, pod := range node.Pods() {
			byPath[pod.Path()] = pod.Namespace
		}
	}
	if d, ok := n.plane.(*directPlane); ok {
		byPath[d.a.Path()], byPath[d.b.Path()] = d.a, d.b
	}
	client, server, _ := n.Ends(path)
	return byPath[client.Netns], byPath[server.Netns], netip.AddrPortFrom(server.Address, 8080)
}

const exchanges = 200

// exchanged is what exchange sends.
var exchanged = Traffic{Forth: exchanges, Back: exchanges, Exact: true, Flows: 1}

// exchange sends packets along a path and says what the counters said before and after, and whom the server saw.
func exchange(t *testing.T, n *Network, path Path) (before, after Counters, seen netip.Addr) {
	t.Helper()
	from, to, at := hosts(t, n, path)
	serve, err := to.Serve(at.Port())
	if err != nil {
		t.Fatal(err)
	}
	defer serve.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := n.Forget(); err != nil {
		t.Fatal(err)
	}
	if before, err = n.Count(); err != nil {
		t.Fatal(err)
	}
	conn, err := from.DialUDP(at, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range exchanges {
		who, err := conn.Echo(ctx, 64)
		if err != nil {
			t.Fatalf("mode %s, %s: %v", n.Mode, path, err)
		}
		seen = who.Addr()
	}
	if after, err = n.Count(); err != nil {
		t.Fatal(err)
	}
	return before, after, seen
}

// Every mode carries every path, masquerades what leaves and nothing else, and its counters tell the paths apart.
func TestModes(t *testing.T) {
	for _, mode := range Names() {
		if Missing(mode) != "" {
			continue
		}
		t.Run(mode, func(t *testing.T) {
			n := built(t, mode)
			for _, path := range Paths() {
				client, _, _ := n.Ends(path)
				want := client.Address
				if path == SNAT {
					want = n.lab.Nodes[0].Addr()
				}
				from, to, _ := hosts(t, n, path)
				if _, err := from.Ping(t.Context(), to.Addr(), lab.PingOptions{}); err != nil {
					t.Errorf("%s: %v", path, err)
				}
				before, after, seen := exchange(t, n, path)
				if seen != want {
					t.Errorf("%s: the server saw %s, want %s", path, seen, want)
				}
				for _, claimed := range Paths() {
					err := n.Carried(before, after, claimed, exchanged)
					if claimed == path && err != nil {
						t.Error(err)
					}
					if claimed != path && err == nil {
						t.Errorf("packets sent %s pass for packets sent %s", path, claimed)
					}
				}
				for _, claimed := range []uint64{exchanges / 2, 4 * exchanges} {
					if err := n.Carried(before, after, path, Traffic{Forth: claimed, Back: claimed, Exact: true, Flows: 1}); err == nil {
						t.Errorf("%s: %d packets pass for %d", path, exchanges, claimed)
					}
				}
			}
			tryPlugins(t, n)
			trySweeps(t, n)
		})
	}
}

func tryPlugins(t *testing.T, n *Network) {
	t.Helper()
	for i := range 3 {
		took, err := n.Add(t.Context(), i)
		if n.Mode == Direct {
			if err == nil {
				t.Error("direct has a plugin")
			}
			return
		}
		if err != nil || took <= 0 {
			t.Errorf("add: took %v, error %v", took, err)
		}
		if _, err := n.Add(t.Context(), i); err == nil {
			t.Error("the same pod was added twice")
		}
	}
	for i := range 3 {
		if took, err := n.Del(t.Context(), i); err != nil || took <= 0 {
			t.Errorf("del: took %v, error %v", took, err)
		}
	}
}

// trySweeps: a network that knows many nodes and Services carries what it carried.
func trySweeps(t *testing.T, n *Network) {
	t.Helper()
	if n.Mode == Direct {
		return
	}
	for _, k := range []int{100, 2} {
		if err := n.SetNodes(t.Context(), k); err != nil {
			t.Error(err)
		}
		services := k - 2
		if n.Mode == EBPF {
			services = 0
		}
		if err := n.SetServices(t.Context(), services); err != nil {
			t.Error(err)
		}
		before, after, _ := exchange(t, n, AcrossNodes)
		if err := n.Carried(before, after, AcrossNodes, exchanged); err != nil {
			t.Error(err)
		}
	}
}

// The checks see traffic that takes another way.
func TestCarriedSeesADetachedProgram(t *testing.T) {
	n := built(t, EBPF)
	node := n.lab.Nodes[0]
	if _, err := node.StopAgent(); err != nil { // it would repair that
		t.Fatal(err)
	}
	var pod *lab.Pod
	for _, p := range node.Pods() {
		if p.Name == client {
			pod = p
		}
	}
	err := node.Do(func() error {
		l, err := node.Netlink().LinkByName(hostLink(pod))
		if err != nil {
			return err
		}
		return attach.Attacher{Dir: bpffs.Dir(node.BPFFS())}.Detach(l.Attrs().Index, attach.FromPod)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []Path{SameNode, AcrossNodes} {
		before, after, _ := exchange(t, n, path) // the stack carries it all the same
		err := n.Carried(before, after, path, exchanged)
		t.Log(err)
		if err == nil {
			t.Errorf("%s: packets that our program never saw pass for carried by it", path)
		}
	}
}

func TestCarriedSeesABridgeWithoutNetfilter(t *testing.T) {
	for _, mode := range []string{IPTables, NFTables} {
		n := built(t, mode)
		if err := n.lab.Nodes[0].WriteSysctl("net/bridge/bridge-nf-call-iptables", "0"); err != nil {
			t.Fatal(err)
		}
		before, after, _ := exchange(t, n, SameNode)
		err := n.Carried(before, after, SameNode, exchanged)
		t.Log(err)
		if err == nil {
			t.Errorf("%s: frames that passed by netfilter pass for carried by it", mode)
		}
	}
}

// nft's rules don't count packets, and what Carried sees of it is each flow's first. That all the others take the same way is seen here.
func TestEveryPacketMeetsNftables(t *testing.T) {
	n := built(t, NFTables)
	node := n.lab.Nodes[0]
	const chain = "filter hook forward priority 1"
	counting := &rules{}
	counting.add("add table ip counting")
	addChains(counting, "ip counting", []nftChain{{"met", chain, []string{"counter accept"}}})
	if err := apply(t.Context(), node, counting.String(), "nft", "-f"); err != nil {
		t.Fatal(err)
	}
	met := func() uint64 {
		listing, err := node.Exec(t.Context(), "nft", "list", "chain", "ip", "counting", "met")
		if err != nil {
			t.Fatal(err)
		}
		packets, _, err := ruleCounter(string(listing), "counter")
		if err != nil {
			t.Fatal(err)
		}
		return packets
	}
	for _, path := range Paths() {
		before := met()
		exchange(t, n, path)
		if rose := met() - before; rose < 2*exchanges || rose > 2*exchanges+50 {
			t.Errorf("%s: %d packets met the forward hook, want %d", path, rose, 2*exchanges)
		}
	}
}

// What a link drops is noticed wherever it is.
func TestCarriedSeesDroppedPackets(t *testing.T) {
	n := built(t, Direct)
	before, after, _ := exchange(t, n, SameNode)
	if err := n.Intact(before, after, SameNode); err != nil {
		t.Error(err)
	}
	from, _, _ := hosts(t, n, SameNode)
	frame := append(bytes.Repeat([]byte{0xff}, 12), 0x88, 0xb5) // to everybody, of a protocol that nobody speaks
	if err := from.SendFrame(lab.Uplink, append(frame, make([]byte, 64)...)); err != nil {
		t.Fatal(err)
	}
	after, err := n.Count()
	if err != nil {
		t.Fatal(err)
	}
	complains(t, n.Intact(before, after, SameNode), `eth0" rose by 1, want 0 to 0`)
	complains(t, n.Carried(before, after, SameNode, exchanged), `eth0" rose by 1, want 0 to 0`)
}

// Flows are counted, forgotten, and opened anew.
func TestForget(t *testing.T) {
	for _, mode := range []string{EBPF, IPTables} {
		n := built(t, mode)
		for range 2 {
			exchange(t, n, SNAT)
			if flows, err := n.Flows(); err != nil || flows < 1 || flows > 3 {
				t.Errorf("%s: %d flows after one was opened, error %v", mode, flows, err)
			}
			if err := n.Forget(); err != nil {
				t.Error(err)
			}
			if flows, err := n.Flows(); err != nil || flows > 0 {
				t.Errorf("%s: %d flows are not forgotten, error %v", mode, flows, err)
			}
		}
	}
	if _, err := built(t, Direct).Flows(); !errors.Is(err, ErrNotApplicable) {
		t.Errorf("direct has flows: %v", err)
	}
}

// Two modes stand at once and do not disturb each other.
func TestSideBySide(t *testing.T) {
	ours, classic := built(t, EBPF), built(t, IPTables)
	idle, err := classic.Count()
	if err != nil {
		t.Fatal(err)
	}
	before, after, _ := exchange(t, ours, AcrossNodes)
	if err := ours.Carried(before, after, AcrossNodes, exchanged); err != nil {
		t.Error(err)
	}
	now, err := classic.Count()
	if err != nil {
		t.Fatal(err)
	}
	if rose := now["n1 FORWARD"] - idle["n1 FORWARD"]; rose > 2 {
		t.Errorf("the idle mode's FORWARD chain saw %d packets", rose)
	}
	programs, err := ours.Programs()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, p := range programs {
		names[fmt.Sprintf("%s %s", p.Node, p.Name)] = true
	}
	if !names["n1 ec_from_pod"] || !names["n2 ec_from_uplink"] {
		t.Errorf("programs: %v", programs)
	}
}

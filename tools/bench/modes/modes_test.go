package modes

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
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
		for deadline := time.Now().Add(priv.Patience(2 * time.Second)); ; time.Sleep(10 * time.Millisecond) {
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

const exchanges = 200

// exchanged is what exchange sends.
var exchanged = Traffic{Forth: exchanges, Back: exchanges, Exact: true, Flows: 1}

// exchange sends packets along a path and says what the counters said before and after, and whom the server saw.
func exchange(t *testing.T, n *Network, path string) (before, after Counters, seen netip.Addr) {
	t.Helper()
	_, to := n.Ends(path)
	return exchangeVia(t, n, path, netip.AddrPortFrom(to.Addr(), TargetPort))
}

// exchangeVia is exchange with a client that sends there.
func exchangeVia(t *testing.T, n *Network, path string, via netip.AddrPort) (before, after Counters, seen netip.Addr) {
	t.Helper()
	from, to := n.Ends(path)
	serve, err := to.Serve(TargetPort)
	if err != nil {
		t.Fatal(err)
	}
	defer serve.Close()
	ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(10*time.Second))
	defer cancel()
	if err := n.Forget(); err != nil {
		t.Fatal(err)
	}
	if before, err = n.Count(); err != nil {
		t.Fatal(err)
	}
	conn, err := from.DialUDP(via, 0)
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
	for _, mode := range result.Modes() {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // which shows that modes do not disturb each other
			n := built(t, mode)
			for _, path := range result.Paths() {
				from, _ := n.Ends(path)
				want := from.Addr()
				if path == result.Egress {
					want = n.lab.Nodes[0].Addr()
				}
				before, after, seen := exchange(t, n, path)
				if seen != want {
					t.Errorf("%s: the server saw %s, want %s", path, seen, want)
				}
				for _, claimed := range result.Paths() {
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
			servesAService(t, n)
			flowsAreForgotten(t, n)
			podsComeAndGo(t, n)
			sizesChange(t, n)
			map[string]func(*testing.T, *Network){
				result.Direct: seesDroppedPackets, result.EBPF: seesADetachedProgram, result.IPTables: seesABridgeWithoutNetfilter, result.KubeProxy: chainsPortmap,
				result.PTP: func(*testing.T, *Network) {}, result.NFTables: func(t *testing.T, n *Network) { everyPacketMeetsNftables(t, n); seesABridgeWithoutNetfilter(t, n) },
				result.VXLAN: seesADirectWay, result.IPTablesVXLAN: seesADirectWay, result.IPv6: seesADetachedProgram, result.IPTablesIPv6: seesABridgeWithoutNetfilter,
			}[mode](t, n)
		})
	}
}

// flowsAreForgotten: a flow is tracked, forgotten, and opened anew.
func flowsAreForgotten(t *testing.T, n *Network) {
	t.Helper()
	exchange(t, n, result.Egress)
	tracked, err := uint64(1), error(nil)
	for range 5 { // between two looks a neighbour may be asked for through a tunnel whose packets netfilter tracks
		if err = n.Forget(); err != nil {
			t.Fatal(err)
		}
		counters, failed := n.Count()
		if tracked, err = counters["n1 tracked"], failed; tracked == 0 || err != nil {
			break
		}
	}
	if err != nil || tracked > 0 {
		t.Errorf("%d flows are not forgotten, error %v", tracked, err)
	}
	if n.Mode == result.EBPF {
		if left, err := entries(n.lab.Nodes[0], usage.Snat); err != nil || left > 0 {
			t.Errorf("%d flows are not forgotten, error %v", left, err)
		}
	}
	before, after, _ := exchange(t, n, result.Egress)
	if err := n.Carried(before, after, result.Egress, exchanged); err != nil {
		t.Error(err)
	}
}

func podsComeAndGo(t *testing.T, n *Network) {
	t.Helper()
	if n.Mode == result.Direct {
		return
	}
	pod, took, err := n.Add(t.Context(), 1)
	if err != nil || took <= 0 {
		t.Fatalf("add: took %v, error %v", took, err)
	}
	if took, err := n.Del(t.Context(), pod); err != nil || took <= 0 {
		t.Errorf("del: took %v, error %v", took, err)
	}
}

// sizesChange: a network that knows many nodes and Services carries what it carried, and one that failed on its way to another size finds back.
func sizesChange(t *testing.T, n *Network) {
	t.Helper()
	ended, end := context.WithCancel(t.Context())
	end()
	for _, k := range []int{100, 2} {
		if _, err := n.Resize(ended, k+10, Services{}); (err == nil) != (n.Mode == result.Direct) {
			t.Errorf("%d nodes, when there is no time: %v", k+10, err)
		}
		for _, changes := range []bool{true, false} {
			if changed, err := n.Resize(t.Context(), k, Services{Number: k - 2}); err != nil || changed != changes {
				t.Errorf("%d nodes and %d Services: changed %v, %v", k, k-2, changed, err)
			}
		}
		for _, node := range n.lab.Nodes {
			if n.setup.agent && Known(node) != k-1 {
				t.Errorf("the map of %s has %d other nodes, want %d", node.Name, Known(node), k-1)
			}
		}
		before, after, _ := exchange(t, n, result.AcrossNodes)
		if err := n.Carried(before, after, result.AcrossNodes, exchanged); err != nil {
			t.Error(err)
		}
	}
}

// seesADetachedProgram: the checks see traffic that takes another way. The stack carries it all the same.
func seesADetachedProgram(t *testing.T, n *Network) {
	t.Helper()
	counters, err := n.Count()
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"ec_from_pod", "ec_from_uplink", "ec_to_uplink"} {
		if _, counted := counters[runs+program]; !counted {
			t.Errorf("the runs of %s are not counted", program)
		}
	}
	node := n.lab.Nodes[0]
	if _, err := node.StopAgent(); err != nil { // it would repair that
		t.Fatal(err)
	}
	err = node.Do(func() error {
		pods, err := node.Netlink().LinkList()
		for _, l := range pods {
			if l.Type() == "veth" && l.Attrs().Name != lab.Uplink {
				err = errors.Join(err, attach.Attacher{Dir: bpffs.Dir(node.BPFFS())}.Detach(l.Attrs().Index, attach.FromPod))
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{result.SameNode, result.AcrossNodes} {
		before, after, _ := exchange(t, n, path)
		if err := n.Carried(before, after, path, exchanged); err == nil {
			t.Errorf("%s: packets that our program never saw pass for carried by it", path)
		}
	}
}

// seesADirectWay: packets between nodes that don't take the tunnel are no tunnel's. Of our nodes the first alone is told to send directly, which the other
// one understands.
func seesADirectWay(t *testing.T, n *Network) {
	t.Helper()
	node, peer := n.lab.Nodes[0], n.lab.NodeSpecs()[1]
	if n.setup.agent {
		if _, err := node.StopAgent(); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(node.StartAgent("--routing-mode", "direct"), node.WaitReady(t.Context())); err != nil {
			t.Fatal(err)
		}
	} else if err := errors.Join(n.delPeer(node, peer), node.AddRoute(peer.PodCIDRs[0], peer.InternalIPs[0], "")); err != nil {
		t.Fatal(err)
	}
	before, after, _ := exchange(t, n, result.AcrossNodes)
	complains(t, n.Carried(before, after, result.AcrossNodes, exchanged), n.setup.tunnel+` tx" rose by 0`)
}

func seesABridgeWithoutNetfilter(t *testing.T, n *Network) {
	t.Helper()
	call := [wire.Families]string{"iptables", "ip6tables"}[n.setup.family]
	if err := n.lab.Nodes[0].WriteSysctl("net/bridge/bridge-nf-call-"+call, "0"); err != nil {
		t.Fatal(err)
	}
	before, after, _ := exchange(t, n, result.SameNode)
	if err := n.Carried(before, after, result.SameNode, exchanged); err == nil {
		t.Error("frames that passed by netfilter pass for carried by it")
	}
}

// everyPacketMeetsNftables: nft's rules don't count packets, and what Carried sees of it is each flow's first. That all the others take the same
// way is seen here.
func everyPacketMeetsNftables(t *testing.T, n *Network) {
	t.Helper()
	node := n.lab.Nodes[0]
	counting := "table ip counting {\nchain met {\ntype filter hook forward priority 1; counter accept\n}\n}\n"
	if err := apply(t.Context(), node, []byte(counting), n.setup.feeder()); err != nil {
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
	for _, path := range result.Paths() {
		before := met()
		exchange(t, n, path)
		if rose := met() - before; rose < 2*exchanges || rose > 2*exchanges+50 {
			t.Errorf("%s: %d packets met the forward hook, want %d", path, rose, 2*exchanges)
		}
	}
}

// seesDroppedPackets: what a link drops is noticed wherever it is.
func seesDroppedPackets(t *testing.T, n *Network) {
	t.Helper()
	before, after, _ := exchange(t, n, result.SameNode)
	if err := n.Intact(before, after, result.SameNode); err != nil {
		t.Error(err)
	}
	from, _ := n.Ends(result.SameNode)
	frame := append(bytes.Repeat([]byte{0xff}, 12), 0x88, 0xb5) // to everybody, of a protocol that nobody speaks
	if err := from.SendFrame(lab.Uplink, append(frame, make([]byte, 64)...)); err != nil {
		t.Fatal(err)
	}
	after, err := n.Count()
	if err != nil {
		t.Fatal(err)
	}
	complains(t, n.Intact(before, after, result.SameNode), `eth0" rose by 1, want 0 to 0`)
	complains(t, n.Carried(before, after, result.SameNode, exchanged), `eth0" rose by 1, want 0 to 0`)
}

// chainsPortmap: beside kube-proxy a pod comes and goes by the same chain as in the classical networks, and what ran is recorded.
func chainsPortmap(t *testing.T, n *Network) {
	t.Helper()
	lists, err := filepath.Glob(filepath.Join(n.lab.Nodes[0].ConfDir(), "*.conflist"))
	if err != nil || len(lists) != 1 {
		t.Fatalf("lists of plugins: %v, %v", lists, err)
	}
	if content, err := os.ReadFile(lists[0]); err != nil || !bytes.Contains(content, []byte(`"portmap"`)) {
		t.Errorf("no portmap: %v in\n%s", err, content)
	}
	files, err := n.Binaries()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
		names = append(names, filepath.Base(file))
	}
	if !slices.Equal(names, []string{"ebpf-cni", "ebpf-agent", "portmap"}) {
		t.Errorf("recorded are %v", names)
	}
}

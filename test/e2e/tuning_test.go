package e2e

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// followLimit is how long the agent may take to follow the Ethernet address that a plugin has given a pod after our ADD.
const followLimit = 10 * time.Second

// listLook is a time in which the agent has looked at the network configuration list.
const listLook = time.Second

// TestTunedMACIsFollowed has the upstream plugin tuning, chained after ours, choose the Ethernet address of each pod.
func TestTunedMACIsFollowed(t *testing.T) {
	t.Parallel()
	const mac = "02:00:00:00:00:77"
	l := startCluster(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	buildPlugin(t, node.CNIBinDir(), "tuning")
	chainTuning(t, node, mac)
	pod := addPod(t, node, "tuned")
	if now, err := os.ReadFile(node.Conflist()); err != nil || !bytes.Contains(now, []byte(mac)) {
		t.Errorf("the agent has not left tuning in the list: %s, %v", now, err)
	}
	link, err := pod.Netlink().LinkByName(pod.IfName)
	if err != nil || link.Attrs().HardwareAddr.String() != mac {
		t.Fatalf("tuning has not set the address: %+v, %v", link, err)
	}
	if _, err := pod.Serve(80); err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(pod.Addr(), 80)
	eventually(t, followLimit, "the host reaches the pod", func() bool {
		_, err := node.TCP(within(t, 300*time.Millisecond), at)
		return err == nil
	})
	reaches(t, addPod(t, node, "beside").Namespace, at)
	if err := pod.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if err := node.DelPod(t.Context(), pod); err != nil {
		t.Error(err)
	}
}

// chainTuning appends tuning to the node's list, as other programs do, and waits until the agent has looked at the list.
func chainTuning(t *testing.T, node *lab.Node, mac string) {
	t.Helper()
	content, err := os.ReadFile(node.Conflist())
	if err != nil {
		t.Fatal(err)
	}
	var list map[string]any
	if err := json.Unmarshal(content, &list); err != nil {
		t.Fatal(err)
	}
	list["plugins"] = append(list["plugins"].([]any), map[string]any{"type": "tuning", "mac": mac, "dataDir": t.TempDir()})
	if content, err = json.Marshal(list); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(node.Conflist(), content, 0o600); err != nil {
		t.Fatal(err)
	}
	time.Sleep(listLook)
}

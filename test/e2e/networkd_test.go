package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// networkd runs systemd's own in a mount namespace with directories of its own. The files below /run/udev say that udev has seen each
// link, as on a host: until then networkd leaves a link alone. There is no D-Bus, which it waits for meanwhile.
const networkd = `
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/systemd
mount -t sysfs sysfs /sys
mkdir -p /run/systemd/netif /run/udev/data
chown systemd-network: /run/systemd/netif
for i in $(seq 1000); do echo I:1 > /run/udev/data/n$i; done
cp -r "$1"/* /etc/systemd
exec /usr/lib/systemd/systemd-networkd
`

// adopts is a host's own configuration: the uplink as it is, and DHCP for whatever else there is.
const adopts = `[Match]
Name=*
[Network]
DHCP=ipv4
`

const uplinkFile = `[Match]
Name=%s
[Network]
KeepConfiguration=static
IPv6AcceptRA=no
`

// uplinkConfig is the host's own configuration of the uplink.
func uplinkConfig(node *lab.Node) string {
	text := fmt.Sprintf(uplinkFile, lab.Uplink)
	for _, addr := range node.Addrs() {
		family := wire.FamilyOf(addr)
		text += fmt.Sprintf("Address=%s/%d\nGateway=%s\n", addr, lab.FabricPrefix[family].Bits(), lab.GatewayAddr[family])
	}
	return text
}

// startNetworkd has a networkd configure the node's links by the files of a directory, which stands for /etc/systemd, until the
// function that it returns is called. What networkd says goes to a file.
func startNetworkd(t *testing.T, node *lab.Node, etc string) (said string, stop func()) {
	t.Helper()
	said = filepath.Join(t.TempDir(), "networkd.log")
	cmd := exec.Command("unshare", "--mount", "sh", "-c", networkd, "networkd", etc)
	cmd.Env = append(os.Environ(), "SYSTEMD_LOG_LEVEL=debug", "SYSTEMD_LOG_TARGET=console")
	return said, startBeside(t, node, cmd, said)
}

// startBeside runs a command on a node until the function that it returns is called; what it says goes to a file.
func startBeside(t *testing.T, node *lab.Node, cmd *exec.Cmd, said string) (stop func()) {
	t.Helper()
	output, err := os.Create(said)
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	cmd.Stdout, cmd.Stderr = output, output
	if err := node.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		late := time.AfterFunc(priv.Patience(10*time.Second), func() { _ = cmd.Process.Kill() })
		defer late.Stop()
		_ = cmd.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// read is what a file says by now.
func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// etcSystemd is a host's /etc/systemd with the files that tools/deploy has for it, or without.
func etcSystemd(t *testing.T, node *lab.Node, ours bool) (dir string) {
	t.Helper()
	dir = t.TempDir()
	files := map[string]string{
		"network/10-uplink.network": uplinkConfig(node),
		"network/20-all.network":    adopts,
	}
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil { //nolint:gosec // networkd is another user
			t.Fatal(err)
		}
	}
	if !ours {
		return dir
	}
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(product, "tools/deploy/host/etc/systemd"))); err != nil {
		t.Fatal(err)
	}
	return dir
}

// ourLosses are what `ip monitor` tells of addresses, neighbours and routes that are ours or on our links and were removed.
var ourLosses = regexp.MustCompile(`(?m)^Deleted .*(proto 142|dev ec([0-9a-f]{11}|-vxlan)|: ec([0-9a-f]{11}|-vxlan) ).*$`)

// A networkd whose configuration adopts every link takes addresses, neighbours and routes away from ours, and asks pods for DHCP
// leases. With the files from tools/deploy it leaves them alone, those too that come while it runs.
func TestNetworkdLeavesOurLinksAlone(t *testing.T) {
	t.Parallel()
	// Without them it asks for a DHCP lease through the tunnel as well.
	asked := []drops.Reason{drops.NotIP, drops.NodeOffLink}
	l := startCluster(t, lab.Options{Nodes: 2}, asked...)
	node := l.Nodes[0]
	pod, far := addPod(t, node, "a"), addPod(t, l.Nodes[1], "far")
	there := serve(t, far.Namespace)
	assertReaches(t, pod.Namespace, there, pod.Addr())
	for _, ours := range []bool{true, false} { // the second leaves sysctls changed
		t.Run(fmt.Sprintf("our files %t", ours), func(t *testing.T) {
			monitored := filepath.Join(t.TempDir(), "monitor")
			stopMonitor := startBeside(t, node, exec.Command("ip", "monitor", "route", "address", "neigh"), monitored)
			before := aboutLinks(t, node, pod)
			said, stop := startNetworkd(t, node, etcSystemd(t, node, ours))
			late := addPod(t, node, fmt.Sprintf("late-%t", ours))
			decision := ": Configuring with /etc/systemd/network/20-all.network"
			if ours {
				decision = ": Unmanaging interface"
			}
			for _, line := range []string{
				lab.Uplink + ": State changed: configuring -> configured", hostLink(pod) + decision, hostLink(late) + decision, tunnelDevice + decision,
			} {
				eventually(t, answerLimit, "networkd says "+line, func() bool { return strings.Contains(read(t, said), line) })
			}
			assertReaches(t, pod.Namespace, there, pod.Addr())
			assertReaches(t, late.Namespace, there, late.Addr())
			stop()
			stopMonitor()
			for _, reason := range asked {
				if n := dropped(t, node, reason); ours && n != 0 {
					t.Errorf("%d packets were dropped as %s", n, reason)
				}
			}
			lost := ourLosses.FindAllString(read(t, monitored), -1)
			if ours != (len(lost) == 0) {
				t.Errorf("of ours was removed: %q", lost)
			}
			if diff := cmp.Diff(before, aboutLinks(t, node, pod)); ours != (diff == "") {
				t.Errorf("pod's link before and after:\n%s", diff)
			}
			if t.Failed() {
				t.Log(read(t, said))
			}
			t.Logf("%d things of ours were removed", len(lost))
		})
	}
}

// hostLink is the name of a pod's link on the host's side.
func hostLink(pod *lab.Pod) string { return pod.Result.Interfaces[0].Name }

// aboutLinks is how a pod's link stands on the host, and all routes of ours.
func aboutLinks(t *testing.T, node *lab.Node, pod *lab.Pod) (lines []string) {
	t.Helper()
	all, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range all.Only("link", "address", "neighbour", "route", "sysctl").Without("fe80:") { // those come when they like
		if strings.Contains(line, hostLink(pod)) || strings.Contains(line, tunnelDevice) || strings.Contains(line, "protocol 142") && !strings.Contains(line, `dev "ec`) {
			lines = append(lines, line)
		}
	}
	return lines
}

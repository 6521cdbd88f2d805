package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// others are rules of somebody else's, in the chains that portmap's jumps are in.
const others = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
[1:60] -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
[2:120] -A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
[3:180] -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
[4:240] -A DOCKER -i docker0 -m comment --comment "dnat name: \"ebpf-cni\" id: \"gone\"" -j RETURN
[5:300] -A DOCKER ! -i docker0 -p tcp -m tcp --dport 8081 -j DNAT --to-destination 172.17.0.2:80
COMMIT
`

// portmapCaller calls the real plugin, as a runtime does after ours.
type portmapCaller struct {
	*testing.T
	dir, backend string
}

func (c portmapCaller) call(command, network, container string, addresses ...string) {
	c.Helper()
	type object = map[string]any
	ips := []object{}
	for _, a := range addresses {
		ips = append(ips, object{"address": a, "interface": 0})
	}
	conf, err := json.Marshal(object{
		"cniVersion": "1.0.0", "name": network, "type": install.Portmap, "backend": c.backend,
		"runtimeConfig": object{"portMappings": []object{
			{"hostPort": 8000 + len(container), "containerPort": 80, "protocol": "tcp"}, {"hostPort": 8000 + len(container), "containerPort": 53, "protocol": "udp"},
			{"hostPort": 9000 + len(container), "containerPort": 81, "protocol": "tcp", "hostIP": "192.0.2.1"},
		}},
		"prevResult": object{"cniVersion": "1.0.0", "interfaces": []object{{"name": "eth0", "sandbox": "/proc/1/ns/net"}}, "ips": ips},
	})
	if err != nil {
		c.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(c.dir, install.Portmap))
	cmd.Env = append(os.Environ(), "PATH="+c.dir+":"+os.Getenv("PATH"), "CNI_COMMAND="+command, "CNI_CONTAINERID="+container, "CNI_NETNS=/proc/1/ns/net",
		"CNI_IFNAME=eth0", "CNI_PATH="+c.dir)
	cmd.Stdin = bytes.NewReader(conf)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.Fatalf("portmap %s %s: %v\n%s", command, container, err, out)
	}
}

// rules are all of this namespace, in each form, with what they have counted.
func (c portmapCaller) rules() string {
	c.Helper()
	var all bytes.Buffer
	for _, command := range [][]string{
		{"nft", "-s", "list", "ruleset"}, {"iptables-nft-save", "-c"}, {"ip6tables-nft-save", "-c"}, {"iptables-legacy-save", "-c"}, {"ip6tables-legacy-save", "-c"},
	} {
		cmd := exec.Command(command[0], command[1:]...)
		out, err := cmd.Output()
		if err != nil {
			c.Fatalf("%v: %v", command, err)
		}
		for line := range bytes.Lines(out) {
			if !bytes.HasPrefix(line, []byte("#")) { // they have the time
				all.Write(line)
			}
		}
	}
	return all.String()
}

// TestSweepOfPortmap sweeps what the upstream portmap plugin leaves, in each form that it writes.
func TestSweepOfPortmap(t *testing.T) {
	dir := t.TempDir()
	priv.Require(t)
	buildPlugin(t, dir, install.Portmap)
	for _, tt := range []struct{ backend, iptables string }{{"iptables", "nft"}, {"iptables", "legacy"}, {"nftables", "nft"}} {
		t.Run(tt.backend+" "+tt.iptables, func(t *testing.T) {
			priv.Isolate(t)
			c := portmapCaller{t, dir, tt.backend}
			for _, family := range []string{"iptables", "ip6tables"} {
				link := filepath.Join(dir, family)
				_ = os.Remove(link)
				program, err := exec.LookPath(family + "-" + tt.iptables)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(program, link); err != nil {
					t.Fatal(err)
				}
				restore := exec.Command(program+"-restore", "-c")
				restore.Stdin = strings.NewReader(others)
				if family == "ip6tables" {
					restore.Stdin = strings.NewReader(strings.NewReplacer("127.0.0.0/8", "::1", "172.17.0.0/16", "fd00:d0c::/64", "172.17.0.2:", "[fd00:d0c::2]:").Replace(others))
				}
				if out, err := restore.CombinedOutput(); err != nil {
					t.Fatalf("write others' rules: %v\n%s", err, out)
				}
			}
			sweepPods(t, c)
		})
	}
}

// sweepPods has two pods of ours and one of another network come and go.
func sweepPods(t *testing.T, c portmapCaller) {
	living := map[string]bool{"a": true, "bb": true}
	p := netfilter.Portmap{
		Network: install.Network, Pods: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")},
		Living: func() (map[string]bool, error) { return living, nil },
	}
	defer p.Close()
	sweep := func(want ...string) {
		t.Helper()
		swept, err := p.Sweep(time.Now())
		if err != nil || !slices.Equal(swept, want) {
			t.Errorf("swept %v, error %v, want %v", swept, err, want)
		}
	}
	same := func(when, want string) {
		t.Helper()
		if diff := cmp.Diff(want, c.rules()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	c.rules() // which makes the older tables
	alone := c.rules()
	sweep()
	same("without portmap", alone)
	c.call("ADD", "other", "ccc", "10.99.0.7/24", "fd00:99::7/64")
	another := c.rules()
	sweep()
	same("with another network's pod", another)
	c.call("ADD", install.Network, "a", "10.244.1.5/32", "fd00:10:244:1::5/128")
	onlyA := c.rules()
	c.call("ADD", install.Network, "bb", "10.244.1.6/32", "fd00:10:244:1::6/128")
	both := c.rules()
	sweep()
	same("while all pods live", both)
	delete(living, "bb")
	sweep("bb")
	same("when one is gone", onlyA)
	c.call("CHECK", install.Network, "a", "10.244.1.5/32", "fd00:10:244:1::5/128")
	delete(living, "a")
	p.Living = func() (map[string]bool, error) { return nil, errors.New("unreadable") }
	if _, err := p.Sweep(time.Now()); err == nil {
		t.Error("swept although nobody knows who lives")
	}
	same("when nobody knows who lives", onlyA)
	p.Living = func() (map[string]bool, error) { return living, nil }
	sweep("a")
	same("when both are gone", another)
	sweep()
	c.call("DEL", "other", "ccc")
	sweep()
	same("after the last pod of any network", alone)
	sweep()
}

// TestAgentSweepsPortmap has a pod end that was made while portmap was chained: nothing translates any more.
func TestAgentSweepsPortmap(t *testing.T) {
	t.Parallel()
	const limit = 15 * time.Second
	l := lab.ForTest(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	buildPlugin(t, node.CNIBinDir(), install.Portmap)
	if err := l.StartAgents(within(t, readyLimit), "--portmap=on"); err != nil {
		t.Fatal(err)
	}
	pods := map[string]*lab.Pod{}
	for i, name := range []string{"first", "last"} {
		pod, err := node.AddPod(t.Context(), name, lab.PodOptions{Capabilities: map[string]any{"portMappings": []map[string]any{
			{"hostPort": 8080 + i, "containerPort": 80, "protocol": "tcp"},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pod.Serve(80); err != nil {
			t.Fatal(err)
		}
		pods[name] = pod
	}
	if _, err := node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	if err := node.StartAgent("--portmap=off"); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	rules := func() string {
		out, err := node.Exec(t.Context(), "nft", "list", "ruleset")
		if err != nil {
			t.Fatal(err)
		}
		legacy, err := node.Exec(t.Context(), "iptables-legacy-save")
		if err != nil {
			t.Fatal(err)
		}
		return string(out) + string(legacy)
	}
	has := func(hostPort int) bool { return strings.Contains(rules(), fmt.Sprintf("dport %d", hostPort)) }
	if err := node.DelPod(t.Context(), pods["first"]); err != nil {
		t.Fatal(err)
	}
	eventually(t, limit, "the rules of the pod that is gone go", func() bool { return !has(8080) })
	if !has(8081) {
		t.Error("a pod that lives has lost its rules")
	}
	for _, family := range l.Options.Families {
		if _, err := l.Outside.TCP(within(t, 3*time.Second), netip.AddrPortFrom(node.AddrOf(family), 8081)); err != nil {
			t.Errorf("a pod that lives has lost its port: %v", err)
		}
	}
	if err := node.DelPod(t.Context(), pods["last"]); err != nil {
		t.Fatal(err)
	}
	eventually(t, limit, "all of portmap's rules go", func() bool { return !has(8081) && !strings.Contains(rules(), "CNI-") })
}

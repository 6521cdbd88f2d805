package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
)

// loopback is the one interface of a new network namespace; it serves as uplink.
const loopback = 1

// makeHealthy gives the host what an agent gives it, and no pods.
func (h host) makeHealthy(t *testing.T) {
	t.Helper()
	dir := bpffs.Dir(h.bpffs)
	lock, err := bpffs.File(t.Context(), filepath.Join(h.stateDir, "agent.lock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(lock.Release)
	for i, hook := range attach.Hooks() {
		p := pins.Program(t, hook.Program(), int32(i))
		if err := p.Pin(dir.Program(hook.Program())); err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(attach.UplinkHooks(), hook) {
			continue
		}
		if _, err := (attach.Attacher{Dir: dir}).Attach(loopback, hook, p); err != nil {
			t.Fatal(err)
		}
	}
	h.write(t)
	h.tell(t, `{"not_ready":"","nodes":[],"problems":[]}`)
}

// tell writes what an agent tells of the cluster.
func (h host) tell(t *testing.T, what string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(h.stateDir, observe.ClusterFile), []byte(what), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (h host) write(t *testing.T) {
	t.Helper()
	dir := bpffs.Dir(h.bpffs)
	node := wire.AddrFrom(netip.MustParseAddr("172.18.0.2"))
	e, err := endpoints.Open(dir.Map(endpoints.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, pod := range []string{"10.244.1.9", "10.244.1.10"} {
		if err := e.Delete(endpoints.Key{Address: wire.AddrFrom(netip.MustParseAddr(pod))}); err != nil {
			t.Fatal(err)
		}
	}
	u, err := uplinks.Open(dir.Map(uplinks.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if err := u.Put(uplinks.Key{Ifindex: loopback}, uplinks.Value{Addresses: wire.Addresses{node}}); err != nil {
		t.Fatal(err)
	}
	c, err := config.Open(dir.Map(config.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	err = c.Put(config.Key{}, config.Value{
		Layout: wire.LayoutVersion, NodeAddresses: wire.Addresses{node},
		PodCIDRAddresses: wire.Addresses{wire.AddrFrom(netip.MustParseAddr("10.244.1.0"))}, PodCIDRLens: [wire.Families]uint32{24},
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestStatusOfHealthyNode(t *testing.T) {
	h := newHost(t)
	h.makeHealthy(t)
	for _, format := range []string{"table", "json", "yaml"} {
		got := call(t, h.args("-o", format, "status")...)
		if got.status != cli.Fine || got.stderr != "" || got.stdout == "" {
			t.Errorf("%s: %+v", format, got)
		}
	}
	if got := call(t, h.args("status")...); !strings.HasSuffix(got.stdout, "\nNo problems.\n") {
		t.Errorf("table:\n%s", got.stdout)
	}
}

func TestStatusTable(t *testing.T) {
	var b strings.Builder
	o := options{env: env{stdout: &b}}
	addr := netip.MustParseAddr
	err := o.writeStatus(observe.Status{
		Agent:    observe.Agent{Running: true, Ready: true},
		Node:     observe.Node{Addresses: []netip.Addr{addr("172.18.0.2")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, Pods: 3, MTU: 1430, PodsAbove: 2, Netfilter: "iptables table nat", Services: "by the programs", SNATPorts: "1024-49151; below 1024: 665-852", HostPorts: 2},
		Uplinks:  []observe.Uplink{{Ifindex: 2, Interface: "eth0", Addresses: []netip.Addr{addr("172.18.0.2")}}},
		Bridges:  []observe.Bridge{{Ifindex: 5, Interface: "docker0", Subnets: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}}},
		Programs: []observe.Program{{Name: "ec_from_pod", ID: 123, Tag: "bbfdd1d66c843c1c"}},
		Attachments: []observe.Attachment{
			{Hook: attach.FromUplink, Ifindex: 2, Interface: "eth0", Mode: attach.TCX, ProgramID: 124},
			{Hook: attach.ToUplink, Ifindex: 2, Interface: "eth0", Mode: attach.TCX, ProgramID: 125},
			{Hook: attach.FromPod, Ifindex: 42, Interface: "ec6ee0b8e0319", Pod: "10.244.1.9"},
		},
		Maps: []observe.Fill{{Name: "devices", Entries: 1, Capacity: 16384}, {Name: "snat", Entries: 131072, Capacity: 262144}},
		Peers: []observe.Peer{
			{Name: "worker", Node: addr("172.18.0.3"), PodCIDR: "10.244.2.0/24", Way: destinations.Direct, Ifindex: 2, Interface: "eth0", MTU: 1500},
			{Name: "worker", Node: addr("fd00::3"), PodCIDR: "fd00:2::/64", Way: destinations.Direct, Ifindex: 2, Interface: "eth0", MTU: 1500},
			{Name: "half", Node: addr("172.18.0.6"), PodCIDR: "10.244.6.0/24", Way: destinations.Direct, Ifindex: 2, Interface: "eth0", MTU: 1500},
			{Name: "half", PodCIDR: "fd00:6::/64", Way: destinations.None},
			{Node: addr("172.19.0.4"), PodCIDR: "10.244.3.0/24", Way: destinations.None},
			{Name: "new", Node: addr("172.18.0.5")},
		},
		Problems: []string{"one thing", "another"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := `agent      running, ready
node       172.18.0.2
pod CIDRs  10.244.1.0/24
pods       3, 2 of them with a larger MTU than the ways to other nodes (1430)
uplinks    eth0 172.18.0.2
bridges    docker0 10.244.1.0/24
snat ports 1024-49151; below 1024: 665-852
services   by the programs
host ports 2, served by the programs; ebpfctl dump hostports lists them
netfilter  translates: iptables table nat
programs   ec_from_pod 123
attached   1 missing, 2 tcx
maps       at most 50 % full: snat, 131072 of 262144
peers      2 direct, 2 off link

PROBLEMS
- one thing
- another
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestStatusOfNetfilter(t *testing.T) {
	for want, node := range map[string]observe.Node{
		"netfilter  does not translate":                                   {},
		"netfilter  masquerades, but no pod's packets: chain POSTROUTING": {Netfilter: "chain POSTROUTING", NetfilterLevel: observe.Masquerades},
		"netfilter  translates: chain PREROUTING":                         {Netfilter: "chain PREROUTING", NetfilterLevel: observe.Translates},
	} {
		var b strings.Builder
		o := options{env: env{stdout: &b}}
		if err := o.writeStatus(observe.Status{Node: node}); err != nil || !strings.Contains(b.String(), "\n"+want+"\n") {
			t.Errorf("error %v, want %q in:\n%s", err, want, b.String())
		}
	}
}

// The line about the agent says what an operator has to know first.
func TestStatusOfTheAgent(t *testing.T) {
	for want, agent := range map[string]observe.Agent{
		"not running":        {},
		"running, not ready": {Running: true, NotReady: "no podCIDR"},
		"running, ready":     {Running: true, Ready: true},
		"running, ready, degraded: cluster, uplinks": {Running: true, Ready: true, Degraded: []string{"cluster", "uplinks"}},
		"running, ready, degraded: source":           {Running: true, Ready: true, Degraded: []string{"source"}, Lost: time.Now()},
		"running, not ready, degraded: endpoints":    {Running: true, Degraded: []string{"endpoints"}},
	} {
		if got := summary(observe.Status{Agent: agent})[0]; got != [2]string{"agent", want} {
			t.Errorf("%v, want %q", got, want)
		}
	}
}

func TestStatusSaysWhatIsWrong(t *testing.T) {
	h := newHost(t)
	got := call(t, h.args("status")...)
	if got.status != cli.Failed || got.stderr != "" {
		t.Errorf("agent dead: status %d, stderr %q", got.status, got.stderr)
	}
	for _, want := range []string{"agent      not running\n", "PROBLEMS\n- no agent is running", "10.244.1.9 cannot send"} {
		if !strings.Contains(got.stdout, want) {
			t.Errorf("status does not say %q:\n%s", want, got.stdout)
		}
	}
	var s struct {
		Agent    struct{ Running bool }
		Problems []string
	}
	asJSON := call(t, h.args("-o", "json", "status")...)
	if err := json.Unmarshal([]byte(asJSON.stdout), &s); err != nil || asJSON.status != cli.Failed || len(s.Problems) == 0 || s.Agent.Running {
		t.Errorf("JSON: %v, %+v", err, asJSON)
	}
}

// watchClosing makes a file and returns a descriptor from which each closing of it by a reader can be read.
func watchClosing(t *testing.T, path string) int {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_CLOSE_NOWRITE); err != nil {
		t.Fatal(err)
	}
	return fd
}

// TestStatusForgetsWhatPasses lets a problem end between the two looks.
func TestStatusForgetsWhatPasses(t *testing.T) {
	h := newHost(t)
	h.tell(t, `{}`)
	lockFile := filepath.Join(h.stateDir, "agent.lock")
	closings := watchClosing(t, lockFile)
	locked := make(chan *bpffs.Lock)
	go func() {
		_, err := unix.Read(closings, make([]byte, unix.SizeofInotifyEvent)) // the first look is at the lock no more
		time.Sleep(problemGrace / 10)                                        // the second is not yet
		l, lockErr := bpffs.File(context.Background(), lockFile)
		if err := errors.Join(err, lockErr); err != nil {
			t.Error(err)
		}
		locked <- l
	}()
	got := call(t, h.args("status")...)
	_, _ = os.ReadFile(lockFile) // so that the lock is taken also when nobody has looked
	(<-locked).Release()
	if strings.Contains(got.stdout, "no agent is running") || !strings.Contains(got.stdout, "agent      running, ready\n") {
		t.Errorf("an agent that has just started is said to be dead:\n%s", got.stdout)
	}
}

func TestStatusSaysWhyTheNodeIsNotReady(t *testing.T) {
	h := newHost(t)
	h.makeHealthy(t)
	h.tell(t, `{"not_ready":"write route to 10.244.1.0/24: invalid argument","nodes":[],"problems":[{"node":"twin","reason":"refused","text":"has no address"}]}`)
	got := call(t, h.args("status")...)
	if got.status != cli.Failed {
		t.Errorf("status %d, want %d", got.status, cli.Failed)
	}
	for _, want := range []string{
		"agent      running, not ready\n",
		"- this node is not ready: write route to 10.244.1.0/24: invalid argument\n", "- node twin: has no address (refused)\n",
	} {
		if !strings.Contains(got.stdout, want) {
			t.Errorf("status does not say %q:\n%s", want, got.stdout)
		}
	}
}

func TestProblemsFitOnAScreen(t *testing.T) {
	var b strings.Builder
	writeProblems(&b, slices.Repeat([]string{"node is off link"}, 5000))
	if lines := strings.Count(b.String(), "\n"); lines > maxProblems+5 || !strings.Contains(b.String(), "and 4980 more") {
		t.Errorf("%d lines:\n%.2000s", lines, b.String())
	}
}
